"""A dump as Python objects: what `msprobe.read` returns.

Everything is read when it is asked for. Reads dumps of mindstudio-probe as well.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import reader
from .errors import UsageError
from .reader import RankFolder
from .values import TensorValue, tensors_in, values_of

if TYPE_CHECKING:
    import pandas

_TENSORS = "dump_tensor_data"
_COLUMNS = (
    "place", "dtype", "shape", "max", "min", "mean", "norm", "requires_grad", "md5", "data_name",
)


@dataclass(frozen=True)
class Record:
    """One record: a call, its gradients, the gradients of parameters, or a saved value.

    ``raw`` is the record as in the file.

    >>> import msprobe
    >>> record = msprobe.read("./dump").step(0).rank(0)["Torch.log.0.forward"]
    >>> record["input_args"][0].norm, record["output"][0].min
    (2.0, -inf)
    >>> [value.place for value in record.tensors]
    ['input_args.0', 'output.0']
    >>> record.tensor("output.0").max
    0.6931471824645996
    >>> record.parent is None, record.stack[0].startswith("File ")
    (True, True)
    """

    name: str
    raw: Any = field(repr=False)
    rank: Rank

    @property
    def kind(self) -> str:
        """What was called: "Module", or the prefix of an API ("Functional"); "saved", "other"."""
        return reader.kind_of(self.name)[0]

    @property
    def part(self) -> str:
        """forward, backward, parameters_grad or debug; empty if the name does not tell."""
        return reader.kind_of(self.name)[1]

    @cached_property
    def content(self) -> Any:
        """``raw`` with a `TensorValue`, `PlainValue` or None in the place of every value."""
        return values_of(self.raw, "", self.rank.path / _TENSORS)

    def __getitem__(self, section: str) -> Any:
        """A section of `content`: ``record["input_args"]``, ``record["output"]``."""
        if isinstance(self.content, dict) and section not in self.content:
            raise KeyError(f"{section!r} in {self.name}; there are {', '.join(self.content)}")
        return self.content[section]

    @cached_property
    def tensors(self) -> tuple[TensorValue, ...]:
        """Every tensor of the record, in the order of the file."""
        return tuple(tensors_in(self.content))

    def tensor(self, place: str) -> TensorValue:
        """The tensor at this place: ``record.tensor("output.0")``. KeyError if there is none."""
        for found in self.tensors:
            if found.place == place:
                return found
        places = ", ".join(found.place for found in self.tensors) or "none"
        raise KeyError(f"{place!r} in {self.name}; there are {places}")

    @property
    def parent(self) -> str | None:
        """Name of the record around this one; None at the top, and without construct.json."""
        parent = self.rank.parents.get(self.name)
        return parent[0] if isinstance(parent, list) else parent

    @property
    def stack(self) -> list[str]:
        """Frames of the caller, innermost first; a backward record has those of its forward."""
        stacks = self.rank.stacks
        return stacks.get(self.name) or stacks.get(reader.forward_of(self.name)) or []


class Rank:
    """The dump of one process in one step: iterates over its records, finds them by name."""

    def __init__(self, folder: RankFolder) -> None:
        self.path = folder.path
        self.step = folder.step
        self.name = folder.name

    def __repr__(self) -> str:
        return f"<Rank {self.name} of step {self.step} in {self.path}>"

    @property
    def number(self) -> int | None:
        """The rank; None for a process without one (``proc1234``)."""
        digits = self.name.removeprefix("rank")
        return int(digits) if digits.isdecimal() else None

    @cached_property
    def header(self) -> dict[str, Any]:
        """Task, level, framework, dump_data_dir."""
        return reader.open_records(self.path)[0]

    def __iter__(self) -> Iterator[Record]:
        """Read the file from its begin, record by record. ValueError where it is broken."""
        for name, raw in reader.open_records(self.path)[1]:
            yield Record(name, raw, self)

    def __getitem__(self, name: str) -> Record:
        """The record of this name; KeyError if there is none."""
        if name not in self._file:
            near = ", ".join(difflib.get_close_matches(name, self._file))
            hint = f"the nearest: {near}" if near else "none has a name like it, see names()"
            raise KeyError(f"{name!r}; of {len(self)} records {hint}")
        return Record(name, self._file[name], self)

    def __contains__(self, name: object) -> bool:
        return name in self._file

    def __len__(self) -> int:
        return len(self._file)

    def names(self) -> list[str]:
        """The names of all records, in the order of the file."""
        return list(self._file)

    def find(self, text: str) -> Iterator[Record]:
        """The records with ``text`` in their name."""
        return (self[name] for name in self._file if text in name)

    @cached_property
    def _file(self) -> reader.RecordFile:
        return reader.RecordFile(self.path)

    @cached_property
    def parents(self) -> dict[str, Any]:
        """construct.json; empty if there is none."""
        return reader.read_parents(self.path)

    @cached_property
    def stacks(self) -> dict[str, list[str]]:
        """Record name → frames, from stack.json; empty if there is none."""
        return reader.read_stacks(self.path)

    @cached_property
    def coverage(self) -> dict[str, Any]:
        """coverage.json: what was not recorded, and why; empty if there is none."""
        found = reader.read_json(self.path / "coverage.json")
        return found if isinstance(found, dict) else {}

    def to_pandas(self) -> pandas.DataFrame:
        """A pandas.DataFrame with one row per tensor. UsageError without pandas."""
        return _frame([self])


@dataclass(frozen=True, slots=True)
class Step:
    """One step: its ``number`` (None where the path does not tell) and its ranks."""

    number: int | None
    ranks: tuple[Rank, ...]

    def __iter__(self) -> Iterator[Rank]:
        return iter(self.ranks)

    def rank(self, rank: int | str) -> Rank:
        """The rank of this number or folder name. KeyError if there is none."""
        for found in self.ranks:
            if rank in (found.number, found.name):
                return found
        raise KeyError(f"{rank!r}; there are {', '.join(found.name for found in self.ranks)}")


class Dump:
    """A whole dump, or the part of it at the given path. See `msprobe.read`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.ranks = tuple(map(Rank, reader.find_ranks(path)))

    def __repr__(self) -> str:
        return f"<Dump {self.path}: {len(self.steps)} steps, {len(self.ranks)} rank folders>"

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The steps in order."""
        ranks: dict[int | None, list[Rank]] = {}
        for rank in self.ranks:
            ranks.setdefault(rank.step, []).append(rank)
        return tuple(Step(number, tuple(found)) for number, found in ranks.items())

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def step(self, number: int) -> Step:
        """The step of this number. KeyError if there is none."""
        for found in self.steps:
            if found.number == number:
                return found
        raise KeyError(f"{number}; there are {[found.number for found in self.steps]}")

    def records(self) -> Iterator[Record]:
        """Every record of every step and rank."""
        return (record for rank in self.ranks for record in rank)

    def to_pandas(self) -> pandas.DataFrame:
        """A pandas.DataFrame with one row per tensor. UsageError without pandas."""
        return _frame(self.ranks)


def _rows(ranks: Iterable[Rank]) -> Iterator[dict[str, Any]]:
    for rank in ranks:
        for record in rank:
            head = {"step": rank.step, "rank": rank.name, "record": record.name}
            head |= {"kind": record.kind, "part": record.part, "parent": record.parent}
            for tensor in record.tensors:
                yield head | {name: getattr(tensor, name) for name in _COLUMNS}


def _frame(ranks: Iterable[Rank]) -> pandas.DataFrame:
    try:
        library: Any = importlib.import_module("pandas")
    except ImportError as err:
        raise UsageError("to_pandas() needs pandas: pip install pandas.") from err
    return library.DataFrame(list(_rows(ranks)))
