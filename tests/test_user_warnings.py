"""A warning about the user's own line names that line, wherever it was found out."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from helpers import debugger, read_dump, read_json
from msprobe.pytorch import PrecisionDebugger, seed_all


def second_construction(folder: Path) -> None:
    debugger(folder, level="L1")
    with warnings.catch_warnings():
        PrecisionDebugger(dump_path=str(folder / "other"))


def unfit_value(folder: Path) -> None:
    debugger(folder, level="debug").save(object(), "x")  # type: ignore[arg-type]


def old_keyword(folder: Path) -> None:
    seed_all(is_gpu=False)


@pytest.mark.parametrize("mistake", [second_construction, unfit_value, old_keyword])
def test_warning_names_the_line_of_the_user(
    mistake: Callable[[Path], None], tmp_path: Path
) -> None:
    with pytest.warns(UserWarning, match=r"\w") as caught:
        mistake(tmp_path)
    assert {warning.filename for warning in caught} == {__file__}


@pytest.mark.parametrize("action", ["ignore", "error"])
@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"leve": 1}, "'leve' (did you mean 'level'?): ignored"),
        ({"task": "structure", "level": "L1"}, "mix is used"),
        ({"statistics": {"overflow_nums": 4}}, "'overflow_nums' has no effect"),
        ({"statistics": {"slice": [{"begin": 5, "end": 2}]}}, "selects nothing"),
        ({"task": "tensor", "async_dump": True}, "'async_dump' with task tensor"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)
def test_warning_about_the_configuration_is_logged_whatever_the_script_does_to_warnings(
    action: Literal["ignore", "error"],
    config: dict[str, object],
    said: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter(action)
        PrecisionDebugger({"dump_path": str(tmp_path), **config})
    (message,) = caplog.messages
    assert said in message


def test_every_saved_value_and_gradient_counts_as_a_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MSPROBE_LOG", "info")
    watcher = debugger(tmp_path, level="debug")
    with caplog.at_level("INFO", logger="msprobe"):
        x = torch.ones(2, requires_grad=True)
        watcher.save(x * 1, "x")
        watcher.save(x * 2, "y")
        watcher.step()
    (file,) = tmp_path.glob("step0/*/debug.json")
    assert len(read_json(file)["data"]) == 4
    assert "4 records" in caplog.text


def test_statistics_of_wide_floats_are_numbers(tmp_path: Path) -> None:
    watcher = debugger(tmp_path, level="L1")
    watcher.start()
    with pytest.raises(TypeError):  # torch takes no longdouble, and the call is recorded
        torch.add(torch.ones(1), np.array([1.5, -2.5], dtype=np.longdouble), alpha="no")
    watcher.stop()
    watcher.step()
    records = read_dump(tmp_path).data
    (record,) = [r for name, r in records.items() if ".add." in name]
    entry = record["input_args"][1]
    assert [entry[key] for key in ("Max", "Min", "Mean")] == [1.5, -2.5, -0.5]
