"""``msprobe.read``: a dump as Python objects."""

from __future__ import annotations

import doctest
import json
import math
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import msprobe
from helpers import collect, debugger
from msprobe.errors import UsageError
from msprobe.records import Record
from msprobe.values import PlainValue, TensorValue

GOLDENS = Path(__file__).parent / "goldens"
SOURCE = str(Path(msprobe.__file__).parents[1])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.fc(x)).log()


def record_steps(path: Path, steps: int = 2, **options: Any) -> Net:
    torch.manual_seed(0)
    net = Net()
    watcher = debugger(path, **options)
    for _ in range(steps):
        watcher.start(net)
        net(torch.randn(2, 4)).sum().backward()
        watcher.stop()
        watcher.step()
    return net


def test_steps_ranks_and_records_are_walked_in_order(tmp_path: Path) -> None:
    record_steps(tmp_path)
    dump = msprobe.read(tmp_path)
    assert [step.number for step in dump] == [0, 1]
    (rank,) = dump.step(1)
    assert (rank.step, rank.number, rank.header["level"]) == (1, None, "mix")
    (data,) = (json.loads((rank.path / "dump.json").read_text()),)
    assert [record.name for record in rank] == list(data["data"]) == rank.names()
    assert len(list(dump.records())) == 2 * len(rank)


def test_record_has_what_the_file_has(tmp_path: Path) -> None:
    record_steps(tmp_path, 1)
    rank = msprobe.read(tmp_path).ranks[0]
    record = rank["Functional.linear.0.forward"]
    assert (record.kind, record.part) == ("Functional", "forward")
    assert record.parent == "Module.fc.Linear.forward.0"
    assert "in forward" in record.stack[0]
    weight = record["input_args"][1]
    raw = record.raw["input_args"][1]
    assert isinstance(weight, TensorValue)
    assert (weight.place, weight.shape, weight.dtype) == ("input_args.1", (3, 4), "torch.float32")
    assert [weight.max, weight.min, weight.mean, weight.norm] == [
        raw[name] for name in ("Max", "Min", "Mean", "Norm")
    ]
    assert weight.requires_grad is True
    places = [tensor.place for tensor in record.tensors]
    assert places == ["input_args.0", "input_args.1", "input_args.2", "output.0"]


def test_backward_record_has_the_stack_of_its_forward(tmp_path: Path) -> None:
    record_steps(tmp_path, 1)
    rank = msprobe.read(tmp_path).ranks[0]
    forward, backward = rank["Torch.relu.0.forward"], rank["Torch.relu.0.backward"]
    assert backward.stack == forward.stack != []
    module = rank["Module.fc.Linear.backward.0"]
    assert module.stack == rank["Module.fc.Linear.forward.0"].stack != []


def test_second_backward_over_a_graph_belongs_to_the_same_forward(tmp_path: Path) -> None:
    x = torch.ones(2, requires_grad=True)

    def twice() -> None:
        y = torch.exp(x).sum()
        y.backward(retain_graph=True)
        y.backward()

    collect(tmp_path, twice, level="L1")
    record = msprobe.read(tmp_path).ranks[0]["Torch.exp.0.backward.1"]
    assert (record.kind, record.part) == ("Torch", "backward")
    assert record.stack != []


def test_statistics_written_as_words_are_floats(tmp_path: Path) -> None:
    x = torch.tensor([1.0, float("inf"), float("nan")])
    y = torch.tensor([-1.0, float("-inf")])
    collect(tmp_path, lambda: (torch.relu(x), torch.abs(y)), level="L1")
    rank = msprobe.read(tmp_path).ranks[0]
    (nan,) = rank["Torch.relu.0.forward"]["input_args"]
    assert math.isnan(nan.max)
    assert not nan.is_finite
    (low,) = rank["Torch.abs.0.forward"]["input_args"]
    assert (low.max, low.min) == (-1.0, -math.inf)


