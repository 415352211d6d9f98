"""What the tool costs, in Python frames of its own: the same number on every machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import msprobe
from helpers import debugger, read_dump
from msprobe.pytorch import PrecisionDebugger
from recorded import our_frames
from runner import run_script

PACKAGE = str(Path(msprobe.__file__).parent)
WARM_UP = 3  # calls before the counted one: stacks, types and counters are known by then


def open_window(folder: Path, model: Any = None, **config: Any) -> PrecisionDebugger:
    watcher = debugger(folder, **config)
    watcher.start(model)
    return watcher


@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_calls_after_stop_take_no_frame_of_ours(level: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    x = torch.ones(2, 2)
    open_window(tmp_path, model, level=level).stop()
    counted = our_frames(lambda: (F.relu(x), x + 1, torch.matmul(x, x), model(x).sum().backward()))
    assert counted == {}


def test_call_of_a_function_taken_in_the_window_takes_one_frame_after_it(tmp_path: Path) -> None:
    watcher = open_window(tmp_path, level="L1")
    taken = F.relu
    watcher.stop()
    assert our_frames(lambda: taken(torch.ones(2))).total() == 1


@pytest.mark.parametrize("level", ["L1", "mix"])
def test_collected_call_takes_at_most_40_frames(level: str, tmp_path: Path) -> None:
    """Statistics, stack, and the hooks for its gradient."""
    model = nn.Sequential(nn.ReLU())
    open_window(tmp_path, model, level=level)
    x = torch.ones(2, 2, requires_grad=True)
    counts = [our_frames(lambda: F.relu(x)) for _ in range(WARM_UP + 1)]
    PrecisionDebugger.stop()

    assert counts[-1].total() <= 40, counts[-1]
    dump = read_dump(tmp_path)
    assert dump.data[f"Functional.relu.{WARM_UP}.forward"]["output"][0]["Norm"] == 2.0
    assert sum(len(names) for names, _ in dump.stack.values()) == len(dump.data)


def test_collected_call_takes_at_most_40_frames_in_backward(tmp_path: Path) -> None:
    open_window(tmp_path, level="L1")
    x = torch.ones(2, 2, requires_grad=True)
    ones = torch.ones(2, 2)
    outputs = [F.relu(x) for _ in range(WARM_UP + 1)]
    counts = [our_frames(lambda out=out: out.backward(ones)) for out in outputs]
    PrecisionDebugger.stop()

    assert counts[-1].total() <= 40, counts[-1]
    assert f"Functional.relu.{WARM_UP}.backward" in read_dump(tmp_path).data


def test_frames_of_a_call_do_not_grow_with_the_number_of_calls(tmp_path: Path) -> None:
    open_window(tmp_path, level="L1")
    x = torch.ones(2, 2, requires_grad=True)
    counts = [our_frames(lambda: F.relu(x)).total() for _ in range(WARM_UP + 1024)][WARM_UP:]
    PrecisionDebugger.stop()
    # Now and then one call measures the tensors, and writes the records, of many.
    assert counts.count(min(counts)) >= 0.98 * len(counts)
    assert sum(counts) / len(counts) <= 40


# ---- import and construction -------------------------------------------------------------------

SCRIPT = """
import json, os, sys
import torch, torch.distributed.distributed_c10d, numpy, yaml

OWNERS = [torch, torch.Tensor, torch.nn.functional, torch._VF, torch.linalg, torch.fft, torch.jit,
          torch.distributed, torch.distributed.distributed_c10d, torch.nn.Module, torch.utils.data,
          torch.optim.Optimizer, torch.special, torch._tensor_str, numpy, numpy.random, yaml, json]

def state():
    return [list(vars(owner).items()) for owner in OWNERS]

def changed(before, after):
    return [f"{owner.__name__}: {[k for k, _ in new]}"
            for owner, old, new in zip(OWNERS, before, after)
            if [(k, id(v)) for k, v in old] != [(k, id(v)) for k, v in new]]

random = torch.get_rng_state().tolist(), numpy.random.get_state()[1].tolist()
before, loaded = state(), set(sys.modules)
import msprobe.pytorch
imported = state()
msprobe.pytorch.PrecisionDebugger({"level": "mix", "dump_path": sys.argv[1]})
constructed = state()
new = set(sys.modules) - loaded
print(json.dumps({
    "by import": changed(before, imported),
    "by construction": changed(imported, constructed),
    "modules": sorted({name.partition(".")[0] for name in new} - set(sys.stdlib_module_names)),
    "dynamo": sorted(name for name in new if name.startswith("torch._dynamo")),
    "random": random == (torch.get_rng_state().tolist(), numpy.random.get_state()[1].tolist()),
    "written": os.listdir(sys.argv[1]),
}))
"""


def test_import_and_construction_change_nothing_and_load_nothing_more(tmp_path: Path) -> None:
    """The libraries of the optional extra are used where they are installed."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    code, output = run_script(script, [str(tmp_path / "dump")], tmp_path, fresh=True)
    assert code == 0, output
    found = json.loads(output)
    assert "msprobe" in (modules := found.pop("modules"))
    assert {*modules} <= {"msprobe", "isal", "numkong", "orjson"}
    assert found == {
        "by import": [],
        "by construction": [],
        "dynamo": [],
        "random": True,
        "written": [],
    }


def test_import_of_the_package_alone_does_not_import_torch(tmp_path: Path) -> None:
    """Launchers look for it with ``importlib.util.find_spec`` and must not pay for torch."""
    script = tmp_path / "script.py"
    script.write_text(
        "import importlib.util, sys\n"
        "assert importlib.util.find_spec('msprobe') is not None\n"
        "import msprobe\n"
        "print([name for name in ('torch', 'numpy', 'yaml') if name in sys.modules])\n"
    )
    code, output = run_script(script, [], tmp_path, fresh=True)
    assert (code, output.strip()) == (0, "[]")
