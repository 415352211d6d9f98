"""Functional collectives: their results are there when somebody has waited for them."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..gate import ThreadState, silenced
from .ops import DTENSOR, FUNCTIONAL_COLLECTIVES

_storage = torch.Tensor.untyped_storage
# Methods, by whatever version of torch has them, that work with tensors for their shapes only.
_ABOUT_SHAPES = (
    "__torch_dispatch__",  # FakeTensorMode
    "propagate",  # the others: ShardingPropagator
    "propagate_op_sharding_non_cached",
    "_propagate_tensor_meta_non_cached",
)
_NOBODY = (
    "no numbers: nobody has waited for the collective before stop(); use its result, or call"
    " wait_tensor() on it, within the window"
)
_CHANGED = "no numbers: the result had been changed in place when we heard that it was there"


class _Postponed(NamedTuple):
    """A description whose values are not there yet."""

    run: Any
    result: Any  # the AsyncCollectiveTensor
    version: int
    path: str
    fill: Callable[[], None]

    def complete(self) -> None:
        """Fill it in: somebody has waited."""
        self.run.guard(self.path, self._fill)
        self.run.journal.release(self.path)

    def _fill(self) -> None:
        before = self.result.completed
        self.result.completed = True  # torch sets it after us, or sets that of a view of it
        try:
            self.fill()
        finally:
            self.result.completed = before

    def give_up(self, is_there: bool) -> None:
        """The window closes: what is not there has no values. Nobody waits because of us."""
        is_there = is_there or self.result.completed  # a compiled region has waited
        if is_there and _version(self.result.elem) == self.version:
            self.complete()
        else:
            self.run.problem(self.path, _CHANGED if is_there else _NOBODY)
            self.run.journal.release(self.path)


class Unwaited:
    """Descriptions of results of functional collectives, until somebody waits for them."""

    def __init__(self) -> None:
        self._postponed: dict[int, list[_Postponed]] = {}  # by address of the memory
        self._wait: Any = None  # what stands in for wait_tensor

    def add(self, run: Any, result: Any, path: str, fill: Callable[[], None]) -> bool:
        """Call ``fill`` when somebody waits for ``result``; False if we would not hear of it."""
        module = sys.modules.get(FUNCTIONAL_COLLECTIVES)
        if self._wait is None or getattr(module, "wait_tensor", None) is not self._wait:
            return False
        run.journal.hold(path)
        postponed = _Postponed(run, result, _version(result.elem), path, fill)
        self._postponed.setdefault(_address(result.elem), []).append(postponed)
        return True

    def patch(self) -> list[tuple[Any, str, Callable[..., Any]]]:
        """The patch of ``wait_tensor``, through which torch waits; empty where it is not loaded."""
        module: Any = sys.modules.get(FUNCTIONAL_COLLECTIVES)
        original = getattr(module, "wait_tensor", None)
        if original is None:
            return []

        @functools.wraps(original)
        def wait_tensor(tensor: Any) -> Any:
            result = original(tensor)
            if self._postponed and type(tensor) is torch.Tensor:
                for postponed in self._postponed.pop(_address(tensor), ()):
                    postponed.complete()
            return result

        self._wait = wait_tensor
        return [(module, "wait_tensor", wait_tensor)]

    def forget(self) -> None:
        """In a forked child: fill in nothing."""
        self._postponed = {}

    def give_up(self) -> None:
        """At stop(): what nobody has waited for stays without values."""
        left, self._postponed = self._postponed, {}
        if left:
            all_there = _all_waited_for()
            for postponed in itertools.chain(*left.values()):
                postponed.give_up(all_there)


def silent_patches(thread: ThreadState) -> list[tuple[Any, str, Callable[..., Any]]]:
    """The patches of what torch computes for itself with functions of the table: nothing is
    recorded meanwhile. Of what is not loaded there are none.

    ``AsyncCollectiveTensor.__new__`` would be recorded with numbers from memory that is being
    received. What DTensor and fake tensors work out about shapes they keep in caches: recorded,
    it would give the first step calls, and so numbers of calls, that no other has.
    """
    found: list[tuple[Any, str, Callable[..., Any]]] = []
    tensors: Any = getattr(sys.modules.get(FUNCTIONAL_COLLECTIVES), "AsyncCollectiveTensor", None)
    if tensors is not None:
        found.append((tensors, "__new__", staticmethod(silenced(tensors.__new__, thread))))
    fake: Any = sys.modules.get("torch._subclasses.fake_tensor")
    owners = {getattr(fake, "FakeTensorMode", None), *map(_propagator, DTENSOR)}
    for owner, name in itertools.product(owners, _ABOUT_SHAPES):
        if hasattr(owner, name):
            found.append((owner, name, silenced(getattr(owner, name), thread)))
    return found


def _propagator(module: str) -> Any:
    """The class that tells how results of DTensor are laid out."""
    dtensor: Any = getattr(sys.modules.get(module), "DTensor", None)
    return type(getattr(getattr(dtensor, "_op_dispatcher", None), "sharding_propagator", None))


def _address(tensor: Any) -> int:
    """Where the memory of a tensor begins: a view has that of its base."""
    return _storage(tensor).data_ptr()


def _all_waited_for() -> bool:
    """Whether no functional collective of this process is under way, whoever has waited."""
    c10d: Any = sys.modules["torch._C._distributed_c10d"]
    size: Any = getattr(c10d, "_get_work_registry_size", None)  # newer torch
    return size is not None and size() == 0


def _version(tensor: Any) -> int:
    return -1 if tensor.is_inference() else int(tensor._version)
