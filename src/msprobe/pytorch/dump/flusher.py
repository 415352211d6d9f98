"""The daemon thread that writes once a second while records arrive."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterable
from typing import Any

PERIOD_S = 0.8  # a record is on disk within a second: this, and the time to write it


class Flusher:
    """Flushes the runs that have something new, also while the training thread hangs.

    `wake` takes no lock that is made in Python, as `threading.Event` is: Ctrl-C may leave it taken.
    """

    def __init__(self) -> None:
        self._dirty: set[Any] = set()
        self._calls: queue.SimpleQueue[None] = queue.SimpleQueue()  # not empty: wake up
        self._ends: queue.SimpleQueue[None] = queue.SimpleQueue()  # not empty: end
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def wake(self, run: Any) -> None:
        """``run`` has something to write."""
        self._dirty.add(run)
        if self._stopped:
            self.flush()  # after the end of the session: nobody else will
        elif self._calls.empty():
            self._calls.put(None)
            if self._thread is None:
                self._start()

    def forget_run(self, run: Any) -> None:
        """``run`` has been written to its end: do not keep it alive until the next round."""
        self._dirty.discard(run)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._stopped:
                self._thread = threading.Thread(target=self._loop, name="msprobe", daemon=True)
                self._thread.start()

    def _loop(self) -> None:
        while True:
            self._calls.get()
            with contextlib.suppress(queue.Empty):
                self._ends.get(timeout=PERIOD_S)
                return
            while not self._calls.empty():
                self._calls.get()
            self.flush()

    def flush(self) -> None:
        """Write all that is new, from any thread."""
        while self._dirty:
            run = self._dirty.pop()
            run.guard("flush", run.journal.flush)

    def flush_others(self, runs: Iterable[Any]) -> None:
        """Write what is new in other runs than these: gradients of earlier steps."""
        for run in self._dirty.difference(runs):
            self._dirty.discard(run)
            run.guard("flush", run.journal.flush)

    def stop(self) -> None:
        """Write all that is new and end the thread."""
        self._stopped = True
        self._ends.put(None)
        self._calls.put(None)
        self.flush()

    def forget(self) -> None:
        """In a forked child, where the thread does not exist: never write."""
        self._stopped = True
        self._dirty = set()
