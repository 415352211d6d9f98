"""Messages go through logging, are visible without set-up, and are quiet by MSPROBE_LOG."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from msprobe.errors import ConfigError
from msprobe.pytorch import PrecisionDebugger
from runner import run_script

SCRIPT = """
import logging, sys
import torch
from msprobe.pytorch import PrecisionDebugger
if sys.argv[1] == "own":
    logging.basicConfig(format="mine: %(message)s", level=logging.WARNING)
if sys.argv[1] == "level":
    logging.getLogger("msprobe").setLevel(logging.ERROR)
debugger = PrecisionDebugger(dump_path="dump")
for _ in range(2):
    debugger.start()
    torch.relu(torch.ones(2))
    debugger.stop()
    debugger.step()
"""


def said(folder: Path, how: str, level: str) -> list[str]:
    (folder / "script.py").write_text(SCRIPT)
    code, output = run_script(
        folder / "script.py", [how], cwd=folder, env={"MSPROBE_LOG": level}, fresh=True
    )
    assert code == 0, output
    return output.splitlines()


def test_first_start_and_each_step_say_one_line(tmp_path: Path) -> None:
    lines = said(tmp_path, "none", "")
    assert lines[0].startswith("[msprobe] recording level L1, task statistics, to dump/step0/proc")
    what = r"\(1 record, 0\.\d kB, \d\.\d s from start to step\)"
    for n, line in enumerate(lines[1:]):
        assert re.fullmatch(rf"\[msprobe\] dump\.json is at dump/step{n} {what}", line)
    assert len(lines) == 3


def test_messages_are_quiet_from_the_level_asked_for(tmp_path: Path) -> None:
    assert said(tmp_path, "none", "warning") == []


def test_a_program_that_has_set_up_logging_keeps_its_handlers(tmp_path: Path) -> None:
    lines = said(tmp_path, "own", "info")
    assert len(lines) == 3
    assert all(line.startswith("mine: ") for line in lines)


@pytest.mark.parametrize(("asked", "lines"), [("", 0), ("info", 3)])
def test_a_level_that_the_program_has_set_stays_unless_the_environment_says_more(
    asked: str, lines: int, tmp_path: Path
) -> None:
    assert len(said(tmp_path, "level", asked)) == lines


def test_an_unknown_level_is_told_at_construction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MSPROBE_LOG", "loud")
    with pytest.raises(ConfigError, match=r"MSPROBE_LOG is 'loud'; expected one of debug, info"):
        PrecisionDebugger(dump_path=tmp_path)
