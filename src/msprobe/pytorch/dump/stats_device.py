"""Max, Min, Mean and Norm of a strided, non-empty tensor on its device, not read back yet."""

from __future__ import annotations

from typing import Any

import torch

from .deferred import Deferred, current_stream
from .stats_cpu import SIGN

# Bound at import: these names are patched while a window is open.
_abs = torch.abs
_amax = torch.amax
_amin = torch.amin
_aminmax = torch.aminmax
_bitwise_xor = torch.bitwise_xor
_clone = torch.Tensor.clone
_is_contiguous = torch.Tensor.is_contiguous
_mean = torch.mean
_reshape = torch.Tensor.reshape
_stack = torch.stack
_to = torch.Tensor.to
_vector_norm = torch.linalg.vector_norm
_view = torch.Tensor.view

_SINGLE = torch.float32
_NARROW = (torch.float16, torch.bfloat16)


def integers(tensor: torch.Tensor, high: bool) -> Deferred:
    """Exact Max and Min; of a 0-dim tensor the value thrice and its absolute value."""
    return _deferred(_extremes(tensor), _two_numbers if tensor.ndim else _scalar)


def uint64s(tensor: torch.Tensor, high: bool) -> Deferred:
    """As `integers`, found in the signed numbers 2**63 below: torch compares only those."""
    finish = _two_numbers if tensor.ndim else _scalar
    signed = _bitwise_xor(_view(tensor, torch.int64), SIGN)
    return _deferred(_extremes(signed), lambda found: finish([v - SIGN for v in found]))


def bools(tensor: torch.Tensor, high: bool) -> Deferred:
    """Whether any and whether all elements are true."""
    found = _extremes(_view(tensor, torch.uint8))
    return _deferred(found, lambda values: _two_numbers([bool(value) for value in values]))


def magnitudes(tensor: torch.Tensor, high: bool) -> Deferred:
    """Max, Min and Mean of the absolute values of a complex tensor."""
    found = _abs(tensor)
    return _deferred([*_extremes(found), _mean(found)], lambda values: [*values, None])


def floats(tensor: torch.Tensor, high: bool) -> Deferred:
    """All four, in the tensor's dtype, with ``high`` in float32; float8 always in float32."""
    dtype = tensor.dtype
    if dtype.itemsize == 1:
        tensor = _to(tensor, _SINGLE)
    if not tensor.ndim:
        # A copy: the user may write to the tensor before it is read back.
        return Deferred(_clone(_reshape(tensor, (1,))), _scalar, current_stream(tensor.device))
    top, low = _extremes(tensor)
    if high and dtype in _NARROW:
        mean, norm = _mean(tensor, dtype=_SINGLE), _vector_norm(tensor, dtype=_SINGLE)
    else:
        mean, norm = _mean(tensor), _vector_norm(tensor)
    return _deferred([top, low, mean, norm], list)


def _extremes(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Max and Min. ``aminmax`` saves a pass, but not every device and stride has it for free."""
    if tensor.is_cuda and _is_contiguous(tensor):
        low, top = _aminmax(tensor)
        return [top, low]
    return [_amax(tensor), _amin(tensor)]


def _deferred(found: list[torch.Tensor], finish: Any) -> Deferred:
    return Deferred(_stack(found), finish, current_stream(found[0].device))


def _two_numbers(values: list[Any]) -> list[Any]:
    return [values[0], values[1], None, None]


def _scalar(values: list[Any]) -> list[Any]:
    return [values[0], values[0], values[0], abs(values[0])]
