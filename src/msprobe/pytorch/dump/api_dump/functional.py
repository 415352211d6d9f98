"""Functional collectives: their results are there when somebody has waited for them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from ..gate import ThreadState
from .ops import FUNCTIONAL_COLLECTIVES


def async_tensor_patch(thread: ThreadState) -> list[tuple[Any, str, Callable[..., Any]]]:
    """The patch of AsyncCollectiveTensor; empty where functional collectives are not loaded.

    torch calls ``Tensor.stride`` when it makes one. A record of that call would read, from memory
    that is being received, numbers that differ from run to run.
    """
    kind: Any = getattr(sys.modules.get(FUNCTIONAL_COLLECTIVES), "AsyncCollectiveTensor", None)
    if kind is None:
        return []
    original = kind.__new__

    @functools.wraps(original)
    def new(*args: Any, **kwargs: Any) -> Any:
        with thread.silent():
            return original(*args, **kwargs)

    return [(kind, "__new__", staticmethod(new))]
