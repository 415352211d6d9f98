"""Several threads and processes at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers import Dump, collect, debugger, read_dump, read_json
from runner import run_script

THREADS = 4
ROUNDS = 15
# More than "forked", which is in the name of a script: from Python 3.12 on it is printed with the
# warning of a fork beside threads.
NOT_RECORDED = "was forked while its parent was recording"


class Worker(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3, bias=False)
        with torch.no_grad():
            self.fc.weight.copy_(torch.eye(3) * value)

    def forward(self, x: Tensor) -> Tensor:
        return F.hardtanh(torch.exp(self.fc(x)), max_val=float("inf"))


def in_threads(count: int, function: Callable[[int], Any]) -> None:
    """Runs ``function(i)`` in each thread, all beginning at once; raises what one has raised."""
    barrier, errors = threading.Barrier(count), []

    def body(number: int) -> None:
        try:
            barrier.wait()
            function(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.fixture
def several(tmp_path: Path) -> Dump:
    """Four threads, each with a module and a value of its own, with gradients."""
    workers = nn.ModuleList([Worker(float(i)) for i in range(THREADS)])

    def work(number: int) -> None:
        for _ in range(ROUNDS):
            workers[number](torch.ones(2, 3)).sum().backward()

    return collect(tmp_path, lambda: in_threads(THREADS, work), workers)


def test_counts_of_calls_from_several_threads_have_no_gap(several: Dump) -> None:
    expected = {f"Torch.exp.{i}.forward" for i in range(THREADS * ROUNDS)}
    assert set(several.names("Torch.exp.")) - set(several.names("backward")) == expected
    for number in range(THREADS):
        name = f"Module.{number}.Worker.forward"
        assert set(several.names(name)) == {f"{name}.{i}" for i in range(ROUNDS)}


def test_records_of_several_threads_are_whole(several: Dump) -> None:
    for name in several.names("forward"):
        assert {"input_args", "input_kwargs", "output"} <= set(several.data[name])
    for name in several.names("Torch.exp."):
        if name.endswith("forward"):
            record = several.data[name]
            (given,), (made,) = record["input_args"], record["output"]
            # exp is within two units in the last place of float32
            assert made["Max"] == pytest.approx(torch.tensor(given["Max"]).exp().item(), rel=3e-7)
    assert several.errors() == []


def test_parent_of_a_call_is_the_module_of_its_own_thread(several: Dump) -> None:
    """The value of a call tells whose it is."""
    for name in several.names("Torch.exp."):
        if name.endswith("forward"):
            number = int(several.data[name]["input_args"][0]["Max"])
            parent = several.construct[name]
            assert parent.startswith(f"Module.{number}.Worker.forward.")
            backward = name.replace(".forward", ".backward")
            assert several.construct[backward] == parent.replace(".forward", ".backward")


def test_each_backward_of_a_thread_has_its_record(several: Dump) -> None:
    for number in range(THREADS):
        for kind in ("Worker", "fc.Linear"):
            name = f"Module.{number}.{kind}.backward"
            assert set(several.names(name)) == {f"{name}.{i}" for i in range(ROUNDS)}


def test_backward_in_another_thread_finds_its_forward(tmp_path: Path) -> None:
    net = Worker(2.0)

    def step() -> None:
        loss = net(torch.ones(2, 3)).sum()
        in_threads(1, lambda _: loss.backward())

    dump = collect(tmp_path, step, nn.Sequential(net))
    assert "Torch.exp.0.backward" in dump.data
    assert dump.construct["Torch.exp.0.backward"] == "Module.0.Worker.backward.0"
    assert "Module.0.fc.Linear.parameters_grad.0" in dump.data


def test_thread_that_outlives_the_window_records_nothing_more(tmp_path: Path) -> None:
    net = Worker(1.0)
    stopped, began = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            torch.exp(torch.ones(1))
            began.set()
            stopped.wait()
            net(torch.ones(1, 3)).sum().backward()
        except BaseException as error:
            errors.append(error)

    watcher = debugger(tmp_path)
    watcher.start(nn.Sequential(net))
    thread = threading.Thread(target=work)
    thread.start()
    began.wait()
    watcher.stop()
    stopped.set()
    thread.join()
    watcher.step()
    assert errors == []
    assert list(read_dump(tmp_path).data) == ["Torch.exp.0.forward"]


LOADER = """
import sys
import torch
from torch.utils.data import DataLoader, Dataset
from msprobe.pytorch import PrecisionDebugger


