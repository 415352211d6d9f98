"""However a run ends, its files can be read and hold what the collector has promised."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers import debugger, read_dump, read_json
from msprobe.errors import ConfigError
from msprobe.pytorch import PrecisionDebugger
from recorded import LEVELS, batch, make_net, rank_folder, read_data
from runner import _environment, run_script

HARNESS = Path(__file__).with_name("kill_harness.py")
HANG_S = 1.6  # the last records must be on disk "within a second or so"
PIECE_S = 0.05

# ---- killed from outside at any moment: see kill_harness.py ------------------------------------


@pytest.fixture(autouse=True)
def only_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the victims say on stderr is compared: without the lines about each step."""
    monkeypatch.setenv("MSPROBE_LOG", "warning")


def harness(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, HARNESS, *arguments],
        env={**os.environ, **_environment()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout


def test_runs_killed_at_random_moments_keep_what_is_a_second_old() -> None:
    """Every level, statistics and tensor. 200 kills: python tests/kill_harness.py --kills 200.

    Two of the runs write megabytes at a time: the kernel cuts a write off at a page boundary when
    the process is killed.
    """
    code, output = harness("--kills", "20", "--seed", "1")
    assert code == 0, output


def test_file_that_can_be_seen_is_never_written_to(tmp_path: Path) -> None:
    """Why the above holds: a write goes to another file, which then takes the name."""
    watcher = debugger(tmp_path, level="L1")
    watcher.start()
    path = rank_folder(tmp_path) / "dump.json"
    for number in range(4):
        with path.open() as seen:
            before = path.read_text()
            torch.tanh(torch.ones(1))
            watcher.stop()
            watcher.start()
            assert seen.read() == before
        assert len(read_data(tmp_path)) == number + 1


# ---- ended by themselves -----------------------------------------------------------------------

SCRIPT = """
import os, signal, sys, time
import torch
from torch import nn
from torch.nn import functional as F
from msprobe.pytorch import PrecisionDebugger

folder, level, end = sys.argv[1:]

class Raise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("in backward")

class Act(nn.Module):
    def forward(self, x):
        if end == "exception in forward":
            raise RuntimeError("in forward")
        return Raise.apply(x) if end == "exception in backward" else F.gelu(x)

def hook(*_):
    raise RuntimeError("in a hook")

net = nn.Sequential(nn.Linear(4, 4), Act(), nn.Linear(4, 2))
if end == "exception in a forward hook":
    net[1].register_forward_hook(hook)
if end == "exception in a backward hook":
    net[1].register_full_backward_hook(hook)
PrecisionDebugger(dump_path=folder, level=level)
PrecisionDebugger.start(net)
x = torch.ones(3, 4, requires_grad=True)
torch.tanh(net[0](x)).sum().backward()
if "a second later" in end:
    for _ in range(25):  # in short pieces: where the machine lets us wait, the other threads too
        time.sleep(0.05)
if "SIGTERM" in end:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(10)
if "os._exit" in end:
    os._exit(3)
if end == "sys.exit":
    sys.exit(4)
if end == "SIGINT":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where shells run the tests
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10)
if end == "last line":
    sys.exit()
net(x).sum().backward()
"""
# what the script has recorded before it ends
BEFORE = {
    "L0": ["Module.0.Linear.forward.0", "Module.0.Linear.parameters_grad.0"],
    "L1": ["Functional.linear.0.forward", "Torch.tanh.0.forward", "Tensor.sum.0.backward"],
}
BEFORE["mix"] = BEFORE["L0"] + BEFORE["L1"]


def run_to_its_end(folder: Path, level: str, end: str) -> tuple[int, str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    return run_script(script, [str(folder / "dump"), level, end], folder)


def check_files(dump_path: Path, expected: list[str]) -> dict[str, Any]:
    folder = rank_folder(dump_path)
    for file in folder.glob("*.json"):
        read_json(file)
    data = read_data(dump_path)
    assert set(expected) <= set(data)
    return data


@pytest.mark.parametrize(
    ("level", "end", "expected_code"),
    [("L0", "SIGTERM a second later", -signal.SIGTERM), ("mix", "os._exit a second later", 3)],
)
def test_end_without_warning_keeps_what_is_a_second_old(
    level: str, end: str, expected_code: int, tmp_path: Path
) -> None:
    code, output = run_to_its_end(tmp_path, level, end)
    assert code == expected_code, output
    check_files(tmp_path / "dump", BEFORE[level])


@pytest.mark.parametrize(("end", "expected_code"), [("SIGTERM", -signal.SIGTERM), ("os._exit", 3)])
def test_end_without_warning_leaves_valid_files(
    end: str, expected_code: int, tmp_path: Path
) -> None:
    code, output = run_to_its_end(tmp_path, "mix", end)
    assert code == expected_code, output
    check_files(tmp_path / "dump", [])


@pytest.mark.parametrize(
    ("end", "expected_code", "error"),
    [
        ("last line", 0, ""),
        ("sys.exit", 4, ""),
        ("SIGINT", 1, "KeyboardInterrupt"),
        ("exception in forward", 1, "RuntimeError: in forward"),
        ("exception in backward", 1, "RuntimeError: in backward"),
        ("exception in a forward hook", 1, "RuntimeError: in a hook"),
        ("exception in a backward hook", 1, "RuntimeError: in a hook"),
    ],
)
def test_end_of_the_interpreter_keeps_everything(
    end: str, expected_code: int, error: str, tmp_path: Path
) -> None:
    code, output = run_to_its_end(tmp_path, "mix", end)
    assert code == expected_code, output
    assert error in output
    assert "msprobe/" not in output, "a traceback of ours"
    data = check_files(tmp_path / "dump", BEFORE["mix"])
    assert set(read_json(rank_folder(tmp_path / "dump") / "construct.json")) >= set(
        name for name in data if "parameters_grad" not in name
    )


# ---- an exception that the user catches --------------------------------------------------------


class Fails(nn.Module):
    """Raises where it is told to, in its first call."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.inner = make_net()
        self.act = nn.Tanh()
        if where == "pre-hook":
            self.act.register_forward_pre_hook(self.fail)
        if where == "hook":
            self.act.register_forward_hook(self.fail)
        if where == "backward hook":
            self.act.register_full_backward_hook(self.fail)

    def fail(self, *_: Any) -> None:
        if self.where:
            self.where = ""
            raise ZeroDivisionError

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.inner(x))
        if self.where == "forward":
            self.fail()
        if self.where == "tensor hook":
            y.register_hook(self.fail)
        return y.square()


PLACES = ["forward", "pre-hook", "hook", "tensor hook", "backward hook"]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("where", PLACES)
def test_exception_that_is_caught_leaves_the_next_step_whole(
    where: str, level: str, tmp_path: Path
) -> None:
    watcher = debugger(tmp_path, level=level)
    net = nn.Sequential(Fails(where))
    for attempt in range(3):
        watcher.start(net)
        try:
            net(batch(0)).sum().backward()
            assert attempt > 0
        except ZeroDivisionError:
            assert attempt == 0
            net.zero_grad()
        watcher.stop()
        watcher.step()
        net.zero_grad()
    first, second, third = (read_data(tmp_path, step) for step in range(3))
    assert second == third
    assert len(second) > len(first) > 1
    # What the failed step has is what it has in common with the others.
    finished = {n: r for n, r in first.items() if ".forward" in n and "output" in r}
    assert finished.items() <= second.items()


def test_call_that_raises_is_recorded_with_its_inputs_after_what_it_called(tmp_path: Path) -> None:
    watcher = debugger(tmp_path, level="mix")
    net = nn.Sequential(Fails("forward"), nn.Linear(3, 1))
    watcher.start(net)
    with pytest.raises(ZeroDivisionError):
        net(batch(0))
    net[1](torch.ones(1, 3))
    watcher.stop()
    data = read_data(tmp_path)
    failed = data["Module.0.Fails.forward.0"]
    assert "output" not in failed
    assert failed["input_args"][0]["shape"] == [2, 4]
    names = list(data)
    assert names.index("Module.0.act.Tanh.forward.0") < names.index("Module.0.Fails.forward.0")
    assert read_dump(tmp_path).construct["Module.1.Linear.forward.0"] is None


# ---- a thread that hangs -----------------------------------------------------------------------


class Hang:
    """A C function that does not come back for a while, as a collective without its peer.

    In pieces: what the machine lets this thread wait, it lets the one wait that writes.
    """

    @staticmethod
    def wait(x: Any) -> Any:
        sleep = ctypes.CDLL(None).usleep
        for _ in range(int(HANG_S / PIECE_S)):
            sleep(int(PIECE_S * 1e6))
        return x


class Wait(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Hang.wait(x)


class SlowThenHangs(nn.Module):
    """Its own work takes longer than a period of the collector, then a part of it hangs."""

    def __init__(self) -> None:
        super().__init__()
        self.wait = Wait()

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(1.1)
        return self.wait(x.exp())


def files_in_a_hang(path: Path, run: Callable[[], Any], name: str) -> dict[str, Any] | None:
    """Contents of dump.json while ``run()`` hangs, once ``name`` is in it."""
    seen: list[dict[str, Any]] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.02):
            data = read_data(path)
            if name in data:
                seen.append(data)
                return

    looking = threading.Thread(target=look)
    looking.start()
    try:
        run()
    finally:
        over.set()
        looking.join()
    return seen[0] if seen else None


@pytest.mark.parametrize("task", ["tensor"])
def test_function_that_hangs_is_the_last_record_with_its_inputs(task: str, tmp_path: Path) -> None:
    watcher = debugger(tmp_path, level="L1", task=task)
    watcher.register_custom_api(Hang, "wait")
    x = torch.arange(3.0)
    watcher.start()
    y = torch.tanh(x)
    data = files_in_a_hang(tmp_path, lambda: Hang.wait(y), "Hang.wait.0.forward")
    watcher.stop()
    assert data is not None
    assert list(data) == ["Torch.tanh.0.forward", "Hang.wait.0.forward"]
    (entry,) = data["Hang.wait.0.forward"]["input_args"]
    assert entry["Max"] == y[2].item()
    assert "output" not in data["Hang.wait.0.forward"]
    assert "output" in read_data(tmp_path)["Hang.wait.0.forward"]


@pytest.mark.parametrize("level", ["L0", "mix"])
def test_module_that_hangs_in_a_module_is_the_last_record(level: str, tmp_path: Path) -> None:
    watcher = debugger(tmp_path, level=level)
    net = nn.Sequential(SlowThenHangs())
    watcher.start(net)
    name = "Module.0.wait.Wait.forward.0"
    data = files_in_a_hang(tmp_path, lambda: net(torch.zeros(2)), name)
    watcher.stop()
    assert data is not None, f"{name} was not written while it hung"
    assert list(data)[-2:] == ["Module.0.SlowThenHangs.forward.0", name]


def test_backward_that_hangs_has_the_records_before_it_on_disk(tmp_path: Path) -> None:
    watcher = debugger(tmp_path, level="L1")
    x = torch.ones(2, requires_grad=True)
    watcher.start()
    y = x.exp()
    y.register_hook(Hang.wait)
    z = y.square().sum()
    name = "Tensor.square.0.backward"
    data = files_in_a_hang(tmp_path, z.backward, name)
    watcher.stop()
    assert data is not None
    assert list(read_data(tmp_path))[-1] == "Tensor.exp.0.backward"


def test_structure_of_a_run_that_hangs_is_on_disk(tmp_path: Path) -> None:
    """The task writes no records, only stack.json and construct.json."""
    watcher = debugger(tmp_path, level="mix", task="structure")
    net = nn.Sequential(nn.Tanh())
    watcher.start(net)
    net(torch.ones(2))
    Hang.wait(0)
    folder = rank_folder(tmp_path)
    construct, stack = (read_json(folder / name) for name in ("construct.json", "stack.json"))
    watcher.stop()
    assert construct == {
        "Torch.tanh.0.forward": "Module.0.Tanh.forward.0",
        "Module.0.Tanh.forward.0": None,
    }
    assert len(stack) == 2


# ---- a disk that is full, a directory that is gone ---------------------------------------------

FULL = """
import os, resource, sys
opened = []
import torch
from torch import nn
from msprobe.pytorch import PrecisionDebugger

folder, level, task, limit = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

def train(net, watched):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        if watched:
            PrecisionDebugger.start(net)
            if step == 1:  # Python ignores SIGXFSZ: a larger file is an OSError
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        for _ in range(4):
            loss = net(torch.ones(64, 32)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if watched:
            PrecisionDebugger.stop()
            PrecisionDebugger.step()
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            opened.append(len(os.listdir("/proc/self/fd")))
    return losses

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(inplace=True), nn.Linear(32, 8))

plain = train(build(), watched=False)
PrecisionDebugger(dump_path=folder, level=level, task=task)
assert train(build(), watched=True) == plain
assert len(set(opened)) == 1, opened
"""


@pytest.mark.parametrize("limit", [6000, 100], ids=["soon full", "full from the begin"])
@pytest.mark.parametrize("task", ["statistics", "tensor"])
def test_full_disk_costs_the_records_that_do_not_fit_and_nothing_else(
    task: str, limit: int, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(FULL)
    code, output = run_script(script, [str(tmp_path / "dump"), "mix", task, str(limit)], tmp_path)
    assert code == 0, output
    assert output.count("File too large") == 1, "one warning per cause"
    first, full, last = (check_step(tmp_path / "dump", step) for step in range(3))
    assert list(first) == list(last)
    assert set(full) < set(first)


def check_step(dump_path: Path, step: int) -> dict[str, Any]:
    """Every file can be read, every file that is named is there and whole, none is a stump."""
    folder = rank_folder(dump_path, step)
    assert not list(folder.glob(".*"))
    for path in folder.glob("*.json"):
        read_json(path)
    dump = read_dump(dump_path, step)
    dump.tensors(list(dump.data.values()))
    for path in folder.glob("dump_tensor_data/*"):
        torch.load(path, weights_only=True)
    return dump.data


def train_with(watcher: PrecisionDebugger, harm: Callable[[], Any]) -> list[float]:
    """Losses of three steps; the second is harmed in its middle."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        watcher.start(net)
        for part in range(2):
            loss = net(batch(step)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if (step, part) == (1, 0):
                harm()
        watcher.stop()
        watcher.step()
    return losses


def plain_losses(path: Path) -> list[float]:
    watcher = debugger(path, level="L1", top={"step": [99]})  # collects nothing
    losses = train_with(watcher, lambda: None)
    PrecisionDebugger._instance = None
    return losses


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("task", ["statistics", "tensor"])
def test_directory_removed_in_the_middle_is_said_and_the_next_step_is_whole(
    task: str, level: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = plain_losses(tmp_path / "plain")
    watcher = debugger(tmp_path / "dump", level=level, task=task)

    def harm() -> None:
        (tmp_path / "dump").rename(tmp_path / "gone")  # threads are writing: no file comes after it
        shutil.rmtree(tmp_path / "gone")

    assert train_with(watcher, harm) == expected
    warnings = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert any("No such file" in warning for warning in warnings)
    assert len(warnings) < 20
    check_step(tmp_path / "dump", 2)


@pytest.mark.parametrize("level", LEVELS)
def test_file_in_place_of_the_directory_is_said_and_training_goes_on(
    level: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What a read-only path is for everybody but root: it can be neither made nor written."""
    expected = plain_losses(tmp_path / "plain")
    dump_path = tmp_path / "dump"

    def harm() -> None:
        shutil.rmtree(dump_path)
        dump_path.write_text("in the way")

    watcher = debugger(dump_path, level=level)
    assert train_with(watcher, harm) == expected
    said = [r.message for r in caplog.records if "Not a directory" in r.message]
    assert any(re.search(r"\(dump_error_info.log in .* can not be written\)", s) for s in said)
    assert dump_path.read_text() == "in the way"
    dump_path.unlink()
    watcher.start(make_net())
    torch.exp(torch.ones(1))
    watcher.stop()
    assert (dump_path / "step3").is_dir(), "it writes again as soon as it can"


@pytest.mark.parametrize("name", ["in the way", "in the way/deeper/dump"])
def test_path_that_can_not_be_written_is_refused_at_construction(name: str, tmp_path: Path) -> None:
    (tmp_path / "in the way").write_text("")
    with pytest.raises(ConfigError, match="in the way"):
        debugger(tmp_path / name)
    assert PrecisionDebugger._instance is None


def test_file_that_a_user_deletes_is_no_reason_to_stop(tmp_path: Path) -> None:
    watcher = debugger(tmp_path, level="L1")
    x = torch.ones(2)
    watcher.start()
    F.relu(x)
    watcher.stop()
    (rank_folder(tmp_path) / "dump.json").unlink()
    watcher.start()
    F.relu(x)
    watcher.stop()
    watcher.step()
    watcher.start()
    F.relu(x)
    watcher.stop()
    assert list(read_data(tmp_path, 1)) == ["Functional.relu.0.forward"]
    assert json.loads((rank_folder(tmp_path, 0) / "construct.json").read_text()) == {}
