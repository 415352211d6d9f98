"""coverage.json: what was not recorded, and why; torch calls that no wrapper saw, on demand."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from helpers import Dump, collect, debugger
from msprobe import missed
from msprobe.cli import main
from msprobe.pytorch import PrecisionDebugger


def coverage(dump_path: Path, step: int = 0) -> dict[str, Any]:
    (path,) = (dump_path / f"step{step}").glob("*/coverage.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.fixture
def on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSPROBE_COVERAGE", "1")


def unseen(dump_path: Path, function: Any, model: Any = None, **config: Any) -> dict[str, int]:
    collect(dump_path, function, model, **({"level": "L1"} | config))
    found: dict[str, int] = coverage(dump_path)["torch_calls_not_recorded"]
    return found


# ---- torch calls that no wrapper saw -----------------------------------------------------------


@pytest.mark.usefixtures("on_demand")
def test_calls_that_no_wrapper_saw_are_counted(tmp_path: Path) -> None:
    x = torch.ones(2, 3)

    def step() -> None:
        x.detach()
        x.detach()
        torch.zeros_like(x)
        torch.relu(x)  # recorded

    assert unseen(tmp_path, step) == {"torch.Tensor.detach": 2, "torch.zeros_like": 1}


@pytest.mark.usefixtures("on_demand")
def test_function_without_a_public_name_is_listed_by_its_place_in_torch(tmp_path: Path) -> None:
    parts = [torch.ones(2), torch.ones(3)]
    assert unseen(tmp_path, lambda: torch._foreach_mul_(parts, 2.0)) == {"torch._foreach_mul_": 1}


@pytest.mark.usefixtures("on_demand")
def test_recorded_calls_and_what_runs_inside_them_are_not_listed(tmp_path: Path) -> None:
    x = torch.ones(2, 3, requires_grad=True)
    assert unseen(tmp_path, lambda: F.cross_entropy(x * 2, torch.tensor([0, 1])).backward()) == {}


@pytest.mark.usefixtures("on_demand")
def test_function_whose_parts_are_recorded_is_not_listed(tmp_path: Path) -> None:
    """nn.init.constant_ can be overridden by itself, and calls Tensor.fill_, which is recorded."""
    assert unseen(tmp_path, lambda: nn.init.constant_(torch.empty(2, 3), 1.0)) == {}


def test_records_and_stacks_are_the_same_while_listening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.GELU(), nn.LSTM(3, 2))
    x = torch.ones(2, 3, requires_grad=True)

    def step() -> None:
        x.grad = None
        net.zero_grad()
        hidden, _ = net(2 / x + x[0])
        nn.init.constant_(hidden.detach().clone(), 2.0)
        F.layer_norm(hidden.T, (2,)).square().sum().backward()

    dumps = []
    for listening in ("", "1"):
        monkeypatch.setenv("MSPROBE_COVERAGE", listening)
        dumps.append(collect(tmp_path / f"listening{listening}", step, net, level="mix"))
        PrecisionDebugger._instance = None
    alone, heard = dumps
    assert heard.data == alone.data
    # Torch's own frames differ: an overridable function in Python hands the call to the mode.
    assert users_frames(heard) == users_frames(alone)
    assert heard.construct == alone.construct


def users_frames(dump: Dump) -> dict[str, list[str]]:
    """Record → frames of this file."""
    return {
        name: [frame for frame in frames if frame.startswith(f"File {__file__}")]
        for names, frames in dump.stack.values()
        for name in names
    }


@pytest.mark.usefixtures("on_demand")
def test_looking_at_a_tensor_is_no_call(tmp_path: Path) -> None:
    x = torch.ones(2, 3, requires_grad=True)

    def look() -> None:
        assert x.shape == x.size()
        assert (x.dtype, x.device.type) == (torch.float32, "cpu")
        assert x.requires_grad
        assert x.grad is None
        assert (x.dim(), len(x), x.numel(), x.stride()) == (2, 2, 6, (3, 1))
        assert x.is_contiguous()
        repr(x)

    assert unseen(tmp_path, look) == {}


@pytest.mark.usefixtures("on_demand")
def test_property_that_gives_a_tensor_is_a_call(tmp_path: Path) -> None:
    x = torch.ones(2, 3, requires_grad=True)
    assert unseen(tmp_path, lambda: (x.T, x.data)) == {
        "torch.Tensor.T.__get__": 1, "torch.Tensor.data.__get__": 1,
    }


@pytest.mark.usefixtures("on_demand")
def test_only_the_first_step_is_listened_to(tmp_path: Path) -> None:
    watcher = debugger(tmp_path, level="L1")
    for _ in range(2):
        watcher.start()
        torch.ones(1).detach()
        watcher.stop()
        torch.ones(1).detach()  # between windows
        watcher.step()
    assert coverage(tmp_path, 0)["torch_calls_not_recorded"] == {"torch.Tensor.detach": 1}
    assert "torch_calls_not_recorded" not in coverage(tmp_path, 1)


@pytest.mark.usefixtures("on_demand")
def test_step_that_is_discarded_is_not_the_one(tmp_path: Path) -> None:
    watcher = debugger(tmp_path, level="L1")
    for number in range(2):
        watcher.start()
        torch.ones(1).detach()
        watcher.stop()
        watcher.step(dump=number == 1)
    assert coverage(tmp_path, 1)["torch_calls_not_recorded"]["torch.Tensor.detach"] >= 1


@pytest.mark.usefixtures("on_demand")
def test_no_mode_is_left_after_stop(tmp_path: Path) -> None:
    before = torch._C._len_torch_function_stack()
    watcher = debugger(tmp_path, level="L1")
    watcher.start()
    assert torch._C._len_torch_function_stack() == before + 1
    watcher.stop()
    assert torch._C._len_torch_function_stack() == before


class Quiet(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("on_demand")
def test_mode_of_the_user_that_is_still_on_at_stop_is_not_taken_away(tmp_path: Path) -> None:
    before = torch._C._len_torch_function_stack()
    watcher = debugger(tmp_path, level="L1")
    watcher.start()
    with Quiet():
        torch.ones(1).detach()
        watcher.stop()
        assert torch._C._len_torch_function_stack() == before + 2
    watcher.step()
    assert torch._C._len_torch_function_stack() == before
    assert coverage(tmp_path)["torch_calls_not_recorded"] == {"torch.Tensor.detach": 1}


@pytest.mark.usefixtures("on_demand")
def test_results_and_gradients_are_the_same_while_listening(tmp_path: Path) -> None:
    def train() -> tuple[torch.Tensor, ...]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 3), nn.GELU(), nn.Dropout(0.3))
        loss = net(torch.randn(2, 4)).detach().requires_grad_().square().sum()
        loss = loss + net(torch.randn(2, 4)).sum()
        loss.backward()
        return (loss.detach(), *(p.grad for p in net.parameters() if p.grad is not None))

    alone = train()
    watched: list[tuple[torch.Tensor, ...]] = []
    collect(tmp_path, lambda: watched.append(train()), level="L1")
    assert all(torch.equal(a, b) for a, b in zip(alone, watched[0], strict=True))


@pytest.mark.usefixtures("on_demand")
def test_exception_of_a_call_passes_and_is_not_counted(tmp_path: Path) -> None:
    def wrong() -> None:
        with pytest.raises(RuntimeError, match="shape"):
            torch.ones(2).view_as(torch.ones(3))
        torch.ones(1).detach()

    assert "torch.Tensor.detach" in unseen(tmp_path, wrong)


def test_without_the_variable_nothing_is_listened_to(tmp_path: Path) -> None:
    collect(tmp_path, lambda: torch.ones(1).detach(), level="L1")
    assert "torch_calls_not_recorded" not in coverage(tmp_path)


@pytest.mark.usefixtures("on_demand")
def test_level_without_functions_counts_none(tmp_path: Path) -> None:
    collect(tmp_path, lambda: torch.ones(1).detach(), nn.Sequential(nn.ReLU()), level="L0")
    assert "torch_calls_not_recorded" not in coverage(tmp_path)


# ---- records incomplete ------------------------------------------------------------------------


def test_call_that_raised_is_incomplete(tmp_path: Path) -> None:
    def wrong() -> None:
        with pytest.raises(RuntimeError):
            torch.mm(torch.ones(2, 3), torch.ones(2, 3))
        torch.relu(torch.ones(1))

    collect(tmp_path, wrong, level="L1")
    incomplete = coverage(tmp_path)["records_incomplete"]
    assert list(incomplete) == ["Torch.mm.0.forward"]
    assert "raised an exception" in incomplete["Torch.mm.0.forward"]


class EndsItsStep(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        PrecisionDebugger.step()
        return x


def test_call_that_has_not_returned_when_the_step_ends_is_incomplete(tmp_path: Path) -> None:
    net = nn.Sequential(EndsItsStep())
    collect(tmp_path, lambda: net(torch.ones(1)), net, level="L0")
    incomplete = coverage(tmp_path)["records_incomplete"]
    assert incomplete == {
        "Module.0.EndsItsStep.forward.0": "it had not returned when the step ended"
    }


def test_call_in_another_thread_that_hangs_is_incomplete(tmp_path: Path) -> None:
    begun, release = threading.Event(), threading.Event()

    class Hangs(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            begun.set()
            release.wait(20)
            return x

    net = nn.Sequential(Hangs())
    thread = threading.Thread(target=net, args=(torch.ones(1),))
    try:
        collect(tmp_path, lambda: (thread.start(), begun.wait(20)), net, level="L0")
    finally:
        release.set()
        thread.join()
    assert list(coverage(tmp_path)["records_incomplete"]) == ["Module.0.Hangs.forward.0"]


def test_complete_step_has_no_incomplete_records(tmp_path: Path) -> None:
    collect(tmp_path, lambda: torch.relu(torch.ones(1)), level="L1")
    assert coverage(tmp_path)["records_incomplete"] == {}


# ---- what else it tells ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "filters"),
    [
        ({}, []),
        ({"list": ["relu"]}, ["list"]),
        ({"data_mode": ["forward"]}, ["data_mode"]),
        ({"top": {"risk_level": "CORE"}}, ["risk_level"]),
    ],
    ids=["none", "list", "data_mode", "risk_level"],
)
def test_filters_that_were_set_are_named(
    options: dict[str, Any], filters: list[str], tmp_path: Path
) -> None:
    collect(tmp_path, lambda: torch.relu(torch.ones(1)), level="L1", **options)
    assert coverage(tmp_path)["filters"] == filters


def test_folders_are_taken_together(tmp_path: Path) -> None:
    for number, calls in enumerate(({"a": 1}, {"a": 2, "b": 9})):
        folder = tmp_path / f"rank{number}"
        folder.mkdir()
        (folder / "dump.json").write_text('{"data": {"Torch.add.0.forward": {}}}')
        noted = {"modules_never_called": ["head"], "torch_calls_not_recorded": calls}
        (folder / "coverage.json").write_text(json.dumps(noted))
        (folder / "dump_error_info.log").write_text("x: odd\nTraceback\n  File\nE: odd\n")
    found = missed.collect(sorted(tmp_path.iterdir()))
    assert found["modules_never_called"] == ["head"]
    assert found["torch_calls_not_recorded"] == {"b": 9, "a": 3}
    assert (found["problems"], found["records"]) == (["x: odd"], 2)


SCRIPT = """
import sys
import torch
from msprobe.pytorch import PrecisionDebugger
debugger = PrecisionDebugger({"level": "L1", "dump_path": "user_dump"})
for step in range(9):
    debugger.start()
    torch.relu(torch.ones(2)).detach()
    debugger.stop()
    debugger.step()
"""


def test_command_shows_calls_of_one_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    assert main(["coverage", str(path)]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"1 step of {path}\n")
    assert "torch calls on tensors that were not recorded:\n  1  torch.Tensor.detach\n" in text


def test_command_exits_with_2_where_the_script_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.py"
    path.write_text("raise SystemExit('no data')")
    assert main(["coverage", str(path)]) == 2
    assert "no data" in capsys.readouterr().out
