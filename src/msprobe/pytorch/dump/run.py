"""StepRun: everything that lives for one step. Passed along, never looked up."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from . import tasks
from .background import ASYNC_LIMIT_BYTES, LIMIT_BYTES, Background
from .call import Call
from .config import DumpConfig, Level
from .coverage import Coverage
from .describe import describe
from .entries import Entry, OnTensor, TensorEntry
from .filters import Names, Selection
from .gate import ThreadState
from .guard import Guard
from .journal import Journal
from .passes import Passes
from .tensor_files import TensorFiles
from .verdicts import Verdicts, tensor_entries
from .writer import Writer

T = TypeVar("T")
_NOT_RETURNED = "it had not returned when the step ended"
_AREAS = frozenset({"optimizer", "clip_grad"})


class StepRun:
    """Counters, selection and descriptions of one step. What it makes of a call goes to a Journal.

    Also the `Sink` of the descriptions.
    """

    def __init__(
        self,
        config: DumpConfig,
        writer: Writer,
        thread: ThreadState,
        passes: Passes,
        wake: Callable[[StepRun], None],
    ) -> None:
        self.config = config
        limit = ASYNC_LIMIT_BYTES if config.async_dump else LIMIT_BYTES
        tensors = TensorFiles(writer, Background(limit, thread.silent))
        self.keep = tensors.save  # Sink
        self.journal = Journal(writer, lambda: wake(self), tensors)
        self.small = self.journal.small
        self.writer = writer
        self.thread = thread
        self.guard = Guard(thread, self.problem).run  # runs all our own work
        # Hears when somebody waits for the result of a functional collective.
        self.on_wait: Callable[[StepRun, Any, str, Callable[[], None]], bool] | None = None
        self.passes = passes
        self.step = 0
        self.begun = 0.0  # time.monotonic() at the first start() of the step
        self.rank: int | None = None
        self.coverage = Coverage()
        self.kept_nodes: list[Any] = []  # accumulators of leaves given to save()
        self.parameter_groups: dict[str, weakref.ref[Any]] = {}  # module → its ParameterGroup
        self.task = tasks.TASKS[config.task]
        self.verdicts: Verdicts | None = None
        self.describer: OnTensor | None = None
        # What is fixed for the step is decided here, not per call.
        directions = config.data_mode
        records = self.task.records
        self.takes_forward = records and "forward" in directions
        self.takes_backward = records and "backward" in directions
        self.takes_input = records and "input" in directions
        self.takes_output = records and "output" in directions
        self.constructs = config.extra_info and config.level != Level.L1
        self.listens = "backward" in directions or self.constructs
        self.judges = self.task.only_bad or self.task.marks_nan
        self._keeps_some = self.task.keeps_all or bool(config.tensor_list)
        self.needs_paths = self._keeps_some  # file names are made of the places of tensors
        self.selection = Selection(
            config.names,
            config.scope,
            config.risk_level,
            expand=config.level == Level.MIX,
            white_list=config.white_list,
            black_list=config.black_list,
        )
        self._tensor_list = Names(config.tensor_list)
        self._counts: dict[str, Any] = {}
        self._areas: set[str] = set()
        self.is_simple = self.selection.takes_all and not self.constructs
        self.use_slices(())

    # ---- names and decisions -----------------------------------------------------------------

    def count(self, key: str) -> int:
        """The next number of ``key``, from 0; atomic, so that threads never share one."""
        counter = self._counts.get(key)
        if counter is None:
            counter = self._counts.setdefault(key, itertools.count())
        return int(next(counter))

    def parent(self, thread: ThreadState) -> Any:
        """What runs around the call that begins: a module's Call, the name of an area, None."""
        return self.module_parent(thread) or thread.area

    def module_parent(self, thread: ThreadState) -> Any:
        """As `parent`, for a module: torch's own areas are no parents of modules."""
        modules = thread.modules
        if modules and modules[-1].run is not self:
            modules.clear()  # left by a step that ended while its module was running
        return modules[-1] if modules else None

    def takes_parameter_grad(self, base: str, backward_kept: bool) -> bool:
        """Whether a parameter gradient of module ``base`` is recorded."""
        if not self.takes_backward or self.task.only_bad:
            return False
        return backward_kept or self.selection.names.match(f"{base}.parameters_grad")

    def keeps(self, record: str) -> bool:
        """Whether the tensors of this record are saved as files, whatever they hold."""
        if not self._keeps_some:
            return False
        return self.task.keeps_all or (bool(self._tensor_list) and self._tensor_list.match(record))

    def judge_by(
        self, is_bad: Callable[[str, Any], bool], limit: int, end: Callable[[str], None]
    ) -> None:
        """Keep the tensors of bad calls only, and ``end`` collecting after ``limit`` of them."""
        self.judges = True
        self._keeps_some = False  # the verdict says which
        self.needs_paths = True
        self.describer = None
        self.verdicts = Verdicts(
            is_bad,
            limit,
            only_bad=self.task.only_bad,
            keep=lambda path, tensor: self.keep(path, tensor),  # `forget` changes it
            problem=self.problem,
            end=end,
        )

    # ---- describing --------------------------------------------------------------------------

    def use_slices(self, more: Sequence[Any]) -> None:
        """Cut tensors by the rules of the configuration and then by ``more``."""
        config = self.config
        mode = "nan" if self.task.marks_nan else config.summary_mode
        rules = (*config.slices, *more)
        self._describers: dict[bool, OnTensor] = {
            keeps: tasks.describer(mode, config.precision == "high", rules, self, keeps)
            for keeps in (False, True)
        }
        # What describes every tensor of the step, where neither names nor results matter.
        simple = self.verdicts is None and (self.task.keeps_all or not self._keeps_some)
        self.describer = self._describers[self.task.keeps_all] if simple else None

    def on_tensor(self, record: str) -> OnTensor:
        """What describes the tensors of this record."""
        if self._keeps_some:
            return self._describers[self.keeps(record)]
        return self._describers[False]

    def visitor(self, call: Call, described: bool, *, before: bool) -> OnTensor:
        """What describes the arguments or results of this call, where `describer` does not."""
        if not described:
            return tasks.blank
        on_tensor = self.on_tensor(call.forward)
        verdicts = self.verdicts
        if verdicts is None:
            return on_tensor
        copy = before and verdicts.may_write(call)
        if before:
            call.held = []

        def visit(value: Any, path: str) -> Any:
            entry = on_tensor(value, path)
            if type(entry) is TensorEntry:
                verdicts.hold(call.held, entry, path, value, copy=copy)
            return entry

        return visit

    def argument(
        self,
        walk: Callable[[Any, str, OnTensor], T],
        value: Any,
        path: str,
        visit: OnTensor,
        found: list[Any],
    ) -> T | Any:
        """One argument of any type; its tensors are added to ``found``.

        If it can not be described, the log says why and the rest stands.
        """

        def noting(tensor: Any, place: str) -> Any:
            entry = visit(tensor, place)
            if type(entry) is TensorEntry:
                found.append(tensor)
            return entry

        try:
            return walk(value, path, noting)
        except Exception as error:
            self.writer.log(path, error)
            kind = type(value)
            return Entry(type=f"{kind.__module__}.{kind.__qualname__}", value=None)

    def tensor(self, value: Any, path: str, visit: OnTensor) -> Any:
        """`argument` for what nearly always is a plain tensor or a parameter."""
        kind = type(value)
        if kind is torch.nn.Parameter or kind is torch.Tensor:
            return visit(value, path)
        return self.argument(describe, value, path, visit, [])

    def judge(self, name: str, results: Any, held: Any) -> bool:
        """Whether a record is written, by what its results hold."""
        if self.verdicts is None:
            return True
        self.journal.read_back()
        return self.verdicts.judge(name, results, held)

    def mark(self, record: dict[str, Any], results: Any) -> None:
        """Task nan_check: field ``is_nan`` of a record, known once its values are read back."""
        if self.task.marks_nan:
            record["is_nan"] = 0
            self.journal.defer(
                None,
                lambda _: record.__setitem__(
                    "is_nan", int(any(entry.bad for entry in tensor_entries(results)))
                ),
            )

    def note(self, name: str, parent: str | None) -> None:
        """Enter a record into construct.json."""
        parents = self.journal.parents
        if parent in _AREAS and parent not in self._areas:
            self._areas.add(parent)
            parents.append((parent, None))
        parents.append((name, parent))

    def saved_entry(self, value: Any, path: str) -> Any:
        """Entry of a tensor given to save(), or of its gradient."""
        return self._describers[self.task.keeps_all](value, path)

    def defer(self, deferred: Any, use: Callable[[Any], None]) -> None:
        """Sink: read these values back at the next flush."""
        self.journal.defer(deferred, use)

    def postpone(self, result: Any, path: str, fill: Callable[[], None]) -> bool:
        """Sink: fill in a description once somebody waits for ``result``."""
        if self.on_wait is None or self.judges:  # a verdict does not wait
            return False
        return self.on_wait(self, result, path, fill)

    def problem(self, path: str, reason: str | Exception) -> None:
        """Sink: a value that could not be computed."""
        self.writer.log(path, reason)

    # ---- the end -----------------------------------------------------------------------------

    def forget(self) -> None:
        """In a forked child: the files are the parent's, whatever gradients still arrive here."""
        nowhere: Any = _Nowhere()
        self.journal = self.writer = self.keep = nowhere

    def close(self, notes: Mapping[str, Any]) -> None:
        """End the step. ``notes`` are further entries of coverage.json."""
        for call in list(self.journal.running.values()):
            if not call.failed:
                self.journal.incomplete[call.forward] = _NOT_RETURNED
                call.give_up()
        self.kept_nodes = []
        unmet = self.selection.unmet()
        unmet += [f"tensor_list entry {e!r} matched no record" for e in self._tensor_list.unmet()]
        said = [*unmet, *self.coverage.said()]
        if said:
            self.writer.log("not recorded", "; ".join(said))
        self.journal.close({**self.coverage.missing(), "selection_unmatched": unmet, **notes})


class _Nowhere:
    """Journal and writer of a run in a forked child. Takes no lock: another thread had them all."""

    def __getattr__(self, name: str) -> _Nowhere:
        return self

    def __call__(self, *_: Any, **__: Any) -> _Nowhere:
        return self
