"""Tables of recorded functions: they resolve, and the added names hide none of the base names."""

from __future__ import annotations

import contextlib
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives
import torch.nn.functional as F
import yaml

from msprobe.errors import ConfigError
from msprobe.pytorch.dump.api_dump import ops

TABLE = yaml.safe_load((ops.FOLDER / "support_wrap_ops.yaml").read_text(encoding="utf-8"))
BEFORE = tuple(sys.modules)
SPECS, MISSING = ops.load_specs()
FILES = ["support_wrap_ops", "builtin_ignore_ops", "custom_wrap_ops", "risk_levels"]


def spelling(spec: ops.ApiSpec) -> str:
    return f"{spec.owner}.{spec.attr}"


def added_spellings() -> set[str]:
    return {
        f"{home}.{name}"
        for category, names in TABLE["added"].items()
        for home in ops.CATEGORIES[category][1]
        for name in names
    }


ADDED = [spec for spec in SPECS if spelling(spec) in added_spellings()]
BASE = [spec for spec in SPECS if spelling(spec) not in added_spellings()]


def function_of(spec: ops.ApiSpec) -> Any:
    return getattr(ops.find_owner(spec.owner), spec.attr)


# --- what load_specs gives


def test_every_spec_names_a_callable() -> None:
    assert all(callable(function_of(spec)) for spec in SPECS)


def test_no_attribute_is_listed_twice() -> None:
    assert max(Counter((spec.owner, spec.attr) for spec in SPECS).values()) == 1


def test_missing_names_are_exactly_those_that_torch_lacks() -> None:
    # Named tensors left torch in 2.13. Added names may be newer than the torch that runs this.
    lacking = {n for n in ("align_as", "align_to") if not hasattr(torch.Tensor, n)}
    expected = {f"tensor.{n}" for n in lacking}
    if not hasattr(torch, "align_tensors"):
        expected.add("torch.align_tensors")
    added = {f"{category}.{n}" for category, names in TABLE["added"].items() for n in names}
    assert set(MISSING) - added == expected


@pytest.mark.parametrize(
    ("prefix", "name", "owner", "attr"),
    [
        ("Functional", "relu", "torch.nn.functional", "relu"),
        ("Tensor", "__add__", "torch.Tensor", "__add__"),
        ("Torch", "norm", "torch", "norm"),
        ("Torch", "norm", "torch.linalg", "norm"),
        ("Torch", "fft.fft", "torch.fft", "fft"),
        ("Torch", "linalg.cholesky", "torch.linalg", "cholesky"),
        ("Torch", "special.erf", "torch.special", "erf"),
        ("VF", "lstm", "torch._VF", "lstm"),
        ("Distributed", "all_reduce", "torch.distributed", "all_reduce"),
        ("Distributed", "all_reduce", "torch.distributed.distributed_c10d", "all_reduce"),
    ],
    ids=lambda value: str(value),
)
def test_name_is_recorded_under_its_prefix(prefix: str, name: str, owner: str, attr: str) -> None:
    assert (prefix, name, owner, attr) in {(s.prefix, s.name, s.owner, s.attr) for s in SPECS}


def test_packages_that_are_not_imported_stay_so() -> None:
    packages = {"torch_npu", "mindspeed"} - set(BEFORE)
    assert packages.isdisjoint(sys.modules)
    assert packages.isdisjoint(spec.owner.partition(".")[0] for spec in SPECS)
    assert packages.isdisjoint(name.partition(".")[0] for name in MISSING)


