"""`msprobe check`: what is wrong with a dump, and where. Standard library only.

A whole file is in memory while it is checked: about ten times its size.
"""

from __future__ import annotations

import json
import math
import re
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import reader, schema
from .reader import RankFolder
from .text import Paint, count, first

_CALL = re.compile(r"(Module\..*)\.forward\.(\d+)|(.*)\.(\d+)\.(?:forward|debug)")
_PARTIAL_TASKS = ("overflow_check", "acc_check")  # record only some calls, whatever was asked
_TENSORS = "dump_tensor_data"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong: in which file, at which record and place (empty: the file)."""

    file: str
    where: str
    problem: str


def check_folder(folder: RankFolder, *, filtered: bool = False) -> list[Finding]:
    """Everything that is wrong in one rank folder, in the order of the files.

    ``filtered``: some calls were left out on purpose (``list``, ``scope``, ...), so gaps are no
    findings. coverage.json says so by itself in our dumps.
    """
    findings: list[Finding] = []
    file = reader.data_file(folder.path).name
    whole = _load(folder.path / file, findings)
    coverage = _load(folder.path / "coverage.json", findings)
    stacks = _load(folder.path / "stack.json", findings)
    parents = _load(folder.path / "construct.json", findings)
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
    if parents is not None:
        whole_task = not filtered and whole.get("task") != "structure"
        findings += _tree(parents, records, all_recorded=whole_task)
    if stacks is not None:
        findings += _stacks(stacks, records)
    return findings


def _load(path: Path, findings: list[Finding]) -> Any:
    """The content of a JSON file, None if there is none; what is wrong with it as findings."""
    if not path.is_file():
        return None
    twice: list[str] = []
    bare: list[str] = []

    def unique(members: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(members)
        if len(made) != len(members):
            names = [name for name, _ in members]
            twice.extend(name for name in made if names.count(name) > 1)
        return made

    def constant(word: str) -> float:
        bare.append(word)
        return float(word)

    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except (ValueError, OSError, RecursionError) as err:
        findings.append(Finding(path.name, "", f"cannot be read: {err}"))
        return None
    findings += [Finding(path.name, name, "the name stands twice") for name in twice]
    if bare:
        where = _first_non_finite(content)
        many = f"{len(bare)} times" if len(bare) > 1 else "once"
        problem = f"not strict JSON: {bare[0]} without quotes ({many} in the file)"
        findings.append(Finding(path.name, where, problem))
    return content


def _first_non_finite(value: Any) -> str:
    """Where the first NaN or infinite float stands, with dots; empty if there is none."""
    if isinstance(value, (dict, list)):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(part, float) and not math.isfinite(part):
                return str(key)
            if below := _first_non_finite(part):
                return f"{key}.{below}".removeprefix("data.")
    return ""


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
            yield f"  {where}: {one.problem}"
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


def _tree(parents: Any, records: dict[str, Any], *, all_recorded: bool) -> Iterator[Finding]:
    file = "construct.json"
    if not isinstance(parents, dict):
        yield Finding(file, "", "expected an object of record name and parent")
        return
    above: dict[str, Any] = {}
    for name, parent in parents.items():
        above[name] = parent[0] if isinstance(parent, list) and parent else parent
        if above[name] is not None and not isinstance(above[name], str):
            yield Finding(file, name, "the parent is neither a name nor null")
        elif above[name] is not None and above[name] not in parents.keys() | records.keys():
            yield Finding(file, name, f"its parent {above[name]} is not in the dump")
    yield from _circles(above)
    if not above:  # level L1 has no tree
        return
    yield from _gaps(file, above)
    for name in records:
        if reader.kind_of(name)[1] in ("forward", "backward") and name not in above:
            yield Finding(file, name, "the record is in dump.json and not here")
    if all_recorded:
        for name in above:
            if reader.kind_of(name)[1] and name not in records:
                yield Finding("dump.json", name, "the call is in construct.json and not here")


def _circles(above: dict[str, Any]) -> Iterator[Finding]:
    """Records that are their own ancestors, one finding per circle."""
    settled: set[Any] = {None}
    for name in above:
        trail: dict[Any, None] = {}
        while name not in settled and name not in trail and name in above:
            trail[name] = None
            name = above[name] if isinstance(above[name], str) else None
        if name in trail:
            yield Finding("construct.json", name, "the record is its own ancestor")
        settled.update(trail)


# ---- stack.json --------------------------------------------------------------------------------


def _stacks(stacks: Any, records: dict[str, Any]) -> Iterator[Finding]:
    file = "stack.json"
    if not isinstance(stacks, dict):
        yield Finding(file, "", "expected an object of numbered entries")
        return
    named: set[str] = set()
    for key, entry in stacks.items():
        if not _is_stack(entry):
            yield Finding(file, key, "expected [[record names], [frames]]")
            continue
        for name in entry[0]:
            if name in named:
                yield Finding(file, key, f"{name} has a stack already")
            named.add(name)
    returned = any("output" in record for record in records.values() if isinstance(record, dict))
    for name, record in records.items():
        if reader.kind_of(name)[1] != "forward" or name in named:
            continue
        # A call that was running when the process was killed has no stack yet.
        if not (returned and isinstance(record, dict) and "output" not in record):
            yield Finding(file, name, "the record has no stack")


def _is_stack(entry: Any) -> bool:
    return (
        isinstance(entry, list)
        and len(entry) == 2
        and all(isinstance(part, list) for part in entry)
        and all(isinstance(text, str) for part in entry for text in part)
    )
