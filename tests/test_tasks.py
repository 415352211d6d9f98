"""Tasks overflow_check, nan_check, acc_check and the live comparison; checksums against files."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from helpers import collect, debugger, read_dump
from msprobe.cli import main
from msprobe.errors import ConfigError
from msprobe.pytorch import PrecisionDebugger

SPOILT = torch.tensor([1.0, -1.0])


def spoil() -> None:
    """Good, bad, good, bad in place, bad through an infinity."""
    torch.exp(SPOILT)
    torch.log(SPOILT)
    torch.abs(SPOILT)
    torch.ones(2).log_().sub_(1).sqrt_()
    torch.div(SPOILT, torch.zeros(2))


BAD = ["Torch.log.0.forward", "Tensor.sqrt_.0.forward", "Torch.div.0.forward"]


@pytest.mark.parametrize(("limit", "found"), [(1, 1), (2, 2), (3, 3), (-1, 3)])
def test_overflow_check_records_bad_calls_up_to_its_number(
    limit: int, found: int, tmp_path: Path
) -> None:
    dump = collect(tmp_path, spoil, level="L1", task="overflow_check", overflow_nums=limit)
    assert list(dump.data) == BAD[:found]


def test_overflow_check_keeps_inputs_as_they_were_before_an_in_place_call(tmp_path: Path) -> None:
    dump = collect(tmp_path, spoil, level="L1", task="overflow_check", overflow_nums=-1)
    record = dump.data["Tensor.sqrt_.0.forward"]
    folder = dump.folder / "dump_tensor_data"
    before = torch.load(folder / record["input_args"][0]["data_name"], weights_only=True)
    after = torch.load(folder / record["output"][0]["data_name"], weights_only=True)
    assert before.tolist() == [-1.0, -1.0]
    assert after.isnan().all()
    assert record["output"][0]["Max"] == "NaN"


@pytest.mark.parametrize("level", ["L0", "mix"])
def test_overflow_check_finds_the_module_that_made_it(level: str, tmp_path: Path) -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / 0

    net = nn.Sequential(nn.Linear(2, 2), Broken())
    dump = collect(
        tmp_path,
        lambda: net(torch.ones(1, 2)),
        net,
        level=level,
        task="overflow_check",
        overflow_nums=-1,
    )
    assert [name for name in list(dump.data) if name.startswith("Module")] == [
        "Module.1.Broken.forward.0"
    ]


def test_overflow_check_hears_of_bad_gradients(tmp_path: Path) -> None:
    x = torch.zeros(2, requires_grad=True)
    dump = collect(
        tmp_path,
        lambda: x.sqrt().sum().backward(),
        level="L1",
        task="overflow_check",
        overflow_nums=-1,
    )
    assert list(dump.data) == ["Tensor.sqrt.0.backward"]


def test_overflow_check_ends_collecting_for_the_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watcher = debugger(tmp_path, level="L1", task="overflow_check")
    for _ in range(3):
        watcher.start()
        spoil()
        watcher.stop()
        watcher.step()
    assert watcher.service.should_stop_service
    assert [path.name for path in tmp_path.glob("step*")] == ["step0"]
    assert "Torch.log.0.forward is bad call number 1: collecting ends here" in caplog.text


def test_nan_check_tells_for_each_call_and_has_no_statistics(tmp_path: Path) -> None:
    dump = collect(tmp_path, spoil, level="L1", task="nan_check")
    bad = {name for name, record in dump.data.items() if record["is_nan"] == 1}
    assert bad == set(BAD)
    assert {record["is_nan"] for record in dump.data.values()} == {0, 1}
    entries = [entry for record in dump.data.values() for entry in record["output"]]
    assert not any("Max" in entry or "Norm" in entry for entry in entries)


def apis(dump: Any) -> set[str]:
    return {name.split(".")[1] for name in list(dump.data)}


@pytest.mark.parametrize(
    ("lists", "recorded"),
    [
        ({}, {"exp", "log", "abs", "log_", "sub_", "sqrt_", "div"}),
        ({"white_list": ["exp", "log"]}, {"exp", "log"}),
        ({"black_list": ["exp", "log"]}, {"abs", "log_", "sub_", "sqrt_", "div"}),
        ({"white_list": ["exp", "log"], "black_list": ["log"]}, {"exp"}),
    ],
    ids=["all", "white", "black", "white minus black"],
)
def test_acc_check_takes_white_list_minus_black_list(
    lists: dict[str, list[str]], recorded: set[str], tmp_path: Path
) -> None:
    dump = collect(tmp_path, spoil, level="L1", task="acc_check", **lists)
    assert apis(dump) == recorded


@pytest.mark.parametrize("key", ["white_list", "black_list"])
def test_acc_check_refuses_names_that_no_function_has(key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"'{key}' has \['conv2dd'\].*Example: \"{key}\""):
        debugger(tmp_path, level="L1", task="acc_check", **{key: ["exp", "conv2dd"]})


def test_live_comparison_keeps_the_tensors_of_calls_that_differ(tmp_path: Path) -> None:
    x = torch.tensor([0.5, -0.5])

    def chain(shift: float) -> None:
        F.gelu(F.relu(x) + shift).sum()

    collect(tmp_path / "a", lambda: chain(0.0), level="L1", summary_mode="md5")
    PrecisionDebugger._instance = None
    dump = collect(
        tmp_path / "b",
        lambda: chain(1.0),
        level="L1",
        task="tensor",
        summary_mode="md5",
        bench_path=str(tmp_path / "a"),
        diff_nums=2,
    )
    saved = {p.name for p in (dump.folder / "dump_tensor_data").iterdir()}
    calls = {name.rsplit(".forward.")[0] for name in saved}
    assert calls == {"Tensor.__add__.0", "Functional.gelu.0"}
    assert {entry["data_name"] for entry in kept(dump.data)} == saved


def test_live_comparison_that_ends_inside_a_module_leaves_a_sound_dump(tmp_path: Path) -> None:
    net, x = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU())), torch.ones(1, 2)
    collect(tmp_path / "a", lambda: net(x), net, level="mix", summary_mode="md5")
    PrecisionDebugger._instance = None
    bench = {"task": "tensor", "summary_mode": "md5", "bench_path": str(tmp_path / "a")}
    dump = collect(tmp_path / "b", lambda: net(x + 1), net, level="mix", **bench)
    assert "Module.0.Sequential.forward.0" not in dump.data
    assert main(["check", str(tmp_path / "b")]) == 0


def kept(value: Any) -> Iterator[dict[str, Any]]:
    """The entries of tensors that have a file."""
    if isinstance(value, list):
        for part in value:
            yield from kept(part)
    elif isinstance(value, dict):
        if "data_name" in value:
            yield value
        else:
            yield from kept(list(value.values()))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.norm = nn.BatchNorm2d(2)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.conv(x)) * 1
        h = self.act(h).clone()
        h += 1
        h.mul_(2)
        return h.transpose(1, 2)


@pytest.mark.parametrize("background", [False, True], ids=["few wait", "async_dump"])
@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_every_checksum_is_that_of_the_bytes_in_the_file(
    level: str, background: bool, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """product.md 4.2: CRC in md5 mode == CRC of the bytes in the .pt, always."""
    net = InPlace()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        net(torch.randn(2, 1, 6, 6)).square().sum().backward()
        optimizer.step()

    dump = collect(
        tmp_path,
        step,
        net,
        level=level,
        task="tensor",
        summary_mode="md5",
        top={"async_dump": background},
    )
    checked = 0
    for entry in kept(dump.data):
        path = dump.folder / "dump_tensor_data" / entry["data_name"]
        saved = torch.load(path, weights_only=True)
        raw = saved.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        assert entry["md5"] == f"{zlib.crc32(raw):08x}", entry["data_name"]
        checked += 1
    assert checked > 15
    assert read_dump(tmp_path).errors() == []


def arrays() -> list[Any]:
    record = np.zeros(2, dtype=[("a", np.float32), ("b", np.int8)])
    return [np.ones(3), np.array([None, "x"], dtype=object), record, np.array(["ab"])]


class Mine:
    @staticmethod
    def takes_arrays(*values: Any) -> Any:
        return values[0]


@pytest.mark.parametrize("task", ["structure", "statistics", "tensor", "acc_check"])
def test_numpy_arrays_leave_nothing_unexplained(task: str, tmp_path: Path) -> None:
    def step() -> None:
        Mine.takes_arrays(*arrays())
        torch.ones(2, requires_grad=True).tanh().detach().numpy()

    watcher = debugger(tmp_path, level="mix" if task == "structure" else "L1", task=task)
    watcher.register_custom_api(Mine, "takes_arrays")
    watcher.start(nn.Sequential(nn.Identity()))
    step()
    watcher.stop()
    watcher.step()
    log = read_dump(tmp_path).errors()
    if task == "tensor":
        places = {line.partition(": ")[0].rpartition(".")[2] for line in log}
        assert places == {"1", "2"}, log  # no file: it would have to be pickled
    else:
        assert log == []
