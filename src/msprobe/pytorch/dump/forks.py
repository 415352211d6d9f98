"""A child that was forked from a recording process records nothing of the parent's."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable

from torch.utils.data import get_worker_info

_logger = logging.getLogger("msprobe")


def call_in_children(method: Callable[[], None]) -> None:
    """Call a bound method in every child forked from now on, while its object is alive."""
    alive = weakref.WeakMethod(method)

    def call() -> None:
        found = alive()
        if found is not None:
            found()

    os.register_at_fork(after_in_child=call)


def say_not_recorded() -> None:
    """A child has made a call that its parent would have recorded.

    Data loader workers say nothing: nobody expects their calls in a dump.
    """
    if get_worker_info() is None:
        _logger.warning(
            "process %d was forked while its parent was recording: nothing is recorded here"
            " unless it calls start() itself",
            os.getpid(),
        )
