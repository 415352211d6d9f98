"""The line that ends a step tells what is on disk, also when the disk was full."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers import debugger, read_json
from msprobe.pytorch import PrecisionDebugger
from msprobe.pytorch.dump import jsonfile

WINDOWS = 3


def call(watcher: PrecisionDebugger, model: nn.Module) -> None:
    watcher.start(model)
    model(torch.ones(1, 2)).sum().backward()
    watcher.stop()


def save(watcher: PrecisionDebugger, model: nn.Module) -> None:
    value = model(torch.ones(1, 2))
    watcher.save(value, "value")
    value.sum().backward()
    watcher.save(value, "again", save_backward=False)
    watcher.stop()


@pytest.mark.parametrize(
    "full",
    [{0, 1, 2}, {0}, {1}, {2}, {0, 1}, {1, 2}, set()],
    ids=lambda windows: f"full in {sorted(windows)}",
)
@pytest.mark.parametrize(
    ("level", "window"), [("L1", call), ("mix", call), ("debug", save)], ids=["L1", "mix", "debug"]
)
def test_line_at_the_end_of_a_step_counts_the_records_on_disk(
    level: str,
    window: Callable[[PrecisionDebugger, nn.Module], None],
    full: set[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("MSPROBE_LOG", "info")
    original = jsonfile._write_all
    number = 0

    def write(*arguments: Any) -> None:
        if number in full and begun:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(*arguments)

    begun = False
    monkeypatch.setattr(jsonfile, "_write_all", write)
    watcher = debugger(tmp_path, level=level)
    model = nn.Sequential(nn.Linear(2, 2))
    if level == "debug":
        watcher.save(1, "first")
    else:
        watcher.start(model)
        watcher.stop()
    begun = True
    for number in range(WINDOWS):  # noqa: B007 (read by `write`)
        window(watcher, model)
    watcher.step()
    (said,) = [re.findall(r"\((\d+) records?,", m) for m in caplog.messages if "from start" in m]
    (file,) = [*tmp_path.rglob("dump.json"), *tmp_path.rglob("debug.json")]
    assert [len(read_json(file)["data"])] == list(map(int, said))
