"""The wrapper that stands in for a torch function while a window is open (the hot path).

A wrapper looks like what it replaces. It equals the original and has its hash, so dict lookups
keyed by functions keep working; its type equals the original's type; its attributes, signature
and pickled form are the original's. Only ``F.gelu is saved_gelu`` needs more: the window
re-binds the references it can reach.
"""

from __future__ import annotations

import functools
import pkgutil
import types
from typing import Any

import torch

from .. import recording
from ..call import Call
from ..gate import HEARS, INSIDE, Gate
from ..quiet import is_capturing
from .collectives import Works, shown_results
from .ops import FUNCTIONAL_COLLECTIVES, ApiSpec, find_owner, risk_of

_is_compiling: Any = getattr(torch.compiler, "is_compiling", lambda: False)
_is_tracing: Any = torch._C._get_tracing_state


class _StandIn(type):
    """Type of wrapper classes: equal to the type of the functions that they stand in for."""

    stands_for: type

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.stands_for

    # Its own hash: the tables of copy and pickle, keyed by types, must not take us for a function.
    __hash__ = type.__hash__


class Wrapper(metaclass=_StandIn):
    """A callable that records the call while its gate is open, and else only makes it."""

    stands_for: type = types.FunctionType

    def __init__(self, original: Any, base: str, gate: Gate) -> None:
        self.original = original
        self.base = base
        self.risk = "FOCUS"
        self.ignore_input: Any = ()
        self.ignore_output: Any = ()
        self.writes_arguments = False  # collectives: the record's output is the arguments
        self.works: Works | None = None  # collectives: who hears that they have finished
        self._gate = gate
        for name in ("__name__", "__qualname__", "__doc__", "__module__"):
            self.__dict__[name] = getattr(original, name, None)
        self.__dict__.update(__annotations__=getattr(original, "__annotations__", {}))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make the call; record it if a window is open and no recorded call is around it."""
        gate = self._gate
        thread = gate.thread
        if thread.state or not gate.open or gate.focus:
            return self.original(*args, **kwargs)
        if _is_compiling() or _is_tracing() or is_capturing():
            return self.original(*args, **kwargs)
        return record_call(self, gate, args, kwargs)

    def of(self, function: Any) -> Wrapper:
        """The same wrapper around another function."""
        other = wrap(unwrapped(function), self.base, self._gate, type(self).__base__)
        for name in ("risk", "ignore_input", "ignore_output", "writes_arguments", "works"):
            setattr(other, name, getattr(self, name))
        return other

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["original"], name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The type of the original, which isinstance() believes."""
        return type(self.original)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.original

    def __hash__(self) -> int:
        return hash(self.original)

    def __repr__(self) -> str:
        return repr(self.original)

    def __copy__(self) -> Any:
        return self.original

    def __deepcopy__(self, memo: Any) -> Any:
        # A copy of a model must not hold a wrapper: nobody would take it out again.
        return self.original

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = self.original.__reduce_ex__(protocol) if _is_bound(self.original) else None
        if isinstance(reduced, tuple):
            return reduced
        # By name, with a function of the standard library: the pickle does not know of us.
        name = f"{self.original.__module__}:{self.original.__qualname__}"
        return pkgutil.resolve_name, (name,)


class OpenWrapper(Wrapper):
    """Of a functional collective: other functions of the table that it calls are recorded too.

    They have been recorded before it was, so it must neither hide nor renumber them.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make the call; record it as `Wrapper` does, unless a functional collective makes it."""
        gate = self._gate
        thread = gate.thread
        if thread.state or thread.collective or not gate.open or gate.focus:
            return self.original(*args, **kwargs)
        if _is_compiling() or _is_tracing() or is_capturing():
            return self.original(*args, **kwargs)
        thread.collective = True
        try:
            return record_call(self, gate, args, kwargs, hides=False)
        finally:
            thread.collective = False


@functools.cache
def _class_for(kind: type, family: type) -> type[Wrapper]:
    made: Any = _StandIn("Wrapper", (family,), {"stands_for": kind})
    return made  # type: ignore[no-any-return]


def wrap(original: Any, base: str, gate: Gate, family: Any = Wrapper) -> Wrapper:
    """A wrapper of ``original`` whose calls are recorded as ``<base>.<n>``."""
    kind: Any = type(original)
    return _class_for(kind, family)(original, base, gate)


def record_call(
    wrapper: Wrapper, gate: Gate, args: Any, kwargs: Any, *, hides: bool = True
) -> Any:
    """Make one call and record it. The user's exceptions pass; ours stay in the log.

    ``hides``: what the function calls is not recorded.
    """
    run, thread = gate.run, gate.thread
    assert run is not None
    stem = f"{wrapper.base}.{run.count(wrapper.base)}"
    forward = stem + ".forward"
    call = Call(run, wrapper.base, forward, stem + ".backward", run.parent(thread), wrapper)
    thread.state = INSIDE if hides else HEARS
    try:
        run.guard(forward, recording.begin, call, args, kwargs)
        try:
            result = wrapper.original(*args, **kwargs)
        except BaseException:
            run.guard(forward, recording.fail, call)
            raise
        if wrapper.works is None or not wrapper.works.take(call, result, args, kwargs):
            shown = result
            if wrapper.writes_arguments:
                shown = shown_results(call, args, kwargs)
            run.guard(forward, recording.finish, call, shown)
        return result
    finally:
        thread.state = HEARS


def _is_bound(function: Any) -> bool:
    """Whether ``function`` is a method, which pickles by its owner and its name."""
    return not isinstance(function, types.FunctionType)


def unwrapped(function: Any) -> Any:
    """What ``function`` stands in for, itself if it is no wrapper."""
    return function.original if is_wrapper(function) else function


def is_wrapper(function: Any) -> bool:
    """Whether ``function`` is one of ours (``isinstance`` would believe what it pretends)."""
    return type(type(function)) is _StandIn


def build_wrappers(
    specs: list[ApiSpec], gate: Gate, works: Works
) -> list[tuple[Any, str, Wrapper]]:
    """(owner, attribute, wrapper) of each spec; one function with two homes shares a wrapper."""
    built: list[tuple[Any, str, Wrapper]] = []
    shared: dict[tuple[str, int], Wrapper] = {}
    works.thread = gate.thread
    for spec in specs:
        owner = find_owner(spec.owner)
        original = vars(owner).get(spec.attr, None) or getattr(owner, spec.attr)
        base = f"{spec.prefix}.{spec.name}"
        wrapper = shared.get((base, id(original)))
        if wrapper is None:
            functional = spec.owner == FUNCTIONAL_COLLECTIVES
            family = OpenWrapper if functional else Wrapper
            wrapper = shared[base, id(original)] = wrap(original, base, gate, family)
            wrapper.risk = risk_of(spec.prefix, spec.name)
            wrapper.ignore_input = spec.ignore_input
            wrapper.ignore_output = spec.ignore_output
            if spec.prefix == "Distributed" and not functional:
                wrapper.writes_arguments = True
                wrapper.works = works
        built.append((owner, spec.attr, wrapper))
    return built
