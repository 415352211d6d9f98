"""The comparer of goldens: passes what the rules allow, and reports each kind of difference."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from golden_compare import crc_of, tree_differences
from golden_values import value_differences

GOLDENS = Path(__file__).parent / "goldens"
TENSOR = {
    "type": "torch.Tensor",
    "dtype": "torch.float32",
    "shape": [2],
    "Max": 2.0,
    "Min": 1.0,
    "Mean": 1.5,
    "Norm": math.sqrt(5.0),
    "requires_grad": False,
}


def zero_dim(**changes: Any) -> dict[str, Any]:
    return TENSOR | {"shape": [], "Max": -2.5, "Min": -2.5, "Mean": -2.5, "Norm": -2.5} | changes


@pytest.mark.parametrize(
    ("golden", "ours"),
    [
        (1, 1),
        (None, 3.5),
        (None, {"type": "set", "value": None}),
        (float("nan"), "NaN"),
        (float("-inf"), "-Infinity"),
        ({}, {"type": "torch.dtype", "value": "torch.float16"}),
        ({"type": "torch.device", "value": "cpu:None"}, {"type": "torch.device", "value": "cpu"}),
        (TENSOR, TENSOR | {"Max": 2.00003}),
        (TENSOR | {"Mean": None}, TENSOR),
        (TENSOR | {"dtype": "torch.bfloat16"}, TENSOR | {"dtype": "torch.bfloat16", "Max": 2.03}),
        (zero_dim(), zero_dim(Norm=2.5)),
        (
            zero_dim(dtype="torch.int64", Max=7, Min=7, Mean=7, Norm=7),
            zero_dim(dtype="torch.int64", Max=7, Min=7, Mean=None, Norm=None),
        ),
        ([TENSOR | {"md5": 2.5}], [TENSOR | {"md5": "0x0000000040200000"}]),
        ([TENSOR | {"md5": "0c245805"}], [TENSOR | {"md5": "ffffffff"}]),
    ],
)
def test_value_that_the_rules_allow_passes(golden: Any, ours: Any) -> None:
    assert list(value_differences(golden, ours, "x")) == []


@pytest.mark.parametrize(
    ("golden", "ours"),
    [
        (1, 2),
        (1, 1.0),
        (1, True),
        (1, None),
        (1.0, 1.0000001),
        ("a", "b"),
        (float("nan"), 0.0),
        (float("nan"), "Infinity"),
        (1.0, "1.0"),
        ({}, {"type": "torch.dtype"}),
        ({}, {"a": 1}),
        ({"type": "torch.device", "value": "cuda:1"}, {"type": "torch.device", "value": "cuda"}),
        ([], [None]),
        ([1, 2], [1, 3]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (TENSOR, None),
        (TENSOR, TENSOR | {"Max": 2.001}),
        (TENSOR, TENSOR | {"Max": None}),
        (TENSOR, TENSOR | {"dtype": "torch.float64"}),
        (TENSOR, TENSOR | {"shape": [1, 2]}),
        (TENSOR, TENSOR | {"requires_grad": True}),
        (TENSOR, TENSOR | {"md5": "0c245805"}),
        (TENSOR | {"md5": "0c245805"}, TENSOR | {"md5": "0x0000000040200000"}),
        (TENSOR | {"md5": "0c245805"}, TENSOR | {"md5": None}),
        (zero_dim(), zero_dim(Mean=2.5, Norm=2.5)),
        (zero_dim(), zero_dim(Mean=None, Norm=2.5)),
    ],
)
def test_value_that_differs_is_reported_once(golden: Any, ours: Any) -> None:
    assert len(list(value_differences(golden, ours, "x"))) == 1


def test_exact_checksums_must_be_equal() -> None:
    golden, ours = TENSOR | {"md5": "0c245805"}, TENSOR | {"md5": "ffffffff"}
    assert list(value_differences(golden, golden, "x", exact_checksums=True)) == []
    assert len(list(value_differences(golden, ours, "x", exact_checksums=True))) == 1


# --- whole trees: a golden against changed copies of itself


def strict(value: Any) -> Any:
    """The golden's values as ours writes them: absolute norms, no NaN literals."""
    if isinstance(value, dict):
        value = {key: strict(part) for key, part in value.items()}
        if value.get("shape") == [] and isinstance(value.get("Norm"), float):
            value["Norm"] = abs(value["Norm"])
        return value
    if isinstance(value, list):
        return [strict(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def copy_of(name: str, target: Path) -> Path:
    """A tree as ours would be: strict json, and a .pt file for each line of the manifest."""
    shutil.copytree(GOLDENS / name / "expected", target)
    for path in target.rglob("*.json"):
        write(path, strict(json.loads(path.read_text(encoding="utf-8"))))
    for path in target.rglob("pt_manifest.json"):
        (path.parent / "dump_tensor_data").mkdir()
        for file, entry in json.loads(path.read_text(encoding="utf-8")).items():
            # Equal bytes where the golden has equal bytes, others elsewhere.
            dtype = getattr(torch, entry["dtype"].removeprefix("torch."))
            value = torch.full(entry["shape"], int(entry["crc32"], 16) % 97, dtype=dtype)
            torch.save(value, path.parent / "dump_tensor_data" / file)
        change(path.parent, "d*.json", lambda d, p=path.parent: own_checksums(d, p))
        path.unlink()
    return target


def own_checksums(value: Any, folder: Path) -> Any:
    """The same json with each CRC that has a file replaced by the CRC of that file."""
    if isinstance(value, list):
        return [own_checksums(part, folder) for part in value]
    if not isinstance(value, dict):
        return value
    value = {key: own_checksums(part, folder) for key, part in value.items()}
    if {"md5", "data_name"} <= set(value):
        value["md5"] = crc_of(folder / "dump_tensor_data" / value["data_name"])
    return value


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, allow_nan=False), encoding="utf-8")