def test_plain_values_come_back_as_what_they_were(tmp_path: Path) -> None:
    x = torch.ones(2, 3)
    collect(
        tmp_path,
        lambda: (torch.clamp(x, -math.inf, max=2), torch.sum(x, dim=[0], dtype=torch.float64)),
        level="L1",
    )
    rank = msprobe.read(tmp_path).ranks[0]
    clamp, total = rank["Torch.clamp.0.forward"], rank["Torch.sum.0.forward"]
    assert clamp["input_args"][1] == PlainValue("input_args.1", "float", -math.inf)
    assert clamp["input_kwargs"]["max"] == PlainValue("input_kwargs.max", "int", 2)
    assert total["input_kwargs"]["dim"][0].value == 0
    dtype = PlainValue("input_kwargs.dtype", "torch.dtype", "torch.float64")
    assert total["input_kwargs"]["dtype"] == dtype


def test_text_that_reads_like_a_number_stays_text(tmp_path: Path) -> None:
    folder = write(tmp_path, {"s.0.debug": {"type": "str", "value": "NaN"}})
    assert msprobe.read(folder).ranks[0]["s.0.debug"].content.value == "NaN"


def test_complex_number_is_a_complex(tmp_path: Path) -> None:
    folder = write(tmp_path, {"c.0.debug": {"type": "complex", "value": "1-2j"}})
    assert msprobe.read(folder).ranks[0]["c.0.debug"].content.value == 1 - 2j


def write(path: Path, records: dict[str, Any], name: str = "dump.json") -> Path:
    head = {"task": "statistics", "level": "mix", "framework": "pytorch", "dump_data_dir": None}
    (path / name).write_text(json.dumps({**head, "data": records}, indent=1))
    return path


def test_load_gives_the_saved_tensor(tmp_path: Path) -> None:
    net = record_steps(tmp_path, 1, task="tensor")
    rank = msprobe.read(tmp_path).ranks[0]
    weight = rank["Module.fc.Linear.forward.0"]["parameters"]["weight"]
    assert torch.equal(weight.load(), net.fc.weight)


def test_load_of_a_tensor_that_was_not_saved_says_what_to_do(tmp_path: Path) -> None:
    record_steps(tmp_path, 1)
    value = msprobe.read(tmp_path).ranks[0]["Torch.relu.0.forward"]["output"][0]
    with pytest.raises(UsageError, match=r'output\.0 was not saved: use "task": "tensor"'):
        value.load()


class Trap:
    def __reduce__(self) -> Any:
        return print, ("executed",)


def test_load_runs_no_code_from_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record_steps(tmp_path, 1, task="tensor")
    value = msprobe.read(tmp_path).ranks[0]["Torch.relu.0.forward"]["output"][0]
    assert value.path is not None
    torch.save(Trap(), value.path)
    with pytest.raises(Exception, match="Weights only load failed"):
        value.load()
    assert "executed" not in capsys.readouterr().out


def test_data_name_does_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    torch.save(torch.ones(1), tmp_path / "secret.pt")
    folder = tmp_path / "rank0"
    folder.mkdir()
    entry = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [1]}
    write(folder, {"x.0.debug": {**entry, "data_name": "../../secret.pt"}})
    with pytest.raises(FileNotFoundError):
        msprobe.read(folder).ranks[0]["x.0.debug"].content.load()


@pytest.mark.parametrize("layout", ["lines", "indented"])
def test_records_are_found_by_name_in_both_layouts(layout: str, tmp_path: Path) -> None:
    record_steps(tmp_path, 1)
    path = msprobe.read(tmp_path).ranks[0].path
    whole = json.loads((path / "dump.json").read_text())
    if layout == "indented":
        (path / "dump.json").write_text(json.dumps(whole, indent=1))
    rank = msprobe.read(tmp_path).ranks[0]
    assert {name: rank[name].raw for name in rank.names()} == whole["data"]
    assert "Torch.relu.0.forward" in rank
    assert [record.name for record in rank.find("relu")] == [
        name for name in whole["data"] if "relu" in name
    ]
    with pytest.raises(KeyError):
        rank["Torch.relu.7.forward"]


def test_coverage_says_what_was_not_recorded(tmp_path: Path) -> None:
    record_steps(tmp_path, 1, list=["no_such_name"])
    assert "'no_such_name'" in msprobe.read(tmp_path).ranks[0].coverage["selection_unmatched"][0]


