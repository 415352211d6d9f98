"""Files have the permissions the user asks for, links lead nowhere, data is never code.

Links: before a step begins anything may stand in dump_path; while it is written somebody may put
links in place of files. (Who may rename our folders has the permissions to change the files.)
"""

from __future__ import annotations

import ast
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import msprobe
from helpers import debugger, read_dump
from msprobe.pytorch import PrecisionDebugger
from runner import run_script

SOURCE = Path(msprobe.__file__).parent


def run_step(watcher: PrecisionDebugger, between: Callable[[], Any] = lambda: None) -> None:
    """A step that writes every kind of file, the log among them."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Identity(), nn.Linear(2, 2))
    watcher.start(net, rank_id=0)
    x = torch.ones(1, 2)
    net[1](net[0](x)).sum().backward()
    between()
    net[1](net[0](x)).sum().backward()
    net[2](torch.ones(2, dtype=torch.uint8).view(torch.bits8))
    watcher.stop()
    watcher.step()


# ---- permissions -------------------------------------------------------------------------------


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077], ids=oct)
def test_files_and_folders_have_the_permissions_of_the_umask(
    mask: int, umask: Callable[[int], int], tmp_path: Path
) -> None:
    umask(mask)
    watcher = debugger(tmp_path / "dump", level="mix", task="tensor")
    run_step(watcher)
    for folder, _, files in os.walk(tmp_path / "dump"):
        assert os.stat(folder).st_mode & 0o777 == 0o777 & ~mask
        for file in files:
            assert os.stat(Path(folder) / file).st_mode & 0o777 == 0o666 & ~mask, file
    names = {p.name for p in (tmp_path / "dump" / "step0" / "rank0").iterdir()}
    assert names == {
        "dump.json", "stack.json", "construct.json", "coverage.json", "dump_error_info.log",
        "dump_tensor_data",
    }  # fmt: skip


# ---- links that somebody has put where we write ------------------------------------------------


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A folder with a file of each name that we write: all must be as before."""
    folder = tmp_path / "victim"
    folder.mkdir()
    names = [*FILES, TENSOR, "step0", "rank0", "notes"]
    for name in names:
        (folder / name).write_text("mine")
    yield folder
    assert {p.name: p.read_text() for p in folder.iterdir()} == dict.fromkeys(names, "mine")


FILES = [
    "dump.json", "stack.json", "construct.json", "coverage.json", "dump_error_info.log",
    ".dump.json.0", ".dump.json.1", ".dump.json.new", ".stack.json.new", ".coverage.json.new",
]  # fmt: skip
TENSOR = "Module.0.Linear.forward.0.input.0.pt"