def change(root: Path, pattern: str, edit: Callable[[Any], Any]) -> None:
    """Rewrites the one file that matches with what ``edit`` makes of it (or leaves in it)."""
    (path,) = root.glob(pattern)
    value = json.loads(path.read_text(encoding="utf-8"))
    write(path, edit(value) or value)


STEP = "dump/step0/*"
PLAIN = "mlp_mix_statistics"


@pytest.mark.parametrize(
    "name",
    [
        *(PLAIN, "arg_types", "autograd_function", "checkpoint_reentrant", "custom_api"),
        *("dtypes_statistics", "gloo_ddp_mix", "mlp_l1_md5", "mlp_mix_tensor_md5", "mlp_slice"),
        *("mlp_structure_mix", "mlp_tensor_list", "shared_module_mix", "transformer_l0"),
    ],
)
def test_golden_equals_itself(name: str, tmp_path: Path) -> None:
    assert tree_differences(name, GOLDENS / name / "expected", copy_of(name, tmp_path / "o")) == []


def rename_key(mapping: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    return {new if key == old else key: value for key, value in mapping.items()}


def data(edit: Callable[[dict[str, Any]], Any]) -> Callable[[Any], None]:
    def apply(dump: dict[str, Any]) -> None:
        dump["data"] = edit(dump["data"]) or dump["data"]

    return apply


def swap_first_two(records: dict[str, Any]) -> dict[str, Any]:
    a, b, *rest = records
    return {name: records[name] for name in (b, a, *rest)}


DAMAGES: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "header": ("dump.json", lambda d: d.update(level="L1"), "level"),
    "number": (
        "dump.json",
        data(lambda r: r["Functional.linear.0.forward"]["output"][0].update(Max=9.0)),
        "Functional.linear.0.forward.output.0.Max",
    ),
    "backward input": (
        "dump.json",
        data(lambda r: r["Functional.relu.0.backward"]["input"][0].update(Norm=9.0)),
        "Functional.relu.0.backward.input.0.Norm",
    ),
    "module gradient": (
        "dump.json",
        data(lambda r: r["Module.act.ReLU.backward.0"]["output"][0].update(Norm=9.0)),
        "Module.act.ReLU.backward.0.output.0.Norm",
    ),
    "parameter gradient": (
        "dump.json",
        data(lambda r: r["Module.fc1.Linear.parameters_grad.0"]["bias"][0].update(Min=9.0)),
        "Module.fc1.Linear.parameters_grad.0.bias.0.Min",
    ),
    "parameter": (
        "dump.json",
        data(lambda r: r["Module.fc1.Linear.forward.0"]["parameters"].pop("bias") and None),
        "Module.fc1.Linear.forward.0.parameters",
    ),
    "section": (
        "dump.json",
        data(lambda r: r["Tensor.sum.0.forward"].pop("input_kwargs") and None),
        "Tensor.sum.0.forward: sections",
    ),
    "missing record": (
        "dump.json",
        data(lambda r: r.pop("Functional.relu.0.forward") and None),
        "lacks ['Functional.relu.0.forward']",
    ),
    "missing backward": (
        "dump.json",
        data(lambda r: r.pop("Module.fc1.Linear.backward.0") and None),
        "lacks ['Module.fc1.Linear.backward.0']",
    ),
    "unknown record": (
        "dump.json",
        data(lambda r: r.update({"Tensor.exp.0.forward": {}})),
        "['Tensor.exp.0.forward'] in excess",
    ),
    "shifted count": (
        "dump.json",
        data(lambda r: rename_key(r, "Functional.linear.1.forward", "Functional.linear.2.forward")),
        "Functional.linear.2.forward",
    ),
    "order": ("dump.json", data(swap_first_two), "order"),
    "stack name": (
        "stack.json",
        lambda s: s["0"][0].pop(),
        "lacks ['Module.fc2.Linear.forward.0']",
    ),
    "stack frame": (
        "stack.json",
        lambda s: s["3"][1].__setitem__(0, s["3"][1][0].replace("line 40", "line 41")),
        "Tensor.pow.0.forward",
    ),
    "stack twice": ("stack.json", lambda s: s.update({"5": [[], s["4"][1]]}), "twice"),
    "parent": (
        "construct.json",
        lambda c: c.update({"Functional.linear.0.forward": None}),
        "Functional.linear.0.forward: parent",
    ),
    "backward parent": (
        "construct.json",
        lambda c: c.update({"Functional.linear.1.backward": "Module.act.ReLU.backward.0"}),
        "Functional.linear.1.backward: parent",
    ),
    "construct name": ("construct.json", lambda c: c.pop("optimizer"), "lacks ['optimizer']"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_to_a_tree_is_reported(damage: str, tmp_path: Path) -> None:
    file, edit, words = DAMAGES[damage]
    ours = copy_of(PLAIN, tmp_path / "ours")
    change(ours, f"{STEP}/{file}", lambda value: edit(value) and None)
    found = tree_differences(PLAIN, GOLDENS / PLAIN / "expected", ours)
    assert any(words in line for line in found), found


@pytest.mark.parametrize(
    ("name", "record"),
    [
        (PLAIN, "Functional.rms_norm.0.forward"),
        (PLAIN, "Tensor.to.0.forward"),
        ("cnn_inplace_l0_tensor", "Module.relu.ReLU.backward.0"),
        ("mlp_risk_core", "Functional.linear.0.forward"),
    ],
    ids=["added name", "class LOW", "backward of an in-place module", "adaptation"],
)
def test_record_that_product_md_adds_is_allowed(name: str, record: str, tmp_path: Path) -> None:
    ours = copy_of(name, tmp_path / "ours")
    change(ours, f"{STEP}/dump.json", data(lambda r: r.update({record: {}})))
    found = tree_differences(name, GOLDENS / name / "expected", ours)
    assert [line for line in found if record in line] == []


@pytest.mark.parametrize(
    ("name", "record"),
    [
        ("mlp_risk_focus", "Tensor.to.0.forward"),
        ("mlp_list_exact_l1", "Functional.linear.1.backward"),
        ("mlp_data_mode_forward", "Functional.linear.1.backward"),
        ("mlp_list_l0", "Functional.rms_norm.0.forward"),
        (PLAIN, "Functional.linear.7.backward"),
    ],
)
def test_record_that_the_selection_excludes_is_reported(
    name: str, record: str, tmp_path: Path
) -> None:
    ours = copy_of(name, tmp_path / "ours")
    change(ours, f"{STEP}/dump.json", data(lambda r: r.update({record: {}})))
    found = tree_differences(name, GOLDENS / name / "expected", ours)
    assert found == [f"dump/step0/proc: data: has ['{record}'] in excess"]


def test_backward_parent_that_mirrors_the_forward_is_allowed(tmp_path: Path) -> None:
    ours = copy_of(PLAIN, tmp_path / "ours")
    parent = {"Functional.linear.0.backward": "Module.fc1.Linear.backward.0"}
    change(ours, f"{STEP}/construct.json", lambda c: c.update(parent))
    assert tree_differences(PLAIN, GOLDENS / PLAIN / "expected", ours) == []


@pytest.mark.parametrize("file", ["stack.json", "construct.json", "dump.json"])
def test_missing_json_file_is_reported(file: str, tmp_path: Path) -> None:
    ours = copy_of(PLAIN, tmp_path / "ours")
    next(ours.glob(f"{STEP}/{file}")).unlink()
    (line,) = tree_differences(PLAIN, GOLDENS / PLAIN / "expected", ours)[:1]
    assert line == f"dump/step0/proc: {file}: in only one of the two"


def test_missing_or_extra_step_is_reported(tmp_path: Path) -> None:
    ours = copy_of(PLAIN, tmp_path / "ours")
    (ours / "dump" / "step1").rename(ours / "dump" / "step2")
    (line,) = tree_differences(PLAIN, GOLDENS / PLAIN / "expected", ours)
    assert "step1" in line
    assert "step2" in line


def test_error_log_is_reported(tmp_path: Path) -> None:
    ours = copy_of(PLAIN, tmp_path / "ours")
    log = next(ours.glob(STEP)) / "dump_error_info.log"
    log.write_text("not recorded: 1 modules were never called (a)\nboom\n", encoding="utf-8")
    assert tree_differences(PLAIN, GOLDENS / PLAIN / "expected", ours) == [
        "dump/step0/proc: dump_error_info.log: ['boom']"
    ]


FILE = "Functional.linear.0.forward.input.0.pt"


def save(path: Path, value: torch.Tensor) -> None:
    torch.save(value, path)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda p: p.unlink(), "missing"),
        (lambda p: save(p.with_name("stranger.pt"), torch.ones(1)), "['stranger.pt'] unknown"),
        (lambda p: save(p, torch.load(p)[:1]), FILE),
        (lambda p: save(p, torch.load(p).double()), FILE),
        (lambda p: save(p, torch.load(p).requires_grad_()), FILE),
    ],
    ids=["missing", "unknown", "shape", "dtype", "requires_grad"],
)
def test_damage_to_a_tensor_file_is_reported(
    damage: Callable[[Path], None], words: str, tmp_path: Path
) -> None:
    name = "mlp_l1_tensor"
    ours = copy_of(name, tmp_path / "ours")
    damage(next(ours.glob(f"{STEP}/dump_tensor_data/{FILE}")))
    found = tree_differences(name, GOLDENS / name / "expected", ours)
    assert any(words in line for line in found), found


