"""StepRun: everything that lives for one step. Passed along, never looked up."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from . import callstack, gradients, names, quiet, stats, tasks
from .call import Call
from .config import DumpConfig, Level
from .describe import Entry, OnTensor, TensorEntry, describe, describe_kwargs, describe_output
from .filters import Names, Selection
from .gate import ThreadState
from .writer import Writer

T = TypeVar("T")
_requires = ("forward", "backward", "input", "output")


class StepRun:
    """Counters, selection and records of one step, and its `Writer`.

    Records are collected without a lock (deques and dicts change atomically) and written by
    `flush`, which may run in any thread.
    """

    def __init__(
        self,
        config: DumpConfig,
        writer: Writer,
        thread: ThreadState,
        passes: gradients.Passes,
        wake: Callable[[StepRun], None],
    ) -> None:
        self.config = config
        self.writer = writer
        self.thread = thread
        self.passes = passes
        self.records = 0
        self.rank: int | None = None
        self.discarded = False
        self.called: set[Any] = set()  # modules that have run: (index of the model, fqn)
        self.hooked: dict[Any, bool] = {}  # modules that could have run → have a forward
        self.kept_nodes: list[Any] = []  # accumulators of leaves given to save()
        self._drafts: dict[str, Any] = {}  # records that may still change: gradients of save()
        self.parameter_groups: weakref.WeakValueDictionary[str, Any] = (
            weakref.WeakValueDictionary()
        )
        self._wake = wake
        self._task = tasks.TASKS[config.task]
        self._takes = {mode: mode in config.data_mode for mode in _requires}
        self._construct = config.extra_info and config.level != Level.L1
        self._stacks_wanted = config.extra_info
        self.selection = Selection(
            config.names, config.scope, config.risk_level, expand=config.level == Level.MIX
        )
        self._tensor_list = Names(config.tensor_list)
        self._counts: dict[str, Any] = {}
        self._areas: set[str] = set()
        self._pending: dict[str, Call] = {}
        self._done: deque[tuple[str, Any]] = deque()
        self._parents: deque[tuple[str, str | None]] = deque()
        self._stacks: deque[tuple[str, Any]] = deque()
        self._deferred: deque[tuple[Any, Callable[[Any], None]]] = deque()
        self._flushing = threading.RLock()
        self.use_slices(())

    # ---- names and decisions -----------------------------------------------------------------

    def count(self, key: str) -> int:
        """The next number of ``key``, from 0; atomic, so that threads never share one."""
        counter = self._counts.get(key)
        if counter is None:
            counter = self._counts.setdefault(key, itertools.count())
        return next(counter)

    def parent(self, thread: ThreadState) -> Any:
        """What runs around the call that begins: a module's Call, the name of an area, None."""
        if thread.modules:
            if thread.modules[-1].run is self:
                return thread.modules[-1]
            thread.modules.clear()  # left by a step that ended while its module was running
        return thread.area

    def module_parent(self, thread: ThreadState) -> Any:
        """As `parent`, for a module: torch's own areas are no parents of modules."""
        parent = self.parent(thread)
        return parent if isinstance(parent, Call) else None

    def keeps(self, record: str) -> bool:
        """Whether the tensors of this record are saved as files."""
        return self._task.keeps_all or (bool(self._tensor_list) and self._tensor_list.match(record))

    def _wants(self, call: Call, name: str, risk: str, within: bool) -> bool:
        return self.selection.takes_all or self.selection.enter(name, risk, within)

    # ---- forward -----------------------------------------------------------------------------

    def begin(self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """The call is about to run: record its inputs as they are now."""
        spec = call.spec
        risk = "CORE" if spec is None else spec.risk
        parent = call.parent if isinstance(call.parent, Call) else None
        call.wanted = self._wants(call, call.forward, risk, parent is not None and parent.within)
        call.within = call.wanted or (parent is not None and parent.within)
        takes = self._task.records and self._takes["forward"]
        found: list[Any] = []
        visit = self._visitor(call.wanted and takes and self._takes["input"], call.forward, found)
        ignored = () if spec is None else spec.ignore_input
        listed = [
            None
            if _ignores(ignored, i)
            else self._argument(describe, a, f"{call.forward}.input.{i}", visit)
            for i, a in enumerate(args)
        ]
        named = {
            k: None if _ignores(ignored, k) else v
            for k, v in self._argument(
                describe_kwargs, kwargs, f"{call.forward}.kwargs", visit
            ).items()
        }
        call.inputs = [*listed, *named.values()]
        if call.wanted and takes:
            if self._takes["input"]:
                call.record = {"input_args": listed, "input_kwargs": named}
            self._pending[call.forward] = call
            if len(self._pending) == 1:
                self._wake(self)
        if (self._takes["backward"] or self._construct) and not (spec and spec.writes_arguments):
            call.seen = gradients.watch(found)

    def finish(self, call: Call, result: Any, parameters: Any = None) -> None:
        """The call has returned: record its outputs and listen for its gradients."""
        spec = call.spec
        takes = self._task.records and self._takes["forward"] and call.wanted
        found: list[Any] = []
        if takes and self._takes["output"] or call.seen is not None:
            visit = self._visitor(takes and self._takes["output"], call.forward, found)
            output = self._argument(describe_output, result, f"{call.forward}.output", visit)
            if spec is not None and spec.ignore_output and isinstance(output, list):
                output = [
                    None if _ignores(spec.ignore_output, i) else e for i, e in enumerate(output)
                ]
            call.outputs = output
            if takes and self._takes["output"]:
                call.record["output"] = output
                if parameters is not None:
                    call.record["parameters"] = self._parameters(call, parameters)
        self._pending.pop(call.forward, None)
        if takes and call.record:
            self.add_record(call.forward, call.record)
        self._note(call.forward, call.parent_name(), wanted=call.wanted)
        self.selection.leave(call.forward)
        if call.seen is not None:
            seen, call.seen = call.seen, None
            gradients.attach(seen, found, self.passes, lambda: call)
        call.record = {}

    def fail(self, call: Call) -> None:
        """The call has raised: its record ends with its inputs."""
        call.failed = True
        call.seen = None
        self._note(call.forward, call.parent_name(), wanted=call.wanted)
        self.selection.leave(call.forward)

    def _parameters(self, call: Call, parameters: Any) -> dict[str, Any]:
        visit = self._describers[self.keeps(call.forward)]
        return {
            name: self._argument(describe, value, f"{call.forward}.parameters.{name}", visit)
            for name, value in parameters
        }

    def _note(self, name: str, parent: str | None, *, wanted: bool, stack: bool = True) -> None:
        """Enter a record into construct.json and, for forwards, stack.json."""
        if self._construct:
            if parent in ("optimizer", "clip_grad") and parent not in self._areas:
                self._areas.add(parent)
                self._parents.append((parent, None))
            self._parents.append((name, parent))
        if stack and self._stacks_wanted and wanted and self._takes["forward"]:
            self._stacks.append((name, callstack.capture()))

    # ---- backward ----------------------------------------------------------------------------

    def enter_backward(self, call: Call) -> bool:
        """A backward pass has reached the call: whether its record is wanted."""
        if not self._takes["backward"] or not self._task.records:
            return False
        parent = call.parent if isinstance(call.parent, Call) else None
        within = parent is not None and parent.within_backward
        wanted = self._wants(call, call.backward, "CORE" if call.wanted else "LOW", within)
        return wanted

    def finish_backward(self, call: Call, record: dict[str, Any]) -> None:
        """All gradients of one pass have arrived."""
        name = call.backward_name()
        if call.takes_backward:
            for section in ("input", "output"):
                if not self._takes[section]:
                    del record[section]
            if record:
                self.add_record(name, record)
        if self._takes["backward"]:
            self._note(name, call.parent_backward(), wanted=False, stack=False)
        self.selection.leave(call.backward)

    def gradient_entry(self, call: Call, section: str, grad: Any, path: str) -> Any:
        """Entry of a gradient; its place alone where data_mode leaves the section out."""
        if not self._takes[section]:
            return None
        return self._describers[bool(path)](grad, path or f"{call.backward}.{section}")

    def takes_parameter_grad(self, base: str, backward_kept: bool) -> bool:
        """Whether a parameter gradient of module ``base`` is recorded."""
        if not self._task.records or not self._takes["backward"]:
            return False
        return backward_kept or self.selection.names.match(f"{base}.parameters_grad")

    def parameter_entry(self, record: str, name: str, grad: Any) -> Any:
        """Entry of a parameter's gradient."""
        path = f"{record}.{name}"
        return self._argument(describe, grad, path, self._describers[self.keeps(record)])

    def add_record(self, name: str, record: Any) -> None:
        """A complete record."""
        self.records += 1
        self._done.append((name, record))
        if len(self._done) == 1:
            self._wake(self)

    def draft_record(self, name: str, record: Any) -> None:
        """A record that may still change until the step ends."""
        self._drafts[name] = record
        self._wake(self)

    def saved_entry(self, value: Any, path: str) -> Any:
        """Entry of a tensor given to save(), or of its gradient."""
        return self._describers[self._task.keeps_all](value, path)

    # ---- describing --------------------------------------------------------------------------

    def use_slices(self, more: Sequence[Any]) -> None:
        """Cut tensors by the rules of the configuration and then by ``more``."""
        config = self.config
        rules = (*config.slices, *more)
        self._describers: dict[bool, OnTensor] = {
            keeps: tasks.describer(
                config.summary_mode, config.precision == "high", rules, self, keeps
            )
            for keeps in (False, True)
        }

    def _visitor(self, described: bool, record: str, found: list[Any]) -> OnTensor:
        on_tensor = self._describers[self.keeps(record)] if described else tasks.blank

        def visit(value: Any, path: str) -> Any:
            entry = on_tensor(value, path)
            if type(entry) is TensorEntry:
                found.append(value)
            return entry

        return visit

    def _argument(
        self, walk: Callable[[Any, str, OnTensor], T], value: Any, path: str, visit: OnTensor
    ) -> T | Any:
        """One argument. If it can not be described, the log says why and the rest stands."""
        try:
            return walk(value, path, visit)
        except Exception as error:
            self.writer.log(path, error)
            kind = type(value)
            return Entry(type=f"{kind.__module__}.{kind.__qualname__}", value=None)

    def defer(self, deferred: Any, use: Callable[[Any], None]) -> None:
        """Sink: read these values back at the next flush."""
        self._deferred.append((deferred, use))

    def keep(self, path: str, tensor: Any) -> str:
        """Sink: save a tensor."""
        if hasattr(tensor, "layout"):
            tensor = tasks.host_copy(tensor)
        with self._flushing:
            return self.writer.save_tensor(path, tensor)

    def problem(self, path: str, reason: str) -> None:
        """Sink: a value that could not be computed."""
        self.writer.log(path, reason)

    def guard(self, name: str, function: Callable[..., T], *args: Any) -> T | None:
        """Run our own work: unseen by the user's modes, marked as ours, and never raising.

        The one place where our errors are caught.
        """
        thread = self.thread
        before = thread.inside, thread.off
        thread.inside = thread.off = True
        try:
            if quiet.is_needed():
                with quiet.quiet():
                    return function(*args)
            return function(*args)
        except Exception as error:
            self.writer.log(name, error)
            return None
        finally:
            thread.inside, thread.off = before

    # ---- what is missing ----------------------------------------------------------------------

    def missing(self) -> dict[str, list[str]]:
        """What was asked for and not recorded: see coverage.json."""
        never = [k for k, has_forward in self.hooked.items() if has_forward and k not in self.called]
        unmet = self.selection.unmet()
        unmet += [f"tensor_list entry {e!r} matched no record" for e in self._tensor_list.unmet()]
        return {
            "modules_never_called": [f if i is None else f"{i}.{f}" for i, f in never],
            "selection_unmatched": unmet,
        }

    # ---- writing -----------------------------------------------------------------------------

    def flush(self, compact: bool = False) -> None:
        """Write what has been collected. Errors of the file system are logged, not raised."""
        with self._flushing:
            if self.discarded:
                return
            running = list(self._pending.items())
            records = _drain(self._done)
            deferred = _drain(self._deferred)
            if deferred:
                values = stats.read_back([d for d, _ in deferred])
                for (_, use), read in zip(deferred, values, strict=True):
                    use(read)
            for name, call in running:
                if not call.failed:
                    break
                self._pending.pop(name, None)
                records.append((name, call.record))
            ended = {name for name, _ in records}
            draft = [(n, c.record) for n, c in running if n not in ended and c.record]
            draft += list(self._drafts.items())
            self._write(records, draft, compact)

    def _write(self, records: list[Any], draft: list[Any], compact: bool) -> None:
        try:
            self.writer.append(
                records, draft, _drain(self._parents), _drain(self._stacks), callstack.render
            )
            if compact:
                self.writer.compact(callstack.render)
        except OSError as error:
            self.writer.log("writing the records", error)

    def move_to(self, folder: str) -> None:
        """Go on in another folder, with all that has been written."""
        with self._flushing:
            self.flush()
            self.writer.move_to(folder)

    def close(self, notes: Mapping[str, Any]) -> None:
        """Write everything and close the files; what still arrives opens them again.

        ``notes`` are further entries of coverage.json.
        """
        for call in list(self._pending.values()):
            call.failed = True
        self.kept_nodes = []
        for name, record in self._drafts.items():
            self.add_record(name, record)
        self._drafts = {}
        self.flush(compact=True)
        with self._flushing:
            missing = self.missing()
            self._say_missing(missing)
            self.writer.write_json("coverage.json", {**missing, **notes})
            self.writer.close()

    def _say_missing(self, missing: Mapping[str, list[str]]) -> None:
        never = missing["modules_never_called"]
        said = list(missing["selection_unmatched"])
        if never:
            first = ", ".join(never[:3]) + (", ..." if len(never) > 3 else "")
            said.append(f"{len(never)} modules were never called ({first})")
        if said:
            self.writer.log("not recorded", "; ".join(said))

    def discard(self) -> None:
        """Remove what was collected; what still arrives is dropped."""
        with self._flushing:
            self.discarded = True
            self.writer.discard()

def _drain(queue: deque[Any]) -> list[Any]:
    items = []
    while queue:
        items.append(queue.popleft())
    return items


def _ignores(rule: Any, place: int | str) -> bool:
    return bool(rule) and (rule == "all" or place in rule)
