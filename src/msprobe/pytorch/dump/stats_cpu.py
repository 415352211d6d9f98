"""Max, Min, Mean and Norm of a strided, non-empty CPU tensor, each byte read from memory once."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from ctypes import c_float
from typing import Any

import numpy as np
import torch

from .fused import Reduced
from .fused import reduce as _fused
from .pieces import PIECE_BYTES, address_of, even, in_memory_order, memory_of, pieces
from .usual import ALONE, SINGLE_MAX, SMALL, SQUARES, usual

# Bound at import: these names are patched while a window is open.
_abs = torch.abs
_amax = torch.amax
_amin = torch.amin
_aminmax = torch.aminmax
_bitwise_xor = torch.bitwise_xor
_copy_ = torch.Tensor.copy_
_dot = torch.dot
_empty = torch.empty
_float = torch.Tensor.float
_is_contiguous = torch.Tensor.is_contiguous
_item = torch.Tensor.item
_narrow = torch.Tensor.narrow
_numel = torch.Tensor.numel
_sum = torch.sum
_frombuffer = np.frombuffer
_largest = np.maximum.reduce
_least = np.minimum.reduce
_threads = torch.get_num_threads
_to = torch.Tensor.to
_vector_norm = torch.linalg.vector_norm
_view = torch.Tensor.view

Values = list[Any]
SIGN = -(1 << 63)
_SINGLE = torch.float32
_DOUBLE = torch.float64
_NUMPY: dict[torch.dtype, Any] = {_SINGLE: np.dtype(np.float32), _DOUBLE: np.dtype(np.float64)}
# A sum of squares outside of these bounds may have lost terms to underflow, or overflowed.
_SQUARES = {_SINGLE: SQUARES, _DOUBLE: (1e-290, torch.finfo(_DOUBLE).max)}


def scalar(tensor: torch.Tensor) -> Values:
    """The value of a 0-dim tensor as Max, Min and Mean, its absolute value as Norm."""
    value = _item(tensor)
    if isinstance(value, bool):
        return [value, value, None, None]
    if isinstance(value, complex):
        return [_item(_abs(tensor))] * 3 + [None]
    return [value, value, value, abs(value)]


def integers(tensor: torch.Tensor, high: bool) -> Values:
    """Exact Max and Min."""
    return [*_extremes(tensor), None, None]


def uint64s(tensor: torch.Tensor, high: bool) -> Values:
    """Exact Max and Min, found in the signed numbers 2**63 below: torch compares only those."""
    top, low = _extremes(_bitwise_xor(_view(tensor, torch.int64), SIGN))
    return [top - SIGN, low - SIGN, None, None]


def bools(tensor: torch.Tensor, high: bool) -> Values:
    """Whether any and whether all elements are true."""
    top, low = _extremes(_view(tensor, torch.uint8))
    return [bool(top), bool(low), None, None]


def magnitudes(tensor: torch.Tensor, high: bool) -> Values:
    """Max, Min and Mean of the absolute values of a complex tensor."""
    work = _DOUBLE if tensor.dtype is torch.complex128 else _SINGLE
    distinct = tensor if _is_contiguous(tensor) else in_memory_order(tensor)
    top, low, total, _ = _walked(distinct, work)
    return [top, low, _mean(total, _numel(distinct), work), None]


def floats(tensor: torch.Tensor, high: bool) -> Values:
    """All four. Sums are made in float32 (float64 for float64) and rounded to float32.

    Without ``high``, Mean and Norm of a 16-bit tensor are rounded to its dtype as torch's own
    are, so that they are infinite beyond its largest number.
    """
    dtype = tensor.dtype
    if dtype is _SINGLE:
        found = usual(tensor)
        if found is not None:
            return found
    count = _numel(tensor)
    work = _DOUBLE if dtype is _DOUBLE else _SINGLE
    distinct = tensor if _is_contiguous(tensor) else in_memory_order(tensor)
    size = _numel(distinct)
    if size <= SMALL:
        plain = distinct if dtype is work else _float(distinct)
        lowest, highest = _aminmax(plain)
        top, low = _item(highest), _item(lowest)
        mean, norm = _item(_sum(plain)) / size, _item(_vector_norm(plain))
    else:
        top, low, total, squares = _walked(distinct, work)
        mean = _mean(total, size, work)
        norm = _root(squares, max(top, -low), distinct, work)
    if size != count:
        norm *= math.sqrt(count // size)
    if work is _SINGLE:
        mean, norm = c_float(mean).value, c_float(norm).value
    if not high and dtype in _ROUNDED:
        rounded = _ROUNDED[dtype]
        mean, norm = rounded(mean), rounded(norm)
    return [top, low, mean, norm]


def _extremes(tensor: torch.Tensor) -> tuple[Any, Any]:
    """Max and Min of an integer tensor."""
    if not _is_contiguous(tensor):
        tensor = in_memory_order(tensor)
    if _numel(tensor) <= SMALL or _is_contiguous(tensor):
        low, top = _aminmax(tensor)
        return _item(top), _item(low)
    # Of a tensor with gaps, aminmax would make a whole copy.
    found = [_aminmax(piece) for piece in pieces(tensor, PIECE_BYTES // tensor.dtype.itemsize)]
    return max(_item(top) for _, top in found), min(_item(low) for low, _ in found)


def _walked(tensor: torch.Tensor, work: torch.dtype) -> Reduced:
    """Max, Min, sum and sum of squares of a float tensor, or of a complex one's absolute values.

    One pass over the memory: all four are taken of a piece while it is in the cache. ``work`` is
    the dtype of each piece; the pieces are added up in float64.
    """
    reduce = _reduced if _threads() == 1 else _reduced_by_threads
    found = [reduce(flat, _NUMPY[work]) for flat in _flat_pieces(tensor, work)]
    tops, lows, sums, squares = zip(*found, strict=True)
    top, low, total = max(tops), min(lows), sum(sums)
    if math.isnan(total) and any(map(math.isnan, tops)):
        top = low = math.nan  # `max` keeps a NaN only if it comes first
    return top, low, total, sum(squares)


def _reduced(flat: torch.Tensor, dtype: Any) -> Reduced:
    """Max, Min, sum and sum of squares of a piece. numpy's Max and Min take half as long."""
    if _fused is not None:
        return _fused(address_of(flat), _numel(flat), dtype.name)
    squares, total = _dot(flat, flat), _sum(flat)  # first the one that waits least for the memory
    array = _frombuffer(memory_of(flat), dtype)
    return float(_largest(array)), float(_least(array)), _item(total), _item(squares)


