"""What `msprobe show` tells of one rank folder, as plain data."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import reader
from .reader import RankFolder

LOG = "dump_error_info.log"
TENSORS = "dump_tensor_data"
LEFT_OUT = "not recorded: "  # how lines of the log begin that name no problem
_RUNNING = "it had begun and not returned"
# Sections of a record that hold what came in; in the others stands what the call made.
_INPUTS = {"forward": ("input_args", "input_kwargs", "parameters"), "backward": ("input",)}


@dataclass(frozen=True, slots=True)
class NonFinite:
    """A record with NaN or infinity: where, and whether the call has made it.

    Made here: what came in was finite, or held infinities only and NaN came out. With task
    nan_check the places are not known, nor where it was made.
    """

    name: str
    places: dict[str, dict[str, float]]
    came_in: frozenset[str]  # those of the places that are inputs
    made_here: bool


@dataclass
class Summary:
    """Counts and findings of one rank folder; ``error`` tells why reading stopped."""

    folder: RankFolder
    header: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    has_statistics: bool = False
    non_finite: list[NonFinite] = field(default_factory=list)
    unfinished: dict[str, str] = field(default_factory=dict)  # record → why it has no result
    unmatched: list[str] = field(default_factory=list)
    named_only: int = 0
    never_called: list[str] = field(default_factory=list)
    files: dict[str, int] = field(default_factory=dict)
    tensor_files: int = 0
    problems: Counter[str] = field(default_factory=Counter)  # reason → how many lines give it
    error: str = ""

    @property
    def records(self) -> int:
        """Number of records in dump.json or debug.json."""
        return sum(sum(parts.values()) for parts in self.counts.values())


def summarize(folder: RankFolder) -> Summary:
    """Read one rank folder; a broken file ends up in ``error``, with what was readable kept."""
    summary = Summary(folder)
    _add_files(summary)
    try:
        summary.header, records = reader.open_records(folder.path)
        _add_records(summary, records)
        coverage = reader.read_json(folder.path / "coverage.json")
        if isinstance(coverage, dict):
            summary.never_called = list(coverage.get("modules_never_called") or [])
            summary.unmatched = list(coverage.get("selection_unmatched") or [])
            known = coverage.get("records_incomplete") or {}
            summary.unfinished = {name: known.get(name, _RUNNING) for name in summary.unfinished}
        if not summary.records:
            summary.named_only = len(reader.read_stacks(folder.path))
    except (ValueError, OSError) as err:
        summary.error = f"cannot be read to its end: {err}"
    return summary


def _add_files(summary: Summary) -> None:
    tensors = summary.folder.path / TENSORS
    for path in sorted(summary.folder.path.iterdir()):
        if path.is_file():
            summary.files[path.name] = path.stat().st_size
    if tensors.is_dir():
        sizes = [path.stat().st_size for path in tensors.iterdir() if path.is_file()]
        summary.files[TENSORS] = sum(sizes)
        summary.tensor_files = len(sizes)
    if LOG in summary.files:
        text = (summary.folder.path / LOG).read_text(encoding="utf-8", errors="replace")
        summary.problems = count_problems(text)


def count_problems(log: str) -> Counter[str]:
    """Count the lines of dump_error_info.log that name a problem, by the reason they give.

    What the configuration left out is none.
    """
    lines = (line for line in problem_lines(log) if not line.startswith(LEFT_OUT))
    return Counter(line.partition(": ")[2] for line in lines)


def problem_lines(log: str) -> Iterator[str]:
    """Yield the lines of dump_error_info.log that name a problem."""
    in_traceback = False
    for line in filter(None, log.splitlines()):
        if line.startswith("Traceback"):
            in_traceback = True
        elif not line[0].isspace():
            if not in_traceback:
                yield line
            in_traceback = False  # this line names the exception and ends the traceback


def _add_records(summary: Summary, records: Iterable[tuple[str, Any]]) -> None:
    without_output: list[str] = []
    with_output = False
    for name, record in records:
        kind, part = reader.kind_of(name)
        summary.counts.setdefault(kind, Counter())[part] += 1
        entries = list(reader.leaves(record))
        summary.has_statistics |= any(reader.has_statistics(entry) for _, entry in entries)
        found = find_non_finite(name, entries, part)
        if found is not None:
            summary.non_finite.append(found)
        if part == "forward" and isinstance(record, dict):
            with_output = with_output or "output" in record
            if "output" not in record and "input_args" in record:
                without_output.append(name)
    # With data_mode ["input"] no record has an output; then its lack says nothing.
    summary.unfinished = dict.fromkeys(without_output, _RUNNING) if with_output else {}


def find_non_finite(
    name: str, entries: Iterable[tuple[str, Any]], part: str
) -> NonFinite | None:
    """Return where the entries of a record hold NaN or infinity, None if none does.

    Plain floats count among saved variables only: -inf as an argument is no news.
    """
    places = {}
    for place, entry in entries:
        found = reader.non_finite(entry)
        if not found and part == "debug" and reader.is_value(entry) and entry is not None:
            value = reader.number(entry.get("value")) if entry.get("type") == "float" else None
            found = {} if value is None or math.isfinite(value) else {"value": value}
        if found or (place == "is_nan" and entry == 1):
            places[place or "value"] = found
    if not places:
        return None
    inputs = _INPUTS.get(part, ())
    came_in = frozenset(place for place in places if place.split(".")[0] in inputs)
    known = bool(inputs) and "is_nan" not in places
    return NonFinite(name, places, came_in, known and _is_made_here(places, came_in))


def _is_made_here(places: dict[str, dict[str, float]], came_in: frozenset[str]) -> bool:
    if not came_in:
        return True
    # Max and Min: the Mean of infinities of both signs is NaN too.
    with_nan = {
        place
        for place, values in places.items()
        if any(math.isnan(values.get(key, 0.0)) for key in ("Max", "Min"))
    }
    return bool(with_nan) and not with_nan & came_in


def matching(folder: Path, text: str) -> Iterator[tuple[str, Any]]:
    """Yield the record of this name, or else each whose name contains the text."""
    _, records = reader.open_records(folder)
    found = []
    for name, record in records:
        if name == text:
            yield name, record
            return
        if text in name:
            found.append((name, record))
    yield from found
