"""Threads that write tensors while the training goes on."""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

_logger = logging.getLogger("msprobe")
PROGRESS_S = 10.0  # between two lines that tell how far a long flush is
# Copies of tensors that wait; the training waits beyond this.
LIMIT_BYTES = 64 << 20
ASYNC_LIMIT_BYTES = 512 << 20  # with async_dump
_THREADS = 2
_LOOK_S = 0.05  # somebody else may have heard the word that a job is done


class Background:
    """Jobs in the order they come, done by a few daemon threads, with a bound on their memory.

    ``unseen``: the block in which a thread works, so that what it does of torch is not recorded.

    Only locks and queues that are made in C: Ctrl-C within `threading.Condition`, which is Python,
    may leave its lock taken for ever.
    """

    def __init__(
        self,
        limit_bytes: int = LIMIT_BYTES,
        unseen: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self.limit_bytes = limit_bytes
        self._unseen = unseen
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()  # (number, size, job) or None: end
        self._said: queue.SimpleQueue[None] = queue.SimpleQueue()  # a word that a job is done
        self._lock = threading.Lock()  # held while what stands below changes
        self._numbers = itertools.count(1)
        self._open: set[int] = set()  # numbers of the jobs that are not done
        self._bytes = 0  # of these
        self._threads: list[threading.Thread] = []
        self._closed = False

    def submit(self, size_bytes: int, job: Callable[[], None]) -> None:
        """Have ``job`` done; waits while too many bytes are waiting. A job must not raise."""
        while self._open and self._bytes + size_bytes > self.limit_bytes:
            self._listen()
        with self._lock:
            closed = self._closed
            if not closed:
                # First the job: should Ctrl-C come in between, it is done and nobody waits for it.
                number = next(self._numbers)
                self._jobs.put((number, size_bytes, job))
                self._open.add(number)
                self._bytes += size_bytes
                if len(self._threads) < _THREADS:
                    self._start()
        if closed:
            job()  # a gradient that comes after the end of its step

    def wait(self) -> None:
        """Return when all jobs given so far are done; where that is long, tell how far it is."""
        told, last = time.monotonic(), max(self._open, default=0)
        while min(self._open, default=last + 1) <= last:
            self._listen()
            if time.monotonic() - told >= PROGRESS_S:
                told = time.monotonic()
                size_mb = self._bytes / 1e6
                _logger.info("tensors to be written: %d (%.1f MB)", len(self._open), size_mb)

    def close(self) -> None:
        """Do what has been given, and end the threads."""
        with self._lock:
            self._closed = True
            threads, self._threads = self._threads, []
        self._jobs.put(None)
        for thread in threads:
            thread.join()

    def _listen(self) -> None:
        with contextlib.suppress(queue.Empty):
            self._said.get(timeout=_LOOK_S)

    def _start(self) -> None:
        thread = threading.Thread(target=self._work, name="msprobe-tensors", daemon=True)
        thread.start()
        self._threads.append(thread)

    def _work(self) -> None:
        with self._unseen():
            while self._do_next():
                pass

    def _do_next(self) -> bool:
        """Do one job; False when no more will come."""
        given = self._jobs.get()
        if given is None:
            self._jobs.put(None)  # for the other threads
            return False
        number, size_bytes, job = given
        job()
        del given, job  # with the tensor
        with self._lock:
            self._open.discard(number)
            self._bytes -= size_bytes
        if self._said.empty():  # perhaps nobody listens
            self._said.put(None)
        return True
