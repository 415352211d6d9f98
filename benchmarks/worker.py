"""Measure ONE configuration in this interpreter and print one line of JSON.

Uses only what every tool of this name has: ``from msprobe.pytorch import PrecisionDebugger``, a
configuration file, ``start``, ``stop``, ``step``. Times are milliseconds of the wall clock;
``cpu_`` before a name: processor time of all threads, which other processes do not lengthen.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from timing import Dumps, Step, make_debugger, measure, peak_mb, prefixed, work_folder

import models


def training_step(name: str) -> tuple[Any, Step]:
    """A model and its whole training step: forward, backward, optimizer."""
    model, loss = models.build(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return model, step


def train(args: argparse.Namespace) -> dict[str, float]:
    """Training steps without the tool, then each within a window of its own."""
    model, step = training_step(args.model)
    plain = measure(step, 2, args.steps, args.seconds, lambda: None)
    peak = peak_mb()
    with work_folder() as folder:
        debugger = make_debugger(folder, args.level, args.task, args.summary)
        after_import = peak_mb()
        dumps = Dumps(folder)

        def watched() -> None:
            debugger.start(model)
            step()
            debugger.stop()
            debugger.step()

        with_tool = measure(watched, 1, args.steps, args.seconds, dumps.remove)
        after = peak_mb()
        watched()
        dumps.take()
    return {
        **prefixed("plain", plain),
        **prefixed("tool", with_tool),
        **dumps.figures,
        "tool_peak_mb": after - after_import,
        "import_peak_mb": after_import - peak,
    }


def stopped(args: argparse.Namespace) -> dict[str, float]:
    """Training steps without the tool, and after a window that has been closed."""
    model, step = training_step(args.model)

    def window() -> None:
        with work_folder() as folder:
            debugger = make_debugger(folder, args.level, args.task, args.summary)
            debugger.start(model)
            step()
            debugger.stop()
            debugger.step()

    return before_and_after(args, step, window)


def control(args: argparse.Namespace) -> dict[str, float]:
    """As `stopped`, with one more step instead of the window: what the process itself changes."""
    _, step = training_step(args.model)
    return before_and_after(args, step, step)


def before_and_after(
    args: argparse.Namespace, step: Step, between: Callable[[], None]
) -> dict[str, float]:
    """Training steps before and after something."""
    plain = measure(step, 5, args.steps, args.seconds, lambda: None)
    between()
    after = measure(step, 5, args.steps, args.seconds, lambda: None)
    return {**prefixed("plain", plain), **prefixed("stopped", after)}


def imported(args: argparse.Namespace) -> dict[str, float]:
    """`import msprobe.pytorch`, torch being there."""
    begin, begin_cpu = time.perf_counter(), time.process_time()
    import msprobe.pytorch  # noqa: F401

    return {
        "import_ms": (time.perf_counter() - begin) * 1e3,
        "import_cpu_ms": (time.process_time() - begin_cpu) * 1e3,
    }


def window(args: argparse.Namespace) -> dict[str, float]:
    """A pair of start() and stop() around nothing."""
    model, _ = models.build(args.model)
    with work_folder() as folder:
        begin = time.perf_counter()
        debugger = make_debugger(folder, args.level, args.task, args.summary)
        ready = time.perf_counter()

        def pair() -> None:
            debugger.start(model)
            debugger.stop()

        pair()
        first = time.perf_counter()
        pairs = measure(pair, 2, args.steps, args.seconds, lambda: None)
        debugger.step()
    return {
        "construct_ms": (ready - begin) * 1e3,
        "first_pair_ms": (first - ready) * 1e3,
        **prefixed("pair", pairs),
    }


def growth(args: argparse.Namespace) -> dict[str, float]:
    """What each of ``--records`` records costs in one step: F.relu on 8 numbers, no gradients.

    A step of 100 records is subtracted, so that the cost of the window itself is not in it.
    """
    x = torch.randn(8)
    spent, peaks = [], []
    with work_folder() as folder, torch.no_grad():
        debugger = make_debugger(folder, "L1", args.task, args.summary)
        for calls in (100, 100, 100 + args.records):
            begin, begin_cpu = time.perf_counter(), time.process_time()
            debugger.start()
            for _ in range(calls):
                F.relu(x)
            debugger.stop()
            debugger.step()
            spent.append((time.perf_counter() - begin, time.process_time() - begin_cpu))
            peaks.append(peak_mb())
    return {
        "us_per_record": (spent[2][0] - spent[1][0]) / args.records * 1e6,
        "cpu_us_per_record": (spent[2][1] - spent[1][1]) / args.records * 1e6,
        "peak_mb": peaks[2] - peaks[1],
    }


def frames(args: argparse.Namespace) -> dict[str, float]:
    """Python frames of the tool per collected F.relu: forward, and backward to its input."""
    inside = 0
    x = torch.randn(8, requires_grad=True)
    with work_folder() as folder:
        debugger = make_debugger(folder, "L1", args.task, args.summary)
        import msprobe

        package = os.path.dirname(os.path.abspath(msprobe.__file__))

        def count(frame: Any, event: str, _: Any) -> None:
            nonlocal inside
            inside += event == "call" and frame.f_code.co_filename.startswith(package)

        debugger.start()
        F.relu(x).backward(torch.ones(8))  # the first call resolves types and names
        counted = []
        for backward in (False, True):
            inside = 0
            sys.setprofile(count)
            y = F.relu(x)
            if backward:
                y.backward(torch.ones(8))
            sys.setprofile(None)
            counted.append(inside)
        debugger.stop()
        debugger.step()
    return {"forward_frames": counted[0], "frames": counted[1]}


MODES = {f.__name__: f for f in (train, stopped, control, imported, window, growth, frames)}


def tool_version() -> str:
    """Which tool, and which libraries of the extra ``fast`` it has loaded."""
    loaded = [name for name in ("isal", "numkong", "orjson") if name in sys.modules]
    extras = f" with {', '.join(loaded)}" if loaded else ""
    for name in ("msprobe-torch", "mindstudio-probe"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{name} {importlib.metadata.version(name)}{extras}"
    return "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--model", choices=models.MODELS, default="small")
    parser.add_argument("--level", default="L1")
    parser.add_argument("--task", default="statistics")
    parser.add_argument("--summary", default="statistics")
    parser.add_argument("--steps", type=int, default=5, help="at least so many of each kind")
    parser.add_argument("--seconds", type=float, default=1.0, help="at least so long for each kind")
    parser.add_argument("--records", type=int, default=1000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = MODES[args.mode](args)
    figures = {k: round(v, 3) for k, v in figures.items()}
    print(json.dumps({**figures, "tool": tool_version(), "torch": torch.__version__}), flush=True)


if __name__ == "__main__":
    main()
