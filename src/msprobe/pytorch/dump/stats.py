"""Max, Min, Mean and Norm of any tensor, and (from `checksums`) its CRC-32 and XOR.

CPU tensors are measured at once; those on a device give a `Deferred`, for `read_back` later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import stats_cpu, stats_device
from .checksums import crc32, xor64
from .deferred import TORCH_ERRORS, CannotMeasure, Deferred, read_back, reason
from .pieces import FREED, is_freed
from .usual import usual as usual_statistics

__all__ = ["CannotMeasure", "Deferred", "crc32", "read_back", "statistics", "usual", "xor64"]

# Bound at import: these names are patched while a window is open.
_cat = torch.cat
_coalesce = torch.Tensor.coalesce
_dequantize = torch.Tensor.dequantize
_is_coalesced = torch.Tensor.is_coalesced
_is_neg = torch.Tensor.is_neg
_numel = torch.Tensor.numel
_reshape = torch.Tensor.reshape
_resolve_neg = torch.Tensor.resolve_neg
_to = torch.Tensor.to
_to_dense = torch.Tensor.to_dense
_unbind = torch.Tensor.unbind
_values = torch.Tensor.values
_zeros = torch.zeros

Values = list[Any]
_STRIDED = torch.strided
_SPARSE = {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}


def _dtypes(*names: str) -> list[torch.dtype]:
    """Those of the dtypes that this version of torch has."""
    return [getattr(torch, name) for name in names if hasattr(torch, name)]


_FLOATS = _dtypes(
    *("float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
_KINDS = {
    **dict.fromkeys(_FLOATS, "floats"),
    **dict.fromkeys(_dtypes("int8", "int16", "int32", "int64", "uint8"), "integers"),
    **dict.fromkeys(_dtypes("uint64"), "uint64s"),
    **dict.fromkeys(_dtypes("bool"), "bools"),
    **dict.fromkeys(_dtypes("complex64", "complex128"), "magnitudes"),
}
_ON_CPU: dict[torch.dtype, Callable[[torch.Tensor, bool], Values]] = {
    dtype: getattr(stats_cpu, kind) for dtype, kind in _KINDS.items()
}
_ON_DEVICE: dict[torch.dtype, Callable[[torch.Tensor, bool], Deferred]] = {
    dtype: getattr(stats_device, kind) for dtype, kind in _KINDS.items()
}
# Dtypes that torch cannot reduce, and one that it can and that holds all their values.
_WIDER = {
    dtype: wider
    for name, wider in (
        ("uint16", torch.int32),
        ("uint32", torch.int64),
        ("complex32", torch.complex64),
    )
    for dtype in _dtypes(name)
}


def statistics(tensor: torch.Tensor, high: bool = False) -> Values | Deferred:
    """``[Max, Min, Mean, Norm]``, with None where the dtype has no such number.

    Floats: in the tensor's own dtype, with ``high`` in float32 (float64 stays); float8 always in
    float32. Integers: exact Max and Min. Bool: any and all. Complex: of the absolute values, no
    Norm. 0-dim: the value thrice, then its absolute value. A NaN makes all four NaN. Sparse: of
    all elements, the zeros included. Empty and meta: four None. Raises `CannotMeasure` only.
    Source: the table "Statistics by dtype" of the format description.
    """
    try:
        measure = _ON_CPU.get(tensor.dtype)
        if (
            measure is None
            or not tensor.is_cpu
            or tensor.layout is not _STRIDED
            or tensor.is_nested
            or _is_neg(tensor)
        ):
            return _unusual(tensor, high)
        if not _numel(tensor):
            return [None] * 4
        if is_freed(tensor):
            raise CannotMeasure(FREED)
        return measure(tensor, high) if tensor.ndim else stats_cpu.scalar(tensor)
    except TORCH_ERRORS as error:
        raise CannotMeasure(reason(error)) from error


def usual(tensor: torch.Tensor) -> Values | None:
    """`statistics` of the most frequent kind of tensor, at the least cost; else None."""
    try:
        return usual_statistics(tensor)
    except TORCH_ERRORS:
        return None  # an odd tensor: `statistics` says what is wrong with it


def device_statistics(tensor: torch.Tensor, high: bool = False) -> Deferred:
    """`statistics` of a plain non-empty tensor in operations of its own device, not read back."""
    measure = _ON_DEVICE.get(tensor.dtype)
    if measure is None:
        raise CannotMeasure(f"torch cannot reduce {tensor.dtype}")
    return measure(tensor, high)


def _unusual(tensor: torch.Tensor, high: bool) -> Values | Deferred:
    """Of a tensor on a device, or of a dtype or layout that must be converted first."""
    if tensor.is_meta or not _numel(tensor):
        return [None] * 4
    if tensor.layout in _SPARSE:
        return _of_sparse(tensor, high)
    if tensor.layout is _STRIDED and is_freed(tensor):
        raise CannotMeasure(FREED)
    plain = _plain(tensor)
    return device_statistics(tensor, high) if plain is tensor else statistics(plain, high)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """One step towards a strided tensor of a dtype that torch can reduce; else the tensor."""
    if tensor.is_nested:
        return _cat([_reshape(part, (-1,)) for part in _unbind(tensor)])
    if tensor.is_quantized:
        return _dequantize(tensor)
    if tensor.layout is not _STRIDED:
        return _to_dense(tensor)
    if _is_neg(tensor):
        return _resolve_neg(tensor)
    wider = _WIDER.get(tensor.dtype)
    return tensor if wider is None else _to(tensor, wider)


def _of_sparse(tensor: torch.Tensor, high: bool) -> Values | Deferred:
    if tensor.layout is torch.sparse_coo and not _is_coalesced(tensor):
        if not tensor.is_cpu:
            raise CannotMeasure("coalescing a sparse tensor would wait for the device")
        tensor = _coalesce(tensor)
    values = _values(tensor)
    share = _numel(values) / _numel(tensor)
    if not share:
        values = _zeros(1, dtype=tensor.dtype, device=tensor.device)
    found = statistics(values, high)
    if share == 1:
        return found
    if isinstance(found, list):
        return _with_zeros(found, share)
    finish = found.finish
    return Deferred(found.values, lambda read: _with_zeros(finish(read), share), found.stream)


def _with_zeros(found: Values, share: float) -> Values:
    """Statistics of a whole of which the measured elements are a ``share``, the others zeros.

    The order of the arguments of ``max`` and ``min`` keeps a NaN.
    """
    top, low, mean, norm = found
    zero = type(top)()
    return [max(top, zero), min(low, zero), None if mean is None else mean * share, norm]
