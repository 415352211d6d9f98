"""`msprobe check`: what is wrong with a dump, and where. Standard library only.

A whole file is in memory while it is checked: about ten times its size.
"""

from __future__ import annotations

import re
import zipfile
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

from . import reader, schema
from .folders import has_data
from .reader import RankFolder
from .strict import Finding, load
from .text import Paint, count, first, visible

_CALL = re.compile(r"(Module\..*)\.forward\.(\d+)|(.*)\.(\d+)\.(?:forward|debug)", re.DOTALL)
_PARTIAL_TASKS = ("overflow_check", "acc_check")  # record only some calls, whatever was asked
_TENSORS = "dump_tensor_data"
_TREE = "construct.json"
_STACK = "stack.json"


def check_folder(folder: RankFolder, *, filtered: bool = False) -> list[Finding]:
    """Everything that is wrong in one rank folder, in the order of the files.

    ``filtered``: some calls were left out on purpose (``list``, ``scope``, ...), so gaps are no
    findings. coverage.json says so by itself in our dumps.
    """
    if not has_data(folder.path):
        return [Finding(reader.DATA_FILES[0], "", "is not there")]
    findings: list[Finding] = []
    file = reader.data_file(folder.path).name
    whole = load(folder.path / file, findings)
    coverage = load(folder.path / "coverage.json", findings)
    stacks = load(folder.path / _STACK, findings)
    parents = load(folder.path / _TREE, findings)
    if whole is None:
        return findings
    findings += [Finding(file, *found) for found in schema.check_header(whole)]
    if not isinstance(whole, dict) or not isinstance(whole.get("data"), dict):
        return findings
    records = whole["data"]
    for name, record in records.items():
        findings += [Finding(file, _at(name, p), t) for p, t in schema.check_record(name, record)]
    findings += _files(folder.path, file, records)
    filtered = filtered or whole.get("task") in _PARTIAL_TASKS or bool(_filters(coverage))
    if not filtered:
        findings += _gaps(file, records)
    closed = coverage is not None
    if parents is not None:
        whole_task = not filtered and whole.get("task") != "structure"
        findings += _tree(parents, records, all_recorded=whole_task, closed=closed)
    if stacks is not None:
        findings += _stacks(stacks, records, closed)
    return [*findings, *(_gone(folder.path) if closed else ())]


def _gone(folder: Path) -> Iterator[Finding]:
    """Of two files that are written together, the one that is not there."""
    there = [name for name in (_STACK, _TREE) if (folder / name).exists()]
    if len(there) == 1:
        yield Finding(_STACK if there[0] == _TREE else _TREE, "", "is not there")


def _at(record: str, place: str) -> str:
    return f"{record}: {place}" if place else record


def _filters(coverage: Any) -> Any:
    return coverage.get("filters") if isinstance(coverage, dict) else None


def describe(findings: dict[str, list[Finding]], limit: int, paint: Paint) -> Iterator[str]:
    """Yield the lines that tell what was found, by rank folder."""
    for title, found in findings.items():
        if not found:
            yield f"{paint(title, 'title')}   nothing wrong"
            continue
        yield f"{paint(title, 'title')}   {paint(count(len(found), 'finding'), 'bad')}"
        for one in first(found, limit):
            where = f"{one.file}: {one.where}" if one.where else one.file
            yield f"  {visible(where)}: {visible(one.problem)}"
        if 0 < limit < len(found):
            yield f"  ... and {len(found) - limit} more (--limit 0 shows all)"
    total = sum(map(len, findings.values()))
    yield f"{count(len(findings), 'folder')} checked, {count(total, 'finding')}"


# ---- files of tensors -------------------------------------------------------------------------


def _files(folder: Path, file: str, records: dict[str, Any]) -> Iterator[Finding]:
    for name, record in records.items():
        for place, entry in reader.leaves(record):
            saved = entry.get("data_name") if reader.is_tensor(entry) else None
            if not isinstance(saved, str):
                continue
            problem = file_problem(folder / _TENSORS / saved)
            if problem:
                yield Finding(file, _at(name, place), f"{_TENSORS}/{saved} {problem}")


def file_problem(path: Path) -> str:
    """Why a saved tensor cannot be read; empty if it can."""
    if path.name in ("", "..") or path.parent.name != _TENSORS:
        return "is outside of the folder"
    if not path.is_file():
        return "is not there"
    try:
        if path.suffix == ".npy":
            with path.open("rb") as file:
                return "" if file.read(6) == b"\x93NUMPY" else "is no numpy file"
        with zipfile.ZipFile(path) as archive:
            return "" if archive.namelist() else "is an empty archive"
    except (OSError, zipfile.BadZipFile) as err:
        return f"is not complete: {err}"


