"""Ctrl-C waits for what must not stop halfway: putting a window in, taking it out, writing."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


@contextlib.contextmanager
def interrupts_wait() -> Iterator[list[Any]]:
    """SIGINT within the block is handled at its end; a second one at once, for a disk that hangs.

    Yields a list that is not empty once one has come. Only in the main thread, where Python
    handles signals, and where the handler is a function. A block within a block adds nothing.
    """
    handler = signal.getsignal(signal.SIGINT)
    around = getattr(handler, "came", None)
    if around is not None:
        yield around
        return
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield []
        return
    came: list[Any] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(frame)
        if len(came) > 1:
            handler(number, frame)

    note.came = came  # type: ignore[attr-defined]
    signal.signal(signal.SIGINT, note)
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, handler)
        if len(came) == 1:
            handler(signal.SIGINT, came[0])
