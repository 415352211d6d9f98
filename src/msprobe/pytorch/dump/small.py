"""Max, Min, Mean and Norm of many small CPU tensors in one go.

The reductions of a tensor of a few hundred elements cost 6 µs, nearly all of it the calls. So
such a tensor is copied as it is now, which costs 1 µs, and measured later together with others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from .deferred import TORCH_ERRORS
from .pieces import is_freed, memory

# Bound at import: these names are patched while a window is open.
_contiguous = torch.Tensor.contiguous
_data_ptr = torch.Tensor.data_ptr
_is_contiguous = torch.Tensor.is_contiguous
_is_neg = torch.Tensor.is_neg
_numel = torch.Tensor.numel
_offset = torch.Tensor.storage_offset
_resolve_neg = torch.Tensor.resolve_neg
_storage = torch.Tensor.untyped_storage

LARGEST = 1024  # elements: beyond, torch's own reductions cost less than those in float64
_STRIDED = torch.strided
_SINGLE_MAX = float(np.finfo(np.float32).max)

Array = Any  # np.ndarray of one dimension
Reduction = Callable[[bytes, Sequence[int]], list[list[float]]]
Waiting = tuple[dict[str, Any], Reduction, bytes]  # entry, how it is measured, its `elements`


def elements(tensor: torch.Tensor, width: int) -> bytes | None:
    """The bytes of a contiguous CPU tensor of 1 to `LARGEST` elements; None of any other.

    ``width``: bytes of one element. The tensor may be part of a graph: only its memory is read.
    (`Tensor.numpy` would forbid the user to resize the storage ever after.)
    """
    try:
        count = _numel(tensor)
        if (
            not 0 < count <= LARGEST
            or not tensor.is_cpu
            or tensor.layout is not _STRIDED
            or tensor.is_nested
            or not _is_contiguous(tensor)
            or _is_neg(tensor)
        ):
            return None
        address = _data_ptr(tensor)
        if not address or _storage(tensor).nbytes() < (_offset(tensor) + count) * width:
            return None  # its memory has been freed
        copy: bytes = memory[address : address + count * width]
        return copy
    except TORCH_ERRORS:
        return None  # an odd tensor: measured alone, the log says what is wrong with it


def elements_of_any(tensor: torch.Tensor, width: int) -> bytes | None:
    """`elements`, also of a tensor whose elements must be packed first.

    So that the numbers of a tensor do not depend on its layout or on what else is recorded.
    """
    copy = elements(tensor, width)
    if copy is not None:
        return copy
    plain = tensor.is_cpu and tensor.layout is _STRIDED and not tensor.is_nested
    if not plain or not 0 < _numel(tensor) <= LARGEST or is_freed(tensor):
        return None
    try:
        return elements(_contiguous(_resolve_neg(tensor)), width)
    except TORCH_ERRORS:
        return None


def fill_in(waiting: Sequence[Waiting]) -> None:
    """Set Max, Min, Mean and Norm of each entry from its `elements`."""
    groups: dict[Reduction, list[tuple[dict[str, Any], bytes]]] = {}
    for entry, reduction, copy in waiting:
        groups.setdefault(reduction, []).append((entry, copy))
    with np.errstate(all="ignore"):  # NaN and infinities are results like others here
        for reduction, group in groups.items():
            copies = [copy for _, copy in group]
            columns = reduction(b"".join(copies), [len(copy) for copy in copies])
            for (entry, _), top, low, mean, norm in zip(group, *columns, strict=True):
                entry["Max"], entry["Min"], entry["Mean"], entry["Norm"] = top, low, mean, norm


def _reduced(single: Array, counts: Array) -> tuple[Array, Array, Array, Array]:
    """Of each part of a float32 array: Max and Min as they are, Mean and Norm in float32.

    Sums are made in float64, in which the square of no float32 is zero or infinite. A total
    beyond float32 makes the Mean infinite, as in torch.
    """
    ends = np.cumsum(counts)
    begins = ends - counts
    double = single.astype(np.float64)
    totals = np.add.reduceat(double, begins)
    totals[np.abs(totals) > _SINGLE_MAX] *= np.inf
    squares = np.add.reduceat(np.square(double, out=double), begins)
    return (
        np.maximum.reduceat(single, begins),
        np.minimum.reduceat(single, begins),
        (totals / counts).astype(np.float32),
        np.sqrt(squares).astype(np.float32),
    )


def _singles(data: bytes, sizes: Sequence[int]) -> list[list[float]]:
    counts = np.array(sizes) // 4
    return [column.tolist() for column in _reduced(np.frombuffer(data, np.float32), counts)]


def _halves(data: bytes, sizes: Sequence[int]) -> list[list[float]]:
    counts = np.array(sizes) // 2
    columns = _reduced(np.frombuffer(data, np.float16).astype(np.float32), counts)
    return [column.astype(np.float16).tolist() for column in columns]


def _halves_high(data: bytes, sizes: Sequence[int]) -> list[list[float]]:
    counts = np.array(sizes) // 2
    columns = _reduced(np.frombuffer(data, np.float16).astype(np.float32), counts)
    return [column.tolist() for column in columns]


def _bfloat16s(data: bytes, sizes: Sequence[int]) -> list[list[float]]:
    top, low, mean, norm = _of_bfloat16(data, sizes)
    return [top.tolist(), low.tolist(), _as_bfloat16(mean).tolist(), _as_bfloat16(norm).tolist()]


def _bfloat16s_high(data: bytes, sizes: Sequence[int]) -> list[list[float]]:
    return [column.tolist() for column in _of_bfloat16(data, sizes)]


def _of_bfloat16(data: bytes, sizes: Sequence[int]) -> tuple[Array, Array, Array, Array]:
    bits = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
    return _reduced(bits.view(np.float32), np.array(sizes) // 2)


def _as_bfloat16(single: Array) -> Array:
    """float32 rounded to nearest even at the upper half of its bits."""
    bits = single.view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32)
    return np.where(np.isfinite(single), rounded.view(np.float32), single)


# dtype → bytes of an element, and how its tensors are measured; without and with
# ``precision: high``.
REDUCTIONS: dict[bool, dict[torch.dtype, tuple[int, Reduction]]] = {
    False: {
        torch.float32: (4, _singles),
        torch.float16: (2, _halves),
        torch.bfloat16: (2, _bfloat16s),
    },
    True: {
        torch.float32: (4, _singles),
        torch.float16: (2, _halves_high),
        torch.bfloat16: (2, _bfloat16s_high),
    },
}
