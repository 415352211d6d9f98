"""A plain CPU tensor as a .pt file, in the format of `torch.save`, at the speed of the file system.

`torch.save` copies the elements and computes a checksum of them, which takes three times as long
as writing them. Here they go from the memory of the tensor to the file in one call of the system.
Around them stand bytes that depend on dtype and shape only.
"""

from __future__ import annotations

import collections
import functools
import io
import os
import pickle
import struct
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .checksums import fast_crc32
from .pieces import memory_of

# Bound at import: these names are patched while a window is open.
_is_conj = torch.Tensor.is_conj
_is_contiguous = torch.Tensor.is_contiguous
_is_neg = torch.Tensor.is_neg
_numel = torch.Tensor.numel
_save = torch.save
_clone = torch.Tensor.clone
_storage = torch.Tensor.untyped_storage

_STORAGES = {
    torch.float32: "FloatStorage",
    torch.float64: "DoubleStorage",
    torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage",
    torch.int8: "CharStorage",
    torch.int16: "ShortStorage",
    torch.int32: "IntStorage",
    torch.int64: "LongStorage",
    torch.uint8: "ByteStorage",
    torch.bool: "BoolStorage",
    torch.complex64: "ComplexFloatStorage",
    torch.complex128: "ComplexDoubleStorage",
}
_LARGEST = (1 << 32) - (1 << 16)  # bytes: a zip file of this form holds no more than 4 GiB
_ALIGNMENT = 64  # bytes: so that the file can be mapped into memory


def save(tensor: torch.Tensor, fd: int) -> int:
    """Write a plain CPU tensor, contiguous if it is strided, to an empty file; bytes written.

    The tensor shares its storage with nothing in the file, whatever else its memory holds.
    OSError when the file can not be written. Without the library isal the checksum of the
    elements is left 0, as with ``torch.serialization.set_crc32_options(False)``: `torch.load` does
    not look at it.
    """
    storage = _STORAGES.get(tensor.dtype)
    if (
        storage is None
        or tensor.layout is not torch.strided
        or not _numel(tensor)
        or not _is_contiguous(tensor)
        or _is_neg(tensor)
        or _is_conj(tensor)
        or tensor.nbytes > _LARGEST
    ):
        return _save_by_torch(tensor, fd)
    data = memory_of(tensor)
    shell = _shell(storage, tuple(tensor.shape), len(data))
    crc = fast_crc32(data) if fast_crc32 else 0
    return _write(fd, [shell.before(crc), data, shell.after(crc)])


def _save_by_torch(tensor: torch.Tensor, fd: int) -> int:
    plain = tensor.layout is torch.strided and not tensor.is_quantized
    if plain and _storage(tensor).nbytes() != tensor.nbytes:
        tensor = _clone(tensor)  # or the file would hold the whole storage
    with os.fdopen(fd, "wb", closefd=False) as file:
        _save(tensor, file)
        return file.tell()


def _write(fd: int, blocks: Sequence[Any]) -> int:
    left = [memoryview(block) for block in blocks]
    total = 0
    while left:
        written = os.writev(fd, left)
        total += written
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if left:
            left[0] = left[0][written:]
    return total


@dataclass(frozen=True)
class _Shell:
    """What stands before and after the elements, with zero where their checksum belongs."""

    head: bytes
    tail: bytes
    crc_in_head: int
    crc_in_tail: int

    def before(self, crc: int) -> bytes:
        return _with_crc(self.head, self.crc_in_head, crc)

    def after(self, crc: int) -> bytes:
        return _with_crc(self.tail, self.crc_in_tail, crc)


def _with_crc(block: bytes, place: int, crc: int) -> bytes:
    return block[:place] + struct.pack("<I", crc) + block[place + 4 :] if crc else block


@functools.lru_cache(maxsize=1024)
def _shell(storage: str, shape: tuple[int, ...], size: int) -> _Shell:
    """The zip file around ``size`` bytes of elements: the records that `torch.load` asks for."""
    order = sys.byteorder.encode("ascii")
    head, directory = b"", b""
    for name, content in (("data.pkl", _pickled(storage, shape)), ("byteorder", order)):
        directory += _entry(name, content, len(head))
        head += _local(name, content, len(head)) + content
    place = len(head)
    head += _local("data/0", None, place, size)
    end = len(head) + size
    crc_in_directory = len(directory) + 16
    directory += _entry("data/0", None, place, size)
    version = b"3\n"
    directory += _entry("version", version, end)
    tail = _local("version", version, end) + version
    start = end + len(tail)
    crc_in_tail = len(tail) + crc_in_directory
    tail += directory
    tail += struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 4, 4, len(directory), start, 0)
    return _Shell(head, tail, place + 14, crc_in_tail)


def _fields(content: bytes | None, size: int) -> tuple[int, ...]:
    """Flags, method (stored), time and date, checksum, size in the file and outside of it."""
    if content is None:
        return 0, 0, 0, 0, 0, size, size
    return 0, 0, 0, 0, zlib.crc32(content), len(content), len(content)


def _local(name: str, content: bytes | None, offset: int, size: int = 0) -> bytes:
    """Header of a record that begins at ``offset``, filled up so that its content is aligned."""
    full = f"archive/{name}".encode("ascii")
    padding = -(offset + 30 + len(full) + 4) % _ALIGNMENT
    extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    fields = _fields(content, size)
    header = struct.pack("<4s5H3I2H", b"PK\3\4", 0, *fields, len(full), len(extra))
    return header + full + extra


def _entry(name: str, content: bytes | None, offset: int, size: int = 0) -> bytes:
    """The record's line in the directory of the zip file."""
    full = f"archive/{name}".encode("ascii")
    fields = _fields(content, size)
    return (
        struct.pack("<4s6H3I5H2I", b"PK\1\2", 0, 0, *fields, len(full), 0, 0, 0, 0, 0, offset)
        + full
    )


class _Tensor:
    """Stands for a tensor while it is pickled."""

    def __init__(self, storage: str, shape: tuple[int, ...]) -> None:
        self.storage = getattr(torch, storage)
        self.shape = shape


class _Storage:
    """Stands for its storage."""

    def __init__(self, identity: tuple[Any, ...]) -> None:
        self.identity = identity


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.identity if type(value) is _Storage else None

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not _Tensor:
            return NotImplemented
        strides, count = [], 1
        for length in reversed(value.shape):
            strides.append(count)
            count *= length
        storage = _Storage(("storage", value.storage, "0", "cpu", count))
        hooks: Any = collections.OrderedDict()
        arguments = (storage, 0, value.shape, tuple(reversed(strides)), False, hooks)
        return torch._utils._rebuild_tensor_v2, arguments


def _pickled(storage: str, shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    _Pickler(file, protocol=2).dump(_Tensor(storage, shape))
    return file.getvalue()
