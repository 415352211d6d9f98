"""The gradients of a module's own parameters, as they stand when a backward pass has ended."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from .. import edges, gradients
from ..call import Call
from ..names import parameters_grad_record

_NO_GRADIENT = (
    "no gradient on this rank: FSDP holds it on another, or it was taken away during backward"
)


class ParameterGroup:
    """Hears when the gradients of one module's own parameters are accumulated, and records them.

    Recorded is ``parameter.grad`` at the end of the backward pass: with what earlier passes have
    left there, and after DDP or FSDP have reduced it. Lives as long as a graph that a recorded
    call of the module has made: the calls refer to it, the graph to the calls. Its hooks are
    removed soon after (`passes.Orphans`).
    """

    __slots__ = (
        "__weakref__",
        "_arrived",
        "_base",
        "_handles",
        "_module",
        "_nodes",
        "_run",
        "_task",
        "passes",
    )

    def __init__(self, run: Any, base: str, module: nn.Module) -> None:
        self._run = run
        self._base = base
        self._module = weakref.ref(module)
        self._nodes: dict[str, Any] = {}
        self._handles: dict[str, Any] = {}
        self._arrived: dict[str, Any] = {}
        self._task: int | None = None
        self.passes: dict[int, bool] = {}  # backward passes through a recorded call → wanted?
        run.passes.orphans.watch(self, self._handles)

    def add(self, name: str, parameter: Any) -> None:
        """Hook the accumulator of a parameter unless it is hooked already."""
        node = edges.accumulator(parameter)
        if node is None or self._nodes.get(name) is node:
            return
        if name in self._handles:
            self._handles.pop(name).remove()
        self._nodes[name] = node
        # An optimizer that steps inside backward takes the gradient away before its end.
        consumed = bool(getattr(parameter, "_post_accumulate_grad_hooks", None))
        self._handles[name] = node.register_prehook(_Arriving(self, name, consumed))

    def arrive(self, name: str, grad: Any) -> None:
        """The gradient of a parameter is about to be accumulated."""
        task = gradients.graph_task()
        if task not in self.passes:
            return  # it comes from a graph that was not recorded
        if self._task != task:
            if self._task is not None:
                self.finish(self._task)
            self._task = task
            self._run.passes.join_last(task, self)
        self._arrived[name] = grad

    def finish(self, task: int) -> None:
        """The backward pass has ended: record what it has accumulated."""
        if self._task != task:
            return
        self._task = None
        arrived, self._arrived = self._arrived, {}
        self._run.guard(self._base, self._record, arrived, self.passes.pop(task, False))

    def _record(self, arrived: dict[str, Any], wanted: bool) -> None:
        run, module = self._run, self._module()
        if module is None or not run.takes_parameter_grad(self._base, wanted):
            return
        number = run.count(f"{self._base}.parameters_grad")
        record = parameters_grad_record(self._base, number)
        visit = run.describer or run.on_tensor(record)
        entries = {}
        for name, consumed in arrived.items():
            parameter = module._parameters.get(name)
            grad = None if parameter is None else parameter.grad
            if grad is None:
                grad = consumed
            if grad is None:
                run.problem(f"{record}.{name}", _NO_GRADIENT)
            entries[name] = [run.tensor(grad, f"{record}.{name}", visit)]
        run.journal.add(record, entries)


class _Arriving:
    """Hook before the accumulator of one parameter. One object, as the hooks of gradients.py."""

    __slots__ = ("_consumed", "_group", "_name")

    def __init__(self, group: ParameterGroup, name: str, consumed: bool) -> None:
        self._group = weakref.ref(group)
        self._name = name
        self._consumed = consumed

    def __call__(self, grads: Any) -> None:
        group = self._group()
        if group is not None and grads[0] is not None:
            group.arrive(self._name, grads[0] if self._consumed else None)


def listen(call: Call, module: nn.Module) -> None:
    """Have the gradients of the module's own parameters recorded that come by this call."""
    own = [(n, p) for n, p in module._parameters.items() if p is not None and p.requires_grad]
    if not own:
        return
    call.run.passes.orphans.remove()
    groups = call.run.parameter_groups
    known = groups.get(call.base)
    group = None if known is None else known()
    if group is None:
        group = ParameterGroup(call.run, call.base, module)
        groups[call.base] = weakref.ref(group)
    for name, parameter in own:
        group.add(name, parameter)
    call.parameters = group
