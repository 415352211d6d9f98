"""Nothing piles up: memory, files, threads, graphs, and the work for one more record."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import threading
import time
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import msprobe
from helpers import debugger, read_dump
from msprobe.pytorch import PrecisionDebugger
from recorded import LEVELS, make_net, read_data

PACKAGE = str(Path(msprobe.__file__).parent)
levels = pytest.mark.parametrize("level", LEVELS)


def open_files() -> list[str]:
    folder = Path("/proc/self/fd")
    found = []
    for name in os.listdir(folder):
        try:
            found.append(os.readlink(folder / name))
        except FileNotFoundError:
            continue  # the listing's own
    return sorted(f for f in found if f.startswith("/"))


# ---- thousands of windows ----------------------------------------------------------------------


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


def exceptions(watcher: PrecisionDebugger, net: nn.Module) -> None:
    watcher.start(net)
    try:
        net(torch.ones(1, 5))
    except RuntimeError:
        watcher.step()


def tensors(watcher: PrecisionDebugger, net: nn.Module) -> None:
    one_window(watcher, net)


@pytest.fixture
def quiet_session(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """pytest keeps every message, and each step may say something."""
    monkeypatch.setenv("MSPROBE_LOG", "warning")
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("quiet_session")
@pytest.mark.parametrize(
    ("level", "window", "count"),
    [
        ("L0", forward_only, 2000),
        ("mix", one_window, 120),
        ("L0", gradients_later, 120),
        ("L1", gradients_later, 60),
        ("mix", exceptions, 80),
        ("L0", tensors, 80),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_windows_leave_no_memory_file_or_thread(
    level: str,
    window: Callable[[PrecisionDebugger, nn.Module], None],
    count: int,
    tmp_path: Path,
) -> None:
    """What is alive after half of the windows is alive after all of them, and no more."""
    task = "tensor" if window is tensors else "statistics"
    watcher = debugger(tmp_path, level=level, task=task)
    net = make_net()
    files, threads = open_files(), threading.active_count()
    seen = []
    for _ in range(2):
        for _ in range(count // 2):
            window(watcher, net)
        if window is gradients_later:
            time.sleep(2)  # they are written within a second, if the machine is quiet
        gc.collect()
        seen.append((len(gc.get_objects()), sys.getallocatedblocks()))
    (objects, blocks), (more_objects, more_blocks) = seen
    # One object or block per window would be count / 2. pytest and the caches of torch add some.
    assert more_objects - objects < count // 8 + 20
    assert more_blocks - blocks < count // 4 + 40
    assert open_files() == files
    assert threading.active_count() <= threads + 1
    assert len(list(tmp_path.iterdir())) == count


@pytest.mark.usefixtures("quiet_session")
def test_bytes_of_memory_do_not_grow_with_the_windows(tmp_path: Path) -> None:
    watcher = debugger(tmp_path, level="mix")
    net = make_net()
    tracemalloc.start()
    try:
        memory = []
        for _ in range(3):
            for _ in range(40):
                one_window(watcher, net)
            time.sleep(1)  # the flusher has let go of the last steps
            gc.collect()
            memory.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    # The first 40 windows fill caches. One entry of one tensor per window would be 9,000 bytes.
    assert memory[2] - memory[1] < 40 * 200


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


def our_frames(function: Callable[[], Any]) -> int:
    entered = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal entered
        entered += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return entered


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
    frames = our_frames(run)
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
