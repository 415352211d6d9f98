"""Collectives: what they wrote is read when they have finished, not when they were started."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .. import recording
from ..call import Call
from ..gate import ThreadState
from .functional import Unwaited, silent_patches

_Future: Any = torch._C.Future  # the class of torch.futures is below it


class _Started:
    """A collective that is under way: its record waits for the last of its Work objects."""

    __slots__ = ("call", "group", "left", "values", "works")

    def __init__(self, call: Call, values: Any, works: list[Any], group: Any) -> None:
        self.call = call
        self.values = values
        self.group = group
        self.works = works
        self.left = len(works)

    def finish(self) -> None:
        self.call.run.guard(self.call.forward, recording.finish, self.call, self.values)

    def is_completed(self) -> bool:
        guard, name = self.call.run.guard, self.call.forward
        if not self.works:
            return self.group not in _coalescing()
        return all(guard(name, _has_ended, work) for work in self.works)


class Works:
    """The Work objects of recorded asynchronous collectives, until somebody waits for them.

    Calls within a coalescing manager begin when it is left and share one Work: until then they
    are ``_gathered``.
    """

    def __init__(self) -> None:
        self.unwaited = Unwaited()
        self.thread = ThreadState()  # that of the wrappers, once there are any
        self._started: dict[int, list[_Started]] = {}  # by id of a Work, which is kept alive
        self._gathered: list[_Started] = []

    def take(self, call: Call, result: Any, args: Any, kwargs: Any) -> bool:
        """Postpone the record of ``call`` if it is not finished when it returns; say whether."""
        kind = _work_type()
        if kind is None:
            return False
        group = _group_of((*args, *kwargs.values())) if _coalescing() else None
        if self._gathered:
            self._begun(None)
        if group is not None and group in _coalescing():
            started = _Started(call, shown_results(call, args, kwargs), [], group)
            self._gathered.append(started)
            return True
        candidates = result if isinstance(result, list) else [result]
        works = [work for work in candidates if isinstance(work, (kind, _Future))]
        if not works:
            return False
        started = _Started(call, shown_results(call, args, kwargs), works, None)
        for work in works:
            self._started.setdefault(id(work), []).append(started)
            if isinstance(work, _Future):  # all_reduce_coalesced, all_gather_coalesced
                work.add_done_callback(functools.partial(self._ended, id(work)))
        return True

    def wrapper(self, original: Any, tells: bool) -> Any:
        """What stands in for a method that ends when its Work has, or ``tells`` whether it has."""

        @functools.wraps(original)
        def method(work: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(work, *args, **kwargs)
            if result or not tells:
                if self._gathered:
                    self._begun(None)  # it was the manager that has waited
                self._finished(work)
            return result

        return method

    def future_wrapper(self, original: Any) -> Any:
        """What stands in for ``Work.get_future``: our callback is the first of the future."""

        @functools.wraps(original)
        def get_future(work: Any) -> Any:
            future = original(work)
            if id(work) in self._started:
                future.add_done_callback(lambda _: self._finished(work))
            return future

        return get_future

    def append_wrapper(self, original: Any) -> Any:
        """What stands in for the method by which a coalescing manager takes its Work."""

        @functools.wraps(original)
        def append(manager: Any, work: Any = None) -> Any:
            self._begun(work)
            return original(manager, work)

        return append

    def _begun(self, work: Any) -> None:
        """What a manager that has been left has gathered goes on as ``work``; None: it is done."""
        left = [started for started in self._gathered if started.group not in _coalescing()]
        self._gathered = [started for started in self._gathered if started not in left]
        for started in left:
            if work is None:
                started.finish()
            else:
                started.works, started.left = [work], 1
                self._started.setdefault(id(work), []).append(started)

    def _finished(self, work: Any) -> None:
        self._ended(id(work))

    def _ended(self, key: int, _: Any = None) -> None:
        for started in self._started.pop(key, ()):
            started.left -= 1
            if started.left == 0:
                started.finish()

    def forget(self) -> None:
        """In a forked child: what the parent waits for is none of its business."""
        self._started, self._gathered = {}, []
        self.unwaited.forget()

    def finish_all(self) -> None:
        """At stop(): record what nobody has waited for, without waiting ourselves.

        Values of a collective that is still running are unknown: its record has no output.
        """
        self.unwaited.give_up()
        every = [*self._gathered, *(s for many in self._started.values() for s in many)]
        self._started, self._gathered = {}, []
        for started in {id(s): s for s in every}.values():
            call = started.call
            if started.is_completed():
                started.finish()
            else:
                call.run.problem(call.forward, "no output: nobody has waited for the collective")
                call.run.guard(call.forward, recording.fail, call)


def _has_ended(work: Any) -> bool:
    return bool(work.done() if isinstance(work, _Future) else work.is_completed())


def shown_results(call: Call, args: Any, kwargs: Any) -> Any:
    """A collective writes into its arguments: they are what the record shows as output.

    isend and irecv show tensor, group, tag and peer, whichever way they were given.
    """
    if call.base in ("Distributed.isend", "Distributed.irecv"):
        given = {**dict(zip(("tensor", "peer", "group", "tag"), args, strict=False)), **kwargs}
        dist: Any = sys.modules["torch.distributed"]
        group = given.get("group")
        peers = [given.get(k) for k in ("peer", "dst", "src", "group_dst", "group_src")]
        peer = next((peer for peer in peers if peer is not None), None)
        group = dist.group.WORLD if group is None else group
        return given.get("tensor"), group, given.get("tag", 0), peer
    return (*args, *kwargs.values())


def work_patch(works: Works) -> list[tuple[Any, str, Callable[..., Any]]]:
    """The patches of Work and of coalescing managers; empty without torch.distributed."""
    kind = _work_type()
    if kind is None:
        return []
    methods = (("wait", False), ("synchronize", False), ("is_completed", True))
    found = [(kind, name, works.wrapper(getattr(kind, name), tells)) for name, tells in methods]
    found.append((kind, "get_future", works.future_wrapper(kind.get_future)))
    c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
    manager = getattr(c10d, "_CoalescingManager", None)
    if manager is not None:
        found.append((manager, "append", works.append_wrapper(manager.append)))
    return [*found, *silent_patches(works.thread), *works.unwaited.patch()]


def _work_type() -> Any:
    return getattr(sys.modules.get("torch._C._distributed_c10d"), "Work", None)


def _coalescing() -> Any:
    """The process groups in whose coalescing manager some thread is."""
    world: Any = getattr(sys.modules["torch.distributed.distributed_c10d"], "_world", None)
    return getattr(world, "pg_coalesce_state", ())


def _group_of(values: Iterable[Any]) -> Any:
    dist: Any = sys.modules["torch.distributed"]
    given = (value for value in values if isinstance(value, dist.ProcessGroup))
    return next(given, dist.group.WORLD)
