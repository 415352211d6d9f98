"""Backward passes that are under way, and hooks whose owners are gone."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

_engine: Any = torch.autograd.Variable._execution_engine


class Finisher(Protocol):
    """What collects gradients over one backward pass."""

    def finish(self, task: int) -> None:
        """The pass ``task`` has ended: report what has arrived."""


class Orphans:
    """Hooks of things that are gone, to be taken out at the next occasion.

    The callback of each weak reference is a function in C. Python throws away what a signal raises
    within a finalizer or a callback in Python: Ctrl-C would be lost, and it likes to come there,
    since signals wait while much is let go of.
    """

    def __init__(self) -> None:
        self._gone: list[Any] = []
        self._handles: dict[Any, dict[str, Any]] = {}

    def watch(self, thing: Any, handles: dict[str, Any]) -> None:
        """Remove what is in ``handles`` once ``thing`` is gone."""
        self._handles[weakref.ref(thing, self._gone.append)] = handles

    def remove(self) -> None:
        """Take out the hooks of what is gone by now."""
        while self._gone:
            for handle in self._handles.pop(self._gone.pop(), {}).values():
                handle.remove()


class Passes:
    """The backward passes that are running, with those that still wait for gradients."""

    def __init__(self) -> None:
        self.orphans = Orphans()
        self._open: dict[int, list[Finisher]] = {}
        self._last: dict[int, list[Finisher]] = {}
        self._lock = threading.Lock()

    def join(self, graph_task: int, backward: Finisher) -> None:
        """Have ``backward`` finished at the end of this pass at the latest."""
        with self._lock:
            self._waiting(graph_task).append(backward)

    def _waiting(self, graph_task: int) -> list[Finisher]:
        waiting = self._open.get(graph_task)
        if waiting is None:
            waiting = self._open[graph_task] = []
            self._at_the_end(self._end, graph_task)
        return waiting

    @staticmethod
    def _at_the_end(function: Callable[[int], None], graph_task: int) -> None:
        # A frame of its own: where the lambda stands, each call makes a cell for it.
        _engine.queue_callback(lambda: function(graph_task))

    def join_last(self, graph_task: int, finisher: Finisher) -> None:
        """Have ``finisher`` finished after whatever else waits for the end of this pass."""
        with self._lock:
            self._waiting(graph_task)  # at its end comes what is last
            self._last.setdefault(graph_task, []).append(finisher)

    def _end(self, graph_task: int) -> None:
        with self._lock:
            waiting = self._open.pop(graph_task, [])
        for backward in waiting:
            backward.finish(graph_task)
        # DDP and FSDP reduce in callbacks of their own that are queued by now. A callback that
        # is queued while they run comes after them.
        if graph_task in self._last:
            self._at_the_end(self._end_last, graph_task)

    def _end_last(self, graph_task: int) -> None:
        with self._lock:
            waiting = self._last.pop(graph_task, [])
        for finisher in waiting:
            finisher.finish(graph_task)

    def finish_all(self) -> None:
        """Finish what a backward that raised has left open: its end is never called back."""
        with self._lock:
            left = [*self._open.items(), *self._last.items()]
            self._open, self._last = {}, {}
        for graph_task, waiting in left:
            for backward in waiting:
                backward.finish(graph_task)
