"""Timing of steps, and the tool's configuration and files. Used by `worker.py`."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

Step = Callable[[], None]
_JSON = ("dump.json", "stack.json", "construct.json")


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
    """What the tool writes below ``folder``: removed after each step, the last one measured."""

    def __init__(self, folder: str) -> None:
        self.path = os.path.join(folder, "dump")
        self.figures: dict[str, float] = {}

    def take(self) -> None:
        in_json = in_tensors = records = 0
        for place, _, names in os.walk(self.path):
            for name in names:
                full = os.path.join(place, name)
                if name.endswith((".pt", ".npy")):
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
        shutil.rmtree(self.path, ignore_errors=True)
        os.makedirs(self.path, exist_ok=True)


@contextlib.contextmanager
def work_folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="bench_", ignore_cleanup_errors=True) as folder:
        yield folder
