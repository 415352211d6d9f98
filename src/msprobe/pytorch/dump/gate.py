"""What every wrapper and hook looks at first: is the window open, and for which step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
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
        self.begin()

    def begin(self) -> None:
        """As in a thread that has just begun."""
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

    __slots__ = ("_heard", "focus", "open", "run", "thread")

    def __init__(self) -> None:
        self.open = False
        self.run: StepRun | None = None
        self.thread = ThreadState()
        self.focus = False  # between module_dump and module_dump_end: only the focused module
        self._heard: Callable[[], None] | None = None

    def forget(self, heard: Callable[[], None]) -> None:
        """In a forked child: record nothing. ``heard`` is called when it is first asked."""
        self.thread.begin()
        self.run = None
        self._heard = heard
        self.__class__ = ForkedGate

    def settle(self) -> bool:
        """A window is about to open. Whether one of the parent's has been open until now."""
        return False


class ForkedGate(Gate):
    """The gate in a child that was forked from an open window, until the first call asks it.

    The class of the gate changes, so that asking costs nothing more in the parent.
    """

    __slots__ = ()

    @property
    def open(self) -> bool:
        """False; who asks is a call that the parent would have recorded."""
        heard, _ = self._heard, self.settle()
        if heard is not None:
            heard()
        return False

    @open.setter
    def open(self, value: bool) -> None:
        """Hooks of the parent's window have no say here."""

    def settle(self) -> bool:
        """Be an ordinary gate, and shut."""
        self.__class__ = Gate  # type: ignore[assignment]
        self._heard = None
        self.open = False
        return True
