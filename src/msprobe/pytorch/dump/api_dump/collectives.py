"""Collectives: what they wrote is read when they have finished, not when they were started."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from .. import recording
from ..call import Call


class _Started:
    """A collective that is under way: its record waits for the last of its Work objects."""

    __slots__ = ("call", "left", "values", "works")

    def __init__(self, call: Call, values: Any, works: list[Any]) -> None:
        self.call = call
        self.values = values
        self.works = works
        self.left = len(works)


class Works:
    """The Work objects of recorded asynchronous collectives, until somebody waits for them."""

    def __init__(self) -> None:
        self._started: dict[int, _Started] = {}  # id of a Work, which is kept alive meanwhile

    def take(self, call: Call, result: Any, args: Any, kwargs: Any) -> bool:
        """Postpone the record of ``call`` if its result is one or several Works; say whether."""
        kind = _work_type()
        candidates = result if isinstance(result, list) else [result]
        works = [work for work in candidates if kind is not None and isinstance(work, kind)]
        if not works:
            return False
        started = _Started(call, shown_results(call, args, kwargs), works)
        for work in works:
            self._started[id(work)] = started
        return True

    def wait_wrapper(self, original: Any) -> Any:
        """What stands in for ``Work.wait``: returns what the original returns."""

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(work, *args, **kwargs)
            self._finished(work)
            return result

        return wait

    def _finished(self, work: Any) -> None:
        started = self._started.pop(id(work), None)
        if started is None:
            return
        started.left -= 1
        if started.left == 0:
            call = started.call
            call.run.guard(call.forward, recording.finish, call, started.values)

    def finish_all(self) -> None:
        """At stop(): record what nobody has waited for, without waiting ourselves.

        Values of a collective that is still running are unknown: its record has no output.
        """
        left = list({id(s): s for s in self._started.values()}.values())
        self._started = {}
        for started in left:
            call = started.call
            if all(work.is_completed() for work in started.works):
                call.run.guard(call.forward, recording.finish, call, started.values)
            else:
                call.run.problem(call.forward, "no output: nobody has waited for the collective")
                call.run.guard(call.forward, recording.fail, call)


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
    """The patch of ``Work.wait``; empty without torch.distributed."""
    kind = _work_type()
    return [] if kind is None else [(kind, "wait", works.wait_wrapper(kind.wait))]


def _work_type() -> Any:
    return getattr(sys.modules.get("torch._C._distributed_c10d"), "Work", None)
