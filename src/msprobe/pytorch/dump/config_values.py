"""Parsers of single configuration values: one function per kind of key.

A parser takes any object and returns the value that `DumpConfig` holds, or raises `ValueError`
whose text is the reason (it may be empty); `config.py` adds file, key, value and example.
"""

from __future__ import annotations

import difflib
import os
import re
import reprlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from numbers import Integral
from typing import TypeGuard

Parser = Callable[[object], object]

MAX_INDEX = 1_000_000
_DIRECTIONS = frozenset({"forward", "backward"})
_SIDES = frozenset({"input", "output"})
DATA_MODES = _DIRECTIONS | _SIDES
_RANGE = re.compile(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", re.ASCII)
_INT64_MAX = 2**63 - 1

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 200
_repr.maxlist = _repr.maxtuple = _repr.maxdict = 20


class Level(str, Enum):
    """What is collected: modules (L0), APIs (L1), both (mix), only `save` calls (debug)."""

    L0 = "L0"
    L1 = "L1"
    MIX = "mix"
    DEBUG = "debug"

    # vllm-ascend compares str(debugger.config.level).upper() with "L0" and "MIX".
    __str__ = str.__str__


@dataclass(frozen=True, slots=True)
class SliceRule:
    """Keep `[begin:end]` of dimension `dim`, where that dimension has `size` elements.

    `size` None: any size; `end` None: to the end; negative bounds count from the end. `tokens`: the
    rule is for the tokens of a batch, which a parameter is not.
    """

    dim: int = 0
    size: int | None = None
    begin: int = 0
    end: int | None = None
    tokens: bool = False


SLICE_KEYS = ("dim", "size", "begin", "end")


def show(value: object) -> str:
    """`repr` of any object, shortened to a few hundred characters; never raises."""
    try:
        return _repr.repr(value)
    except (ValueError, RecursionError):  # an int of more than 4300 digits, a deep structure
        return f"<{type(value).__name__}>"


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """" (did you mean 'X'?)" with the choice nearest to `word` whatever its case, else ""."""
    by_folded = {choice.casefold(): choice for choice in choices}
    matches = difflib.get_close_matches(word.casefold(), by_folded, n=1)
    return f" (did you mean {by_folded[matches[0]]!r}?)" if matches else ""


def one_of(*choices: str) -> Parser:
    """A parser that accepts exactly these strings, case included."""

    def parse(value: object) -> str:
        if not isinstance(value, str):
            raise ValueError("not a string")
        if value not in choices:
            raise ValueError("unknown" + did_you_mean(value, choices))
        return value

    return parse


def level(value: object) -> Level:
    """One of the four levels; L2 is refused with the reason."""
    if isinstance(value, str) and value == "L2":
        raise ValueError(
            "kernel dump (L2) needs Ascend's own stack (CANN and torch_npu); this library"
            " collects modules and APIs"
        )
    return Level(one_of(*(member.value for member in Level))(value))


def of_type(kind: type) -> Parser:
    """A parser that accepts the values of one type as they are (0 and 1 are not booleans)."""

    def parse(value: object) -> object:
        if not isinstance(value, kind):
            raise ValueError("")
        return value

    return parse


def path(value: object) -> str:
    """A path as string with `~` expanded; a relative one stays relative."""
    found = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(found, str):
        raise ValueError("not a path")
    if not found or "\0" in found:
        raise ValueError("it contains a NUL character" if found else "empty")
    return os.path.expanduser(found)


def texts(value: object) -> tuple[str, ...]:
    """A list of strings."""
    found = []
    for element in _elements(value):
        if not isinstance(element, str):
            raise ValueError(f"element {show(element)} is not a string")
        found.append(element)
    return tuple(found)


def patterns(value: object) -> tuple[str, ...]:
    """Substrings of record names and `name-regex(...)` entries, each of which must compile."""
    found = texts(value)
    for entry in found:
        if entry.startswith("name-regex("):
            _check_regex(entry)
    return found


def _check_regex(entry: str) -> None:
    if not entry.endswith(")"):
        raise ValueError(f"element {show(entry)} lacks the closing bracket of name-regex(...)")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            re.compile(entry[len("name-regex(") : -1])
    except (re.error, OverflowError, RecursionError) as err:
        reason = f"element {show(entry)} is not a valid regular expression ({err})"
        raise ValueError(reason) from err


def record_kind(name: str) -> str | None:
    """"api" or "module" if `name` is a complete record name of that kind, else None."""
    parts = name.split(".")
    if len(parts) < 4 or not parts[0]:
        return None
    if parts[0] == "Module" and parts[-2] in _DIRECTIONS and parts[-1].isdecimal():
        return "module"
    return "api" if parts[-1] in _DIRECTIONS and parts[-2].isdecimal() else None


def scope(value: object) -> tuple[str, ...]:
    """No name, or the two complete record names at which recording begins and ends."""
    names = texts(value)
    if len(names) not in (0, 2):
        raise ValueError(f"it has {len(names)} element{'s' * (len(names) != 1)}")
    for name in names:
        if record_kind(name) is None:
            raise ValueError(f"{show(name)} is not a complete record name")
    return names


def numbers(value: object) -> frozenset[int]:
    """The integers of a list such as `[0, "3", "4-6"]`; ranges include both ends."""
    found: set[int] = set()
    for element in _elements(value):
        found.update(_number_range(element))
    return frozenset(found)


def _number_range(element: object) -> range:
    match = _RANGE.fullmatch(element) if isinstance(element, str) else None
    if match:
        first = _bound(match[1])
        last = _bound(match[2] or match[1])
    elif _is_int(element):
        first = last = int(element)
    else:
        raise ValueError(f"element {show(element)} is neither an integer nor a range")
    if first < 0 or max(first, last) > MAX_INDEX:
        raise ValueError(f"element {show(element)} is outside 0 to {MAX_INDEX}")
    if first > last:
        raise ValueError(f"range {show(element)} begins after its end")
    return range(first, last + 1)


def _bound(digits: str) -> int:
    # Eight digits are enough to be out of bounds, and int() refuses very long strings.
    return int(digits.lstrip("0")[:8] or "0")


def count(value: object) -> int:
    """An integer that is -1 (no end) or at least 1."""
    if not _is_int(value) or (value != -1 and value < 1):
        raise ValueError("")
    return int(value)


def data_mode(value: object) -> frozenset[str]:
    """The selected directions and sides, completed: none of a kind means both of it."""
    modes = texts(value)
    for mode in modes:
        if mode not in ("all", *DATA_MODES):
            raise ValueError(f"element {show(mode)} is unknown{did_you_mean(mode, DATA_MODES)}")
    if "all" in modes and len(modes) > 1:
        raise ValueError("'all' cannot be combined with other elements")
    found = frozenset(modes) & DATA_MODES
    return (found & _DIRECTIONS or _DIRECTIONS) | (found & _SIDES or _SIDES)


def slices(value: object) -> tuple[SliceRule, ...]:
    """The rules of a list of objects with the keys dim, size, begin, end."""
    if isinstance(value, Mapping) and not value:
        return ()
    return tuple(_slice_rule(element) for element in _elements(value))


def _slice_rule(element: object) -> SliceRule:
    if not isinstance(element, Mapping):
        raise ValueError(f"element {show(element)} is not an object")
    given: dict[str, int] = {}
    for key in (key for key in SLICE_KEYS if element.get(key) is not None):
        bound = element[key]
        if not _is_int(bound) or abs(int(bound)) > _INT64_MAX:
            raise ValueError(f"{key} {show(bound)} is not an integer of 64 bits")
        if bound < 0 and key in ("dim", "size"):
            raise ValueError(f"{key} {bound} is negative")
        given[key] = int(bound)
    return SliceRule(**given)  # type: ignore[arg-type]  # `tokens` is no key of the user's


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _elements(value: object) -> list[object]:
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray)):
        return list(value)
    raise ValueError("not a list")
