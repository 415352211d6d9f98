"""Threads that write tensors while the training goes on."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

_logger = logging.getLogger("msprobe")
PROGRESS_S = 10.0  # between two lines that tell how far a long flush is
# Copies of tensors that wait; the training waits beyond this.
LIMIT_BYTES = 64 << 20
ASYNC_LIMIT_BYTES = 512 << 20  # with async_dump
_THREADS = 2


class Background:
    """Jobs in the order they come, done by a few daemon threads, with a bound on their memory.

    ``unseen``: the block in which a thread works, so that what it does of torch is not recorded.
    """

    def __init__(
        self,
        limit_bytes: int = LIMIT_BYTES,
        unseen: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.limit_bytes = limit_bytes
        self._unseen = unseen
        self._jobs: deque[tuple[int, int, Callable[[], None]]] = deque()
        self._open: set[int] = set()  # numbers of the jobs that are not done
        self._given = 0
        self._bytes = 0
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        self._closed = False

    def submit(self, size_bytes: int, job: Callable[[], None]) -> None:
        """Have ``job`` done; waits while too many bytes are waiting. A job must not raise."""
        with self._changed:
            if not self._closed:
                self._submit(size_bytes, job)
                return
        job()  # a gradient that comes after the end of its step

    def _submit(self, size_bytes: int, job: Callable[[], None]) -> None:
        while self._bytes and self._bytes + size_bytes > self.limit_bytes:
            self._changed.wait()
        self._bytes += size_bytes
        self._given += 1
        self._open.add(self._given)
        self._jobs.append((self._given, size_bytes, job))
        if len(self._threads) < _THREADS:
            thread = threading.Thread(target=self._work, name="msprobe-tensors", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._changed.notify_all()

    def wait(self) -> None:
        """Return when all jobs given so far are done; where that is long, tell how far it is."""
        with self._changed:
            last, told = self._given, time.monotonic()
            while self._open and min(self._open) <= last:
                self._changed.wait(PROGRESS_S)
                if time.monotonic() - told >= PROGRESS_S:
                    told = time.monotonic()
                    size_mb = self._bytes / 1e6
                    _logger.info("tensors to be written: %d (%.1f MB)", len(self._open), size_mb)

    def close(self) -> None:
        """Do what has been given, and end the threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            threads, self._threads = self._threads, []
        for thread in threads:
            thread.join()

    def _work(self) -> None:
        with self._unseen():
            while self._do_next():
                pass

    def _do_next(self) -> bool:
        """Do one job; False when no more will come."""
        with self._changed:
            while not self._jobs:
                if self._closed:
                    return False
                self._changed.wait()
            number, size_bytes, job = self._jobs.popleft()
        job()
        del job  # with the tensor
        with self._changed:
            self._open.discard(number)
            self._bytes -= size_bytes
            self._changed.notify_all()
        return True
