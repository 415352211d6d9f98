"""An error of ours in start() does not reach the training and leaves torch as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers import debugger
from msprobe.pytorch.dump import window


@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_a_window_that_can_not_be_opened_is_said_and_training_goes_on(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no hooks today")

    monkeypatch.setattr(window.Compilers, "install", broken)  # in the middle of the installation
    net = nn.Sequential(nn.Linear(2, 2))
    before = {name: dict(vars(part)) for name, part in net.named_modules()}
    watcher = debugger(tmp_path, level=level)
    watcher.start(net)
    net(torch.ones(1, 2)).sum().backward()
    watcher.stop()
    watcher.step()
    assert {name: dict(vars(part)) for name, part in net.named_modules()} == before
    (log,) = tmp_path.glob("step0/*/dump_error_info.log")
    assert "start: RuntimeError: no hooks today" in log.read_text()