def test_package_that_is_imported_gives_its_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    npu = types.ModuleType("torch_npu")
    vars(npu).update(npu_swiglu=len, atb=types.SimpleNamespace(npu_ring_mla=len))
    gmm = types.ModuleType("mindspeed.ops.gmm")
    vars(gmm).update(npu_gmm=len)
    for name, module in (
        ("torch_npu", npu),
        ("mindspeed", types.ModuleType("mindspeed")),
        ("mindspeed.ops.gmm", gmm),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    specs, missing = ops.load_specs()
    new = [s for s in specs if s.owner.partition(".")[0] in ("torch_npu", "mindspeed")]
    assert new == [
        ops.ApiSpec("NPU", "npu_ring_mla", "torch_npu.atb", "npu_ring_mla"),
        ops.ApiSpec("NPU", "npu_swiglu", "torch_npu", "npu_swiglu"),
        ops.ApiSpec("MindSpeed", "npu_gmm", "mindspeed.ops.gmm", "npu_gmm"),
    ]
    assert missing == MISSING


def test_functional_collectives_that_are_not_loaded_yet_are_not_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded, missing = ops.load_specs()
    monkeypatch.delitem(sys.modules, ops.FUNCTIONAL_COLLECTIVES)
    monkeypatch.setattr(torch.distributed, "_functional_collectives", None)
    before, missing_before = ops.load_specs()
    late = {(s.prefix, s.name) for s in loaded} - {(s.prefix, s.name) for s in before}
    assert ("Distributed", "_functional_collectives.all_reduce") in late
    assert {name.partition(".")[0] for _, name in late} == {"_functional_collectives"}
    assert missing_before == [name for name in missing if "_functional_collectives" not in name]


# --- added names hide nothing (product.md, section 5)


def test_added_name_shares_no_counter_with_a_base_name() -> None:
    base = {(spec.prefix, spec.name) for spec in BASE}
    assert base.isdisjoint((spec.prefix, spec.name) for spec in ADDED)


def test_hiding_names_are_left_out() -> None:
    left_out = {
        "torch.Tensor.__rtruediv__",
        "torch.Tensor.__rfloordiv__",
        "torch.Tensor.__rmatmul__",
        "torch.Tensor.__getitem__",
        "torch.Tensor.istft",
        "torch.nn.functional.linear_cross_entropy",
        "torch.unravel_index",
        "torch.lu",
    }
    assert left_out.isdisjoint(map(spelling, SPECS))


X = torch.arange(1.0, 17.0).reshape(4, 4)
HALF = torch.ones(16, 16, dtype=torch.bfloat16)
STACK = HALF[None]
EIGHT = torch.ones(32, 32).to(torch.float8_e4m3fn)
EIGHT_T = EIGHT.t()
EIGHT_STACK = EIGHT[None].transpose(1, 2)

# A device without the kernel refuses the call when all the Python code has run.
REFUSED = contextlib.suppress(NotImplementedError, RuntimeError)

# A call of each added function that is written in Python. One that is written in C cannot reach a
# base name: C++ does not look attributes up on torch or torch.Tensor.
PYTHON_CALLS: dict[str, list[Callable[[], object]]] = {
    "torch.nn.functional.rms_norm": [lambda: F.rms_norm(X, (4,))],
    "torch.nn.functional.grouped_mm": [
        lambda: F.grouped_mm(HALF, STACK, offs=torch.tensor([16], dtype=torch.int32)),
    ],
    "torch.nn.functional.scaled_mm": [lambda: scaled_mm()],
    "torch.nn.functional.scaled_grouped_mm": [lambda: scaled_grouped_mm()],
    "torch.Tensor.__rlshift__": [lambda: 2 << torch.tensor([1, 2])],
    "torch.Tensor.__rrshift__": [lambda: 2 >> torch.tensor([1, 2])],
    "torch.unique": [
        lambda: torch.unique(X),
        lambda: torch.unique(X, dim=0, return_inverse=True, return_counts=True),
    ],
    "torch.distributed.all_gather_coalesced": [
        lambda: dist.all_gather_coalesced([[torch.zeros(2)]], [torch.ones(2)]),
    ],
    "torch.distributed.all_gather_single": [
        lambda: dist.all_gather_single(torch.zeros(2), torch.ones(2)),
    ],
    "torch.distributed.all_reduce_coalesced": [
        lambda: dist.all_reduce_coalesced([torch.ones(2)]),
    ],
    "torch.distributed.reduce_scatter_single": [
        lambda: dist.reduce_scatter_single(torch.zeros(2), torch.ones(2)),
    ],
}


def scaled_mm() -> None:
    scale, recipe = torch.ones(()), F.ScalingType.TensorWise
    with REFUSED:
        F.scaled_mm(EIGHT, EIGHT_T, scale, recipe, scale, recipe)


def scaled_grouped_mm() -> None:
    rows, recipe = torch.ones(32), F.ScalingType.RowWise
    end = torch.tensor([32], dtype=torch.int32)
    with REFUSED:
        F.scaled_grouped_mm(EIGHT, EIGHT_STACK, rows, recipe, rows[None], recipe, offs=end)


def is_python(spec: ops.ApiSpec) -> bool:
    return isinstance(function_of(spec), types.FunctionType)


def test_every_added_function_in_python_is_called_by_the_test_below() -> None:
    in_python = {spelling(spec) for spec in ADDED if is_python(spec)}
    second_homes = {name for name in in_python if "distributed_c10d" in name}
    # What they call is recorded as well: tests/test_distributed.py.
    open_ones = {name for name in in_python if name.startswith(ops.FUNCTIONAL_COLLECTIVES)}
    assert in_python - second_homes - open_ones <= set(PYTHON_CALLS)


def put(monkeypatch: pytest.MonkeyPatch, spec: ops.ApiSpec, replacement: object) -> None:
    owner = ops.find_owner(spec.owner)
    if isinstance(owner, type):
        monkeypatch.setattr(owner, spec.attr, replacement)
    else:  # setattr would leave the original in a module that gives it by __getattr__ (torch._VF)
        monkeypatch.setitem(vars(owner), spec.attr, replacement)


@pytest.fixture(scope="module")
def one_process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def base_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The base functions that were called, each replaced by one that notes its name."""
    called: list[str] = []

    def noting(original: Callable[..., Any], name: str) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return original(*args, **kwargs)

        return wrapper

    for spec in BASE:
        put(monkeypatch, spec, noting(function_of(spec), spelling(spec)))
    return called


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.filterwarnings("ignore:.*coalesced` will be deprecated:FutureWarning")
@pytest.mark.parametrize("name", [n for n in PYTHON_CALLS if n in set(map(spelling, ADDED))])
def test_added_function_in_python_calls_no_base_function(name: str, base_calls: list[str]) -> None:
    for call in PYTHON_CALLS[name]:
        call()
    assert base_calls == []


@pytest.mark.parametrize(
    ("cell", "attr"),
    [
        (torch.nn.LSTM(2, 3), "lstm"),
        (torch.nn.GRU(2, 3), "gru"),
        (torch.nn.RNN(2, 3), "rnn_tanh"),
        (torch.nn.RNN(2, 3, nonlinearity="relu"), "rnn_relu"),
        (torch.nn.LSTMCell(2, 3), "lstm_cell"),
        (torch.nn.GRUCell(2, 3), "gru_cell"),
        (torch.nn.RNNCell(2, 3), "rnn_tanh_cell"),
        (torch.nn.RNNCell(2, 3, nonlinearity="relu"), "rnn_relu_cell"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_recurrent_module_calls_the_listed_attribute(
    cell: torch.nn.Module, attr: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []
    for spec in SPECS:
        if spec.prefix == "VF":
            call = function_of(spec)
            put(monkeypatch, spec, lambda *a, n=spec.attr, f=call: called.append(n) or f(*a))
    cell(torch.ones(1, 2))
    assert called == [attr]


# --- ignore rules


def test_receive_buffer_is_ignored_by_position_and_by_keyword_separately() -> None:
    irecv = next(s for s in SPECS if s.attr == "irecv")
    assert [ops.ignores(irecv.ignore_input, key) for key in (0, "tensor", 1)] == [1, 1, 0]
    assert irecv.ignore_output == ops.NOTHING


def copy_tables(folder: Path, **texts: str) -> Path:
    for name in FILES:
        text = texts.get(name, (ops.FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder


def test_rule_for_all_inputs_covers_every_key(tmp_path: Path) -> None:
    text = "Functional: {relu: {input: all, output: [0, 2]}}"
    specs, _ = ops.load_specs(copy_tables(tmp_path, builtin_ignore_ops=text))
    relu = next(s for s in specs if s.owner == "torch.nn.functional" and s.attr == "relu")
    assert relu.ignore_input == "all"
    assert ops.ignores(relu.ignore_input, 5)
    assert ops.ignores(relu.ignore_input, "inplace")
    assert relu.ignore_output == frozenset({0, 2})


@pytest.mark.parametrize("key", ["linalg.cond", "cond"])
def test_rule_for_a_dotted_name_may_use_the_table_or_the_record(tmp_path: Path, key: str) -> None:
    text = f"Torch: {{{key}: {{input: [1]}}}}"
    specs, _ = ops.load_specs(copy_tables(tmp_path, builtin_ignore_ops=text))
    assert next(s for s in specs if s.attr == "cond").ignore_input == frozenset({1})


def test_deleted_name_is_not_wrapped(tmp_path: Path) -> None:
    specs, missing = ops.load_specs(copy_tables(tmp_path, support_wrap_ops="torch: [add]\ntensor:"))
    assert [spelling(s) for s in specs] == ["torch.add"]
    assert missing == []


def test_name_that_torch_lacks_is_reported(tmp_path: Path) -> None:
    text = "torch: [add, no_such_op]\nadded: {torch: [fft.nope]}\naten: [add]"
    specs, missing = ops.load_specs(copy_tables(tmp_path, support_wrap_ops=text))
    assert [spelling(s) for s in specs] == ["torch.add"]
    assert missing == ["torch.no_such_op", "torch.fft.nope"]


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("support_wrap_ops", "functionall: [relu]", ["functionall", "functional"]),
        ("support_wrap_ops", "torch: add", ["torch", "add", "list"]),
        ("support_wrap_ops", "torch: [1]", ["torch", "1"]),
        ("support_wrap_ops", "torch: ['a b']", ["a b"]),
        ("support_wrap_ops", "added: [add]", ["added"]),
        ("support_wrap_ops", "added: {added: [add]}", ["added"]),
        ("support_wrap_ops", "- relu", ["list", "mapping"]),
        ("support_wrap_ops", "torch: [", ["line 1"]),
        ("support_wrap_ops", "torch: !!python/object/apply:os.getcwd []", ["python/object"]),
        ("builtin_ignore_ops", "distributed: {recv: {input: [0]}}", ["'distributed'", "NPU"]),
        ("builtin_ignore_ops", "Distributed: [recv]", ["Distributed", "recv"]),
        ("builtin_ignore_ops", "Distributed: {recv: [0]}", ["Distributed.recv", "input"]),
        ("builtin_ignore_ops", "Distributed: {recv: {in: [0]}}", ["Distributed.recv", "in"]),
        ("builtin_ignore_ops", "Distributed: {recv: {input: 0}}", ["Distributed.recv", "input"]),
        ("builtin_ignore_ops", "Distributed: {recv: {input: [-1]}}", ["Distributed.recv", "-1"]),
        ("builtin_ignore_ops", "Distributed: {recv: {input: [true]}}", ["True"]),
        ("builtin_ignore_ops", "Distributed: {recv: {output: [x]}}", ["output", "x"]),
        ("builtin_ignore_ops", "Distributed: {recv: {output: All}}", ["output", "All"]),
    ],
)
def test_broken_table_names_file_and_value(
    tmp_path: Path, file: str, text: str, words: list[str]
) -> None:
    folder = copy_tables(tmp_path, **{file: text})
    with pytest.raises(ConfigError) as error:
        ops.load_specs(folder)
    assert str(folder / f"{file}.yaml") in str(error.value)
    assert [word for word in words if word not in str(error.value)] == []


# --- functions of the user


def test_shipped_custom_table_is_empty() -> None:
    assert ops.load_custom() == {}


def test_custom_table_gives_names_per_module(tmp_path: Path) -> None:
    text = "__main__: [add_and_mul]\nmy.kernels:\n- rope\n- swiglu\nempty:"
    folder = copy_tables(tmp_path, custom_wrap_ops=text)
    assert ops.load_custom(folder) == {
        "__main__": ["add_and_mul"],
        "my.kernels": ["rope", "swiglu"],
        "empty": [],
    }


@pytest.mark.parametrize(
    "text",
    ["my-module: [f]", "m: f", "m: [f.g]", "m: ['f()']", "m: [1]", "1: [f]", ".m: [f]", "[m]"],
)
def test_broken_custom_table_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"custom_wrap_ops\.yaml"):
        ops.load_custom(copy_tables(tmp_path, custom_wrap_ops=text))


# --- risk classes


@pytest.mark.parametrize(
    ("prefix", "name", "risk"),
    [
        ("Functional", "conv2d", "CORE"),
        ("Functional", "linear", "CORE"),
        ("Functional", "softmax", "CORE"),
        ("Functional", "cross_entropy", "CORE"),
        ("Functional", "rms_norm", "CORE"),
        ("Torch", "gather", "CORE"),
        ("Distributed", "all_reduce", "CORE"),
        ("NPU", "npu_swiglu", "CORE"),
        ("MindSpeed", "npu_gmm", "CORE"),
        ("Functional", "relu", "FOCUS"),
        ("VF", "lstm", "FOCUS"),
        ("mymod", "never_heard_of", "FOCUS"),
        ("Tensor", "to", "LOW"),
        ("Torch", "cat", "LOW"),
        ("Tensor", "copy_", "LOW"),
    ],
)
def test_risk_class_of_an_api(prefix: str, name: str, risk: str) -> None:
    assert ops.risk_of(prefix, name) == risk


def test_risk_classes_are_disjoint() -> None:
    table = yaml.safe_load((ops.FOLDER / "risk_levels.yaml").read_text(encoding="utf-8"))
    assert set(table) == {"CORE", "LOW"}
    assert set(table["CORE"]).isdisjoint(table["LOW"])


def test_broken_risk_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"risk_levels\.yaml.*FOCUS"):
        ops.load_risk(copy_tables(tmp_path, risk_levels="FOCUS: [relu]"))
