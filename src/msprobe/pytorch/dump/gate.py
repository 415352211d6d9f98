"""What every wrapper and hook looks at first: is the window open, and for which step."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .run import StepRun


# States of a thread. INSIDE a recorded API call the calls that it makes are not recorded; OFF, in
# our own work or a compiler, nothing is. Numbers: each access of a threading.local costs.
HEARS, INSIDE, OFF = 0, 1, 2


class ThreadState(threading.local):
    """What one thread is doing. Each thread sees its own values; a new one has just begun."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """As in a thread that has just begun."""
        self.state = HEARS
        self.autocast = False  # the user's autocast is on, while our own work has lifted it
        self.collective = False  # a recorded functional collective, which may call others
        self.modules: list[Any] = []  # the `Call` of each module that is running, outermost first
        self.area: str | None = None  # "optimizer" or "clip_grad" while torch runs one of them

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Record nothing in this thread for the block."""
        before = self.state
        self.state = OFF
        try:
            yield
        finally:
            self.state = before


def silenced(function: Any, thread: ThreadState) -> Any:
    """``function``, during which nothing is recorded in its thread."""

    @functools.wraps(function)
    def silent(*args: Any, **kwargs: Any) -> Any:
        with thread.silent():
            return function(*args, **kwargs)

    return silent


class Gate:
    """Shared by all wrappers and hooks of a session: they record only while it is ``open``."""

    __slots__ = ("_shut", "focus", "open", "run", "thread")

    def __init__(self) -> None:
        self.open = False
        self.run: StepRun | None = None
        self.thread = ThreadState()
        self.focus = False  # between module_dump and module_dump_end: only the focused module
        self._shut: Callable[[bool], None] | None = None

    def forget(self, shut: Callable[[bool], None]) -> None:
        """In a forked child: record nothing.

        ``shut`` takes the parent's window back: when a call asks the gate (True), or when the child
        opens a window of its own (False), whichever comes first.
        """
        self.thread.begin()
        self.run = None
        self._shut = shut
        self.__class__ = ForkedGate

    def settle(self, by_call: bool = False) -> None:
        """A window is about to open: none of the parent's may be left."""


class ForkedGate(Gate):
    """The gate in a child that was forked from an open window, until the first call asks it.

    The class of the gate changes, so that asking costs nothing more in the parent.
    """

    __slots__ = ()

    @property
    def open(self) -> bool:
        """False; who asks is a call that the parent would have recorded."""
        self.settle(by_call=True)
        return False

    @open.setter
    def open(self, value: bool) -> None:
        """Hooks of the parent's window have no say here."""

    def settle(self, by_call: bool = False) -> None:
        """Be an ordinary gate, and shut."""
        shut, self._shut = self._shut, None
        self.__class__ = Gate  # type: ignore[assignment]
        self.open = False
        if shut is not None:
            shut(by_call)
