"""A small model with each kind of call in it, and readers of the files that a run of it leaves."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import msprobe

PACKAGE = str(Path(msprobe.__file__).parent)
LEVELS = ("L0", "L1", "mix")


class Net(nn.Module):
    """Modules, an in-place module, a function, an operator of Tensor."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, width)
        self.act = nn.ReLU(inplace=True)
        self.fc2 = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.act(self.fc1(x))) * 2)


def make_net(seed: int = 0) -> Net:
    """The same weights for the same seed, whatever the generators have drawn before."""
    net = Net()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return net


def batch(number: int) -> torch.Tensor:
    """The inputs of one training step."""
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(100 + number))


def read_json(path: Path) -> Any:
    """A file that must be strict JSON in which no name stands twice."""

    def unique(members: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in members]
        assert len(names) == len(set(names)), f"{path}: a name stands twice"
        return dict(members)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{path}: {constant} is no JSON")

    return json.loads(
        path.read_text(encoding="utf-8"), object_pairs_hook=unique, parse_constant=refuse
    )


def rank_folder(dump_path: Path | str, step: int = 0) -> Path:
    """The one folder ``rank<R>`` or ``proc<PID>`` of a step."""
    (folder,) = (Path(dump_path) / f"step{step}").iterdir()
    return folder


def read_data(dump_path: Path | str, step: int = 0, file: str = "dump.json") -> dict[str, Any]:
    """The records of a step, by name in the order of the file."""
    return read_json(rank_folder(dump_path, step) / file)["data"]


def read_beside(dump_path: Path | str, file: str, step: int = 0) -> Any:
    """Another file of a step: construct.json, stack.json, coverage.json."""
    return read_json(rank_folder(dump_path, step) / file)


def step_names(dump_path: Path | str) -> list[str]:
    """Which steps have a folder."""
    return sorted(folder.name for folder in Path(dump_path).iterdir())


def our_frames(function: Callable[[], Any]) -> Counter[str]:
    """Calls of functions of the package while ``function()`` runs, by name."""
    entered: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            entered[f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return entered
