"""A JSON object on disk that grows by appending and is valid at every moment.

Members that are not final (calls that have begun and not returned) stand after the final ones
and are overwritten by the next write, like the closing brackets.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any


def _make_encoder() -> Callable[[Any], str]:
    """The encoder of the json module; its C part made once instead of for every record."""
    make: Any = getattr(json.encoder, "c_make_encoder", None)
    # default: the length of a ragged dimension is no int (torch.SymInt)
    plain = json.JSONEncoder(allow_nan=False, ensure_ascii=False, default=str)
    if make is None:  # not CPython
        return plain.encode
    text: Any = json.encoder.encode_basestring
    encode_chunks = make(None, plain.default, text, None, ": ", ", ", False, False, False)
    return lambda value: "".join(encode_chunks(value, 0))


_encode = _make_encoder()
_FLAGS = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_MAX_BITS = 1 << 13  # of an int as a number: Python's reader refuses more than 4,300 digits
_NON_FINITE = {float("inf"): "Infinity", float("-inf"): "-Infinity"}


def encode(value: Any) -> str:
    """``value`` as strict JSON on one line; NaN and infinities become strings."""
    try:
        return _encode(value)
    except ValueError:
        return _encode(finite(value))


def finite(value: Any) -> Any:
    """``value`` with NaN, Infinity and -Infinity as the strings of these names.

    An int of thousands of digits becomes a string too, in hexadecimal.
    """
    if isinstance(value, float):
        return value if value - value == 0 else _NON_FINITE.get(value, "NaN")
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        return hex(value)
    if isinstance(value, dict):
        return {key: finite(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return value


def member(name: str, value: Any) -> bytes:
    """One ``"name": value`` of an object as UTF-8; lone surrogates stay as JSON escapes."""
    try:
        text = _encode({name: value})
    except ValueError:
        text = _encode({name: finite(value)})
    return text[1:-1].encode("utf-8", "backslashreplace")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


class JsonFile:
    """One growing object. ``head`` opens it (``{"data": {``), ``tail`` closes it (``}}``).

    A write may stop halfway: at a page boundary when the process is killed, anywhere when the
    disk is full. So two files hold the object in turn. `append` completes the one that nobody
    sees and then gives it the visible name. Until `close` both have a hidden name as well.

    Errors of the file system (full, removed, read-only) come out of `append` as OSError; what
    was on disk before stays valid.
    """

    def __init__(self, path: str, head: str, tail: str) -> None:
        self._begin(path, head, tail)
        with _replacement(path) as fd:
            _write_all(fd, self._head + self._tail, 0)

    def _begin(self, path: str, head: str, tail: str) -> None:
        self.path = path
        self._head = _bytes(head)
        self._tail = b"\n" + tail.encode() + b"\n"
        self._end = len(self._head)  # of head and final members
        self._empty = True
        self._draft = b""  # what stands between them and the closing brackets
        self._shown = 0  # which of the two has the visible name
        self._fds: list[int | None] = [None, None]
        self._ends = [0, 0]  # how much of head and final members each file holds
        self._sizes = [0, 0]  # how long each may be
        self._closed = False

    @classmethod
    def resume(cls, path: str, head: str, tail: str) -> JsonFile:
        """Go on with a non-empty file that ends with ``tail``, as `append` writes it."""
        file = cls.__new__(cls)
        file._begin(path, head, tail)
        file._empty = False
        file._end = os.path.getsize(path) - len(file._tail)
        return file

    def append(self, members: Sequence[bytes], draft: Sequence[bytes] = ()) -> None:
        """Add ``members``; ``draft`` follows them until the next call."""
        final = self._joined(members, self._empty)
        open_ = self._joined(draft, self._empty and not members)
        if not final and open_ == self._draft:
            return
        other = 1 - self._shown
        head = self._catch_up(other)
        self._write(other, head + final + open_ + self._tail, self._end - len(head))
        self._show(other)
        # Only now: whoever is interrupted before (Ctrl-C, a full disk) may do all of it again.
        self._end += len(final)
        self._ends[other] = self._end
        self._draft = open_
        self._empty = self._empty and not members
        if self._closed:
            self._release()

    def close(self) -> None:
        """Leave one file, with its visible name; a later `append` opens it for a moment."""
        self._release()
        self._closed = True

    def move_to(self, path: str) -> None:
        """The file itself is about to be renamed to ``path``."""
        self._release()
        self.path = path

    def replace_head(self, head: str) -> None:
        """Write the file anew with another opening; what follows stays."""
        self._release()
        with open(self.path, encoding="utf-8") as old:
            body = old.read()[len(self._head.decode()) :]
        replace_file(self.path, lambda new: new.write(head + body))
        self._end += len(_bytes(head)) - len(self._head)
        self._head = _bytes(head)

    def size_bytes(self) -> int:
        """Length of the file."""
        return self._end + len(self._draft) + len(self._tail)

    def _joined(self, members: Sequence[bytes], first: bool) -> bytes:
        if not members:
            return b""
        return (b"\n" if first else b",\n") + b",\n".join(members)

    def _hidden(self, slot: int | str) -> str:
        folder, name = os.path.split(self.path)
        return os.path.join(folder, f".{name}.{slot}")

    def _catch_up(self, slot: int) -> bytes:
        """Bring the hidden file up to the final members of the other one.

        Returns what is still missing: the head, if there is nothing else.
        """
        source, target = self._fds[self._shown], self._fds[slot]
        if target is None:
            target = self._fds[slot] = _new_file(self._hidden(slot))
        if self._ends[slot] == 0 and self._end == len(self._head):
            return self._head
        if source is None:
            source = self._fds[self._shown] = os.open(self.path, _FLAGS)
        while self._ends[slot] < self._end:
            block = os.pread(source, min(self._end - self._ends[slot], 1 << 20), self._ends[slot])
            if not block:
                raise OSError(errno.EIO, "somebody has cut the file off", self.path)
            self._write(slot, block, self._ends[slot])
            self._ends[slot] += len(block)
        return b""

    def _write(self, slot: int, block: bytes, offset: int) -> None:
        """Write what the file ends with from now on."""
        fd, end = self._fds[slot], offset + len(block)
        assert fd is not None
        longest = self._sizes[slot] = max(self._sizes[slot], end)  # a full disk may stop it halfway
        _write_all(fd, block, offset)
        if longest > end:
            os.ftruncate(fd, end)
            self._sizes[slot] = end

    def _show(self, slot: int) -> None:
        hidden, partial = self._hidden(slot), self._hidden("new")
        try:
            os.link(hidden, partial, follow_symlinks=False)
        except OSError:  # a file system without hard links
            os.replace(hidden, self.path)
        else:
            os.replace(partial, self.path)
        self._shown = slot
        if self._fds[1 - slot] is not None and not os.path.lexists(self._hidden(1 - slot)):
            self._forget(1 - slot)  # it has no name left: the next append writes it anew

    def _forget(self, slot: int) -> None:
        fd, self._fds[slot], self._ends[slot], self._sizes[slot] = self._fds[slot], None, 0, 0
        if fd is not None:
            os.close(fd)

    def _release(self) -> None:
        for name in hidden_names(self.path):  # Ctrl-C may have left any of them
            with contextlib.suppress(OSError):
                os.unlink(name)
        for slot in (0, 1):
            self._forget(slot)


def hidden_names(path: str) -> list[str]:
    """What a killed process may have left beside the file ``path``."""
    folder, name = os.path.split(path)
    return [os.path.join(folder, f".{name}.{slot}") for slot in (0, 1, "new")]


def replace_file(path: str, write: Callable[[Any], None]) -> None:
    """Write a text file next to ``path`` and rename it over: readers see the old or the new."""
    with (
        _replacement(path) as fd,
        open(fd, "w", encoding="utf-8", errors="backslashreplace", closefd=False) as file,
    ):
        write(file)


@contextlib.contextmanager
def _replacement(path: str) -> Iterator[int]:
    """A file that takes the name ``path`` at the end of the block, if nothing is raised there."""
    folder, name = os.path.split(path)
    partial = os.path.join(folder, f".{name}.new")
    fd = _new_file(partial)
    try:
        try:
            yield fd
        finally:
            os.close(fd)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise


def _new_file(path: str) -> int:
    """A file of our own: not what a killed process has left there, nor through a link."""
    flags = _FLAGS | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags, 0o666)
    except FileExistsError:
        os.unlink(path)
        return os.open(path, flags, 0o666)


def _write_all(fd: int, block: bytes, offset: int) -> None:
    view = memoryview(block)
    while view:
        written = os.pwrite(fd, view, offset)
        view = view[written:]
        offset += written
