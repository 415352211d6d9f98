"""Max, Min, Mean and Norm of the most frequent kind of tensor: float32, on the CPU, not small."""

from __future__ import annotations

import math
from ctypes import c_float
from typing import Any

import numpy as np
import torch

from .fused import Reduced
from .fused import reduce as _fused
from .pieces import PIECE_BYTES, even, in_memory_order, is_dense, is_freed, memory_at

# Bound at import: these names are patched while a window is open.
_as_strided = torch.Tensor.as_strided
_contiguous = torch.Tensor.contiguous
_data_ptr = torch.Tensor.data_ptr
_detach = torch.Tensor.detach
_dot = torch.dot
_is_contiguous = torch.Tensor.is_contiguous
_is_neg = torch.Tensor.is_neg
_item = torch.Tensor.item
_numel = torch.Tensor.numel
_offset = torch.Tensor.storage_offset
_split = torch.unsafe_split
_storage = torch.Tensor.untyped_storage
_stride = torch.Tensor.stride
_sum = torch.sum
_frombuffer = np.frombuffer
_largest = np.maximum.reduce
_least = np.minimum.reduce
_threads = torch.get_num_threads

Values = list[Any]
_FLOAT32 = np.dtype(np.float32)
_PIECE = PIECE_BYTES // 4  # elements
_STRIDED = torch.strided
SINGLE_MAX = torch.finfo(torch.float32).max
SMALL = 1 << 14  # elements up to which torch's reductions of the whole are as fast
GRAIN = 1 << 15  # elements up to which torch reduces in one thread
# Elements of the largest tensor that is not worth the frame, and of the largest of which one
# thread is as fast as several. A sum of squares outside of these bounds may have lost terms to
# underflow, or overflowed.
if _fused is None:
    LEAST, ALONE, SQUARES = SMALL, GRAIN, (1e-30, SINGLE_MAX)
else:
    LEAST, ALONE, SQUARES = 1 << 10, 1 << 18, (0.0, torch.finfo(torch.float64).max)


def usual(tensor: torch.Tensor) -> Values | None:
    """`stats_cpu.floats` of a plain float32 tensor; None of a small or odd one.

    The most frequent case, in one frame and few calls: the model has pushed Python and torch out
    of the cache, and each further call costs several times what it does elsewhere.
    """
    count = _numel(tensor)
    if (
        count <= LEAST
        or not tensor.is_cpu
        or tensor.layout is not _STRIDED
        or tensor.is_nested
        or _is_neg(tensor)
        or (count > ALONE and _threads() > 1)
    ):
        return None
    address = _data_ptr(tensor)
    if not address or _storage(tensor).nbytes() < (_offset(tensor) + count) * 4:
        return None  # its memory has been freed
    if not (_is_contiguous(tensor) or is_dense(tensor.shape, _stride(tensor))):
        packed = None if is_freed(tensor) or count > _PIECE else _packed(tensor, count)
        if packed is None:
            return None
        tensor, address = packed, _data_ptr(packed)
    if _fused is not None:
        top, low, total, square = _fused(address, count, "float32")
    else:
        top, low, total, square = _of_block(tensor, address, count)
    if square != square:
        return [math.nan] * 4
    least, most = SQUARES
    if -SINGLE_MAX <= total <= SINGLE_MAX and least <= square <= most:
        return [top, low, c_float(total / count).value, c_float(math.sqrt(square)).value]
    return None


def _packed(tensor: torch.Tensor, count: int) -> torch.Tensor | None:
    """A copy of a tensor with gaps, not more than a piece; None of an expanded one."""
    distinct = in_memory_order(_detach(tensor))
    return _contiguous(distinct) if _numel(distinct) == count else None


def _of_block(tensor: torch.Tensor, address: int, count: int) -> Reduced:
    """What `fused.reduce` gives of a float32 tensor without gaps, by torch and numpy."""
    flat = _as_strided(_detach(tensor), (count,), (1,))  # its elements in the order of memory
    array = _frombuffer(memory_at(address, count * 4), _FLOAT32)
    top, low, total, square = -math.inf, math.inf, 0.0, 0.0
    size, begin = even(count, _PIECE), 0
    for piece in (flat,) if count <= _PIECE else _split(flat, size):
        squares, sums = _dot(piece, piece), _sum(piece)  # first what waits least for the memory
        values = array[begin : begin + size]
        begin += size
        top, low = max(top, float(_largest(values))), min(low, float(_least(values)))
        total += _item(sums)
        square += _item(squares)
    return top, low, total, square
