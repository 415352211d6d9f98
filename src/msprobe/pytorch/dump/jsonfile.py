"""A JSON object on disk that grows by appending and is valid at every moment.

New members go over the old closing brackets together with new closing brackets in one write.
Members that are not final (calls that have begun and not returned) stand after the final ones
and are overwritten by the next write.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from typing import Any



def _make_encoder() -> Callable[[Any], str]:
    """The encoder of the json module; its C part made once instead of for every record."""
    make: Any = getattr(json.encoder, "c_make_encoder", None)
    plain = json.JSONEncoder(allow_nan=False, ensure_ascii=False)
    if make is None:  # not CPython
        return plain.encode
    text: Any = json.encoder.encode_basestring
    encode_chunks = make(None, plain.default, text, None, ": ", ", ", False, False, False)
    return lambda value: "".join(encode_chunks(value, 0))


_encode = _make_encoder()
_FLAGS = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_NON_FINITE = {float("inf"): "Infinity", float("-inf"): "-Infinity"}


def encode(value: Any) -> str:
    """``value`` as strict JSON on one line; NaN and infinities become strings."""
    try:
        return _encode(value)
    except ValueError:
        return _encode(finite(value))


def finite(value: Any) -> Any:
    """``value`` with NaN, Infinity and -Infinity as the strings of these names."""
    if isinstance(value, float):
        return value if value - value == 0 else _NON_FINITE.get(value, "NaN")
    if isinstance(value, dict):
        return {key: finite(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return value


def member(name: str, value: Any) -> bytes:
    """One ``"name": value`` of an object as UTF-8; lone surrogates stay as JSON escapes."""
    return f"{_encode(name)}: {encode(value)}".encode("utf-8", "backslashreplace")


class JsonFile:
    """One growing object. ``head`` opens it (``{"data": {``), ``tail`` closes it (``}}``).

    Errors of the file system (full, removed, read-only) come out of `append` as OSError; what
    was on disk before stays valid.
    """

    def __init__(self, path: str, head: str, tail: str) -> None:
        self.path = path
        self._tail = b"\n" + tail.encode() + b"\n"
        self._empty = True
        body = self._head = head.encode("utf-8", "backslashreplace")
        self._fd: int | None = os.open(path, _FLAGS | os.O_CREAT | os.O_TRUNC, 0o666)
        self._end = len(body)  # where the next final member goes
        self._size = 0  # of the file
        self._draft = b""  # what stands between _end and the closing brackets
        _write_all(self._fd, body + self._tail, 0)
        self._size = len(body) + len(self._tail)

    @classmethod
    def resume(cls, path: str, head: str, tail: str) -> JsonFile:
        """Go on with a non-empty file that ends with ``tail``, as `append` writes it."""
        file = cls.__new__(cls)
        file.path = path
        file._head = head.encode("utf-8", "backslashreplace")
        file._tail = b"\n" + tail.encode() + b"\n"
        file._empty = False
        file._fd = None
        file._size = os.path.getsize(path)
        file._end = file._size - len(file._tail)
        file._draft = b""
        return file

    def replace_head(self, head: str) -> None:
        """Write the file anew with another opening; what follows stays."""
        self.close()
        with open(self.path, encoding="utf-8") as old:
            body = old.read()[len(self._head.decode()) :]
        replace_file(self.path, lambda new: new.write(head + body))
        shift = len(head.encode("utf-8", "backslashreplace")) - len(self._head)
        self._head = head.encode("utf-8", "backslashreplace")
        self._end += shift
        self._size += shift

    def append(self, members: Sequence[bytes], draft: Sequence[bytes] = ()) -> None:
        """Add ``members``; ``draft`` follows them until the next call."""
        final = self._joined(members, self._empty)
        open_ = self._joined(draft, self._empty and not members)
        if not final and open_ == self._draft:
            return
        block = final + open_ + self._tail
        # Shorter than before: blanks after the closing bracket keep it valid until trimmed.
        block += b" " * (self._size - self._end - len(block))
        fd = self._descriptor()
        try:
            _write_all(fd, block, self._end)
        except OSError:
            self._roll_back(fd)
            raise
        self._size = max(self._size, self._end + len(block))
        self._end += len(final)
        self._empty = self._empty and not members
        self._draft = open_

    def close(self) -> None:
        """Trim and close the file; a later `append` opens it again."""
        if self._fd is None:
            return
        size = self._end + len(self._draft) + len(self._tail)
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, size)
            self._size = size
        os.close(self._fd)
        self._fd = None

    def size_bytes(self) -> int:
        """Length of the file."""
        return self._size

    def _joined(self, members: Sequence[bytes], first: bool) -> bytes:
        if not members:
            return b""
        return (b"\n" if first else b",\n") + b",\n".join(members)

    def _descriptor(self) -> int:
        if self._fd is None:
            self._fd = os.open(self.path, _FLAGS)
        return self._fd

    def _roll_back(self, fd: int) -> None:
        # The old bytes fit where they were, so this needs no space.
        with contextlib.suppress(OSError):
            _write_all(fd, self._draft + self._tail, self._end)
            os.ftruncate(fd, self._end + len(self._draft) + len(self._tail))
            self._size = self._end + len(self._draft) + len(self._tail)


def replace_file(path: str, write: Callable[[Any], None]) -> None:
    """Write a text file next to ``path`` and rename it over: readers see the old or the new."""
    partial = f"{path}.{os.getpid()}.tmp"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(partial)
    fd = os.open(partial, _FLAGS | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
            write(file)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise


def _write_all(fd: int, block: bytes, offset: int) -> None:
    view = memoryview(block)
    while view:
        written = os.pwrite(fd, view, offset)
        view = view[written:]
        offset += written
