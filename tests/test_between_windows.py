"""What the user changes between two windows is seen by the next one, as by a first window.

A window keeps what it can of the one before: the plan of the patches, the hooks of known modules,
where references were found. The changes here leave the number of modules, of names and of
attributes as it was: counting would not notice them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers import Dump, debugger, read_dump
from msprobe.pytorch import PrecisionDebugger

Change = Callable[[nn.Module, pytest.MonkeyPatch], None]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act: Any = abs
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.act(self.inner(x))
        return result


class Doubling:
    """A function of the user's that is an object: its class may change."""

    def __call__(self, x: Tensor) -> Tensor:
        return 2 * x


class Halving(Doubling):
    def __call__(self, x: Tensor) -> Tensor:
        return x / 2


def holding(function: Any) -> Change:
    def change(model: Any, patch: pytest.MonkeyPatch) -> None:
        model[0].act = function

    return change


def part_replaced(model: Any, patch: pytest.MonkeyPatch) -> None:
    model[1].inner[1] = nn.GELU()


def parts_exchanged(model: Any, patch: pytest.MonkeyPatch) -> None:
    parts = model[1].inner
    parts[0], parts[1] = parts[1], parts[0]


def part_renamed(model: Any, patch: pytest.MonkeyPatch) -> None:
    parts = model[0].inner._modules
    parts["last"] = parts.pop("1")


def part_shared(model: Any, patch: pytest.MonkeyPatch) -> None:
    model[1].inner[0] = model[0].inner[0]


def part_of_another_class(model: Any, patch: pytest.MonkeyPatch) -> None:
    model[0].inner[1].__class__ = nn.Tanh


def torch_patched(model: Any, patch: pytest.MonkeyPatch) -> None:
    original = F.relu
    patch.setattr(F, "relu", lambda x, inplace=False: original(x) + 1)


def tensor_patched(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.Tensor, "tanh", lambda x: x)
    model[0].act = torch.Tensor.tanh


def torch_patched_by_an_object(model: Any, patch: pytest.MonkeyPatch) -> None:
    model[0].act = Doubling()
    patch.setattr(F, "gelu", model[0].act)


def object_of_another_class(model: Any, patch: pytest.MonkeyPatch) -> None:
    model[0].act.__class__ = Halving


CHANGES: dict[str, list[Change]] = {
    "a function of Python": [holding(F.silu)],
    "a builtin function": [holding(F.gelu)],
    "a function of torch": [holding(torch.tanh)],
    "a method": [holding(torch.Tensor.sigmoid)],
    "a slot": [holding(torch.Tensor.__abs__)],
    "another function after it": [holding(torch.tanh), holding(torch.sigmoid)],
    "part replaced": [part_replaced],
    "parts exchanged": [parts_exchanged],
    "part renamed": [part_renamed],
    "part shared": [part_shared],
    "part of another class": [part_of_another_class],
    "torch patched": [torch_patched],
    "tensor patched": [tensor_patched],
    "torch patched by an object": [torch_patched_by_an_object],
    "its class changed": [torch_patched_by_an_object, object_of_another_class],
}


def state(model: nn.Module) -> list[Any]:
    """Every attribute of every module in order, by identity, and what their tables hold."""
    return [
        (name, key, id(value), [*value.items()] if isinstance(value, dict) else None)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
    ]


def last_window(
    folder: Path, level: str, model: nn.Module, changes: Sequence[Change], patch: Any
) -> Dump:
    """What the window after the changes records, with one empty window before each change."""
    PrecisionDebugger._instance = None
    watcher = debugger(folder, level=level)
    for change in changes:
        watcher.start(model)
        watcher.stop()
        change(model, patch)
    before = state(model)
    watcher.start(model)
    model(torch.tensor([[1.0, -2.0], [3.0, 4.0]]))
    watcher.stop()
    watcher.step()
    assert state(model) == before
    return read_dump(folder)


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_window_after_a_change_records_what_a_first_window_records(
    level: str, changes: list[Change], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(Block(), Block())
    dump = last_window(tmp_path / "second", level, model, changes, monkeypatch)
    expected = last_window(tmp_path / "first", level, model, [], monkeypatch)
    assert dump.data == expected.data
    assert dump.construct == expected.construct
    assert dump.data


@pytest.mark.parametrize(
    ("change", "record"),
    [
        (holding(F.silu), "Functional.silu.0.forward"),
        (holding(F.gelu), "Functional.gelu.0.forward"),
        (holding(torch.tanh), "Torch.tanh.0.forward"),
        (holding(torch.Tensor.sigmoid), "Tensor.sigmoid.0.forward"),
        (torch_patched_by_an_object, "Functional.gelu.0.forward"),
    ],
    ids=["function", "builtin function", "function of torch", "method", "object"],
)
def test_function_given_to_a_module_between_windows_is_recorded(
    change: Change, record: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(Block(), Block())
    assert record in last_window(tmp_path, "mix", model, [change], monkeypatch).data


def test_module_imported_between_windows_is_searched_when_another_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sys.modules is as long as it was."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("first_of_a_user", "second_of_a_user"):
        (tmp_path / f"{name}.py").write_text("from torch.nn.functional import silu\n")
    watcher = debugger(tmp_path / "dump", level="L1")
    for name in ("first_of_a_user", "second_of_a_user"):
        module = __import__(name)
        watcher.start()
        module.silu(torch.ones(2))
        watcher.stop()
        del sys.modules[name]
    watcher.step()
    names = [f"Functional.silu.{number}.forward" for number in range(2)]
    assert list(read_dump(tmp_path / "dump").data) == names


@pytest.mark.parametrize("first", [None, F.relu, torch.tanh], ids=["None", "F.relu", "torch.tanh"])
def test_global_set_between_steps_is_recorded(
    first: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of names is as it was; what the name led to before does not matter."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "globals_of_a_user.py").write_text("act = None\n")
    user: Any = __import__("globals_of_a_user")
    watcher = debugger(tmp_path / "dump", level="L1")
    found = []
    for step, function in enumerate((first, F.silu, first, torch.sigmoid)):
        user.act = function
        watcher.start()
        if function is not None:
            user.act(torch.ones(2))
        watcher.stop()
        watcher.step()
        assert user.act is function
        found.append(list(read_dump(tmp_path / "dump", step=step).data))
    del sys.modules["globals_of_a_user"]
    names = {None: [], F.relu: ["Functional.relu.0.forward"], torch.tanh: ["Torch.tanh.0.forward"]}
    silu, sigmoid = ["Functional.silu.0.forward"], ["Torch.sigmoid.0.forward"]
    assert found == [names[first], silu, names[first], sigmoid]
