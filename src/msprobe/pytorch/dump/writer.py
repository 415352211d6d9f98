"""The files of one step and rank: dump.json, stack.json, construct.json, .pt, the error log.

Knows nothing of calls and tensors' meaning: it is handed names, JSON-able values and tensors.
"""

from __future__ import annotations

import contextlib
import logging
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from . import jsonfile, lines, ptfile
from .names import file_name, may_be_ours

_logger = logging.getLogger("msprobe")
_JSON = ("dump.json", "stack.json", "construct.json", "debug.json", "coverage.json")
_HIDDEN = {name for file in _JSON for name in jsonfile.hidden_names(file)}
_LOG = "dump_error_info.log"
_TENSORS = "dump_tensor_data"
_SIDE_FILES = ("stack", "construct")
_SMALL = 1 << 14  # bytes of a stack.json that is written anew at every stop()


class Writer:
    """Writes below ``folder``. Not thread-safe: its `StepRun` holds a lock around each call."""

    def __init__(
        self,
        folder: str,
        header: Mapping[str, Any],
        *,
        keeps_tensors: bool,
        extra: bool,
        warned: set[str],
        base: str = "",
    ) -> None:
        self._base = base  # a relative folder stays where it was meant, whatever chdir() does
        self.shown = folder
        folder = self.folder = os.path.join(base, folder)
        self.debug = header["level"] == "debug"
        self._warned = warned  # causes that have been said, in this step or an earlier one
        _make(folder)
        _empty(folder)
        self.tensor_folder = os.path.join(folder, _TENSORS)
        if keeps_tensors:
            os.makedirs(self.tensor_folder, exist_ok=True)
        shown = os.path.join(self.shown, _TENSORS)
        self._header = {**header, "dump_data_dir": shown if keeps_tensors else None}
        name = self.main_file = "debug.json" if self.debug else "dump.json"
        self._data = jsonfile.JsonFile(os.path.join(folder, name), self._head(), "}}")
        self._stack: jsonfile.JsonFile | None = None
        self._construct: jsonfile.JsonFile | None = None
        try:
            if extra and not self.debug:
                stack, construct = (os.path.join(folder, f"{n}.json") for n in _SIDE_FILES)
                self._stack = jsonfile.JsonFile(stack, "{", "}")
                self._construct = jsonfile.JsonFile(construct, "{", "}")
        except BaseException:
            self.close()  # the disk is full: what has been opened stays with nobody
            raise
        self._stacks: dict[tuple[str, ...], list[str]] = {}  # frames → records with this stack
        self._frames: dict[Any, tuple[str, ...]] = {}  # stack key → frames as text
        self._stack_entries = 0
        self._compacted_bytes = 0  # length of stack.json when it was last written in compact form
        self._final = 0  # records that no later `append` writes over
        self.bytes_in_tensors = 0
        self.records = 0  # in the main file as it is on disk

    def _head(self) -> str:
        return jsonfile.encode(self._header)[:-1] + ', "data": {'

    def append(self, records: Sequence[bytes], running: Sequence[bytes]) -> None:
        """Write lines of final records and of running calls.

        Their parents and stacks come first, so that every record on disk has them.
        """
        self._data.append(records, running)
        self._final += len(records)
        self.records = self._final + len(running)

    def append_parents(self, parents: Sequence[tuple[str, str | None]]) -> None:
        """Write (record, parent)."""
        if self._construct is not None:
            self._construct.append([lines.pair(name, parent) for name, parent in parents])

    def append_stacks(
        self, stacks: Sequence[tuple[str, Any]], render: Callable[[Any], list[str]]
    ) -> None:
        """Write (record, stack key). What a full disk does not take, `compact` writes later."""
        if self._stack is None:
            return
        fresh: dict[tuple[str, ...], list[str]] = {}
        for name, key in stacks:
            frames = self._frames.get(key)
            if frames is None:
                # Calls on one line differ in their key and not in their text.
                frames = self._frames[key] = tuple(render(key))
            fresh.setdefault(frames, []).append(name)
        members = [
            jsonfile.member(str(self._stack_entries + place), [names, frames])
            for place, (frames, names) in enumerate(fresh.items())
        ]
        failed = None
        try:
            self._stack.append(members)
        except OSError as error:
            failed = error
        for frames, names in fresh.items():
            self._stacks.setdefault(frames, []).extend(names)
        self._stack_entries += len(members)
        if failed is not None:
            raise failed

    @property
    def has_stacks(self) -> bool:
        """Whether stack.json is written."""
        return self._stack is not None

    def compact(self, *, now: bool) -> None:
        """Write stack.json once more with each stack once, if some stand there several times.

        Unless ``now``, a large file only when it has doubled since: a step may have thousands of
        windows, and what each of them writes must not grow with their number.
        """
        if self._stack is None or self._stack_entries == len(self._stacks):
            return
        if not now and _SMALL < self._stack.size_bytes() < 2 * self._compacted_bytes:
            return
        path = self._stack.path

        def write(file: Any) -> None:
            file.write("{")
            for i, (frames, names) in enumerate(self._stacks.items()):
                text = jsonfile.member(str(i), [names, frames]).decode("utf-8")
                file.write((",\n" if i else "\n") + text)
            file.write("\n}\n")

        jsonfile.replace_file(path, write)
        self._stack.close()
        self._stack = jsonfile.JsonFile.resume(path, "{", "}")
        self._compacted_bytes = self._stack.size_bytes()
        self._stack_entries = len(self._stacks)

    def tensor_name(self, path: str, tensor: Any) -> str:
        """Name of the file of the tensor (or numpy array) at ``path``."""
        return file_name(path, ".npy" if isinstance(tensor, np.ndarray) else ".pt")

    def save_tensor(self, name: str, tensor: Any) -> None:
        """Write a plain contiguous CPU tensor (or numpy array); from any thread."""
        full = os.path.join(self.tensor_folder, name)
        fd = os.open(full, _NEW_FILE, 0o666)
        try:
            if isinstance(tensor, np.ndarray):
                with os.fdopen(fd, "wb", closefd=False) as file:
                    np.save(file, np.asarray(tensor), allow_pickle=False)
                    size = file.tell()
            else:
                size = ptfile.save(tensor, fd)
            self.bytes_in_tensors += size
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(full)  # no record will name what is there
            raise
        finally:
            os.close(fd)

    def log(self, where: str, error: BaseException | str) -> None:
        """Note a problem in dump_error_info.log; the first of each cause also as a warning."""
        cause = text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        if isinstance(error, OSError) and error.strerror:
            cause = error.strerror  # the same for every file
        is_new = cause not in self._warned
        more = ""
        if is_new and isinstance(error, BaseException):
            more = "\n" + "".join(traceback.format_exception(error)).rstrip()
        is_noted = self._note(f"{where}: {text}{more}\n")
        if is_new:
            self._warned.add(cause)
            see = "see %s in %s" if is_noted else "%s in %s can not be written"
            _logger.warning(f"%s: %s ({see})", where, text, _LOG, self.shown)

    def _note(self, text: str) -> bool:
        try:
            fd = os.open(os.path.join(self.folder, _LOG), _LOG_FILE, 0o666)
            with os.fdopen(fd, "a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
        except OSError:
            return False
        return True

    def write_json(self, name: str, value: Any) -> None:
        """Write a further file of the folder, as a whole."""
        text = jsonfile.encode(value)
        jsonfile.replace_file(os.path.join(self.folder, name), lambda file: file.write(text))

    def move_to(self, folder: str) -> None:
        """Rename the folder (the rank has become known)."""
        self.shown, folder = folder, os.path.join(self._base, folder)
        for file in (self._data, self._stack, self._construct):
            if file is not None:
                file.move_to(os.path.join(folder, os.path.basename(file.path)))
        _remove_links(folder)
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        if os.path.isdir(folder):
            _empty(folder)
            for name in os.listdir(self.folder):
                os.replace(os.path.join(self.folder, name), os.path.join(folder, name))
            os.rmdir(self.folder)
        else:
            os.rename(self.folder, folder)
        self.folder = folder
        self.tensor_folder = os.path.join(folder, _TENSORS)
        if self._header["dump_data_dir"] is not None:
            self._header["dump_data_dir"] = os.path.join(self.shown, _TENSORS)
            self._data.replace_head(self._head())

    def discard(self) -> None:
        """Remove what this step has written."""
        self.close()
        remove(self.folder)

    def size_bytes(self) -> int:
        """What this step has written so far."""
        files = [f for f in (self._data, self._stack, self._construct) if f is not None]
        return self.bytes_in_tensors + sum(f.size_bytes() for f in files)

    def close(self) -> None:
        """Close the files; a later `append` (a late gradient) opens them again."""
        for file in (self._data, self._stack, self._construct):
            if file is not None:
                file.close()


_SAFE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _SAFE
_LOG_FILE = os.O_WRONLY | os.O_CREAT | os.O_APPEND | _SAFE


def remove(folder: str) -> None:
    """Remove our files from the folder, it and the folder of its step if that leaves them empty."""
    _empty(folder, quiet=True)
    for path in (os.path.join(folder, _TENSORS), folder, os.path.dirname(folder)):
        with contextlib.suppress(OSError):
            os.rmdir(path)  # only if nobody else has files there


def _make(folder: str) -> None:
    _remove_links(folder)
    os.makedirs(folder, exist_ok=True)


def _remove_links(folder: str) -> None:
    """The folders of the step and the rank are ours: a link there would lead to other files."""
    for path in (os.path.dirname(folder), folder):
        if os.path.islink(path):
            os.unlink(path)
            _logger.warning("%s: removed a symbolic link that stood in place of our folder", path)


def _empty(folder: str, *, quiet: bool = False) -> None:
    """Remove the files of an earlier run: only names that we write, and never through a link."""
    present = set(os.listdir(folder))
    for name in present & _HIDDEN:
        os.unlink(os.path.join(folder, name))  # left by a process that was killed
    old = [name for name in (*_JSON, _LOG) if name in present]
    tensors = os.path.join(folder, _TENSORS)
    if os.path.islink(tensors):
        os.unlink(tensors)
    if os.path.isdir(tensors):
        old += [os.path.join(_TENSORS, n) for n in os.listdir(tensors) if may_be_ours(n)]
    for name in old:
        os.unlink(os.path.join(folder, name))
    if old and not quiet:
        _logger.warning("%s: removed %d files of an earlier run", folder, len(old))
