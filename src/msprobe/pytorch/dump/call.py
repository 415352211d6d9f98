"""One recorded call of an API or module, from its begin to its gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from . import names
from .entries import TensorEntry, fill

if TYPE_CHECKING:
    from .run import StepRun


ONE = (True,)  # the places of tensors where there is nothing but one tensor
_tensor = torch.Tensor


class Call:
    """State of one call. Also the listener of its gradients (see gradients.py)."""

    __slots__ = (
        "__weakref__",
        "_grads_in",
        "_grads_out",
        "_times",
        "backward",
        "base",
        "failed",
        "forward",
        "held",
        "held_grads",
        "inputs",
        "module",
        "noted",
        "outputs",
        "parameters",
        "parent",
        "raised",
        "record",
        "run",
        "seen",
        "spec",
        "stack",
        "takes_backward",
        "told",
        "wanted",
        "within",
        "within_backward",
    )

    def __init__(
        self, run: StepRun, base: str, forward: str, backward: str, parent: Any, spec: Any = None
    ) -> None:
        self.run = run
        self.base = base
        self.forward = forward
        self.backward = backward
        self.parent = parent  # the Call of the module around it, the name of an area, or None
        self.spec = spec  # the wrapper of an API; None for a module
        self.module = 0  # id of a module
        self.raised: Any = None  # the exception that was being handled when the call began
        self.stack: Any = None  # key of the caller's stack
        self.wanted = False
        self.takes_backward = False
        self.within = False  # `list` selects this module's forward: so is what runs in it
        self.within_backward = False
        self.failed = False  # it has raised, or its step has ended: the record stays as it is
        self.noted = False  # its stack and its parent are with the journal
        self.told = False  # so is the parent of its backward record
        self.record: dict[str, Any] = {}
        self.held: Any = ()  # tensors until the verdict, see verdicts.py
        self.held_grads: Any = ()
        self.seen: Any = None
        self.inputs: Any = ()  # places of tensors in the arguments: the shape of section "output"
        self.outputs: Any = ()  # places of tensors in the results: the shape of section "input"
        self.parameters: Any = None  # the ParameterGroup of a module
        self._grads_in: Any = None  # place → entry, while a pass is under way
        self._grads_out: Any = None
        self._times = 0

    def parent_name(self) -> str | None:
        """Name of the parent's forward record for construct.json."""
        return self.parent.forward if type(self.parent) is Call else self.parent

    def tell_backward(self, name: str) -> None:
        """Enter a backward record into construct.json, with all that stands above it.

        A module may have no backward record of its own: the gradients came by a side door.
        """
        parent: Call | None = self.parent if type(self.parent) is Call else None
        if name != self.backward or not self.told:
            self.told = True
            self.run.note(name, None if parent is None else parent.backward)
        if parent is not None and not parent.told:
            parent.tell_backward(parent.backward)

    # ---- whether it is recorded --------------------------------------------------------------

    def decide(self) -> None:
        """Whether the forward record is wanted; what `list` makes of the records within it."""
        run, selected = self.run, self.run.selection.names
        parent: Call | None = self.parent if type(self.parent) is Call else None
        within = parent is not None and parent.within
        self.wanted = self._is_selected(self.forward, within, taken=run.takes_forward)
        if self.spec is None and selected:
            # Both now: in backward the inner calls come before the module.
            self.within = within or selected.would_match(self.forward)
            self.within_backward = selected.would_match(self.backward) or (
                parent is not None and parent.within_backward
            )

    def _decide_backward(self) -> bool:
        parent: Call | None = self.parent if type(self.parent) is Call else None
        within = parent is not None and parent.within_backward
        return self._is_selected(self.backward, within)

    def _is_selected(self, name: str, within: bool, *, taken: bool = True) -> bool:
        selection, api = self.run.selection, self.base.rpartition(".")[2]
        risk = "CORE" if self.spec is None else str(self.spec.risk)
        return selection.takes_api(api) and selection.enter(name, risk, within, taken=taken)

    def give_up(self) -> None:
        """Its record ends with its inputs; its stack and parent are noted."""
        run = self.run
        if not self.noted:
            if self.stack is not None and not run.task.only_bad:
                run.journal.stack(self.forward, self.stack)
            if run.constructs:
                run.note(self.forward, self.parent_name())
            self.noted = True
        self.failed = True
        if not run.selection.takes_all:
            run.selection.leave(self.forward)

    # ---- listener of gradients ---------------------------------------------------------------

    def guard(self, function: Callable[..., None], *args: Any) -> None:
        """Run the work of a hook: unseen, and without ever raising into the backward."""
        self.run.guard(self.backward, function, *args)

    def begin(self, graph_task: int) -> None:
        """A backward pass has reached the call."""
        run = self.run
        self._grads_in, self._grads_out = {}, {}
        self.takes_backward = run.takes_backward and (
            run.selection.takes_all or self._decide_backward()
        )
        if run.verdicts is not None:
            self.held_grads = []
        group = self.parameters
        if group is not None:
            group.passes[graph_task] = self.takes_backward or group.passes.get(graph_task, False)

    def grad_output(self, place: int, grad: Any) -> None:
        """Gradient of output ``place``."""
        if self.takes_backward and self.run.takes_input and self._grads_out is not None:
            self._grads_out[place] = self._describe(grad, "input", place)

    def grad_input(self, place: int, grad: Any) -> None:
        """Gradient of input ``place``."""
        if self.takes_backward and self.run.takes_output and self._grads_in is not None:
            self._grads_in[place] = self._describe(grad, "output", place)

    def _describe(self, grad: Any, section: str, place: int) -> Any:
        run, name = self.run, self.backward
        visit = run.describer
        if visit is not None and not run.needs_paths and type(grad) is _tensor:
            return visit(grad, name)
        visit = visit or run.on_tensor(name)
        path = self._path(section, place) if run.needs_paths else name
        entry: Any = run.tensor(grad, path, visit)
        if run.verdicts is not None and type(entry) is TensorEntry:
            run.verdicts.hold(self.held_grads, entry, path, grad, copy=False)
        return entry

    def done(self) -> None:
        """The record of this pass is complete."""
        run, name = self.run, self.backward
        if self._times:
            name = self.backward_name()
        if self.takes_backward and self._grads_in is not None:
            record = {}
            if run.takes_input:
                shape = self.outputs if type(self.outputs) is tuple else self._results()
                record["input"] = _filled(shape, self._grads_out)
            if run.takes_output:
                record["output"] = _filled(self.inputs, self._grads_in)
            if record and (not run.judges or self._passes_verdict(name, record)):
                run.journal.add(name, record)
        if run.constructs:
            self.tell_backward(name)
        if not run.selection.takes_all:
            run.selection.leave(self.backward)
        self._grads_out = self._grads_in = None
        self.held_grads = ()
        self._times += 1

    def _passes_verdict(self, name: str, record: dict[str, Any]) -> bool:
        run = self.run
        run.mark(record, list(record.values()))
        results = list(record.values()) if run.task.only_bad else record.get("output")
        return run.judge(name, results, self.held_grads)

    def backward_name(self) -> str:
        """Name of the backward record of this pass over the graph."""
        return names.repeated_backward(self.backward, self._times) if self._times else self.backward

    def _path(self, section: str, place: int) -> str:
        paths: list[str] = []
        shape = self._results() if section == "input" else self.inputs
        fill(shape, f"{self.backward_name()}.{section}", paths.append)
        return paths[place]

    def _results(self) -> Any:
        # Fields of a named tuple are told by position, as autograd tells them.
        return tuple(self.outputs.values()) if isinstance(self.outputs, dict) else self.outputs


def _filled(shape: Any, grads: dict[int, Any]) -> list[Any]:
    """The places of tensors with their gradients, null elsewhere."""
    if shape == ONE:
        return [grads.get(0)]
    places = itertools.count()
    filled: list[Any] = []
    for part in shape:
        if part is True:
            filled.append(grads.get(next(places)))
        else:
            filled.append(part and fill(part, "", lambda _: grads.get(next(places))))
    return filled
