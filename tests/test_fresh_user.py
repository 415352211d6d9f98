"""What users met who had read nothing but the README."""

from __future__ import annotations

import ast
import errno
import gc
import itertools
import os
import sys
import threading
import weakref
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import msprobe
from helpers import debugger, read_dump
from msprobe.cli import main
from msprobe.errors import ConfigError
from msprobe.pytorch import PrecisionDebugger
from msprobe.pytorch.dump import jsonfile
from msprobe.pytorch.dump.passes import Orphans
from runner import run_script

SOURCE = Path(msprobe.__file__).parent


# ---- Ctrl-C while things are let go of ---------------------------------------------------------


def test_no_python_code_of_ours_runs_when_things_are_let_go_of() -> None:
    """Python drops what a signal raises within a finalizer or the callback of a weak reference."""
    banned = {"WeakSet", "WeakValueDictionary", "WeakKeyDictionary", "finalize", "__del__"}
    collector = [SOURCE / "pytorch" / "dump", SOURCE / "pytorch" / "debugger"]
    for path in itertools.chain.from_iterable(folder.rglob("*.py") for folder in collector):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {getattr(n, "attr", getattr(n, "name", None)) for n in ast.walk(tree)}
        assert not names & banned, path


@pytest.mark.parametrize("level", ["L0", "mix"])
def test_end_of_a_recorded_graph_runs_no_python_function(level: str, tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    watcher = debugger(tmp_path, level=level)
    watcher.start(net)
    kept = [net(torch.ones(1, 3)).sum() for _ in range(3)]
    watcher.stop()
    watcher.step()
    entered: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            entered.append(frame.f_code.co_filename)

    gc.collect()
    sys.setprofile(note)
    kept.clear()
    gc.collect()
    sys.setprofile(None)
    assert [name for name in entered if name.startswith(str(SOURCE))] == []


def test_hooks_of_what_is_gone_are_removed_at_the_next_occasion() -> None:
    class Thing:
        pass

    class Handle:
        removed = 0

        def remove(self) -> None:
            self.removed += 1

    orphans, thing, handle = Orphans(), Thing(), Handle()
    orphans.watch(thing, {"weight": handle})
    orphans.remove()
    assert handle.removed == 0
    gone = weakref.ref(thing)
    del thing
    gc.collect()
    assert gone() is None
    orphans.remove()
    orphans.remove()
    assert handle.removed == 1


# ---- a full disk -------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", range(6))
def test_files_that_can_not_be_begun_are_closed(
    failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = jsonfile._write_all, itertools.count()

    def write(*arguments: Any) -> None:
        if next(calls) == failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(*arguments)

    watcher = debugger(tmp_path, level="mix")
    before = sorted(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(jsonfile, "_write_all", write)
        watcher.start(nn.Linear(2, 2))
        watcher.stop()
        watcher.step()
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert not [path for path in tmp_path.rglob(".*")]


# ---- numbers -----------------------------------------------------------------------------------


def test_large_finite_elements_are_not_told_as_infinite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watcher = debugger(tmp_path, level="L1")
    watcher.start()
    torch.relu(torch.full((1000, 1000), 100.0).half())  # the Norm is beyond float16
    watcher.stop()
    watcher.step()
    (step,) = msprobe.read(tmp_path).steps
    (rank,) = step.ranks
    tensor = rank["Torch.relu.0.forward"].tensor("output.0")
    assert tensor.norm == float("inf")
    assert tensor.is_finite
    assert main(["show", str(tmp_path)]) == 0
    assert "no NaN or infinity in any statistic" in capsys.readouterr().out


@pytest.mark.parametrize("in_background", [False, True], ids=["few wait", "async_dump"])
def test_sparse_tensors_are_saved(in_background: bool, tmp_path: Path) -> None:
    top = {"async_dump": in_background}
    watcher = debugger(tmp_path, level="L1", task="tensor", top=top, list=["add"])
    one = torch.eye(3).to_sparse()
    watcher.start()
    total = torch.add(one, one)
    watcher.stop()
    watcher.step()
    dump = read_dump(tmp_path)
    entry = dump.data["Torch.add.0.forward"]["output"][0]
    found = torch.load(dump.folder / "dump_tensor_data" / entry["data_name"], weights_only=True)
    assert torch.equal(found.to_dense(), total.to_dense())


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize("task", ["statistics", "tensor"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_have_the_numbers_of_all_their_elements(
    layout: torch.layout, task: str, tmp_path: Path
) -> None:
    parts = [torch.tensor([1.0, -2.0]), torch.tensor([3.0, 4.0, 5.0])]
    nested = torch.nested.nested_tensor(parts, layout=layout)
    watcher = debugger(tmp_path, level="L1", task=task)
    watcher.start()
    torch.sin(nested)
    watcher.stop()
    watcher.step()
    dump = read_dump(tmp_path)
    entry = dump.data["Torch.sin.0.forward"]["input_args"][0]
    assert [entry["Max"], entry["Min"]] == [5.0, -2.0]
    assert entry["Mean"] == pytest.approx(2.2, rel=1e-6)
    assert entry["Norm"] == pytest.approx(55**0.5, rel=1e-6)
    assert (entry["shape"] is None) == (layout is torch.strided)
    assert "data_name" not in entry
    assert "report" not in "".join(dump.errors())


# ---- odd calls and places ----------------------------------------------------------------------


def test_start_and_stop_from_several_threads_raise_nothing(tmp_path: Path) -> None:
    watcher = debugger(tmp_path, level="L1")
    raised: list[Exception] = []

    def work() -> None:
        try:
            for _ in range(20):
                watcher.start()
                torch.sin(torch.zeros(3))
                watcher.stop()
                watcher.step()
        except Exception as error:
            raised.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert raised == []


def test_step_within_a_window_says_that_it_has_closed_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watcher = debugger(tmp_path, level="L1")
    with caplog.at_level("INFO", logger="msprobe"):
        for _ in range(2):
            watcher.start()
            watcher.step()
    assert caplog.text.count("step() has closed the window") == 1


def test_removed_working_directory_does_not_matter_to_an_absolute_path(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, tempfile, torch\n"
        "from msprobe.pytorch import PrecisionDebugger\n"
        "folder = tempfile.mkdtemp(); os.chdir(folder); os.rmdir(folder)\n"
        "PrecisionDebugger(dump_path=sys.argv[1], level='L1')\n"
        "PrecisionDebugger.start(); torch.sin(torch.ones(1))\n"
        "PrecisionDebugger.stop(); PrecisionDebugger.step()\n"
    )
    code, output = run_script(script, [str(tmp_path / "dump")], tmp_path, fresh=True)
    assert code == 0, output
    assert len(read_dump(tmp_path / "dump").data) == 1


def test_path_that_is_too_deep_is_a_wrong_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dump_path"):
        PrecisionDebugger(dump_path=str(tmp_path) + "/d" * 3000)


def test_name_with_a_line_break_is_a_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net = nn.Sequential()
    net.add_module("lin\n", nn.Linear(2, 2))
    watcher = debugger(tmp_path, level="mix")
    watcher.start(net)
    net(torch.ones(1, 2)).sum().backward()
    watcher.stop()
    watcher.step()
    assert main(["check", str(tmp_path)]) == 0, capsys.readouterr().out
