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

from helpers import Dump, collect, debugger, read_dump
from runner import run_script

THREADS = 4
ROUNDS = 15


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
