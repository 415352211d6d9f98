"""How to walk through the memory of a CPU tensor in pieces that fit in the cache."""

from __future__ import annotations

import ctypes
import functools
import math
import sys
from collections.abc import Iterator
from typing import Any

import torch

from .deferred import CannotMeasure

# Bound at import: these names are patched while a window is open.
_as_strided = torch.Tensor.as_strided
_data_ptr = torch.Tensor.data_ptr
_element_size = torch.Tensor.element_size
_is_contiguous = torch.Tensor.is_contiguous
_numel = torch.Tensor.numel
_offset = torch.Tensor.storage_offset
_split = torch.unsafe_split
_storage = torch.Tensor.untyped_storage
_stride = torch.Tensor.stride
_unbind = torch.Tensor.unbind
_view = torch.Tensor.view

# The memory of this process as one array of bytes, of which a slice is a copy: a third of the cost
# of calling a function. `Tensor.numpy` would be simpler, but it forbids the user to resize the
# storage ever after.
memory: Any = (ctypes.c_char * sys.maxsize).from_address(0)
_shown = memoryview(memory).cast("B").toreadonly()

PIECE_BYTES = 3 << 18  # per thread: stays in the cache of the core while it is reduced
FREED = "its memory has been freed"


def is_freed(tensor: torch.Tensor) -> bool:
    """Whether a strided tensor has elements beyond its memory.

    FSDP leaves sharded parameters without any, and a storage may have been made smaller. Reading
    such a tensor ends the process, or gives what others have left there.
    """
    if not _numel(tensor):
        return False
    try:
        memory = _storage(tensor).nbytes()
    except NotImplementedError:  # a device that keeps its memory elsewhere (XLA)
        return False
    if tensor.is_nested or not memory:
        return not memory
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, _stride(tensor), strict=True))
    return bool(memory < (_offset(tensor) + reach + 1) * _element_size(tensor))


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the distinct elements of a strided tensor, the dimension of largest stride first.

    Dimensions of size 1 and expanded ones (stride 0) are gone, so that the view has fewer
    elements than ``tensor``, by a whole factor, if it was expanded. Contiguous if dense.
    """
    return _as_strided(tensor, *_order(tensor.shape, _stride(tensor)))


@functools.lru_cache(maxsize=4096)
def _order(shape: torch.Size, strides: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Shape and strides of `in_memory_order`."""
    every = zip(strides, shape, strict=True)
    kept = sorted(((s, size) for s, size in every if s and size != 1), reverse=True)
    return [size for _, size in kept], [stride for stride, _ in kept]


@functools.lru_cache(maxsize=4096)
def is_dense(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    """Whether the elements fill their memory without gaps and overlaps, in whatever order."""
    sizes, steps = _order(shape, strides)
    expected = 1
    for size, step in zip(reversed(sizes), reversed(steps), strict=True):
        if step != expected:
            return False
        expected *= size
    return expected == math.prod(shape)


def pieces(tensor: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """Views that together are a non-empty strided tensor in C order, each of <= ``size`` elements.

    The views of a contiguous tensor are 1-D and contiguous; others may have any shape and stride.
    """
    if _is_contiguous(tensor):
        yield from _split(_view(tensor, -1), size)
        return
    row = _numel(tensor) // tensor.shape[0]
    if row > size:
        for part in _unbind(tensor):
            yield from pieces(part, size)
    else:
        yield from _split(tensor, size // row)


def even(count: int, most: int) -> int:
    """Elements of each of the fewest equal pieces of up to ``most``: each costs Python as well."""
    return -(-count // -(-count // most))


def address_of(tensor: torch.Tensor) -> int:
    """Where the memory of a contiguous CPU tensor begins; the caller keeps the tensor alive."""
    size = _element_size(tensor)
    if _storage(tensor).nbytes() < (_offset(tensor) + _numel(tensor)) * size:
        raise CannotMeasure(FREED)
    address = _data_ptr(tensor)
    if not address:
        raise CannotMeasure("it has no memory")  # the zeros that autograd makes up
    return address


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor; the caller keeps the tensor alive."""
    return memory_at(address_of(tensor), _numel(tensor) * _element_size(tensor))


def memory_at(address: int, size: int) -> memoryview:
    """``size`` bytes; the caller keeps what they belong to alive."""
    return _shown[address : address + size]
