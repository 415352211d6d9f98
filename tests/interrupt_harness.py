"""Interrupts small runs by Ctrl-C at random moments and looks at the files and at torch.

``python tests/interrupt_harness.py --times 3000`` prints one line per failure and a summary; exit
code 1 if anything failed. The signal comes from another thread, so it hits between any two
instructions of Python where Python looks for signals.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from helpers import debugger, read_json
from msprobe import check, reader
from msprobe.pytorch import PrecisionDebugger
from recorded import batch, make_net
from torch_state import changes, torch_state


class Biter:
    """Sends SIGINT to this process, once, some time after `arm`."""

    def __init__(self) -> None:
        self._armed = threading.Event()
        self._disarmed = threading.Event()
        self._delay_s = 0.0
        threading.Thread(target=self._loop, daemon=True).start()

    def arm(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._disarmed.clear()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._armed.set()

    def disarm(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._disarmed.set()

    def _loop(self) -> None:
        while True:
            self._armed.wait()
            self._armed.clear()
            if not self._disarmed.wait(self._delay_s):
                os.kill(os.getpid(), signal.SIGINT)


def run(watcher: PrecisionDebugger, net: nn.Module) -> None:
    watcher.start(net)
    net(batch(0)).sum().backward()
    watcher.stop()
    watcher.step()


class Session:
    """One debugger, interrupted as long as that does no harm."""

    def __init__(self, level: str, task: str, biter: Biter) -> None:
        self._biter = biter
        self._torch = torch_state()
        self._folder = Path(tempfile.mkdtemp(prefix="interrupts"))
        self._watcher = debugger(self._folder, level=level, task=task)
        run(self._watcher, make_net())
        self._whole = self._data(*self._steps())

    def attempt(self, delay_s: float) -> tuple[bool, list[str]]:
        """One run that is interrupted and one that is not: was it in time, what is wrong."""
        net, came = make_net(), False
        try:
            self._biter.arm(delay_s)
            run(self._watcher, net)
        except KeyboardInterrupt:
            came = True
        finally:
            self._biter.disarm()
        self._watcher.stop()
        found = changes(self._torch, torch_state())
        if any(part._forward_hooks or part._forward_pre_hooks for part in net.modules()):
            found.append("hooks are left")
        self._watcher.step()
        found += self._problems()
        run(self._watcher, make_net())
        (step,) = self._steps()
        if self._data(step) != self._whole:
            found.append("the next step is another")
        found += self._problems()
        return came, found

    def close(self) -> None:
        PrecisionDebugger._instance = None
        shutil.rmtree(self._folder)

    def _steps(self) -> list[Path]:
        return list(self._folder.glob("step*/*"))

    def _data(self, step: Path) -> Any:
        return read_json(step / "dump.json")["data"]

    def _problems(self) -> list[str]:
        found = []
        for place in self._steps():
            folder = reader.RankFolder(place, 0, place.name)
            # A call that was counted and had not begun when it was interrupted has no record.
            problems = check.check_folder(folder, filtered=True)
            found += [f"{p.file}: {p.where}: {p.problem}" for p in problems]
            found += [f"{name} is left" for name in os.listdir(place) if name.startswith(".")]
            shutil.rmtree(place.parent)
        return found


def interrupt(level: str, task: str, times: int, luck: random.Random) -> tuple[int, int]:
    """How many runs were interrupted, and after how many something was wrong."""
    before = signal.getsignal(signal.SIGINT)
    biter = Biter()
    session = Session(level, task, biter)
    begin = time.perf_counter()
    for _ in range(5):
        session.attempt(60.0)
    lasts_s = (time.perf_counter() - begin) / 10
    interrupted = wrong = 0
    for _ in range(times):
        came, found = session.attempt(luck.uniform(0, lasts_s))
        interrupted += came
        if found:
            wrong += 1
            print(f"{level}, {task}: " + "; ".join(found[:5]))
            session.close()
            session = Session(level, task, biter)
    session.close()
    signal.signal(signal.SIGINT, before)
    return interrupted, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--level", default="mix")
    parser.add_argument("--task", default="statistics")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ["MSPROBE_LOG"] = "error"
    torch.set_num_threads(1)
    # Ctrl-C within a finalizer or a callback of a weak reference is lost, which Python tells.
    with contextlib.suppress(AttributeError):
        sys.unraisablehook = lambda _: None
    luck = random.Random(options.seed)
    interrupted, wrong = interrupt(options.level, options.task, options.times, luck)
    print(f"{interrupted} of {options.times} runs interrupted, {wrong} with problems")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