def plant(place: Path, target: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    elif place.exists():
        place.unlink()
    place.symlink_to(target)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("exists", [True, False], ids=["to a file", "to nowhere"])
def test_link_in_place_of_a_file_is_replaced(
    name: str, exists: bool, victim: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "dump" / "step0" / "rank0"
    plant(folder / name, victim / name if exists else tmp_path / "new")
    run_step(debugger(tmp_path / "dump", level="mix", task="tensor"))
    assert not (tmp_path / "new").exists()
    for path in folder.iterdir():
        assert not path.is_symlink()
    assert len(read_dump(tmp_path / "dump").data) > 5


PLACES = ["step0", "step0/rank0", "step0/rank0/dump_tensor_data"]


@pytest.mark.parametrize("place", PLACES)
def test_link_in_place_of_a_folder_is_replaced(place: str, victim: Path, tmp_path: Path) -> None:
    plant(tmp_path / "dump" / place, victim)
    run_step(debugger(tmp_path / "dump", level="mix", task="tensor"))
    assert not (tmp_path / "dump" / place).is_symlink()
    dump = read_dump(tmp_path / "dump")
    assert len(dump.tensors(list(dump.data.values()))) > 5


def test_link_in_place_of_a_tensor_is_replaced(victim: Path, tmp_path: Path) -> None:
    folder = tmp_path / "dump" / "step0" / "rank0" / "dump_tensor_data"
    plant(folder / TENSOR, victim / TENSOR)
    run_step(debugger(tmp_path / "dump", level="mix", task="tensor"))
    assert not (folder / TENSOR).is_symlink()


@pytest.mark.parametrize(
    "name", [*FILES, "dump_tensor_data/" + TENSOR.replace("0.input", "1.input")]
)
def test_link_that_comes_while_the_step_is_written_is_not_followed(
    name: str, victim: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "dump" / "step0" / "rank0"
    watcher = debugger(tmp_path / "dump", level="mix", task="tensor")

    def harm() -> None:
        watcher.stop()
        plant(folder / name, victim / Path(name).name.replace("1.input", "0.input"))
        PrecisionDebugger.start(nn.Sequential(nn.Linear(2, 2)))

    run_step(watcher, harm)


def test_folder_of_a_rank_that_becomes_known_late_is_not_reached_through_a_link(
    victim: Path, tmp_path: Path
) -> None:
    watcher = debugger(tmp_path / "dump", level="L1", task="tensor")
    watcher.start()
    torch.tanh(torch.ones(1))
    watcher.stop()
    plant(tmp_path / "dump" / "step0" / "rank0", victim)
    watcher.start(rank_id=0)
    watcher.stop()
    watcher.step()


# ---- data that would like to be code -----------------------------------------------------------


def calls() -> Iterator[tuple[str, ast.Call]]:
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                yield f"{path.relative_to(SOURCE)}:{node.lineno}", node


def name_of(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return f"{name_of(function.value)}.{function.attr}"
    return function.id if isinstance(function, ast.Name) else ""


def keyword(call: ast.Call, name: str) -> str | None:
    return next((ast.unparse(k.value) for k in call.keywords if k.arg == name), None)


FORBIDDEN = {
    "eval", "exec", "compile", "__import__",
    "pickle.load", "pickle.loads", "marshal.loads", "marshal.load", "shelve.open", "os.system",
    "dill.load", "joblib.load", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all",
    "torch.jit.load", "torch.hub.load", "runpy.run_module",
}  # fmt: skip


def test_source_loads_no_pickle_and_runs_no_text() -> None:
    found = [where for where, call in calls() if name_of(call.func) in FORBIDDEN]
    # selfcheck runs the user's own script: that is what it is for.
    assert [where for where in found if not where.startswith(("selfcheck", "scripts"))] == []


def test_only_modules_that_the_source_names_are_imported() -> None:
    imports = [(w, c) for w, c in calls() if name_of(c.func).endswith("import_module")]
    assert [w for w, c in imports if not isinstance(c.args[0], ast.Constant)] == []


def test_every_torch_load_is_of_weights_only() -> None:
    loads = [(w, c) for w, c in calls() if name_of(c.func) in ("torch.load", "_torch_load")]
    assert [where for where, call in loads if keyword(call, "weights_only") != "True"] == []


def test_every_yaml_is_loaded_safely() -> None:
    loaders = []
    for where, call in calls():
        if name_of(call.func).endswith("yaml.load"):
            loader = keyword(call, "Loader") or ast.unparse(call.args[1])
            path = SOURCE / where.partition(":")[0]
            lines = [line for line in path.read_text().splitlines() if loader in line]
            loaders.append(any("SafeLoader" in line for line in lines))
    assert all(loaders)
    assert any(name_of(call.func).endswith(("yaml.safe_load", "yaml.load")) for _, call in calls())


def test_no_numpy_file_is_read_as_pickle() -> None:
    loads = [(w, c) for w, c in calls() if name_of(c.func) in ("np.load", "numpy.load", "np.save")]
    assert [w for w, c in loads if keyword(c, "allow_pickle") == "True"] == []


TABLES = """
import os, sys
import torch

site, mark = sys.argv[1:3]
sys.path.insert(0, site)
tables = site + "/msprobe/pytorch/dump/api_dump/"
yaml = {
    "a module that is not loaded": "evil:\\n- run\\nevil.inner:\\n- run\\n",
    "a tag of python": "!!python/object/apply:os.mkdir ['" + mark + "/tag']\\n",
    "a module by a tag": "torch: !!python/module:evil\\n",
}
for kind, text in yaml.items():
    child = os.fork()
    if not child:
        with open(tables + "custom_wrap_ops.yaml", "w") as file:
            file.write(text)
        from msprobe.errors import ConfigError
        from msprobe.pytorch import PrecisionDebugger
        try:
            PrecisionDebugger(dump_path=mark + "/dump", level="L1")
            PrecisionDebugger.start()
            torch.tanh(torch.ones(1))
            PrecisionDebugger.stop()
            outcome = "runs"
        except ConfigError as error:
            outcome = "refused"
        print("found:", kind, outcome, "evil" in sys.modules, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_table_of_custom_functions_neither_imports_nor_runs_anything(tmp_path: Path) -> None:
    site, mark = tmp_path / "site", tmp_path / "mark"
    mark.mkdir()
    shutil.copytree(SOURCE, site / "msprobe")
    (site / "evil.py").write_text(f"open({str(mark / 'imported')!r}, 'w')\ndef run(): pass\n")
    script = tmp_path / "script.py"
    script.write_text(TABLES)
    arguments = [str(site), str(mark)]
    code, output = run_script(script, arguments, env={"PYTHONPATH": str(site)}, fresh=True)
    assert code == 0, output
    assert [line for line in output.splitlines() if line.startswith("found: ")] == [
        "found: a module that is not loaded runs False",
        "found: a tag of python refused False",
        "found: a module by a tag refused False",
    ], output
    assert [p.name for p in mark.iterdir()] == ["dump"]
