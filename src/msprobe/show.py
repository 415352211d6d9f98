"""`msprobe show`: a dump in readable form, as text or JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from . import reader, summary
from .reader import RankFolder
from .summary import NonFinite, Summary
from .text import Paint, count, first, indent, readable, readable_size, table, visible

COLUMNS = ("dtype", "shape", "Max", "Min", "Mean", "Norm", "requires_grad", "md5", "data_name")
_TITLES = {"data_name": "file"}
_PARTS = ("forward", "backward", "parameters_grad", "debug", "")
MANY_FOLDERS = 8  # from here on one line each


def overview(folders: Sequence[RankFolder], limit: int, paint: Paint) -> Iterator[str]:
    """Yield the lines that describe a whole dump."""
    steps = {folder.step for folder in folders}
    ranks = {folder.name for folder in folders}
    yield f"{count(len(steps), 'step')}, {count(len(ranks), 'process', 'es')}"
    if len(folders) > MANY_FOLDERS:
        yield from table([["", "records", "with NaN or infinity", "size", ""], *_lines(folders)])
        yield "Choose with --step and --rank to see one in full."
        return
    for folder in folders:
        yield ""
        yield from _describe(summary.summarize(folder), limit, paint)


def _lines(folders: Sequence[RankFolder]) -> Iterator[list[str]]:
    for found in map(summary.summarize, folders):
        size = readable_size(sum(found.files.values()))
        many = found.problems.total()
        problems = count(many, "problem") + " logged" if many else ""
        yield [
            found.folder.title, str(found.records), str(len(found.non_finite)), size,
            found.error or problems,
        ]


def _describe(found: Summary, limit: int, paint: Paint) -> Iterator[str]:
    header = found.header
    what = f"task {header.get('task', '?')}, level {header.get('level', '?')}"
    yield f"{paint(found.folder.title, 'title')}   {count(found.records, 'record')}   {what}"
    yield from indent(table(_kind_rows(found)))
    if found.named_only:
        yield f"  {found.named_only} calls named in stack.json (no values recorded)"
    yield f"  files: {', '.join(_file_sizes(found))}"
    yield from indent(_problems(found, limit, paint))
    if found.non_finite:
        yield from indent(_non_finite(found.non_finite, limit, paint))
    elif found.error:
        return
    elif header.get("task") == "nan_check":
        yield "  no NaN or infinity in any record"
    elif found.has_statistics:
        yield "  no NaN or infinity in any statistic"


def _kind_rows(found: Summary) -> list[list[str]]:
    parts = [part for part in _PARTS if any(counts[part] for counts in found.counts.values())]
    rows = [["kind", *(part or "records" for part in parts)]]
    for kind in sorted(found.counts, key=lambda kind: (kind != "Module", kind)):
        counts = found.counts[kind]
        rows.append([kind, *(str(counts[part]) if counts[part] else "" for part in parts)])
    return rows if found.counts else []


def _file_sizes(found: Summary) -> Iterator[str]:
    for name, size in found.files.items():
        many = f" ({count(found.tensor_files, 'file')})" if name == summary.TENSORS else ""
        yield f"{name} {readable_size(size)}{many}"


def _problems(found: Summary, limit: int, paint: Paint) -> Iterator[str]:
    if found.error:
        yield paint(found.error, "bad")
    if found.problems:
        lines = count(found.problems.total(), "problem")
        yield paint(f"{lines} in {found.folder.path / summary.LOG}", "bad")
        yield from indent(_reasons(found, limit))
    if found.unfinished:
        last, why = list(found.unfinished.items())[-1]
        many = count(len(found.unfinished), "call")
        yield f"{many} without a result; last: {visible(last)} ({visible(why)})"
    if found.never_called:
        names = visible(", ".join(first(found.never_called, limit)))
        yield f"{count(len(found.never_called), 'module')} never called: {names}"
    yield from map(visible, found.unmatched)


def _reasons(found: Summary, limit: int) -> Iterator[str]:
    reasons = found.problems.most_common()
    yield from table([[str(many), reason] for reason, many in first(reasons, limit)])
    if 0 < limit < len(reasons):
        yield f"... and {len(reasons) - limit} more reasons (--limit 0 shows all)"


def _non_finite(found: Sequence[NonFinite], limit: int, paint: Paint) -> Iterator[str]:
    yield paint(f"NaN or infinity in {count(len(found), 'record')}; first: {found[0].name}", "bad")
    rows = []
    for index, record in enumerate(first(found, limit)):
        for place, values in record.places.items():
            text = ", ".join(f"{name} {readable(value)}" for name, value in values.items())
            made_here = record.made_here and place not in record.came_in
            origin = "made here" if made_here else ""
            rows.append([">" if index == 0 else " ", record.name, place, text, origin])
    yield from table(rows)
    if 0 < limit < len(found):
        yield f"... and {len(found) - limit} more records (--limit 0 shows all)"


def records(
    folders: Sequence[RankFolder], text: str, limit: int, paint: Paint
) -> Iterator[str]:
    """Yield the lines that describe the records which match ``text``."""
    total = 0
    for folder in folders:
        shown = list(summary.matching(folder.path, text))
        if not shown:
            continue
        total += len(shown)
        parents, stacks = reader.read_parents(folder.path), reader.read_stacks(folder.path)
        for name, record in first(shown, limit):
            yield f"{paint(folder.title, 'title')}   {paint(name, 'name')}"
            if name in parents:
                yield f"  parent: {visible(parents[name] or 'none')}"
            yield from indent(_entries(record, paint))
            yield from indent(_stack(name, stacks, paint))
            yield ""
        if 0 < limit < len(shown):
            yield f"... and {len(shown) - limit} more in {folder.title} (--limit 0 shows all)"
    hint = "" if total else "; upper and lower case count"
    yield f"{count(total, 'record')} with {text!r} in the name{hint}"


def _entries(record: Any, paint: Paint) -> Iterator[str]:
    tensors: list[tuple[str, Any]] = []
    values: list[list[str]] = []
    for place, entry in reader.leaves(record):
        if reader.is_tensor(entry):
            tensors.append((place, entry))
        else:
            values.append([place or "value", _plain(entry)])
    if tensors:
        yield from _tensor_table(tensors, paint)
    yield from table(values)


def _tensor_table(tensors: Sequence[tuple[str, Any]], paint: Paint) -> Iterator[str]:
    columns = [name for name in COLUMNS if any(name in entry for _, entry in tensors)]
    rows = [["place", *(_TITLES.get(name, name) for name in columns)]]
    for place, entry in tensors:
        cells = [readable(entry[name]) if name in entry else "" for name in columns]
        rows.append([place or "value", *cells])
    title, *lines = table(rows)
    yield title
    for line, (_, entry) in zip(lines, tensors, strict=True):
        yield paint(line, "bad") if reader.non_finite(entry) else line


def _stack(name: str, stacks: dict[str, list[str]], paint: Paint) -> Iterator[str]:
    """The frames of a record; a backward record shows those of its forward."""
    forward = reader.forward_of(name)
    frames = stacks.get(name) or stacks.get(forward)
    if not frames:
        return
    yield "stack:" if name in stacks else f"stack of {forward}:"
    for frame in frames:
        where, _, source = frame.partition(", \n ")
        yield f"  {paint(where, 'dim')}"
        yield f"      {visible(source.strip())}"


def as_json(folders: Sequence[RankFolder], text: str | None) -> str:
    """Return the same content as one strict JSON document: NaN and infinities are strings."""
    if text is None:
        content = [_summary_json(summary.summarize(folder)) for folder in folders]
    else:
        content = [found for folder in folders for found in _records_json(folder, text)]
    return json.dumps(strict(content), indent=1, allow_nan=False)


def _summary_json(found: Summary) -> dict[str, Any]:
    return {
        "path": str(found.folder.path),
        "step": found.folder.step,
        "rank": found.folder.name,
        **found.header,
        "records": found.records,
        "kinds": {kind: dict(parts) for kind, parts in found.counts.items()},
        "non_finite": [
            {"record": record.name, "places": record.places, "made_here": record.made_here}
            for record in found.non_finite
        ],
        "unfinished": found.unfinished,
        "selection_unmatched": found.unmatched,
        "modules_never_called": found.never_called,
        "files": found.files,
        "tensor_files": found.tensor_files,
        "problems": found.problems.total(),
        "problems_by_reason": dict(found.problems.most_common()),
        "error": found.error or None,
    }


def _records_json(folder: RankFolder, text: str) -> Iterator[dict[str, Any]]:
    parents, stacks = reader.read_parents(folder.path), reader.read_stacks(folder.path)
    for name, record in summary.matching(folder.path, text):
        yield {
            "step": folder.step,
            "rank": folder.name,
            "name": name,
            "parent": parents.get(name),
            "stack": stacks.get(name) or stacks.get(reader.forward_of(name)),
            "record": record,
        }


def strict(value: Any) -> Any:
    """Return the value with NaN and infinities as strings, as our own files have them."""
    if isinstance(value, float) and not math.isfinite(value):
        return readable(value)
    if isinstance(value, dict):
        return {key: strict(item) for key, item in value.items()}
    return [strict(item) for item in value] if isinstance(value, list) else value


def _plain(entry: Any) -> str:
    if isinstance(entry, dict) and "value" in entry:
        return f"{entry['type']} {readable(entry['value']) or None}"
    return json.dumps(entry, ensure_ascii=False) if isinstance(entry, dict) else str(entry)