def _reduced_by_threads(flat: torch.Tensor, dtype: Any) -> Reduced:
    """As `_reduced`, by torch's threads where it would use them."""
    if _numel(flat) <= ALONE:
        return _reduced(flat, dtype)
    squares, total, top, low = _dot(flat, flat), _sum(flat), _amax(flat), _amin(flat)
    return _item(top), _item(low), _item(total), _item(squares)


def _flat_pieces(tensor: torch.Tensor, work: torch.dtype) -> Iterator[torch.Tensor]:
    """1-D contiguous pieces of dtype ``work``; of a complex tensor, its absolute values.

    Each piece is valid until the next one is asked for: those that must be converted or packed
    go through one buffer, since allocating each anew costs page faults.
    """
    size = even(_numel(tensor), PIECE_BYTES // work.itemsize * _threads())
    magnitude = tensor.dtype.is_complex
    if _numel(tensor) <= size and _is_contiguous(tensor):
        ready = _abs(tensor) if magnitude else tensor if tensor.dtype is work else _float(tensor)
        yield _view(ready, -1)
        return
    buffer = None
    for piece in pieces(tensor, size):
        if piece.dtype is work and _is_contiguous(piece):
            yield piece if piece.ndim == 1 else _view(piece, -1)
            continue
        if buffer is None:
            buffer = _empty(min(size, _numel(tensor)), dtype=work, device="cpu")
        flat = _narrow(buffer, 0, 0, _numel(piece))
        if magnitude:
            _abs(piece, out=_view(flat, piece.shape))
        else:
            _copy_(_view(flat, piece.shape), piece)
        yield flat


def _mean(total: float, count: int, work: torch.dtype) -> float:
    """``total / count``; infinite, as in torch, when the total is beyond ``work``."""
    if work is _SINGLE and not -SINGLE_MAX <= total <= SINGLE_MAX:
        total *= math.inf
    return total / count


def _root(squares: float, peak: float, tensor: torch.Tensor, work: torch.dtype) -> float:
    """The 2-norm from the sum of squares, where that can be trusted, else torch's own.

    ``peak``: the largest absolute value.
    """
    least, most = _SQUARES[work]
    if least <= squares <= most:
        return math.sqrt(squares)
    if peak == 0 or not math.isfinite(peak):
        return abs(peak)
    norm: float = _item(_vector_norm(_to(tensor, work)))
    return norm


def _as_half(value: float) -> float:
    try:
        half: float = struct.unpack("e", struct.pack("e", value))[0]
    except OverflowError:
        half = math.copysign(math.inf, value)
    return half


def _as_bfloat16(value: float) -> float:
    """``value``, a float32, rounded to nearest even at the upper half of its bits."""
    if not math.isfinite(value):
        return value
    bits: int = struct.unpack("I", struct.pack("f", value))[0]
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    rounded: float = struct.unpack("f", struct.pack("I", bits))[0]
    return rounded


_ROUNDED: dict[torch.dtype, Callable[[float], float]] = {
    torch.float16: _as_half,
    torch.bfloat16: _as_bfloat16,
}