class Numbers(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.relu(torch.full((2,), float(i)))


def main(out, method):
    debugger = PrecisionDebugger(dump_path=out, level="L1")
    loader = DataLoader(
        Numbers(), batch_size=2, num_workers=1, multiprocessing_context=method, timeout=300
    )
    debugger.start()
    total = 0.0
    for batch in loader:
        total += torch.tanh(batch).shape[0]
    debugger.stop()
    debugger.step()
    assert total == 8


if __name__ == "__main__":
    main(*sys.argv[1:])
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_data_loader_never_write(method: str, tmp_path: Path) -> None:
    script = tmp_path / "loader.py"
    script.write_text(LOADER, encoding="utf-8")
    arguments = [str(tmp_path / "out"), method]
    code, output = run_script(script, arguments, tmp_path, fresh=method == "spawn")
    assert code == 0, output
    dump = read_dump(tmp_path / "out")
    assert dump.names("tanh") == [f"Torch.tanh.{i}.forward" for i in range(4)]
    assert dump.names("relu") == []
    assert dump.errors() == []
    assert NOT_RECORDED not in output


FORK = """
import json
import os
import sys
import traceback
from pathlib import Path

import torch
from torch import nn

from msprobe.pytorch import PrecisionDebugger

out = Path(sys.argv[1])


def in_child(function):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            function()
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def own_window(debugger, model):
    debugger.start(model)
    model(torch.ones(1, 2)).sum().backward()
    debugger.stop()
    debugger.step()


model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
debugger = PrecisionDebugger({"dump_path": str(out), "task": "tensor", "level": sys.argv[2]})
"""


def run_fork(body: str, level: str, folder: Path) -> str:
    script = folder / "fork.py"
    script.write_text(FORK + body, encoding="utf-8")
    code, output = run_script(script, [str(folder / "out"), level], folder)
    assert code == 0, output
    return output


@pytest.mark.parametrize("level", ["L0", "mix"])
@pytest.mark.parametrize("when", ["open", "stopped", "stepped"])
def test_backward_in_a_forked_child_does_not_write(when: str, level: str, tmp_path: Path) -> None:
    """The graph was made in the parent: its hooks belong to the files of the parent."""
    body = """
debugger.start(model)
loss = model(torch.ones(1, 2, requires_grad=True)).sum()
if when != "open":
    debugger.stop()
if when == "stepped":
    debugger.step()
in_child(loss.backward)
assert not list(out.rglob("*backward*.pt"))
for path in out.rglob("dump.json"):
    assert not [name for name in json.loads(path.read_text())["data"] if "backward" in name]
loss.backward()
debugger.stop()
debugger.step()
"""
    run_fork(f"when = {when!r}\n{body}", level, tmp_path)
    dump = read_dump(tmp_path / "out")
    assert dump.names("backward")
    assert dump.errors() == []


@pytest.mark.parametrize("level", ["L0", "mix"])
def test_forked_child_says_at_its_first_call_that_it_is_not_recorded(
    level: str, tmp_path: Path
) -> None:
    body = """
def work():
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
    assert vars(torch.Tensor).get("sum") is None and not model[0]._forward_hooks


debugger.start(model)
in_child(lambda: print("quiet child"))
print("noisy child", flush=True)
in_child(work)
model(torch.ones(1, 2))
debugger.stop()
debugger.step()
"""
    output = run_fork(body, level, tmp_path)
    quiet, _, noisy = output.partition("noisy child")
    assert NOT_RECORDED not in quiet
    assert noisy.count(NOT_RECORDED) == 1
    dump = read_dump(tmp_path / "out")
    assert "Module.1.Tanh.forward.0" in dump.data
    assert not dump.names("backward")
    assert dump.errors() == []


@pytest.mark.parametrize("level", ["L0", "mix"])
@pytest.mark.parametrize("where", ["window", "call"])
def test_forked_child_that_starts_a_window_has_a_folder_of_its_own(
    where: str, level: str, tmp_path: Path
) -> None:
    """Also if it was forked in the middle of a recorded call."""
    body = """
import mine


def fork():
    in_child(lambda: own_window(debugger, model))


mine.fork = lambda: fork()
debugger.register_custom_api(mine, "fork")
debugger.start(model)
model(torch.ones(1, 2))
(mine.fork if sys.argv[0].endswith("call.py") else fork)()
debugger.stop()
debugger.step()
"""
    (tmp_path / "mine.py").write_text("", encoding="utf-8")
    script = tmp_path / f"{where}.py"
    script.write_text(FORK + body, encoding="utf-8")
    code, output = run_script(script, [str(tmp_path / "out"), level], tmp_path)
    assert code == 0, output
    assert NOT_RECORDED not in output
    folders = list((tmp_path / "out/step0").iterdir())
    assert len(folders) == 2
    records = [read_json(folder / "dump.json")["data"] for folder in folders]
    by_backward = [[name for name in data if "backward" in name] for data in records]
    assert sorted(map(bool, by_backward)) == [False, True]
    forwards = [{n for n in data if ".forward" in n and "mine" not in n} for data in records]
    assert forwards[0] ^ forwards[1] <= {"Tensor.sum.0.forward"}
