"""Hooks on the modules of a model: torch's own, so that they see what torch sees."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn

from .. import recording
from ..call import Call
from ..gate import OFF, Gate
from ..names import module_base, module_records
from ..quiet import is_capturing
from .parameters import listen

_is_tracing: Any = torch._C._get_tracing_state


class ModuleHook:
    """What the two hooks of one module share."""

    __slots__ = ("_base", "_kind", "always", "fqn", "gate", "index")

    def __init__(self, gate: Gate, index: int | None, fqn: str, *, focused: bool = False) -> None:
        self.gate = gate
        self.index = index
        self.fqn = fqn
        self.always = focused  # the module of module_dump records while all others are quiet
        self._base = ""
        self._kind: Any = None  # of which class the module was when `_base` was made

    def name(self, index: int | None, fqn: str) -> None:
        """The module stands there now."""
        if (index, fqn) != (self.index, self.fqn):
            self.index, self.fqn, self._kind = index, fqn, None

    def base_of(self, module: nn.Module) -> str:
        """How the names of its records begin."""
        kind = type(module)
        if kind is not self._kind:
            self._base, self._kind = module_base(self.index, self.fqn, kind.__name__), kind
        return self._base

    def is_off(self) -> bool:
        """Whether its calls are not to be recorded now."""
        gate = self.gate
        return not gate.open or gate.thread.state == OFF or (gate.focus and not self.always)


def _begin(call: Call, module: nn.Module, args: Any, kwargs: Any) -> None:
    recording.begin(call, args, kwargs)
    if call.seen is not None and module._parameters:
        listen(call, module)


def forget_left_over(modules: list[Call], beginning: nn.Module | None = None) -> None:
    """End the calls that stand in ``modules`` though their forward is no longer on the stack.

    torch calls no hook of a module that an exception like KeyboardInterrupt leaves.
    ``beginning``: the module whose call is about to begin; its own frame does not count.
    """
    if not modules:
        return
    running: Counter[int] = Counter()
    frame: FrameType | None = sys._getframe(1)
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
    """A hook as torch holds it: a callable that a copy of the model can not trigger."""

    __slots__ = ("_target",)

    def __init__(self, target: Any) -> None:
        self._target = target

    def __call__(self, *args: Any) -> None:
        """Do what the hook is for; torch takes None for "nothing to change"."""
        self._target(*args)

    def __reduce__(self) -> Any:
        # A callable of the standard library that takes anything and returns None, so that the
        # pickle can be read where msprobe is not installed.
        return getattr, (contextlib.nullcontext(), "__exit__")


class Before(Hook):
    """Forward pre-hook of a module."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A call begins."""
        hook: ModuleHook = self._target
        if hook.is_off() or _is_tracing() or is_capturing():
            return
        gate = hook.gate
        run, thread = gate.run, gate.thread
        assert run is not None
        base = hook.base_of(module)
        for other in thread.modules:
            if other.base is base:  # it calls itself, or Ctrl-C has ended its last call
                forget_left_over(thread.modules, module)
                break
        forward, backward = module_records(base, run.count(base))
        call = Call(run, base, forward, backward, run.module_parent(thread))
        call.raised = sys.exc_info()[1]
        call.module = id(module)
        run.coverage.called.add((hook.index, hook.fqn))
        thread.modules.append(call)
        run.guard(forward, _begin, call, module, args, kwargs)


class After(Hook):
    """Forward hook of a module, called also when the forward has raised."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        """A call has ended."""
        hook: ModuleHook = self._target
        modules = hook.gate.thread.modules
        base = hook.base_of(module)
        place = len(modules) - 1
        while place >= 0 and modules[place].base != base:
            place -= 1
        if place < 0 or _is_tracing():
            return  # it began before this window
        call: Call = modules[place]
        del modules[place:]  # with what an interrupted forward has left above it
        raised = sys.exc_info()[1] is not call.raised
        if raised or hook.is_off() or call.run is not hook.gate.run:
            call.run.guard(call.forward, recording.fail, call)
        else:
            call.run.guard(call.forward, recording.finish, call, result, module._parameters)


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
        before, after = Before(hook), After(hook)
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
