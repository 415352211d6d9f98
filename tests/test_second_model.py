"""start() with a further model while a window is open."""

from __future__ import annotations

import io
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import msprobe
from helpers import debugger


class Activation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = F.relu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(x)


def test_functions_held_by_a_second_model_are_recorded_under_their_names(tmp_path: Path) -> None:
    first, second = nn.Sequential(Activation()), nn.Sequential(Activation())
    watcher = debugger(tmp_path)
    for model in (first, second):
        watcher.start(model)
        model(torch.ones(2))
    torch.save(second, io.BytesIO())  # what it holds is what torch.nn.functional has now
    watcher.stop()
    watcher.step()
    names = msprobe.read(tmp_path).ranks[0].names()
    assert names[2:] == ["Functional.relu.1.forward", "Module.0.Activation.forward.1"]
    assert second[0].act is F.relu