def test_step_and_rank_are_chosen_by_number_or_name(tmp_path: Path) -> None:
    for name in ("step0/rank0", "step0/rank10", "step3/proc77"):
        (tmp_path / name).mkdir(parents=True)
        write(tmp_path / name, {})
    dump = msprobe.read(tmp_path)
    assert dump.step(0).rank(10).name == "rank10"
    assert dump.step(3).rank("proc77").number is None
    with pytest.raises(KeyError, match=r"2; there are \[0, 3\]"):
        dump.step(2)
    with pytest.raises(KeyError, match="there are rank0, rank10"):
        dump.step(0).rank(1)


def test_rank_folder_is_a_dump_of_one_rank(tmp_path: Path) -> None:
    record_steps(tmp_path, 1)
    (rank,) = msprobe.read(tmp_path).ranks
    assert msprobe.read(rank.path).ranks[0].names() == rank.names()


@pytest.mark.parametrize("documented", [msprobe.read, Record], ids=["read", "Record"])
def test_examples_in_the_documentation_run(
    documented: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher = debugger(tmp_path / "dump", level="L1", task="tensor")
    watcher.start(rank_id=0)
    torch.relu(torch.tensor([-1.0, 2.0]))
    torch.log(torch.tensor([0.0, 2.0]))
    watcher.stop()
    watcher.step()
    monkeypatch.chdir(tmp_path)
    (test,) = doctest.DocTestFinder(recurse=False).find(documented, "example")
    assert test.examples
    assert doctest.DocTestRunner().run(test).failed == 0


def test_path_without_a_dump_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no dump"):
        msprobe.read(tmp_path)


@pytest.mark.parametrize(
    "golden",
    [
        "arg_types", "crash_in_step", "dtypes_xor", "gloo_collectives", "mlp_mix_tensor_md5",
        "model_list_l0", "save_debug_md5", "transformer_l0",
    ],
)
def test_dump_of_the_original_is_read(golden: str) -> None:
    """All values have a place, and all records that construct.json tells of have a parent."""
    dump = msprobe.read(GOLDENS / golden / "expected" / "dump")
    for rank in dump.ranks:
        whole = json.loads(next(rank.path.glob("d*.json")).read_text())
        assert rank.names() == list(whole["data"])
        tensors = sum(len(record.tensors) for record in rank)
        assert tensors == json.dumps(whole["data"]).count('"shape": [')
        assert all(r.parent is None or isinstance(r.parent, str) for r in rank)


def test_nan_literal_of_the_original_is_a_float() -> None:
    dump = msprobe.read(GOLDENS / "save_debug_statistics" / "expected" / "dump")
    assert math.isnan(dump.ranks[0]["f.0.debug"].content.value)


def test_pandas_table_has_a_row_per_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pandas itself is not installed here; what it is given is what DataFrame takes."""
    record_steps(tmp_path)
    pandas: Any = types.ModuleType("pandas")
    pandas.DataFrame = lambda rows: rows
    monkeypatch.setitem(sys.modules, "pandas", pandas)
    dump = msprobe.read(tmp_path)
    rows = dump.to_pandas()
    assert len(rows) == sum(len(record.tensors) for record in dump.records())
    row = next(row for row in rows if row["record"] == "Functional.linear.0.forward")
    expected = {"step": 0, "kind": "Functional", "place": "input_args.0", "shape": (2, 4)}
    assert expected.items() <= row.items()
    assert len(dump.ranks[0].to_pandas()) == len(rows) // 2


def test_without_pandas_the_error_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {})
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match="pip install pandas"):
        msprobe.read(tmp_path).to_pandas()


def test_import_of_the_package_loads_no_other_module_of_it() -> None:
    code = (
        "import sys, msprobe; before = sorted(n for n in sys.modules if n.startswith('msprobe'));"
        "msprobe.read(sys.argv[1]); print(before, 'torch' in sys.modules)"
    )
    golden = GOLDENS / "mlp_l0_statistics" / "expected" / "dump"
    result = subprocess.run(
        [sys.executable, "-c", code, str(golden)],
        env={"PYTHONPATH": SOURCE}, text=True, capture_output=True, check=True,
    )
    assert result.stdout == "['msprobe'] False\n"
