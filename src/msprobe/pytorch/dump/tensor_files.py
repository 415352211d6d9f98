"""Tensors on their way into files of their own, and the names of files that did not come about."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from . import copies, jsonfile
from .background import Background
from .writer import Writer

_DATA_NAME = re.compile(rb'"data_name": ?("(?:[^"\\]|\\.)*")')
_NO_NAME = b'"data_name": null'


class TensorFiles:
    """Writes tensors in the background.

    Whoever writes records waits for the files first, and takes the names of those that could not
    be written out of the records.
    """

    def __init__(self, writer: Writer, background: Background) -> None:
        self._writer = writer
        self._background = background
        self._unsaved: set[bytes] = set()  # files that could not be written, as JSON
        self._discarded = False

    def save(self, path: str, tensor: Any) -> str:
        """Have a tensor or numpy array written as it is now; the name of its file.

        In the background, or at once if it is too large to have a copy wait, or of a dtype that
        torch can not copy.
        """
        name = self._writer.tensor_name(path, tensor)
        size = _size_bytes(tensor)
        copy = copies.snapshot(tensor) if size <= self._background.limit_bytes else None
        if copy is None:
            self._save(path, name, copies.host_copy(tensor))
        else:
            self._background.submit(size, lambda: self._save(path, name, copy))
        return name

    def _save(self, path: str, name: str, tensor: Any) -> None:
        try:
            if not self._discarded:
                self._writer.save_tensor(name, tensor)
        except Exception as error:
            self._writer.log(path, error)
            self._unsaved.add(jsonfile.encode(name).encode())

    def wait(self) -> None:
        """Return when the files of all tensors so far are complete, or have failed."""
        self._background.wait()

    def checked(self, records: Sequence[bytes]) -> Sequence[bytes]:
        """Lines of records without the names of files that could not be written."""
        unsaved = self._unsaved
        if not unsaved:
            return records
        return [
            _DATA_NAME.sub(lambda m: _NO_NAME if m[1] in unsaved else m[0], line)
            for line in records
        ]

    def close(self) -> None:
        """Write what is left; what comes later is written at once."""
        self._background.close()

    def discard(self) -> None:
        """Write nothing more."""
        self._discarded = True
        self._background.close()


def _size_bytes(tensor: Any) -> int:
    """Memory of a tensor or numpy array; of one that is not strided, an upper bound."""
    try:
        return int(tensor.nbytes)
    except RuntimeError:  # sparse
        return int(tensor.numel() * tensor.element_size())
