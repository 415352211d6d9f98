"""Reading dump trees, ours and those of the original tool; standard library only.

A tree is ``<dump_path>/step<N>/rank<R>`` (or ``proc<PID>``) with dump.json or debug.json in each
folder. NaN and infinities are strings in our files and bare literals in the original's: both come
out as floats only where a caller asks (`number`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import UsageError

DATA_FILES = ("dump.json", "debug.json")
_OURS = '"data": {'  # how the first line of our layout ends
STATISTICS = ("Max", "Min", "Mean", "Norm")
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_STEP = re.compile(r"step(\d+)")
_RANK = re.compile(r"(rank|proc)(\d*)")
# A backward that runs once more over the same graph has a further number.
# DOTALL: names may hold any letter, a line break too.
_MODULE = re.compile(
    r"(Module\..*)\.(forward|backward|parameters_grad)(\.\d+)(?:\.\d+)?", re.DOTALL
)
_API = re.compile(r"(([^.]+)\..*\.\d+)\.(forward|backward)(?:\.\d+)?", re.DOTALL)
_SAVED = re.compile(r".*\.\d+\.debug", re.DOTALL)


@dataclass(frozen=True, slots=True)
class RankFolder:
    """The files of one process in one step. ``step`` is None where the path does not tell."""

    path: Path
    step: int | None
    name: str

    @property
    def title(self) -> str:
        """The last parts of the path: ``step0/rank0``."""
        return self.name if self.step is None else f"step{self.step}/{self.name}"


def find_ranks(path: str | Path) -> list[RankFolder]:
    """Return the rank folders at or below a dump path, step folder or rank folder, in order.

    Raises UsageError where there is none.
    """
    root = Path(path).expanduser()
    if not root.is_dir():
        raise UsageError(f"{root} is {'not a directory' if root.exists() else 'not there'}.")
    if _has_data(root):
        return [_rank_folder(root.resolve())]
    below = [folder for folder in root.glob("*") if _has_data(folder)]
    if not below:
        below = [folder for folder in root.glob("step*/*") if _has_data(folder)]
    if not below:
        raise UsageError(
            f"{root} holds no dump: expected step<N>/rank<R>/dump.json (or debug.json) below it, "
            "or one of these folders. Give the dump_path of config.json."
        )
    return sorted(map(_rank_folder, (folder.resolve() for folder in below)), key=_order)


def _has_data(folder: Path) -> bool:
    return any((folder / name).is_file() for name in DATA_FILES)


def _rank_folder(path: Path) -> RankFolder:
    step = _STEP.fullmatch(path.parent.name)
    return RankFolder(path, int(step[1]) if step else None, path.name)


def _order(folder: RankFolder) -> tuple[int, str, int, str]:
    match = _RANK.fullmatch(folder.name)
    kind, number = (match[1], int(match[2] or 0)) if match else ("", 0)
    return (-1 if folder.step is None else folder.step, kind, number, folder.name)


def open_records(folder: Path) -> tuple[dict[str, Any], Iterator[tuple[str, Any]]]:
    """Return the header of dump.json or debug.json and an iterator over ``(name, record)``.

    Our layout, one record per line, is read line by line; any other JSON is read at once.
    ValueError (JSONDecodeError) where the file is not JSON, also during the iteration.
    """
    path = data_file(folder)
    with path.open(encoding="utf-8") as file:
        first = file.readline().rstrip()
        if first.endswith(_OURS):
            header = json.loads(first + "}}")
            del header["data"]
            return header, _lines(path)
    whole = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(whole, dict) or not isinstance(whole.get("data"), dict):
        raise ValueError(f'{path.name} has no "data" object')
    records = whole.pop("data")
    return whole, iter(records.items())


def data_file(folder: Path) -> Path:
    """The file of a rank folder that holds its records: dump.json, or debug.json."""
    return next(folder / name for name in DATA_FILES if (folder / name).is_file())


class RecordFile(Mapping[str, Any]):
    """dump.json or debug.json by record name, in the order of the file.

    Of our layout only the places of the lines are kept, and a record is read when it is asked
    for; any other layout is read as a whole. ValueError where the file is broken.
    """

    def __init__(self, folder: Path) -> None:
        self._path = data_file(folder)
        self._known: dict[str, Any] = {}  # name → offset of its line, or the record
        with self._path.open("rb") as file:
            self._by_line = file.readline().rstrip().endswith(_OURS.encode())
            while self._by_line:
                offset, line = file.tell(), file.readline()
                if not line.startswith(b'"'):
                    break
                name, _ = json.JSONDecoder().raw_decode(line.decode("utf-8"))
                self._known[name] = offset
        if not self._by_line:
            self._known = dict(open_records(folder)[1])

    def __getitem__(self, name: str) -> Any:
        found = self._known[name]
        if not self._by_line:
            return found
        with self._path.open("rb") as file:
            file.seek(found)
            line = file.readline().decode("utf-8").strip().rstrip(",")
        return json.loads("{" + line + "}")[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open(encoding="utf-8") as file:
        next(file)
        for number, line in enumerate(file, start=2):
            text = line.strip()
            if text == "}}":
                return
            try:
                yield from json.loads("{" + text.rstrip(",") + "}").items()
            except json.JSONDecodeError as err:
                raise ValueError(f"line {number}: {err.msg}") from err
    raise ValueError("the closing brackets are missing")


def read_json(path: Path) -> Any:
    """Return the content of a JSON file, None if there is no such file; ValueError if broken."""
    if not path.is_file():
        return None
    return json.loads(path.read_text(encoding="utf-8"))


def read_parents(folder: Path) -> dict[str, Any]:
    """Return construct.json: record name → parent record name or None; empty if there is none."""
    parents = read_json(folder / "construct.json")
    return parents if isinstance(parents, dict) else {}


def read_stacks(folder: Path) -> dict[str, list[str]]:
    """Return record name → its frames from stack.json, innermost first."""
    entries = read_json(folder / "stack.json")
    if not isinstance(entries, dict):
        return {}
    return {name: frames for names, frames in entries.values() for name in names}


def kind_of(name: str) -> tuple[str, str]:
    """Return what a record is of and which part: ``("Module", "forward")``, ``("Torch", ...)``.

    Saved variables of level debug are ``("saved", "debug")``, other names ``("other", "")``.
    """
    if match := _MODULE.fullmatch(name):
        return "Module", match[2]
    if match := _API.fullmatch(name):
        return match[2], match[3]
    return ("saved", "debug") if _SAVED.fullmatch(name) else ("other", "")


def forward_of(name: str) -> str:
    """Return the name of the forward record to which a record belongs."""
    if match := _MODULE.fullmatch(name):
        return f"{match[1]}.forward{match[3]}"
    match = _API.fullmatch(name)
    return f"{match[1]}.forward" if match else name


def is_tensor(entry: Any) -> bool:
    """Tell whether an entry describes a tensor or an array.

    Arguments may be called shape and dtype as well: what stands there is an object, not text.
    """
    return isinstance(entry, dict) and "shape" in entry and isinstance(entry.get("dtype"), str)


def is_value(entry: Any) -> bool:
    """Tell whether an entry describes one plain argument: null, a number, a dtype, ..."""
    if not isinstance(entry, dict):
        return not isinstance(entry, list)
    return isinstance(entry.get("type"), str) and not is_tensor(entry)


def leaves(record: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ``(place, entry)`` for every tensor and plain value: ``("input_args.0", {...})``."""
    if is_tensor(record) or is_value(record):
        yield place, record
        return
    pairs = record.items() if isinstance(record, dict) else enumerate(record)
    for key, value in pairs:
        yield from leaves(value, f"{place}.{key}" if place else str(key))


def number(value: Any) -> float | None:
    """Return a statistic as a float, also from "NaN" or "-Infinity"; None if it is no number."""
    if isinstance(value, str):
        return _NON_FINITE.get(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    return None


def has_statistics(entry: Any) -> bool:
    """Tell whether a tensor entry holds any of Max, Min, Mean, Norm."""
    return is_tensor(entry) and any(entry.get(name) is not None for name in STATISTICS)


def non_finite(entry: Any) -> dict[str, float]:
    """Return the statistics that are NaN or infinite of a tensor entry with such elements.

    Told by Max and Min: Mean and Norm of large finite elements may be infinite.
    """
    if not is_tensor(entry):
        return {}
    extremes = [number(entry.get(name)) for name in ("Max", "Min")]
    if all(value is None or math.isfinite(value) for value in extremes):
        return {}
    found = ((name, number(entry.get(name))) for name in STATISTICS)
    return {k: value for k, value in found if value is not None and not math.isfinite(value)}
