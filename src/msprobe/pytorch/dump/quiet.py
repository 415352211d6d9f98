"""Run our own tensor work unseen: by the user's modes, by autocast, by autograd.

Each is lifted only when it is active; the test is a few C calls, since it runs for every record.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

_C: Any = torch._C
_dispatch_modes = _C._len_torch_dispatch_stack
_function_modes = _C._len_torch_function_stack


def _each_autocast() -> bool:
    return torch.is_autocast_enabled() or torch.is_autocast_cpu_enabled()


# torch >= 2.4 answers for all devices in one call.
_autocast: Any = getattr(_C, "_is_any_autocast_enabled", _each_autocast)
_AUTOCAST_KEYS = [
    getattr(_C.DispatchKey, name)
    for name in ("AutocastCPU", "AutocastCUDA", "AutocastXPU", "AutocastPrivateUse1")
    if hasattr(_C.DispatchKey, name)
]


def is_needed() -> bool:
    """Whether a mode or autocast is active, so that our tensor work must run under `quiet`."""
    return bool(_dispatch_modes() or _function_modes() or _autocast())


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Lift dispatch modes, function modes and autocast for the block, in this thread."""
    with contextlib.ExitStack() as stack:
        if _function_modes():
            stack.enter_context(_C.DisableTorchFunction())
        if _dispatch_modes():
            stack.enter_context(_disable_current_modes())
        if _autocast():
            for key in _AUTOCAST_KEYS:
                stack.enter_context(_C._ExcludeDispatchKeyGuard(_C.DispatchKeySet(key)))
        yield
