"""Hooks on the modules of a model: torch's own, so that they see what torch sees."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .. import edges, gradients, recording
from ..call import Call
from ..gate import OFF, Gate
from ..names import module_base, module_records, parameters_grad_record
from ..quiet import is_capturing

_is_tracing: Any = torch._C._get_tracing_state
_NO_GRADIENT = (
    "no gradient on this rank: FSDP holds it on another, or it was taken away during backward"
)


class ModuleHook:
    """The pair of hooks of one module. In a copy or pickle of the model it does nothing."""

    __slots__ = ("_base", "_gate", "_named", "always", "fqn", "index")

    def __init__(self, gate: Gate, index: int | None, fqn: str, *, focused: bool = False) -> None:
        self._gate = gate
        self.index = index
        self.fqn = fqn
        self.always = focused  # the module of module_dump records while all others are quiet
        self._base = ""
        self._named: Any = None  # what `_base` was made of: a module may move or change its class

    def _base_of(self, module: nn.Module) -> str:
        named = self.index, self.fqn, type(module).__name__
        if named != self._named:
            self._named = named
            self._base = module_base(*named)
        return self._base

    def _is_off(self) -> bool:
        gate = self._gate
        return not gate.open or gate.thread.state == OFF or (gate.focus and not self.always)

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Forward pre-hook."""
        if self._is_off() or _is_tracing() or is_capturing():
            return
        gate = self._gate
        run, thread = gate.run, gate.thread
        assert run is not None
        base = self._base_of(module)
        for other in thread.modules:
            if other.base is base:  # it calls itself, or Ctrl-C has ended its last call
                forget_left_over(thread.modules, module)
                break
        forward, backward = module_records(base, run.count(base))
        call = Call(run, base, forward, backward, run.module_parent(thread))
        call.raised = sys.exc_info()[1]
        call.module = id(module)
        run.coverage.called.add((self.index, self.fqn))
        thread.modules.append(call)
        run.guard(forward, _begin, call, module, args, kwargs)

    def after(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        """Forward hook, called also when the forward has raised."""
        modules = self._gate.thread.modules
        base = self._base_of(module)
        place = len(modules) - 1
        while place >= 0 and modules[place].base != base:
            place -= 1
        if place < 0 or _is_tracing():
            return  # it began before this window
        call: Call = modules[place]
        del modules[place:]  # with what an interrupted forward has left above it
        raised = sys.exc_info()[1] is not call.raised
        if raised or self._is_off() or call.run is not self._gate.run:
            call.run.guard(call.forward, recording.fail, call)
        else:
            call.run.guard(call.forward, recording.finish, call, result, module._parameters)


def _begin(call: Call, module: nn.Module, args: Any, kwargs: Any) -> None:
    recording.begin(call, args, kwargs)
    if call.seen is not None and module._parameters:
        _listen(call, module)


def forget_left_over(modules: list[Call], beginning: nn.Module | None = None) -> None:
    """End the calls that stand in ``modules`` though their forward is no longer on the stack.

    torch calls no hook of a module that an exception like KeyboardInterrupt leaves.
    ``beginning``: the module whose call is about to begin; its own frame does not count.
    """
    running: Counter[int] = Counter()
    frame = sys._getframe(1) if modules else None
    while frame is not None:
        if frame.f_code.co_name == "_call_impl":
            running[id(frame.f_locals.get("self"))] += 1
        frame = frame.f_back
    running[id(beginning)] -= 1
    for place, call in enumerate(modules):
        running[call.module] -= 1
        if running[call.module] < 0:
            for left in modules[place:]:
                left.run.guard(left.forward, recording.fail, left)
            del modules[place:]
            return


class Hook:
    """One of the two, as torch holds it: a callable that a copy of the model can not trigger."""

    __slots__ = ("_call",)

    def __init__(self, call: Any) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        """Do what the hook is for; torch takes None for "nothing to change"."""
        self._call(*args)

    def __reduce__(self) -> Any:
        # A callable of the standard library that takes anything and returns None, so that the
        # pickle can be read where msprobe is not installed.
        return getattr, (contextlib.nullcontext(), "__exit__")


class HookPair:
    """Both hooks of one module, to be put in and taken out.

    torch's own functions register them once, for a moment. From then on their ids stay theirs, and
    putting them in costs a tenth of registering: models have thousands of modules, windows come by
    the thousand.
    """

    __slots__ = ("_after", "_before", "hook", "module")

    def __init__(
        self, module: nn.Module, hook: ModuleHook, died: Callable[[Any], None] | None = None
    ) -> None:
        # ``died`` is a function in C: see `passes.Orphans`.
        self.module = weakref.ref(module, died)
        self.hook = hook
        before, after = Hook(hook.before), Hook(hook.after)
        try:
            handle = module.register_forward_pre_hook(before, with_kwargs=True)
            self._before = handle.id, before
            handle = module.register_forward_hook(after, with_kwargs=True, always_call=True)
            self._after = handle.id, after
        finally:  # by what they are: Ctrl-C may have come before their ids were known
            _take_out(before, module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs)
            always = module._forward_hooks_always_called
            _take_out(after, module._forward_hooks, module._forward_hooks_with_kwargs, always)

    def put_in(self, module: nn.Module) -> None:
        """Put both hooks in, behind those of others."""
        number, before = self._before
        module._forward_pre_hooks[number] = before
        module._forward_pre_hooks_with_kwargs[number] = True
        number, after = self._after
        module._forward_hooks[number] = after
        module._forward_hooks_with_kwargs[number] = True
        module._forward_hooks_always_called[number] = True

    def take_out(self, module: nn.Module) -> None:
        """Take both hooks out."""
        number = self._before[0]
        module._forward_pre_hooks.pop(number, None)
        module._forward_pre_hooks_with_kwargs.pop(number, None)
        number = self._after[0]
        module._forward_hooks.pop(number, None)
        module._forward_hooks_with_kwargs.pop(number, None)
        module._forward_hooks_always_called.pop(number, None)


def _take_out(hook: Any, hooks: dict[int, Any], *flags: dict[int, Any]) -> None:
    for number in [number for number, other in hooks.items() if other is hook]:
        for table in (hooks, *flags):
            table.pop(number, None)


Part = tuple[int | None, str, nn.Module]  # index of its model in the list or None, fqn, module


def named_modules(models: list[nn.Module], listed: bool) -> list[Part]:
    """Every module of the models, as `nn.Module.named_modules` in a fifth of its time.

    The index is that of the model in its list, None for a single model.
    """
    parts: list[Part] = []
    for number, model in enumerate(models):
        index = number if listed else None
        named: dict[int, Part] = {id(model): (index, "", model)}
        _add_named(model, "", index, named)
        parts += named.values()
    return parts


def _add_named(module: nn.Module, prefix: str, index: int | None, named: dict[int, Part]) -> None:
    for name, part in module._modules.items():
        if part is not None and id(part) not in named:
            named[id(part)] = index, prefix + name, part
            if part._modules:
                _add_named(part, f"{prefix}{name}.", index, named)


def hookable(parts: list[Part]) -> tuple[list[Part], list[str]]:
    """Those of the `named_modules` that are recorded, and the names of those left to torch.

    The models themselves are not recorded. Scripted modules take no hooks of this kind. A
    TransformerEncoderLayer in eval mode takes none, nor do its parts: torch would leave its fused
    kernel, and the results would be others. Level L1 and mix record the kernel itself.
    """
    recorded: list[Part] = []
    fused: list[str] = []
    special = torch.jit.ScriptModule, nn.TransformerEncoderLayer
    inside = ""
    for part in parts:
        index, fqn, module = part
        if not fqn:
            inside = ""  # the next model
        elif inside and fqn.startswith(inside):
            continue
        elif not isinstance(module, special):
            recorded.append(part)
        elif _may_be_fused(module):
            inside = fqn + "."
            fused.append(fqn if index is None else f"{index}.{fqn}")
        elif not isinstance(module, torch.jit.ScriptModule):
            recorded.append(part)
    return recorded, fused


def _may_be_fused(module: nn.Module) -> bool:
    layer: Any = nn.TransformerEncoderLayer
    return isinstance(module, layer) and not module.training and (
        type(module).forward is layer.forward
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
        visit = run.on_tensor(record)
        entries = {}
        for name, consumed in arrived.items():
            parameter = module._parameters.get(name)
            grad = consumed if parameter is None or parameter.grad is None else parameter.grad
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


def _listen(call: Call, module: nn.Module) -> None:
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
