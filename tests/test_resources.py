"""Nothing piles up: memory, files, threads, graphs, and the work for one more record."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import msprobe
import window_growth
from helpers import debugger, read_dump
from msprobe.pytorch import PrecisionDebugger
from recorded import LEVELS, our_frames, read_data
from window_growth import WINDOWS, Alive

PACKAGE = str(Path(msprobe.__file__).parent)
levels = pytest.mark.parametrize("level", LEVELS)


# ---- thousands of windows ----------------------------------------------------------------------

GROWTH = Path(window_growth.__file__)


@pytest.fixture(scope="module")
def measured() -> dict[str, list[Alive]]:
    """What was alive after each round of each story, in a process that does nothing else."""
    found = subprocess.run([sys.executable, GROWTH], capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stderr
    stories: dict[str, list[Alive]] = {name: [] for name in WINDOWS}
    for name, alive in map(json.loads, found.stdout.splitlines()):
        stories[name].append(Alive(**alive))
    return stories


def growth(rounds: list[Alive], kind: str) -> float:
    """How much more there is for each window since the first round, which has filled caches."""
    before, after = rounds[0], rounds[-1]
    return float(getattr(after, kind) - getattr(before, kind)) / (after.windows - before.windows)


@pytest.mark.parametrize("story", [n for n in WINDOWS if not n.startswith("planted")])
def test_windows_leave_no_memory_file_or_thread(
    story: str, measured: dict[str, list[Alive]]
) -> None:
    """Measured on a loaded machine: up to 0.1 of an object or block, 20 bytes a window."""
    rounds = measured[story]
    assert growth(rounds, "objects") < 0.5
    assert growth(rounds, "blocks") < 0.5
    assert growth(rounds, "bytes") < 100  # one entry of one tensor has more than 200
    assert len({tuple(alive.files) for alive in rounds}) == 1
    assert len({alive.threads for alive in rounds}) == 1
    steps = {"thrown away, mix": 0, "unwanted steps, mix": 1}.get(story, rounds[-1].windows)
    assert rounds[-1].steps == steps


@pytest.mark.parametrize(
    ("story", "kind", "bound"), [("planted object", "blocks", 0.5), ("planted bytes", "bytes", 100)]
)
def test_growth_of_a_planted_leak_is_seen(
    story: str, kind: str, bound: float, measured: dict[str, list[Alive]]
) -> None:
    assert growth(measured[story], kind) > bound


def test_thread_of_the_session_ends_with_it(tmp_path: Path) -> None:
    before = threading.active_count()
    for number in range(5):
        watcher = debugger(tmp_path / str(number), level="L1")
        watcher.start()
        torch.tanh(torch.ones(1))
        watcher.stop()
        PrecisionDebugger._instance = None
    for _ in range(200):
        if threading.active_count() == before:
            break
        time.sleep(0.01)
    assert threading.active_count() == before


# ---- activations and graphs --------------------------------------------------------------------


class Memory:
    """Which pieces of memory and nodes of the graph are alive, by the order of their making."""

    def __init__(self) -> None:
        self.pieces: list[weakref.ref[Any]] = []

    def add(self, thing: Any) -> None:
        self.pieces.append(weakref.ref(thing))

    def alive(self) -> list[bool]:
        return [piece() is not None for piece in self.pieces]


class Make(torch.autograd.Function):
    """Its result lives in memory, and its node is an object, whose end can be seen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, memory: Memory) -> Tensor:
        array = np.exp(x.detach().numpy())
        memory.add(array)  # torch keeps it exactly as long as the storage
        memory.add(ctx)
        out = torch.from_numpy(array)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (out,) = ctx.saved_tensors
        return grad * out, None


class Layer(nn.Module):
    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.memory = memory

    def forward(self, x: Tensor) -> Tensor:
        return Make.apply(x * self.weight, self.memory).tanh()


def never_backward(net: nn.Module, look: Callable[[], None]) -> None:
    y = net(torch.ones(4))
    look()
    del y
    look()


def backward_then_drop(net: nn.Module, look: Callable[[], None]) -> None:
    loss = net(torch.ones(4)).sum()
    loss.backward()
    look()
    del loss
    look()


def retained(net: nn.Module, look: Callable[[], None]) -> None:
    loss = net(torch.ones(4)).sum()
    loss.backward(retain_graph=True)
    look()
    loss.backward()
    look()
    del loss
    look()


def without_graph(net: nn.Module, look: Callable[[], None]) -> None:
    with torch.no_grad():
        y = net(torch.ones(4))
    look()
    del y
    look()


def exception_in_backward(net: nn.Module, look: Callable[[], None]) -> None:
    def fail(grad: Tensor) -> None:
        raise ZeroDivisionError

    h = net[0](torch.ones(4))
    h.register_hook(fail)
    loss = net[1](h).sum()
    del h
    with contextlib.suppress(ZeroDivisionError):
        loss.backward()
    look()
    del loss
    look()


def exception_in_forward(net: nn.Module, look: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):
        net[1](net[0](torch.ones(4)).reshape(2, 2) @ torch.ones(3, 3))
    look()


def second_order(net: nn.Module, look: Callable[[], None]) -> None:
    x = torch.ones(4, requires_grad=True)
    loss = net(x).sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    look()
    del loss, grad
    look()


def part_of_the_outputs(net: nn.Module, look: Callable[[], None]) -> None:
    h = net[0](torch.ones(4))
    side = h.square().sum()
    net[1](h).sum().backward()
    look()
    del h, side
    look()


