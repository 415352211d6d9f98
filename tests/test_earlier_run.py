"""A folder that an earlier run has left is emptied of its files, and of no others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from helpers import debugger
from msprobe.pytorch import PrecisionDebugger


class Apis:
    @staticmethod
    def take(*values: object, **named: object) -> object:
        return values


def calls(watcher: PrecisionDebugger) -> None:
    """Files of every kind in the table of docs/output-format.md."""
    watcher.register_custom_api(Apis, "take")
    net = nn.Sequential()
    net.add_module("part", nn.Linear(2, 2))
    net.add_module("n" * 300, nn.Tanh())
    watcher.start(net, rank_id=3)
    y = net(torch.ones(1, 2)).sum()
    y.backward(retain_graph=True)
    y.backward()  # the backward records of the same calls once more
    Apis.take([torch.ones(1), np.ones(1)], **{"x/y": torch.ones(1), "z": np.ones(2)})
    watcher.stop()


def saved(watcher: PrecisionDebugger) -> None:
    x = torch.ones(2, requires_grad=True)
    for name in ("x", "a/b", "n" * 300):
        values = [x * 1, x * 2, x * 3]
        watcher.save(values[0], name)
        watcher.save({"k": values[1:]}, name)
        torch.autograd.backward([value.sum() for value in values])


PROGRAMS: dict[str, Callable[[PrecisionDebugger], None]] = {"mix": calls, "debug": saved}


def run(folder: Path, level: str, program: Callable[[PrecisionDebugger], None]) -> Path:
    """``program`` as the whole run of a process; its folder of tensors."""
    watcher = debugger(folder, level=level, task="tensor")
    program(watcher)
    watcher.step()
    PrecisionDebugger._instance = None
    (found,) = (folder / "step0").iterdir()
    return found / "dump_tensor_data"


def one_call(watcher: PrecisionDebugger) -> None:
    watcher.start(nn.Identity(), rank_id=3)
    torch.tanh(torch.ones(1))
    watcher.stop()


def one_value(watcher: PrecisionDebugger) -> None:
    watcher.save(torch.ones(1), "other")


@pytest.mark.parametrize(
    ("level", "later", "stays"),
    [
        ("mix", one_call, {"Torch.tanh.0.forward.input.0.pt", "Torch.tanh.0.forward.output.0.pt"}),
        ("debug", one_value, {"other.0.debug.pt"}),
    ],
    ids=PROGRAMS,
)
def test_every_kind_of_tensor_file_of_an_earlier_run_is_removed(
    level: str, later: Callable[[PrecisionDebugger], None], stays: set[str], tmp_path: Path
) -> None:
    earlier = run(tmp_path, level, PROGRAMS[level])
    assert len(list(earlier.iterdir())) > 9
    assert {file.name for file in run(tmp_path, level, later).iterdir()} == stays


OTHERS = [
    "weights.pt", "reference.npy", "model.forward.pt", "epoch.3.pt", "linear.0.weight.pt",
    "debug.pt", "layer.0.backward.pt", "v1.0.npy", "run~2.pt", "notes.txt",
    "Torch.tanh.0.forward.input.0.txt",
]  # fmt: skip


@pytest.mark.parametrize("discard", [False, True], ids=["a later run", "step(dump=False)"])
def test_files_of_others_among_the_tensors_stay(discard: bool, tmp_path: Path) -> None:
    folder = run(tmp_path, "mix", one_call)
    for name in OTHERS:
        (folder / name).write_text("mine")
    if discard:
        watcher = debugger(tmp_path, level="mix", task="tensor")
        one_call(watcher)
        watcher.step(dump=False)
    else:
        run(tmp_path, "mix", one_call)
    found = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert {name for name, content in found.items() if content == b"mine"} == set(OTHERS)
    assert len(found) == len(OTHERS) + (0 if discard else 2)
