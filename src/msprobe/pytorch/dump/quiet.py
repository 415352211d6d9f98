"""Run our own tensor work unseen: by the user's modes, by autocast, by autograd.

Each is lifted only when it is active. Whether one is, is asked for every record, by the C
functions bound here: `dispatch_modes`, `function_modes` and `autocast` are true when one is.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

_C: Any = torch._C
dispatch_modes = _C._len_torch_dispatch_stack
function_modes = _C._len_torch_function_stack


def _each_autocast() -> bool:
    return torch.is_autocast_enabled() or torch.is_autocast_cpu_enabled()


# torch >= 2.4 answers for all devices in one call.
autocast: Any = getattr(_C, "_is_any_autocast_enabled", _each_autocast)
# Whether vmap, grad or another transform of torch.func is running, asked without functorch: nearly
# any question to it gives the thread a state that each node of a graph then copies, 2 % of a step.
_key_is_on: Any = _C._dispatch_tls_is_dispatch_key_included
in_transform: Any = functools.partial(_key_is_on, _C.DispatchKey.FuncTorchDynamicLayerFrontMode)
# Disables __torch_function__ of tensor subclasses for a block.
subclass_functions_off: Any = getattr(_C, "DisableTorchFunctionSubclass", _C.DisableTorchFunction)


def _is_capturing() -> bool:
    # Asked before CUDA is in use, or where it can not be used, torch raises: builds with CUDA run
    # on machines without a driver, too, and in forked children.
    try:
        return _cuda_is_initialized() and bool(_C._cuda_isCurrentStreamCapturing())
    except RuntimeError:
        return False


_cuda_is_initialized: Any = torch.cuda.is_initialized
# Whether a CUDA graph is being captured: nothing may be read then. Without CUDA, bool() is False.
is_capturing: Any = _is_capturing if torch.version.cuda or torch.version.hip else bool
_AUTOCAST_KEYS = [
    getattr(_C.DispatchKey, name)
    for name in ("AutocastCPU", "AutocastCUDA", "AutocastXPU", "AutocastPrivateUse1")
    if hasattr(_C.DispatchKey, name)
]
_TRANSFORM_KEYS = _C.DispatchKeySet(_C.DispatchKey.FuncTorchDynamicLayerFrontMode)
_TRANSFORM_KEYS |= _C.DispatchKeySet(_C.DispatchKey.FuncTorchDynamicLayerBackMode)
# For a block: plain tensors are computed with as outside of vmap, grad and the like.
transforms_off: Any = functools.partial(_C._ExcludeDispatchKeyGuard, _TRANSFORM_KEYS)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Lift dispatch modes, function modes and autocast for the block, in this thread."""
    with contextlib.ExitStack() as stack:
        if function_modes():
            stack.enter_context(_C.DisableTorchFunction())
        if dispatch_modes():
            stack.enter_context(_disable_current_modes())
        if autocast():
            for key in _AUTOCAST_KEYS:
                stack.enter_context(_C._ExcludeDispatchKeyGuard(_C.DispatchKeySet(key)))
        yield