# ---- counts ------------------------------------------------------------------------------------


def _gaps(file: str, names: Iterable[str]) -> Iterator[Finding]:
    """Counts of calls that do not run from 0 without a gap."""
    counts: defaultdict[str, set[int]] = defaultdict(set)
    for name in names:
        if match := _CALL.fullmatch(name):
            counts[match[1] or match[3]].add(int(match[2] or match[4]))
    for base, found in counts.items():
        missing = sorted(set(range(max(found))) - found)
        if missing:
            shown = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
            yield Finding(file, base, f"calls {shown} of {max(found) + 1} are missing")


# ---- construct.json ----------------------------------------------------------------------------


def _tree(
    parents: Any, records: dict[str, Any], *, all_recorded: bool, closed: bool
) -> Iterator[Finding]:
    if not isinstance(parents, dict):
        yield Finding(_TREE, "", "expected an object of record name and parent")
        return
    # Under Megatron the original writes [parent, number of the micro step].
    above = {n: p[0] if isinstance(p, list) and p else p for n, p in parents.items()}
    yield from _parents(above, above.keys() | records.keys())
    yield from _circles(above)
    yield from _gaps(_TREE, above)
    if above:  # level L1 has no tree
        backward = [name for name in records if reader.kind_of(name)[1] == "backward"]
        for name in _lacking([*_returned(records, closed), *backward], above, records, closed):
            yield Finding(_TREE, name, "the record is in dump.json and not here")
    # Gradients that came by a side door: the parts of a module have backward records, it has none.
    parents_only = {parent for parent in above.values() if isinstance(parent, str)}
    # A process that was killed may have written the tree and not the records.
    for name in above if all_recorded and closed else ():
        part = reader.kind_of(name)[1]
        if part and name not in records and not (part == "backward" and name in parents_only):
            yield Finding("dump.json", name, "the call is in construct.json and not here")


def _parents(above: dict[str, Any], known: Container[Any]) -> Iterator[Finding]:
    for name, parent in above.items():
        if parent is None or name == "megatron_micro_step_number":
            continue
        if not isinstance(parent, str):
            yield Finding(_TREE, name, "the parent is neither a name nor null")
        elif parent not in known:
            yield Finding(_TREE, name, f"its parent {parent} is not in the dump")


def _circles(above: dict[str, Any]) -> Iterator[Finding]:
    """Records that are their own ancestors, one finding per circle."""
    settled: set[str] = set()
    for start in above:
        name: Any = start
        trail: dict[str, None] = {}
        while isinstance(name, str) and name in above and name not in settled and name not in trail:
            trail[name] = None
            name = above[name]
        if isinstance(name, str) and name in trail:
            yield Finding(_TREE, name, "the record is its own ancestor")
        settled.update(trail)


# ---- stack.json --------------------------------------------------------------------------------


def _stacks(stacks: Any, records: dict[str, Any], closed: bool) -> Iterator[Finding]:
    if not isinstance(stacks, dict):
        yield Finding(_STACK, "", "expected an object of numbered entries")
        return
    named: set[str] = set()
    for key, entry in stacks.items():
        if not _is_stack(entry):
            yield Finding(_STACK, key, "expected [[record names], [frames]]")
            continue
        for name in entry[0]:
            if name in named:
                yield Finding(_STACK, key, f"{name} has a stack already")
            named.add(name)
    for name in _lacking(_returned(records, closed), named, records, closed):
        yield Finding(_STACK, name, "the record has no stack")


def _lacking(
    wanted: Iterable[str], present: Container[str], records: dict[str, Any], closed: bool
) -> list[str]:
    """The wanted records that are not present.

    Where the process was killed before it could close the files, the last records stand in
    dump.json before their stacks and parents are written: they are not meant.
    """
    lacking = [name for name in wanted if name not in present]
    if lacking and not closed:
        last = set(takewhile(lambda name: name not in present, reversed(records)))
        lacking = [name for name in lacking if name not in last]
    return lacking


def _returned(records: dict[str, Any], closed: bool) -> list[str]:
    """The forward records of calls that have ended.

    One that was running when the process was killed has no output, no stack and no parent yet.
    With data_mode ["input"] no record has an output: then all are meant.
    """
    calls = {n: r for n, r in records.items() if reader.kind_of(n)[1] == "forward"}
    if closed:
        return list(calls)
    with_output = [n for n, r in calls.items() if isinstance(r, dict) and "output" in r]
    return with_output or list(calls)


def _is_stack(entry: Any) -> bool:
    return (
        isinstance(entry, list)
        and len(entry) == 2
        and all(isinstance(part, list) for part in entry)
        and all(isinstance(text, str) for part in entry for text in part)
    )
