"""What a dump.json must look like, written out by hand; docs/dump.schema.json says the same.

Each function yields ``(place, what is wrong)``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from . import reader

Problem = tuple[str, str]
_NAN_WORDS = frozenset({"NaN", "Infinity", "-Infinity"})


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))  # bool as well: any() and all() of a bool tensor


def _is_statistic(value: Any) -> bool:
    return value is None or _is_number(value) or (_is_text(value) and value in _NAN_WORDS)


Rule = tuple[Callable[[Any], bool], str]
_TEXT: Rule = (_is_text, "text")
_TEXT_OR_NULL: Rule = (lambda value: value is None or _is_text(value), "text or null")
_LIST: Rule = (_is_list, "a list")
_LIST_OR_NULL: Rule = (lambda value: value is None or _is_list(value), "a list or null")
_OBJECT: Rule = (_is_object, "an object")
_STATISTIC: Rule = (_is_statistic, 'a number, null, "NaN", "Infinity" or "-Infinity"')
_FLAG: Rule = (lambda value: value in (0, 1), "0 or 1")

_HEADER: dict[str, Rule] = {
    "task": _TEXT, "level": _TEXT, "framework": _TEXT, "dump_data_dir": _TEXT_OR_NULL,
    "data": _OBJECT,
}
_TENSOR: dict[str, Rule] = {
    "type": _TEXT, "dtype": _TEXT, "shape": _LIST_OR_NULL,
    "Max": _STATISTIC, "Min": _STATISTIC, "Mean": _STATISTIC, "Norm": _STATISTIC,
    "requires_grad": (lambda value: isinstance(value, bool), "true or false"),
    "md5": (lambda value: value is None or _is_text(value) or _is_number(value), "text or null"),
    "data_name": _TEXT_OR_NULL,
}
_REQUIRED = ("type", "dtype", "shape")
# A torch.Size, named tuple or mapping as the only result stands without a list around it.
_RESULT: Rule = (lambda value: isinstance(value, (list, dict)), "a list or an object")
_SECTIONS: dict[str, dict[str, Rule]] = {
    "forward": {
        "input_args": _LIST, "input_kwargs": _OBJECT, "output": _RESULT, "parameters": _OBJECT,
        "is_nan": _FLAG,
    },
    "backward": {"input": _RESULT, "output": _RESULT, "is_nan": _FLAG},
}
_P2P_OP: dict[str, Rule] = {
    "class_type": _TEXT, "tensor": _OBJECT, "op": _TEXT, "peer": (_is_number, "a number"),
    "tag": (_is_number, "a number"), "group_id": _TEXT_OR_NULL,
}


def check_header(whole: Any) -> Iterator[Problem]:
    """Check the members of dump.json beside the records."""
    if not isinstance(whole, dict):
        yield "", f"the file holds {_kind(whole)}; expected an object"
        return
    yield from _missing(whole, tuple(_HEADER), "")
    yield from _members(whole, _HEADER, "")


def check_record(name: str, record: Any) -> Iterator[Problem]:
    """Check one record: its name, its sections, and every value in it."""
    part = reader.kind_of(name)[1]
    if part == "debug":
        yield from check_entry(record, "")
    elif not part:
        yield "", "the name has none of the known forms"
    elif not isinstance(record, dict):
        yield "", f"the record is {_kind(record)}; expected an object"
    elif part == "parameters_grad":
        for parameter, entries in record.items():
            if not isinstance(entries, list) or len(entries) != 1:
                yield parameter, f"is {_kind(entries)}; expected a list of one"
            yield from check_entry(entries, parameter)
    else:
        yield from _check_sections(record, _SECTIONS[part])


def _check_sections(record: dict[str, Any], sections: dict[str, Rule]) -> Iterator[Problem]:
    for section, value in record.items():
        if section not in sections:
            yield section, f"unknown section; expected one of {', '.join(sections)}"
        elif section != "is_nan":
            yield from check_entry(value, section)
    yield from _members(record, sections, "")


def check_entry(entry: Any, place: str) -> Iterator[Problem]:
    """Check one value: null, a tensor, a plain value, or lists and objects of these."""
    if isinstance(entry, list):
        for i, part in enumerate(entry):
            yield from check_entry(part, f"{place}.{i}" if place else str(i))
    elif isinstance(entry, dict):
        yield from _check_object(entry, place)
    elif entry is not None:
        yield place, f"{_kind(entry)} by itself; expected an object with a type"


def _check_object(entry: dict[str, Any], place: str) -> Iterator[Problem]:
    if _is_text(entry.get("class_type")):
        yield from _members(entry, _P2P_OP, place)
    elif entry.get("type") in ("torch.Tensor", "numpy.ndarray") or reader.is_tensor(entry):
        yield from _missing(entry, _REQUIRED, place)
        yield from _members(entry, _TENSOR, place)
    elif _is_text(entry.get("type")):
        if len(entry) == 1:
            yield place, f'a {entry["type"]} without "value"'
    else:
        for key, part in entry.items():
            yield from check_entry(part, f"{place}.{key}" if place else key)


def _missing(found: dict[str, Any], names: tuple[str, ...], place: str) -> Iterator[Problem]:
    lacking = [name for name in names if name not in found]
    if lacking:
        yield place, f"has no {', '.join(lacking)}"


def _members(found: dict[str, Any], rules: dict[str, Rule], place: str) -> Iterator[Problem]:
    for name, value in found.items():
        fits, expected = rules.get(name, (None, ""))
        if fits is not None and not fits(value):
            shown = json.dumps(value) if _is_text(value) or _is_number(value) else _kind(value)
            yield f"{place}.{name}" if place else name, f"is {shown}; expected {expected}"


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a truth value"}
    return "null" if value is None else names.get(type(value), "a number")
