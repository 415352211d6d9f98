"""Checksums of the bytes of a tensor: CRC-32, and the XOR of its 64-bit words."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from .deferred import TORCH_ERRORS, CannotMeasure, Deferred, current_stream, reason
from .pieces import FREED, is_freed, memory_of, pieces

fast_crc32: Any = None
try:  # the optional extra "fast": the same values, many times as fast
    from isal import isal_zlib

    fast_crc32 = isal_zlib.crc32
except ImportError:
    pass
_crc32: Callable[[Any, int], int] = fast_crc32 or zlib.crc32

# Bound at import: these names are patched while a window is open.
_bitwise_xor = torch.bitwise_xor
_cat = torch.cat
_clone = torch.Tensor.clone
_contiguous = torch.Tensor.contiguous
_copy_ = torch.Tensor.copy_
_cpu = torch.Tensor.cpu
_element_size = torch.Tensor.element_size
_empty = torch.empty
_int_repr = torch.Tensor.int_repr
_is_contiguous = torch.Tensor.is_contiguous
_narrow = torch.Tensor.narrow
_numel = torch.Tensor.numel
_offset = torch.Tensor.storage_offset
_resolve_conj = torch.Tensor.resolve_conj
_resolve_neg = torch.Tensor.resolve_neg
_stride = torch.Tensor.stride
_unbind = torch.Tensor.unbind
_view = torch.Tensor.view
_zeros = torch.zeros
_frombuffer = np.frombuffer
_xor_reduce = np.bitwise_xor.reduce

_WORD = np.dtype("<u8")
_MASK = (1 << 64) - 1
_COPIED_BYTES = 1 << 19  # of a non-contiguous tensor at a time; fits in the L2 cache
_SMALL = 1 << 13  # elements up to which one copy of the whole is faster
_STRIP = 256  # elements


def crc32(tensor: torch.Tensor) -> str:
    """CRC-32 (as `zlib.crc32`) of the C-order little-endian bytes, as 8 hexadecimal digits.

    A tensor on a device is copied to the host now. Raises `CannotMeasure`.
    """
    try:
        _require_bytes(tensor)
        crc = 0
        if _numel(tensor):
            for run in _runs(tensor if tensor.is_cpu else _cpu(tensor)):
                crc = _crc32(run, crc)
        return f"{crc:08x}"
    except TORCH_ERRORS as error:
        raise CannotMeasure(reason(error)) from error


def xor64(tensor: torch.Tensor) -> str | Deferred:
    """XOR of the C-order bytes taken as little-endian 64-bit words, as "0x" and 16 digits.

    The last word is filled up with zero bytes. A tensor on a device gives a `Deferred` that
    finishes to a list with that text. Raises `CannotMeasure`.
    """
    try:
        _require_bytes(tensor)
        if not _numel(tensor):
            return _hexadecimal([0])[0]
        if not tensor.is_cpu:
            return device_xor64(tensor)
        word = begin = 0
        for run in _runs(tensor):
            word ^= _rotated(_xor_of_words(run), begin % 8)
            begin += len(run)
        return _hexadecimal([word])[0]
    except TORCH_ERRORS as error:
        raise CannotMeasure(reason(error)) from error


def device_xor64(tensor: torch.Tensor) -> Deferred:
    """`xor64` of a non-empty tensor in operations of its own device; nothing is read back."""
    flat = [_view(_contiguous(part), -1) for part in _plain_parts(tensor)]
    octets = _view(flat[0] if len(flat) == 1 else _cat(flat), torch.uint8)
    count = _numel(octets)
    bulk = count // 8 * 8
    last = _zeros(8, dtype=torch.uint8, device=octets.device)
    if bulk < count:
        _copy_(_narrow(last, 0, 0, count - bulk), _narrow(octets, 0, bulk, count - bulk))
    word = _view(last, torch.int64)
    if bulk:
        words = _narrow(octets, 0, 0, bulk)
        # An int64 view must begin at a multiple of 8 bytes.
        words = _view(words if _offset(words) % 8 == 0 else _clone(words), torch.int64)
        word = _bitwise_xor(word, _halved(words))
    return Deferred(word, _hexadecimal, current_stream(tensor.device))


def _halved(words: torch.Tensor) -> torch.Tensor:
    """The XOR of all elements as one element: torch has no such reduction."""
    count = words.shape[0]
    while count > 1:
        half = count // 2
        folded = _bitwise_xor(_narrow(words, 0, 0, half), _narrow(words, 0, half, half))
        if count % 2:
            first = _narrow(folded, 0, 0, 1)
            _copy_(first, _bitwise_xor(first, _narrow(words, 0, count - 1, 1)))
        words, count = folded, half
    return words


def _hexadecimal(words: list[int]) -> list[str]:
    return [f"0x{word & _MASK:016x}" for word in words]


def _xor_of_words(run: memoryview) -> int:
    bulk = len(run) // 8 * 8
    word = int.from_bytes(run[bulk:], "little")
    return word ^ int(_xor_reduce(_frombuffer(run, _WORD, bulk // 8))) if bulk else word


def _rotated(word: int, octets: int) -> int:
    """``word`` as it stands when its bytes begin ``octets`` places later in a 64-bit word."""
    return (word << 8 * octets | word >> 64 - 8 * octets) & _MASK


def _require_bytes(tensor: torch.Tensor) -> None:
    if tensor.is_meta:
        raise CannotMeasure("a meta tensor has no bytes")
    if tensor.layout is not torch.strided:
        raise CannotMeasure(f"a tensor of layout {tensor.layout} has no bytes in C order")
    if is_freed(tensor):
        raise CannotMeasure(FREED)


def _plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensor, or those in a nested one, with bytes that are those of its elements."""
    if tensor.is_nested:
        return [part for nested in _unbind(tensor) for part in _plain_parts(nested)]
    if tensor.is_quantized:
        return [_int_repr(tensor)]
    return [_resolve_neg(_resolve_conj(tensor))]


def _runs(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a non-empty CPU tensor in C order, where possible its own memory.

    Each view is valid until the next one is asked for.
    """
    for part in _plain_parts(tensor):
        if not _numel(part):
            continue
        if _is_contiguous(part):
            yield memory_of(part)
        elif _numel(part) <= _SMALL:
            packed = _contiguous(part)  # kept alive while its memory is looked at
            yield memory_of(packed)
        else:
            yield from _packed_runs(part)


def _packed_runs(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a non-contiguous tensor, copied to one buffer piece by piece."""
    octets = _element_size(tensor)
    size = min(_COPIED_BYTES // octets, _numel(tensor))
    buffer = _empty(size, dtype=tensor.dtype, device="cpu")
    for piece in pieces(tensor, size):
        packed = _narrow(buffer, 0, 0, _numel(piece))
        shaped = _view(packed, piece.shape)
        width = piece.shape[-1]
        # Each element of a row may lie in a cache line of its own, whose others belong to the
        # rows below: in strips, the lines are still in the cache for them (5 times as fast).
        strip = _STRIP if _stride(piece)[-1] * octets >= 64 else width
        for begin in range(0, width, strip):
            count = min(strip, width - begin)
            _copy_(_narrow(shaped, -1, begin, count), _narrow(piece, -1, begin, count))
        yield memory_of(packed)
