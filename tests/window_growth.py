"""What thousands of windows leave behind, measured in a process of its own: run as a script.

In the process of a test pytest and its plugins allocate as well, and nobody knows when. Here the
same rounds of windows follow each other: after the first, which fills caches, each must leave what
it has found. Prints one JSON object: name of the story → what was alive after each round.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from helpers import debugger
from msprobe.pytorch import PrecisionDebugger
from recorded import make_net

ROUNDS = 5
Window = Callable[[PrecisionDebugger, nn.Module], None]


@dataclass(frozen=True)
class Alive:
    """What there is after a round: objects known to the garbage collector, blocks of Python's
    allocator (objects of up to 512 bytes, and their parts), bytes if tracemalloc runs, threads,
    open files, folders of steps.
    """

    windows: int
    objects: int
    blocks: int
    bytes: int
    threads: int
    files: list[str]
    steps: int


@dataclass(frozen=True)
class Story:
    """Windows of one kind: ``count`` in each round, of which there are `ROUNDS`."""

    window: Window
    count: int
    level: str
    task: str = "statistics"
    in_bytes: bool = False
    top: Mapping[str, Any] = field(default_factory=dict)  # of the configuration


def one_window(watcher: PrecisionDebugger, net: nn.Module) -> None:
    watcher.start(net)
    net(torch.ones(1, 4)).sum().backward()
    watcher.stop()
    watcher.step()


def gradients_later(watcher: PrecisionDebugger, net: nn.Module) -> None:
    watcher.start(net)
    loss = net(torch.ones(1, 4)).sum()
    watcher.stop()
    watcher.step()
    loss.backward()


def forward_only(watcher: PrecisionDebugger, net: nn.Module) -> None:
    watcher.start(net)
    net(torch.ones(1, 4))  # its graph is dropped
    watcher.stop()
    watcher.step()


@torch.inference_mode()
def thrown_away(watcher: PrecisionDebugger, net: nn.Module) -> None:
    """As the dummy runs of a server."""
    watcher.start(net)
    net(torch.ones(1, 4))
    watcher.stop()
    watcher.step(dump=False)


def exceptions(watcher: PrecisionDebugger, net: nn.Module) -> None:
    watcher.start(net)
    try:
        net(torch.ones(1, 5))
    except RuntimeError:
        watcher.step()


def keeps_one_object(watcher: PrecisionDebugger, net: nn.Module) -> None:
    """A planted leak, the smallest there is: 16 bytes that the garbage collector does not see."""
    forward_only(watcher, net)
    _KEPT.append(object())


def keeps_some_bytes(watcher: PrecisionDebugger, net: nn.Module) -> None:
    """A planted leak that Python's allocator does not count: a buffer that grows."""
    forward_only(watcher, net)
    _BUFFER.extend(bytes(200))


_KEPT: list[object] = [None] * 10_000  # so that the list itself needs no more room
del _KEPT[:]
_BUFFER = bytearray()

WINDOWS = {
    "forward only, L0": Story(forward_only, 400, "L0"),  # 2,000 in all
    "backward, mix": Story(one_window, 40, "mix"),
    "backward after the step, L0": Story(gradients_later, 40, "L0"),
    "backward after the step, L1": Story(gradients_later, 40, "L1"),
    "thrown away, mix": Story(thrown_away, 40, "mix"),
    "unwanted steps, mix": Story(forward_only, 100, "mix", top={"step": [0, 500]}),
    "exceptions, mix": Story(exceptions, 40, "mix"),
    "tensors, L0": Story(one_window, 40, "L0", task="tensor"),
    "bytes of memory, mix": Story(one_window, 40, "mix", in_bytes=True),
    "planted object": Story(keeps_one_object, 40, "L0"),
    "planted bytes": Story(keeps_some_bytes, 40, "L0", in_bytes=True),
}


def open_files() -> list[str]:
    """The files of this process that have a name, pipes left out."""
    folder = Path("/proc/self/fd")
    found = []
    for name in os.listdir(folder):
        try:
            found.append(os.readlink(folder / name))
        except FileNotFoundError:
            continue  # the listing's own
    return sorted(f for f in found if f.startswith("/"))


def settle() -> None:
    """Wait until the thread of the session has let go of the steps that have ended."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        gc.collect()
        if not any(type(thing).__name__ == "StepRun" for thing in gc.get_objects()):
            return
        time.sleep(0.05)
    # What is still there is counted below.


def measure(name: str, folder: Path) -> None:
    """Print what is alive after each round, a line each: what is kept here would be counted."""
    story = WINDOWS[name]
    watcher = debugger(folder, level=story.level, task=story.task, top=dict(story.top))
    net = make_net()
    if story.in_bytes:
        tracemalloc.start()
    for number in range(ROUNDS):
        for _ in range(story.count):
            story.window(watcher, net)
        settle()
        # It holds names, one for each of the strings that torch makes in C++ to look them up.
        getattr(sys, "_clear_internal_caches", sys._clear_type_cache)()  # Python 3.13
        alive = Alive(
            (number + 1) * story.count,
            len(gc.get_objects()),
            sys.getallocatedblocks(),
            tracemalloc.get_traced_memory()[0],
            threading.active_count(),
            open_files(),
            len(os.listdir(folder)),
        )
        print(json.dumps([name, asdict(alive)]), flush=True)
    tracemalloc.stop()
    PrecisionDebugger._instance = None


def main() -> None:
    logging.disable(logging.WARNING)
    gc.freeze()  # what torch has made need not be looked through again and again
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(WINDOWS):
            measure(name, Path(folder) / str(number))


if __name__ == "__main__":
    main()
