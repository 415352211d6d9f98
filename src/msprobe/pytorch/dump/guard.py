"""Our own work on the path of a call or hook: unseen, marked as ours, and never raising."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from .gate import OFF, ThreadState
from .quiet import autocast, dispatch_modes, function_modes, quiet, subclass_functions_off

T = TypeVar("T")


class Guard:
    """Runs our own work; an error of ours is told to ``problem`` with the name of the record."""

    def __init__(self, thread: ThreadState, problem: Callable[[str, Exception], None]) -> None:
        self._thread = thread
        self._problem = problem

    def run(self, name: str, function: Callable[..., T], *args: Any) -> T | None:
        """Result of ``function``; None if it has raised.

        The one place where our errors are caught.
        """
        thread = self._thread
        state = thread.state
        thread.state = OFF
        try:
            # A subclass's own __torch_function__ must not hear of our work either.
            with subclass_functions_off():
                if dispatch_modes() or function_modes() or autocast():
                    return self._unseen(function, args)
                return function(*args)
        except Exception as error:
            self._problem(name, error)
            return None
        finally:
            thread.state = state

    def _unseen(self, function: Callable[..., T], args: Any) -> T:
        thread = self._thread
        thread.autocast = autocast()
        try:
            with quiet():
                return function(*args)
        finally:
            thread.autocast = False