STORIES = [
    never_backward, backward_then_drop, retained, without_graph, exception_in_backward,
    exception_in_forward, second_order, part_of_the_outputs,
]  # fmt: skip


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Without the garbage collector a cycle of ours would keep what it should not."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def live(story: Callable[[nn.Module, Callable[[], None]], None]) -> list[list[bool]]:
    memory = Memory()
    net = nn.Sequential(Layer(memory), Layer(memory))
    seen: list[list[bool]] = []
    watcher = PrecisionDebugger._instance
    if watcher is not None:
        watcher.start(net)
    story(net, lambda: seen.append(memory.alive()))
    if watcher is not None:
        watcher.stop()
        watcher.step()
    seen.append(memory.alive())
    return seen


@pytest.mark.parametrize("task", ["statistics", "tensor"])
@levels
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
@pytest.mark.usefixtures("no_collector")
def test_activations_and_graphs_die_when_they_would_without_the_tool(
    story: Callable[..., None], level: str, task: str, tmp_path: Path
) -> None:
    expected = live(story)
    assert not any(expected[-1])
    debugger(tmp_path, level=level, task=task, summary_mode="md5")
    assert live(story) == expected
    assert len(read_data(tmp_path)) > 0


@levels
@pytest.mark.usefixtures("no_collector")
def test_graph_dies_when_backward_comes_after_the_step(level: str, tmp_path: Path) -> None:
    memory = Memory()
    net = nn.Sequential(Layer(memory))
    watcher = debugger(tmp_path, level=level)
    watcher.start(net)
    loss = net(torch.ones(4)).sum()
    watcher.stop()
    watcher.step()
    assert all(memory.alive())
    loss.backward()
    del loss
    assert not any(memory.alive())


@levels
@pytest.mark.usefixtures("no_collector")
def test_model_and_arguments_die_with_the_users_last_reference(level: str, tmp_path: Path) -> None:
    watcher = debugger(tmp_path, level=level)
    memory = Memory()
    net = nn.Sequential(Layer(memory))
    memory.pieces.clear()
    memory.add(net[0])
    memory.add(net[0].weight)
    watcher.start(net)
    with torch.no_grad():
        net(torch.ones(4))
    watcher.stop()
    watcher.step()
    memory.pieces[2:] = []
    del net
    assert not any(memory.alive())


# ---- the work for one more record --------------------------------------------------------------


def written_bytes() -> int:
    """What this process has handed to write calls, of whatever kind."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["wchar"])


@pytest.mark.parametrize(
    ("windows", "calls"), [(1, 5000), (500, 10)], ids=["one window", "500 windows"]
)
def test_work_per_record_does_not_grow_with_the_records_of_the_step(
    windows: int, calls: int, tmp_path: Path
) -> None:
    """Python frames and bytes written: 5,000 records in one step against 500."""
    few = (1, calls // 10) if windows == 1 else (windows // 10, calls)
    few_frames, few_bytes = cost_of_a_record(tmp_path / "few", *few)
    many_frames, many_bytes = cost_of_a_record(tmp_path / "many", windows, calls)
    assert many_frames < 1.1 * few_frames
    # Each record goes into two files; if one flush writes all of them, into one.
    assert many_bytes < 2.2 * few_bytes


def cost_of_a_record(path: Path, windows: int, calls: int) -> tuple[float, float]:
    """Our frames and the bytes written, on average, in a step of this many records."""
    watcher = debugger(path, level="L1")
    x = torch.ones(2)

    def run() -> None:
        for _ in range(windows):
            watcher.start()
            for _ in range(calls):
                torch.tanh(x)
            watcher.stop()

    before = written_bytes()
    frames = our_frames(run).total()
    watcher.step()
    PrecisionDebugger._instance = None
    records = windows * calls
    assert len(read_data(path)) == records
    return frames / records, (written_bytes() - before) / records


# ---- names -------------------------------------------------------------------------------------


def nested(depth: int) -> nn.Module:
    net: nn.Module = nn.Tanh()
    for i in range(depth):
        net = nn.Sequential(*([nn.Identity()] * (i % 2)), net)
    return net


LONG: dict[str, Callable[[], nn.Module]] = {
    "deep": lambda: nested(130),  # 130 calls inside each other, each of 5 frames of torch
    "long name": lambda: _named("n" * 300),
    "many bytes per letter": lambda: _named("\u6570" * 100),
    "long class": lambda: nn.Sequential(type("C" * 300, (nn.Tanh,), {})()),
}


def _named(name: str) -> nn.Module:
    net = nn.Sequential()
    net.add_module(name, nn.Tanh())
    net.add_module(name + "2", nn.Tanh())
    return net


@pytest.mark.parametrize("kind", LONG)
def test_names_longer_than_a_file_name_have_files_of_their_own(kind: str, tmp_path: Path) -> None:
    net = LONG[kind]()
    watcher = debugger(tmp_path, level="mix", task="tensor")
    watcher.start(net)
    net(torch.ones(2))
    watcher.stop()
    watcher.step()
    dump = read_dump(tmp_path)
    assert dump.errors() == []
    names = []
    for record in dump.data.values():
        for entry in (*record["input_args"], *record["output"]):
            names.append(entry["data_name"])
            assert len(os.fsencode(entry["data_name"])) <= 255
            saved = dump.tensors(entry)
            assert saved[0].item() == entry["Max"]
    assert len(set(names)) == len(names) == len(list(dump.folder.glob("dump_tensor_data/*")))
