"""One recorded call of an API or module, from its begin to its gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from . import names, recording
from .describe import describe, mirror

if TYPE_CHECKING:
    from .run import StepRun


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
        "outputs",
        "parameters",
        "parent",
        "raised",
        "record",
        "risk",
        "run",
        "seen",
        "spec",
        "stack",
        "takes_backward",
        "wanted",
        "within",
        "within_backward",
    )

    def __init__(self, run: StepRun, base: str, forward: str, backward: str, parent: Any) -> None:
        self.run = run
        self.base = base
        self.forward = forward
        self.backward = backward
        self.parent = parent  # the Call of the module around it, the name of an area, or None
        self.spec: Any = None  # the wrapper of an API; None for a module
        self.stack: Any = None  # key of the caller's stack
        self.wanted = False
        self.takes_backward = False
        self.within = False  # `list` selects this module's forward: so is what runs in it
        self.within_backward = False
        self.failed = False
        self.raised: Any = None  # the exception that was being handled when the call began
        self.risk = "CORE"
        self.record: dict[str, Any] = {}
        self.held: list[Any] = []  # tensors until the verdict, see verdicts.py
        self.held_grads: list[Any] = []
        self.seen: Any = None
        self.inputs: list[Any] = []  # entries of the arguments: the shape of section "output"
        self.outputs: Any = []  # entries of the results: the shape of section "input"
        self.parameters: list[Any] = []  # the ParameterGroup of a module
        self._grads_in: dict[int, Any] = {}
        self._grads_out: dict[int, Any] = {}
        self._times = 0

    def parent_name(self) -> str | None:
        """Name of the parent's forward record for construct.json."""
        return self.parent.forward if isinstance(self.parent, Call) else self.parent

    def parent_backward(self) -> str | None:
        """Name of the parent's backward record."""
        return self.parent.backward if isinstance(self.parent, Call) else None

    def grad_output(self, place: int, grad: Any) -> None:
        """Gradient of output ``place``."""
        self.run.guard(self.backward, self._take, self._grads_out, "input", place, grad)

    def grad_input(self, place: int, grad: Any) -> None:
        """Gradient of input ``place``."""
        self.run.guard(self.backward, self._take, self._grads_in, "output", place, grad)

    def _take(self, into: dict[int, Any], section: str, place: int, grad: Any) -> None:
        run = self.run
        if not self.takes_backward or not run.takes(section):
            return
        path = self._path(section, place) if run.needs_paths(self.backward) else self.backward
        into[place] = run.argument(describe, grad, path, run.on_gradient(self))

    def _path(self, section: str, place: int) -> str:
        paths: list[str] = []
        shape = self._shape("input") if section == "input" else self.inputs
        mirror(shape, f"{self.backward_name()}.{section}", paths.append)
        return paths[place]

    def _shape(self, section: str) -> Any:
        if section == "output":
            return self.inputs
        # Fields of a named tuple are told by position, as autograd tells them.
        return list(self.outputs.values()) if isinstance(self.outputs, dict) else self.outputs

    def backward_name(self) -> str:
        """Name of the backward record of this pass over the graph."""
        return names.repeated_backward(self.backward, self._times)

    def begin(self, graph_task: int) -> None:
        """A backward pass has reached the call."""
        self.run.guard(self.backward, self._begin, graph_task)

    def _begin(self, graph_task: int) -> None:
        self.takes_backward = self.run.takes_backward(self)
        for group in self.parameters:
            group.passes[graph_task] = self.takes_backward or group.passes.get(graph_task, False)

    def done(self) -> None:
        """The record of this pass is complete."""
        self.run.guard(self.backward, self._done)

    def _done(self) -> None:
        record = {
            section: mirror(self._shape(section), "", _next_entry(grads))
            for section, grads in (("input", self._grads_out), ("output", self._grads_in))
        }
        self._grads_out, self._grads_in = {}, {}
        recording.finish_backward(self, record)
        self.held_grads = []
        self._times += 1


def _next_entry(grads: dict[int, Any]) -> Callable[[str], Any]:
    places: Iterator[int] = iter(range(1 << 62))
    return lambda path: grads.get(next(places))
