"""The daemon thread that writes once a second while records arrive."""

from __future__ import annotations

import threading
from typing import Any

PERIOD_S = 0.8  # a record is on disk within a second: this, and the time to write it


class Flusher:
    """Flushes the runs that have something new, also while the training thread hangs."""

    def __init__(self) -> None:
        self._dirty: set[Any] = set()
        self._woken = threading.Event()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def wake(self, run: Any) -> None:
        """``run`` has something to write."""
        self._dirty.add(run)
        if self._stopped.is_set():
            self.flush()  # after the end of the session: nobody else will
        elif not self._woken.is_set():
            self._woken.set()
            if self._thread is None:
                self._start()

    def forget_run(self, run: Any) -> None:
        """``run`` has been written to its end: do not keep it alive until the next round."""
        self._dirty.discard(run)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._stopped.is_set():
                self._thread = threading.Thread(target=self._loop, name="msprobe", daemon=True)
                self._thread.start()

    def _loop(self) -> None:
        while True:
            self._woken.wait()
            if self._stopped.wait(PERIOD_S):
                return
            self._woken.clear()
            self.flush()

    def flush(self) -> None:
        """Write all that is new, from any thread."""
        while self._dirty:
            run = self._dirty.pop()
            run.guard("flush", run.journal.flush)

    def stop(self) -> None:
        """Write all that is new and end the thread."""
        self._stopped.set()
        self._woken.set()
        self.flush()

    def forget(self) -> None:
        """In a forked child, where the thread does not exist: never write."""
        self._stopped.set()
        self._dirty = set()
