"""The runs of the current step, and the folders they write to."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from . import device
from .config import DumpConfig
from .flusher import Flusher
from .gate import ThreadState
from .passes import Passes
from .run import StepRun
from .tasks import TASKS
from .verdicts import Bench, has_overflow, read_bench
from .writer import Writer, remove

_logger = logging.getLogger("msprobe")


class Runs:
    """One `StepRun` for each dump_path of the step: the path may change between two windows."""

    def __init__(
        self, thread: ThreadState, passes: Passes, end: Callable[[str], None]
    ) -> None:
        self._thread = thread
        self._passes = passes
        self._end = end  # what a task calls when it has seen enough
        self._open: dict[str, StepRun] = {}
        self._alive: list[weakref.ref[StepRun]] = []  # graphs refer to older steps
        self._flusher = Flusher()
        self._warned: set[str] = set()
        self._base = _current_folder()

    def __bool__(self) -> bool:
        return bool(self._open)

    def get(self, config: DumpConfig, step: int, rank: int | None) -> StepRun:
        """The run that writes to the dump_path in force. OSError if its files can not be made."""
        run = self._open.get(config.dump_path)
        if run is None:
            run = self._open[config.dump_path] = self._make(config, step, rank)
        else:
            _learn_rank(run, rank)
        return run

    def _make(self, config: DumpConfig, step: int, rank: int | None) -> StepRun:
        task = TASKS[config.task]
        folder = folder_of(config, step, rank)
        try:
            writer = Writer(
                folder,
                {"task": config.task, "level": config.level.value, "framework": "pytorch"},
                keeps_tensors=task.keeps_all or task.only_bad or bool(config.tensor_list),
                extra=config.extra_info,
                warned=self._warned,
                base=self._base,
            )
            run = StepRun(config, writer, self._thread, self._passes, self._flusher.wake)
            self._alive = [alive for alive in self._alive if alive() is not None]
            self._alive.append(weakref.ref(run))
            run.step, run.rank, run.begun = step, rank, time.monotonic()
            if task.only_bad:
                run.judge_by(has_overflow, config.overflow_nums, self._end)
            elif config.bench_path is not None:
                bench = _bench(config.bench_path, step, rank)
                run.judge_by(bench.differs, config.diff_nums, self._end)
        except BaseException:
            with contextlib.suppress(OSError):
                remove(os.path.join(self._base, folder))
            raise
        return run

    def flush(self) -> None:
        """Write what the runs have collected, as stop() does."""
        if self._open:
            self._passes.finish_all()
        self._passes.orphans.remove()
        for run in list(self._open.values()):
            run.guard("stop", run.journal.flush, True)
        self._flusher.flush_others(self._open.values())

    def close(self, notes: Mapping[str, Any], *, discard: bool = False) -> None:
        """End the step: write the files to their end, or remove them."""
        for path, run in list(self._open.items()):
            if discard:
                run.guard("step(dump=False)", run.journal.discard)
            else:
                _write(run, notes)
            self._flusher.forget_run(run)
            del self._open[path]  # only now: Ctrl-C may come anywhere, and step() once more

    def stop(self) -> None:
        """The session has ended: from now on what still arrives is written at once."""
        self._flusher.stop()

    def forget(self) -> None:
        """In a forked child: nothing that the parent collects is written here."""
        self._open = {}
        for alive in self._alive:
            run = alive()
            if run is not None:
                run.forget()
        self._flusher.forget()
        self._flusher = Flusher()


def folder_of(config: DumpConfig, step: int, rank: int | None) -> str:
    """``<dump_path>/step<N>/rank<R>``, or ``proc<PID>`` in a process without a rank."""
    return os.path.join(config.dump_path, f"step{step}", _rank_name(rank))


def _rank_name(rank: int | None) -> str:
    return f"proc{os.getpid()}" if rank is None else f"rank{rank}"


def _learn_rank(run: StepRun, rank: int | None) -> None:
    """A rank that has become known gives the folder of the step its name."""
    if run.rank is None and rank is not None:
        run.rank = rank
        folder = folder_of(run.config, run.step, rank)
        run.guard("renaming the folder", run.journal.move_to, folder)


def _current_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # somebody has removed it; an absolute dump_path needs none
        return ""


def _write(run: StepRun, notes: Mapping[str, Any]) -> None:
    _learn_rank(run, device.current_rank())
    run.guard("step", run.close, notes)
    if run.rank in (None, 0):
        _logger.info(
            "%s is at %s (%d record%s, %s, %.1f s from start to step)",
            run.writer.main_file,
            os.path.dirname(run.writer.shown),
            run.writer.records,
            "" if run.writer.records == 1 else "s",
            _readable(run.writer.size_bytes()),
            time.monotonic() - run.begun,
        )


def _readable(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f} MB" if size_bytes >= 100_000 else f"{size_bytes / 1e3:.1f} kB"


def _bench(path: str, step: int, rank: int | None) -> Bench:
    try:
        return Bench(read_bench(path, step, _rank_name(rank)))
    except (OSError, ValueError, KeyError) as error:
        _logger.warning(
            "bench_path: step %d has no readable dump to compare with, so no tensor of this step"
            " is saved: %s",
            step,
            error,
        )
        return Bench({})
