"""What every wrapper and hook looks at first: is the window open, and for which step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .run import StepRun


class ThreadState(threading.local):
    """What one thread is doing. Each thread sees its own values; a new one has just begun.

    ``inside``: a recorded API call, so the calls it makes are not recorded.
    ``off``: our own work, or a compiler: nothing at all is recorded. Implies ``inside``.
    """

    def __init__(self) -> None:
        self.inside = False
        self.off = False
        self.autocast = False  # the user's autocast is on, while our own work has lifted it
        self.collective = False  # a recorded functional collective, which may call others
        self.modules: list[Any] = []  # the `Call` of each module that is running, outermost first
        self.area: str | None = None  # "optimizer" or "clip_grad" while torch runs one of them

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Record nothing in this thread for the block."""
        before = self.inside, self.off
        self.inside = self.off = True
        try:
            yield
        finally:
            self.inside, self.off = before


class Gate:
    """Shared by all wrappers and hooks of a session: they record only while it is ``open``."""

    __slots__ = ("focus", "open", "run", "thread")

    def __init__(self) -> None:
        self.open = False
        self.run: StepRun | None = None
        self.thread = ThreadState()
        self.focus = False  # between module_dump and module_dump_end: only the focused module
