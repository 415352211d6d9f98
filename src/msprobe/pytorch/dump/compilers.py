"""Compilers, tracers and tensor formatting work as if the tool were not there.

They read functions and modules instead of calling them: what they must see is torch as it is.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .gate import OFF, ThreadState, silenced
from .patches import Patches

_ENTRANCES = {
    "torch": ("compile",),
    "torch.jit": ("script", "trace", "trace_module"),
    "torch.export": ("export",),
}

_OfUser: Any = torch.autograd.function.BackwardCFunction
_COMPILED, _FUNCTORCH = "CompiledFunction", "torch._functorch."  # the backward of a compiled region


def prime_torch_caches() -> None:
    """Fill the caches that torch builds from its own attributes, before any is replaced.

    Unprimed they would keep our wrappers for ever (measured: ``with torch.device("meta")`` then
    makes CPU tensors, also after the window).
    """
    importlib.import_module("torch.utils._device")._device_constructors()
    with warnings.catch_warnings():  # torch 2.1 looks at its own deprecated names
        warnings.simplefilter("ignore")
        torch.overrides.get_overridable_functions()


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Keep Dynamo away from what runs in the block: start() and stop() in a compiled region."""
    loaded = "torch._dynamo.eval_frame" in sys.modules
    set_frame: Any = torch._C._dynamo.eval_frame.set_eval_frame if loaded else lambda _: None
    before = set_frame(None)
    try:
        yield
    finally:
        set_frame(before)


@functools.cache
def _skip_our_code() -> None:
    """Have Dynamo leave the frames of this package alone, those around `uncompiled` too."""
    for name in ("trace_rules", "skipfiles"):  # torch >= 2.2, torch 2.1
        rules: Any = sys.modules.get(f"torch._dynamo.{name}")
        if hasattr(rules, "add"):
            rules.add("msprobe")
            return


class Compilers:
    """Lifts the whole window around the compilers' entrances and compiled regions."""

    def __init__(
        self, thread: ThreadState, lift: Callable[[], None], put_back: Callable[[], None]
    ) -> None:
        self._thread = thread
        self._lift_window = lift
        self._put_window_back = put_back
        self._patches = Patches()
        self._frames = Patches()
        self._lock = threading.RLock()
        self._depth = 0
        self._regions = threading.local()

    def install(self) -> None:
        """Guard the compilers that are loaded. A second call adds what has come since."""
        if not self._patches.is_installed():
            for path, names in _ENTRANCES.items():
                owner: Any = sys.modules.get(path)
                for name in names:
                    if hasattr(owner, name):
                        self._patches.replace(owner, name, self._lifting(getattr(owner, name)))
            tracer: Any = getattr(sys.modules.get("torch.fx"), "Tracer", None)
            if tracer is not None:
                self._patches.replace(tracer, "trace", self._lifting(tracer.trace))
        self._guard_dynamo()

    def restore(self) -> None:
        """Take the guards out."""
        if getattr(self._regions, "running", None) is not None:
            self._end_region()  # stop() within a compiled region, whose exit will not be heard
        self._patches.restore()
        self._frames.restore()

    def _enter(self) -> None:
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                self._lift_window()
                self._patches.lift()

    def _leave(self) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth <= 0:  # below: Ctrl-C has come before `_enter` could count
                self._depth = 0
                # The first compilation of a process replaces torch.jit.trace and others for good.
                self._patches.put_back(lambda _, theirs: self._lifting(theirs))
                self._put_window_back()

    def _lifting(self, function: Any) -> Any:
        @functools.wraps(function)
        def lifting(*args: Any, **kwargs: Any) -> Any:
            try:
                self._enter()
                with self._thread.silent():
                    return function(*args, **kwargs)
            finally:
                self._leave()
                self._guard_dynamo()  # torch.compile may have loaded it just now

        return lifting

    def _end_region(self) -> None:
        _, self._thread.state = self._regions.running
        self._regions.running = None
        self._leave()

    def _guard_dynamo(self) -> None:
        """Lift the window while a compiled region runs.

        Dynamo sets its frame callback at the entrance of a region and sets the former one at the
        exit, in the same frame; what is set in between belongs to nested frames. So it neither
        traces our wrappers and hooks nor guards on them: no break, and a region that was compiled
        inside a window is not compiled again outside.
        """
        if self._frames.is_installed():
            return
        frames: Any = sys.modules.get("torch._dynamo.eval_frame")
        if frames is None:
            return
        _skip_our_code()
        name = "_maybe_set_eval_frame"
        if not hasattr(frames, name):
            name = "set_eval_frame"  # torch < 2.5
        original = getattr(frames, name)
        regions = self._regions

        def set_callback(callback: Any, *args: Any) -> Any:
            caller = sys._getframe(1)
            running = getattr(regions, "running", None)
            if callback and running is None and caller.f_code.co_name != "__enter__":
                regions.running = (id(caller), self._thread.state)
                self._thread.state = OFF
                self._enter()
            before = original(callback, *args)
            if running is not None and running[0] == id(caller):
                self._end_region()  # now that Dynamo does not trace what runs there
            return before

        self._frames.replace(frames, name, set_callback)
        self._guard_backward()

    def _guard_backward(self) -> None:
        for name in ("apply", "apply_boxed"):  # the second came later
            if hasattr(_OfUser, name):
                opaque = _OpaqueBackward(getattr(_OfUser, name), self._thread)
                self._frames.replace(_OfUser, name, opaque)


class _OpaqueBackward:
    """Method by which autograd runs the backward of a function that is written in Python.

    Of a compiled region it is as opaque as the forward; of others it is the original.
    """

    def __init__(self, original: Any, thread: ThreadState) -> None:
        self._original = original
        self._thread = thread

    def __get__(self, node: Any, owner: Any = None) -> Any:
        bound = self._original.__get__(node, owner)
        function = None if node is None else node._forward_cls
        is_compiled = (
            function is not None
            and function.__name__ == _COMPILED
            and function.__module__.startswith(_FUNCTORCH)
        )
        return silenced(bound, self._thread) if is_compiled else bound
