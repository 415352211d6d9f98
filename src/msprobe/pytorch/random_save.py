"""`random_save`: a CSV of every call that draws random numbers, and where it was made."""

from __future__ import annotations

import contextlib
import csv
import io
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import UsageError
from .dump import callstack, device
from .dump.patches import Patches
from .random_calls import RandomCall, draws, install_wrappers

logger = logging.getLogger(__name__)

HEADER = "\ufeffapi_name,stack\r\n"  # with a byte order mark, so that spreadsheets take it as UTF-8


def random_save(output_path: str | os.PathLike[str] = "./output") -> None:
    """Write one row per random call from now on to a CSV file in `output_path`.

    The file is ``random_rank{r}_{time}.csv``, or ``random_proc{pid}_{time}.csv`` as long as there
    is no process group. Columns: ``api_name`` (``torch_random.rand.0``: library, function, count)
    and ``stack`` (innermost frame first). Each row is on disk before the call runs. Watched are the
    functions of ``random_apis.yaml``; a dropout that drops nothing (eval, p=0) gives no row.

    Not seen: functions bound by ``from x import f`` before, ``random.Random`` and
    ``numpy.random.RandomState`` objects, code inside ``torch.compile``, forked child processes.

    A second call with the same path does nothing. UsageError: another path, or not writable.

    >>> import tempfile, torch
    >>> folder = tempfile.mkdtemp()
    >>> random_save(folder)
    >>> _ = torch.rand(2)
    >>> stop_random_save()
    >>> len(list(Path(folder).glob("random_*.csv")))
    1
    """
    global _recorder
    if not isinstance(output_path, (str, os.PathLike)):
        raise TypeError(
            f'random_save: output_path is {output_path!r}; expected a path. Example: "./output".'
        )
    folder = Path(output_path).expanduser().absolute()
    if _recorder is not None:
        if _recorder.folder == folder:
            return
        raise UsageError(
            f"random_save({str(output_path)!r}): rows already go to {_recorder.path}. "
            "Keep that path, or call stop_random_save() of msprobe.pytorch.random_save first."
        )
    try:
        recorder = _Recorder(folder)
    except OSError as err:
        raise UsageError(
            f"random_save: cannot write to {folder}: {err.strerror}. Pass a writable directory, "
            'for example output_path="./output".'
        ) from err
    _recorder = recorder
    install_wrappers(recorder.patches, recorder.add)
    logger.info("random_save: random calls are listed in %s", recorder.path)


def stop_random_save() -> None:
    """Take the wrappers back and close the file; without a `random_save` before, do nothing."""
    global _recorder
    recorder, _recorder = _recorder, None
    if recorder is not None:
        recorder.patches.restore()
        recorder.close()


class _Recorder:
    """The open CSV file, how often each function was called, and the patches."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.patches = Patches()
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._started = time.strftime("%Y%m%d%H%M%S")
        self._rank = device.current_rank()
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self._file = self._open()
        os.write(self._file, HEADER.encode())

    def add(self, call: RandomCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Append the row of a call that is about to run."""
        if self._file < 0 or os.getpid() != self._pid or not draws(call, args, kwargs):
            return
        frames = callstack.render(callstack.capture())
        stack = "".join(f"{frame} \n" for frame in frames)
        with self._lock:
            row = io.StringIO(newline="")
            csv.writer(row).writerow([f"{call.title}.{self._counts[call.title]}", stack])
            self._counts[call.title] += 1
            self._write(row.getvalue().encode("utf-8", "backslashreplace"))

    def close(self) -> None:
        """Close the file; later rows are dropped."""
        with self._lock:
            file, self._file = self._file, -1
            if file >= 0:
                os.close(file)

    def _open(self) -> tuple[Path, int]:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        for number in range(1000):
            path = self._path(number)
            try:
                return path, os.open(path, flags, 0o666)
            except FileExistsError:  # stopped and started again within a second
                continue
        raise FileExistsError(17, "too many files of this second", str(self.folder))

    def _path(self, number: int = 0) -> Path:
        who = f"proc{self._pid}" if self._rank is None else f"rank{self._rank}"
        again = f"_{number}" if number else ""
        return self.folder / f"random_{who}_{self._started}{again}.csv"

    def _write(self, row: bytes) -> None:
        """Write whole rows or nothing; the first failure ends the recording, not the training."""
        if self._file < 0:
            return
        try:
            self._take_rank_name()
            size = os.fstat(self._file).st_size
            if os.write(self._file, row) < len(row):
                os.ftruncate(self._file, size)
                raise OSError(28, "no space left")
        except OSError as err:
            logger.warning(
                "random_save stops at %s, the program goes on: %s", self.path, err.strerror
            )
            os.close(self._file)
            self._file = -1

    def _take_rank_name(self) -> None:
        """Rename the file once the process has a rank: it often starts before its group does."""
        if self._rank is None:
            self._rank = device.current_rank()
            if self._rank is not None and not self._path().exists():
                with contextlib.suppress(OSError):
                    self.path = self.path.rename(self._path())


_recorder: _Recorder | None = None
