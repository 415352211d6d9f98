"""What a dump did not record, and why: from coverage.json and dump_error_info.log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from . import reader, summary
from .text import count, first, indent, table

_LISTS = ("modules_never_called", "selection_unmatched", "apis_not_in_this_torch")
_SHOWN = 5


def collect(folders: Sequence[Path]) -> dict[str, Any]:
    """What the rank folders tell, taken together; lists without repetitions."""
    found: dict[str, Any] = {name: {} for name in _LISTS}
    incomplete: dict[str, str] = {}
    calls: Counter[str] | None = None
    problems: dict[str, None] = {}
    records = 0
    for folder in folders:
        noted = reader.read_json(folder / "coverage.json") or {}
        for name in _LISTS:
            found[name].update(dict.fromkeys(noted.get(name) or ()))
        incomplete.update(noted.get("records_incomplete") or {})
        if "torch_calls_not_recorded" in noted:
            calls = (calls or Counter()) + Counter(noted["torch_calls_not_recorded"])
        log = folder / summary.LOG
        if log.is_file():
            text = log.read_text(encoding="utf-8", errors="replace")
            problems.update(dict.fromkeys(summary.problem_lines(text)))
        records += len(reader.RecordFile(folder))
    return {
        "records": records,
        **{name: list(names) for name, names in found.items()},
        "records_incomplete": incomplete,
        "torch_calls_not_recorded": None if calls is None else dict(calls.most_common()),
        "problems": [line for line in problems if not line.startswith(summary.LEFT_OUT)],
    }


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield the lines that tell what was not collected, and why."""
    yield "not collected:"
    told = list(_told(found))
    yield from indent(told or ["nothing is known to be missing"])


def _told(found: dict[str, Any]) -> Iterator[str]:
    modules = found["modules_never_called"]
    if modules:
        yield f"{count(len(modules), 'module')} never called: {_some(modules)}"
    yield from found["selection_unmatched"]
    for name, why in first(list(found["records_incomplete"].items()), _SHOWN):
        yield f"{name} is incomplete: {why}"
    yield from _more(found["records_incomplete"], "record")
    absent = found["apis_not_in_this_torch"]
    if absent:
        yield f"{count(len(absent), 'function')} that this torch does not have: {_some(absent)}"
    for line in first(found["problems"], _SHOWN):
        yield f"{summary.LOG}: {line}"
    yield from _more(found["problems"], "problem")


def calls(found: dict[str, Any]) -> Iterator[str]:
    """Yield the lines that tell which torch functions ran unrecorded, and how often."""
    unseen = found["torch_calls_not_recorded"]
    if unseen is None:
        yield "torch calls were not counted: level L0 and debug record no functions"
    elif not unseen:
        yield "every call of a torch function on tensors was recorded"
    else:
        yield "torch calls on tensors that were not recorded:"
        yield from indent(table([[str(number), name] for name, number in unseen.items()]))


def _some(names: Sequence[str]) -> str:
    return ", ".join(first(names, _SHOWN)) + (", ..." if len(names) > _SHOWN else "")


def _more(items: Any, noun: str) -> Iterator[str]:
    if len(items) > _SHOWN:
        yield f"... and {count(len(items) - _SHOWN, f'more {noun}')}"