def test_one_tensor_with_two_contents_is_reported(tmp_path: Path) -> None:
    name = "mlp_l1_tensor"
    ours = copy_of(name, tmp_path / "ours")
    path = next(ours.glob(f"{STEP}/dump_tensor_data/Functional.relu.0.forward.input.0.pt"))
    save(path, torch.load(path) + 1)
    (line,) = tree_differences(name, GOLDENS / name / "expected", ours)
    assert "which it equals in the golden" in line


def test_one_tensor_with_two_checksums_is_reported(tmp_path: Path) -> None:
    name = "mlp_l1_md5"
    ours = copy_of(name, tmp_path / "ours")
    edit = data(lambda r: r["Functional.relu.0.forward"]["input_args"][0].update(md5="00000000"))
    change(ours, f"{STEP}/dump.json", edit)
    (line,) = tree_differences(name, GOLDENS / name / "expected", ours)
    assert "the golden has one checksum" in line


def test_checksum_that_is_not_that_of_its_file_is_reported(tmp_path: Path) -> None:
    name = "mlp_mix_tensor_md5"
    ours = copy_of(name, tmp_path / "ours")
    edit = data(lambda r: r["Tensor.sum.0.forward"]["output"][0].update(md5="00000000"))
    change(ours, f"{STEP}/dump.json", edit)
    (line,) = tree_differences(name, GOLDENS / name / "expected", ours)
    assert "Tensor.sum.0.forward.output.0: 00000000, but" in line
