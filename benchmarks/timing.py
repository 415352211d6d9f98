"""Timing of steps, and the tool's configuration and files. Used by `worker.py`."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

Step = Callable[[], None]
_JSON = ("dump.json", "stack.json", "construct.json")
_TENSORS = (".pt", ".npy")


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(step: Step, warm_up: int, least: int, seconds: float, after: Step) -> dict[str, float]:
    """Median and best time of ``step``: at least ``least`` times and ``seconds`` long.

    ``after`` runs unmeasured behind each.
    """
    for _ in range(warm_up):
        step()
        after()
    wall, cpu = [], []
    gc.collect()
    end = time.perf_counter() + seconds
    while len(wall) < least or time.perf_counter() < end:
        begin_cpu, begin = time.process_time(), time.perf_counter()
        step()
        wall.append((time.perf_counter() - begin) * 1e3)
        cpu.append((time.process_time() - begin_cpu) * 1e3)
        after()
    return {
        "ms": statistics.median(wall),
        "best_ms": min(wall),
        "cpu_ms": statistics.median(cpu),
        "steps": len(wall),
    }


def prefixed(prefix: str, figures: dict[str, float]) -> dict[str, float]:
    return {f"{prefix}_{key}": value for key, value in figures.items()}


def make_debugger(folder: str, level: str, task: str, summary: str) -> Any:
    """The debugger of a configuration; imports the tool."""
    section = {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": summary}
    config = {
        "task": task,
        "level": level,
        "dump_path": os.path.join(folder, "dump"),
        "risk_level": "ALL",  # the tools differ in their default
        task: section,
    }
    path = os.path.join(folder, "config.json")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(config, file)
    from msprobe.pytorch import PrecisionDebugger

    return PrecisionDebugger(config_path=path)


class Dumps:
    """What the tool writes below ``folder``: put away after each step, the last one measured."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._removed = 0
        self.path = os.path.join(folder, "dump")
        self.figures: dict[str, float] = {}

    def take(self) -> None:
        in_json = in_tensors = records = 0
        for full in self._files():
            name = os.path.basename(full)
            if name.endswith(_TENSORS):
                in_tensors += os.path.getsize(full)
            elif name in _JSON:
                in_json += os.path.getsize(full)
            if name == "dump.json":
                with open(full, encoding="utf-8") as file:
                    records += len(json.load(file)["data"])
        self.figures = {
            "records": records,
            "json_bytes_per_record": in_json / max(records, 1),
            "tensor_mb": in_tensors / 2**20,
        }
        self.remove()

    def remove(self) -> None:
        """Free the memory of the files and put them away without deleting them.

        Where thousands of files have been deleted, ext4 takes ten times as long to create others
        for the next minutes, which no training meets.
        """
        for full in self._files():
            os.truncate(full, 0)
        if os.path.isdir(self.path):
            os.rename(self.path, os.path.join(self._folder, f"removed{self._removed}"))
            self._removed += 1
        os.makedirs(self.path)

    def _files(self) -> list[str]:
        return [os.path.join(place, n) for place, _, names in os.walk(self.path) for n in names]


@contextlib.contextmanager
def work_folder() -> Iterator[str]:
    """A folder for the files of one process; within $BENCH_FOLDER, whose owner deletes it."""
    parent = os.environ.get("BENCH_FOLDER")
    if parent is not None:
        yield tempfile.mkdtemp(dir=parent)
        return
    with tempfile.TemporaryDirectory(prefix="bench_", ignore_cleanup_errors=True) as folder:
        yield folder
