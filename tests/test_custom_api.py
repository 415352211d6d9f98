"""Functions that the user adds: register_custom_api, custom_wrap_ops.yaml, torch.ops, Triton."""

from __future__ import annotations

import logging
import math
import re
import shutil
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import msprobe
from msprobe.errors import UsageError
from msprobe.pytorch import PrecisionDebugger
from msprobe.pytorch.dump.api_dump import ops
from recorded import batch, make_net, read_beside, read_data
from runner import run_script

Data = dict[str, Any]

X = torch.tensor([[1.0, -2.0], [3.0, 4.0]])


@pytest.fixture
def my_ops(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module of the user's with a function that calls torch's."""
    module = types.ModuleType("my_ops")

    def compute(a: torch.Tensor, b: float = 1.0, *, c: Any = None) -> torch.Tensor:
        return F.relu(a) * b if c is None else a + c

    module.compute = compute  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_ops", module)
    return module


def debugger_at(path: Path, level: str = "L1", **top: Any) -> Any:
    return PrecisionDebugger({"level": level, **top}, dump_path=path)


def recorded(path: Path, *calls: Callable[[], Any]) -> Data:
    """The records of these calls in one window of a step."""
    PrecisionDebugger.start()
    for call in calls:
        call()
    PrecisionDebugger.stop()
    PrecisionDebugger.step()
    step = PrecisionDebugger._instance.service.current_iter - 1
    return read_data(path, step)


# ---- what can be registered


def test_a_function_of_a_module_is_recorded_under_the_modules_name(
    my_ops: Any, tmp_path: Path
) -> None:
    """Arguments by position and by name, the result, and nothing of what it calls inside."""
    debugger_at(tmp_path).register_custom_api(my_ops, "compute")
    data = recorded(
        tmp_path,
        lambda: my_ops.compute(X, 2.0),
        lambda: my_ops.compute(X, b=3.0, c=torch.ones(2)),
    )
    assert list(data) == ["my_ops.compute.0.forward", "my_ops.compute.1.forward"]
    first, second = data.values()
    assert first["input_args"][1] == {"type": "float", "value": 2.0}
    assert first["output"][0]["Max"] == 8.0
    assert list(second["input_kwargs"]) == ["b", "c"]
    assert second["output"][0]["Min"] == -1.0


def test_gradients_of_a_registered_function_are_recorded(my_ops: Any, tmp_path: Path) -> None:
    """Two autograd nodes inside; the record shows what enters and leaves the whole."""
    debugger_at(tmp_path).register_custom_api(my_ops, "compute")
    x = X.clone().requires_grad_()
    data = recorded(tmp_path, lambda: my_ops.compute(x, 2.0).sum().backward())
    record = data["my_ops.compute.0.backward"]
    assert record["input"][0]["Max"] == 1.0
    exact = np.where(X.numpy() > 0, 2.0, 0.0)
    assert record["output"][0]["Norm"] == pytest.approx(np.linalg.norm(exact), rel=1e-6)
    assert record["output"][1] is None


@pytest.mark.parametrize("prefix", ["Mine", "My.Prefix", "x y/z"])
def test_a_prefix_replaces_the_modules_name(prefix: str, my_ops: Any, tmp_path: Path) -> None:
    debugger_at(tmp_path).register_custom_api(my_ops, "compute", prefix)
    assert list(recorded(tmp_path, lambda: my_ops.compute(X))) == [f"{prefix}.compute.0.forward"]


class Ops:
    scale = 3.0

    def method(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale

    @staticmethod
    def static(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    @classmethod
    def of_class(cls, x: torch.Tensor) -> torch.Tensor:
        return x * cls.scale


class Child(Ops):
    scale = 5.0


@pytest.mark.parametrize(
    ("owner", "name", "position"),
    [(Ops, "method", 1), (Ops, "static", 0), (Ops, "of_class", 1), (Child, "method", 1)],
    ids=["method", "staticmethod", "classmethod", "inherited"],
)
def test_functions_of_a_class_keep_their_kind(
    owner: type, name: str, position: int, tmp_path: Path
) -> None:
    """Called on an instance, they return what they returned, and the class is left as it was."""
    before = dict(vars(owner))
    debugger = debugger_at(tmp_path)
    debugger.register_custom_api(owner, name)
    results = []
    data = recorded(tmp_path, lambda: results.append(getattr(owner(), name)(X)))
    assert list(data) == [f"{owner.__name__}.{name}.0.forward"]
    record = data[f"{owner.__name__}.{name}.0.forward"]
    assert record["input_args"][position]["Max"] == 4.0
    factor = 5.0 if owner is Child else 3.0
    assert torch.equal(results[0], X * factor)
    assert record["output"][0]["Max"] == 4 * factor
    assert dict(vars(owner)) == before
    assert all(vars(owner)[key] is value for key, value in before.items())


def test_a_static_method_is_recorded_when_called_on_the_class(tmp_path: Path) -> None:
    debugger = debugger_at(tmp_path)
    debugger.register_custom_api(Ops, "static")
    debugger.register_custom_api(Ops, "of_class")
    data = recorded(tmp_path, lambda: Ops.static(X), lambda: Ops.of_class(X))
    assert list(data) == ["Ops.static.0.forward", "Ops.of_class.0.forward"]


@pytest.mark.parametrize(
    "result",
    [{}, {"n": 5}, {"a": {"b": X}}, None, (), [X, None], object()],
    ids=["empty dict", "dict of a number", "nested", "none", "empty tuple", "list", "object"],
)
def test_any_result_passes_and_is_recorded(result: Any, my_ops: Any, tmp_path: Path) -> None:
    my_ops.compute = lambda: result
    debugger_at(tmp_path).register_custom_api(my_ops, "compute")
    returned = []
    data = recorded(tmp_path, lambda: returned.append(my_ops.compute()))
    assert returned[0] is result
    assert "output" in data["my_ops.compute.0.forward"]


def test_a_function_that_raises_is_recorded_with_its_inputs(my_ops: Any, tmp_path: Path) -> None:
    error = ValueError("the user's own")

    def compute(_: Any) -> None:
        raise error

    my_ops.compute = compute
    debugger_at(tmp_path).register_custom_api(my_ops, "compute")

    def call() -> None:
        with pytest.raises(ValueError, match="own") as caught:
            my_ops.compute(X)
        assert caught.value is error

    data = recorded(tmp_path, call, lambda: F.relu(X))
    assert set(data) == {"my_ops.compute.0.forward", "Functional.relu.0.forward"}
    assert list(data["my_ops.compute.0.forward"]) == ["input_args", "input_kwargs"]


def test_a_reference_taken_earlier_is_recorded_too(
    my_ops: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``from my_ops import compute`` in another file of the user's."""
    train = types.ModuleType("train")
    compute = train.compute = my_ops.compute  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "train", train)
    debugger_at(tmp_path).register_custom_api(my_ops, "compute")
    assert list(recorded(tmp_path, lambda: train.compute(X))) == ["my_ops.compute.0.forward"]
    assert train.compute is compute


def test_a_registered_function_is_wanted_at_every_risk_level(my_ops: Any, tmp_path: Path) -> None:
    """Also one that has the name of an API of no risk, as ``cat`` is."""
    my_ops.cat = my_ops.compute
    debugger_at(tmp_path, risk_level="CORE").register_custom_api(my_ops, "cat")
    data = recorded(tmp_path, lambda: my_ops.cat(X), lambda: torch.cat([X]))
    assert list(data) == ["my_ops.cat.0.forward"]


def test_a_registered_function_has_its_module_as_parent_at_mix(my_ops: Any, tmp_path: Path) -> None:
    class Block(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return my_ops.compute(x)

    model = nn.Sequential(Block())
    debugger = debugger_at(tmp_path, "mix")
    debugger.register_custom_api(my_ops, "compute")
    debugger.start(model)
    model(X)
    debugger.stop()
    parents = read_beside(tmp_path, "construct.json")
    assert parents["my_ops.compute.0.forward"] == "Module.0.Block.forward.0"


def test_registration_has_no_effect_at_level_l0(my_ops: Any, tmp_path: Path) -> None:
    net, compute = make_net(), my_ops.compute
    debugger = debugger_at(tmp_path, "L0")
    debugger.register_custom_api(my_ops, "compute")
    debugger.start(net)
    debugger.register_custom_api(my_ops, "compute")
    assert my_ops.compute is compute
    net(batch(0))
    debugger.stop()
    assert all(name.startswith("Module.") for name in read_data(tmp_path))


# ---- when it is installed, and restored


def test_the_function_is_replaced_in_the_window_only(my_ops: Any, tmp_path: Path) -> None:
    compute = my_ops.compute
    debugger = debugger_at(tmp_path)
    debugger.register_custom_api(my_ops, "compute")
    assert my_ops.compute is compute
    for _ in range(2):
        debugger.start()
        assert vars(my_ops)["compute"] is not compute
        debugger.stop()
        assert vars(my_ops)["compute"] is compute


def test_a_function_that_the_user_replaces_between_windows_is_the_one_that_runs(
    my_ops: Any, tmp_path: Path
) -> None:
    debugger_at(tmp_path).register_custom_api(my_ops, "compute")
    recorded(tmp_path, lambda: my_ops.compute(X))
    newer = my_ops.compute = lambda x: x + 100
    data = recorded(tmp_path, lambda: my_ops.compute(X))
    assert data["my_ops.compute.0.forward"]["output"][0]["Max"] == 104.0
    assert my_ops.compute is newer


def test_restore_ends_the_recording(my_ops: Any, tmp_path: Path) -> None:
    debugger = debugger_at(tmp_path)
    debugger.register_custom_api(my_ops, "compute")
    assert "my_ops.compute.0.forward" in recorded(tmp_path, lambda: my_ops.compute(X))
    debugger.restore_custom_api(my_ops, "compute")
    found = recorded(tmp_path, lambda: my_ops.compute(X))
    assert list(found) == ["Functional.relu.0.forward", "Tensor.__mul__.0.forward"]


def test_registration_and_restoration_in_an_open_window_act_at_once(
    my_ops: Any, tmp_path: Path
) -> None:
    compute = my_ops.compute
    debugger = debugger_at(tmp_path)
    debugger.start()
    debugger.register_custom_api(my_ops, "compute", "First")
    my_ops.compute(X)
    debugger.restore_custom_api(my_ops, "compute")
    assert vars(my_ops)["compute"] is compute
    debugger.register_custom_api(my_ops, "compute", "Second")
    my_ops.compute(X)
    debugger.stop()
    assert vars(my_ops)["compute"] is compute
    assert list(read_data(tmp_path)) == ["First.compute.0.forward", "Second.compute.0.forward"]


@pytest.mark.parametrize("opened", [False, True], ids=["before the window", "in the window"])
def test_a_second_registration_replaces_the_first(
    opened: bool, my_ops: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The last prefix wins, each call has one record, and one restore gives the original back."""
    compute = my_ops.compute
    debugger = debugger_at(tmp_path)
    if opened:
        debugger.start()
    debugger.register_custom_api(my_ops, "compute", "First")
    debugger.register_custom_api(my_ops, "compute", "Second")
    debugger.start()
    my_ops.compute(X)
    debugger.restore_custom_api(my_ops, "compute")
    assert vars(my_ops)["compute"] is compute
    debugger.stop()
    assert vars(my_ops)["compute"] is compute
    assert list(read_data(tmp_path)) == ["Second.compute.0.forward"]
    assert caplog.records == []


@pytest.mark.parametrize("opened", [False, True], ids=["before the window", "in the window"])
def test_an_api_that_is_recorded_anyway_takes_the_new_name_and_gives_it_back(
    opened: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """``register_custom_api(torch, "matmul", ...)`` is the design document's example."""
    relu = torch.relu
    debugger = debugger_at(tmp_path)
    if opened:
        debugger.start()
    debugger.register_custom_api(torch, "relu", "Mine")
    if not opened:
        debugger.start()
    torch.relu(X)
    debugger.restore_custom_api(torch, "relu")
    torch.relu(X)
    debugger.stop()
    assert torch.relu is relu
    debugger.start()
    torch.relu(X)
    debugger.stop()
    assert torch.relu is relu
    assert list(read_data(tmp_path)) == [
        "Mine.relu.0.forward", "Torch.relu.0.forward", "Torch.relu.1.forward",
    ]  # fmt: skip
    assert caplog.records == []


def test_the_default_prefix_of_torch_is_its_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    debugger_at(tmp_path).register_custom_api(torch, "matmul")
    assert list(recorded(tmp_path, lambda: torch.matmul(X, X))) == ["torch.matmul.0.forward"]
    assert caplog.records == []


def test_restoring_what_was_not_registered_does_nothing(my_ops: Any, tmp_path: Path) -> None:
    compute, relu = my_ops.compute, torch.relu
    debugger = debugger_at(tmp_path)
    for owner, name in ((my_ops, "compute"), (torch, "relu"), (my_ops, "absent")):
        debugger.restore_custom_api(owner, name)
    debugger.start()
    debugger.restore_custom_api(torch, "relu")
    torch.relu(X)
    debugger.stop()
    assert (my_ops.compute, torch.relu) == (compute, relu)
    assert list(read_data(tmp_path)) == ["Torch.relu.0.forward"]


# ---- wrong arguments


WRONG = {
    "no such function": (("nothing",), "my_ops has no 'nothing'"),
    "name is no text": ((5,), "api is 5; expected the name of a function as a str"),
    "name is the function": ((math.sqrt,), "api is <built-in function sqrt>"),
    "prefix is no text": (("compute", 5), "api_prefix is 5; expected a str"),
    "not callable": (("pi",), "my_ops.pi is a float, not a function"),
}


@pytest.mark.parametrize(("arguments", "said"), WRONG.values(), ids=WRONG)
def test_a_wrong_registration_is_refused_at_the_call(
    arguments: Any, said: str, my_ops: Any, tmp_path: Path
) -> None:
    my_ops.pi = math.pi
    debugger = debugger_at(tmp_path)
    with pytest.raises(UsageError, match=re.escape(f"register_custom_api: {said}")):
        debugger.register_custom_api(my_ops, *arguments)
    recorded(tmp_path, lambda: F.relu(X))
    assert my_ops.pi is math.pi


def test_registration_needs_a_debugger(my_ops: Any) -> None:
    with pytest.raises(UsageError, match="construct it first"):
        PrecisionDebugger.register_custom_api(my_ops, "compute")


# ---- custom_wrap_ops.yaml


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """custom_wrap_ops.yaml of a copy of the package's tables, which stand-in for them."""
    folder = tmp_path / "api_dump"
    folder.mkdir()
    for path in ops.FOLDER.glob("*.yaml"):
        shutil.copy(path, folder)
    monkeypatch.setattr(ops.load_custom, "__defaults__", (folder,))
    return folder / "custom_wrap_ops.yaml"


def test_the_table_registers_functions_under_their_module(
    table: Path, my_ops: Any, tmp_path: Path
) -> None:
    table.write_text("my_ops:\n  - compute\ntorch.nn.functional:\n  - relu\n")
    debugger_at(tmp_path / "dump")
    data = recorded(tmp_path / "dump", lambda: my_ops.compute(X), lambda: F.relu(X))
    assert list(data) == ["my_ops.compute.0.forward", "torch.nn.functional.relu.0.forward"]


def test_a_module_that_loads_late_is_found_at_a_later_start(
    table: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, request: Any
) -> None:
    """Not imported for the user, and not an error until it is there."""
    table.write_text("my_ops:\n  - compute\n")
    debugger_at(tmp_path / "dump")
    recorded(tmp_path / "dump", lambda: F.gelu(X))
    my_ops = request.getfixturevalue("my_ops")
    assert list(recorded(tmp_path / "dump", lambda: my_ops.compute(X))) == [
        "my_ops.compute.0.forward"
    ]
    assert caplog.records == []


def test_a_function_that_the_module_lacks_is_said_once(
    table: Path, my_ops: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    my_ops.pi = math.pi
    table.write_text("my_ops:\n  - nothing\n  - pi\n  - compute\n")
    debugger_at(tmp_path / "dump")
    for _ in range(2):
        assert list(recorded(tmp_path / "dump", lambda: my_ops.compute(X))) == [
            "my_ops.compute.0.forward"
        ]
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert said == [
        f"custom_wrap_ops.yaml: my_ops has no function {name!r}" for name in ("nothing", "pi")
    ]


def test_a_registration_of_the_users_beats_the_table(
    table: Path, my_ops: Any, tmp_path: Path
) -> None:
    table.write_text("my_ops:\n  - compute\n")
    debugger_at(tmp_path / "dump").register_custom_api(my_ops, "compute", "Mine")
    assert list(recorded(tmp_path / "dump", lambda: my_ops.compute(X))) == [
        "Mine.compute.0.forward"
    ]


EDITED = """
import sys
import torch
import torch.nn.functional as F
import msprobe
from msprobe.pytorch import PrecisionDebugger

assert msprobe.__file__.startswith(sys.argv[2]), msprobe.__file__

def add_and_mul(a, b, c):
    return (a + b) * c

x = torch.ones(2, 2)
PrecisionDebugger(dump_path=sys.argv[1], level="L1")
PrecisionDebugger.start()
add_and_mul(x, x, x)
F.linear(x, x)
F.linear(x, weight=x)
F.gelu(x)
F.relu(x)
PrecisionDebugger.stop()
"""


def test_tables_edited_in_the_installed_package_are_in_force_in_the_next_process(
    tmp_path: Path,
) -> None:
    """The three edits of the design document: add a function, blank arguments, leave an API out."""
    site = tmp_path / "site"
    shutil.copytree(Path(msprobe.__file__).parent, site / "msprobe")
    tables = site / "msprobe" / "pytorch" / "dump" / "api_dump"
    (tables / "custom_wrap_ops.yaml").write_text("__main__:\n  - add_and_mul\n")
    (tables / "builtin_ignore_ops.yaml").write_text(
        "Functional:\n  linear:\n    input: [0, weight]\n  gelu:\n    output: all\n"
    )
    support = (tables / "support_wrap_ops.yaml").read_text()
    functional, relu, rest = support.partition("\n- relu\n")
    assert relu
    (tables / "support_wrap_ops.yaml").write_text(f"{functional}\n{rest}")
    script = tmp_path / "script.py"
    script.write_text(EDITED)
    arguments = [str(tmp_path / "dump"), str(site)]
    code, output = run_script(script, arguments, env={"PYTHONPATH": str(site)}, fresh=True)
    assert code == 0, output
    data = read_data(tmp_path / "dump")
    names = ["__main__.add_and_mul.0", "Functional.linear.0", "Functional.linear.1",
             "Functional.gelu.0"]  # fmt: skip
    assert [name.removesuffix(".forward") for name in data][:4] == names
    assert not any("Functional.relu" in name for name in data)
    first, second, gelu = (data[f"{name}.forward"] for name in names[1:])
    assert first["input_args"][0] is None
    assert first["input_args"][1]["Max"] == 1.0
    assert (second["input_args"], second["input_kwargs"]) == ([None], {"weight": None})
    assert second["output"][0]["Max"] == 2.0
    assert gelu["input_args"][0]["Max"] == 1.0
    assert gelu["output"] == [None]


# ---- custom_op_namespaces


@pytest.fixture(scope="module")
def library() -> Iterator[Any]:
    made = torch.library.Library("msprobe_test", "DEF")
    made.define("scale(Tensor x, float by=2.0) -> Tensor")
    made.impl("scale", lambda x, by=2.0: x * by, "CompositeImplicitAutograd")
    yield made
    made._destroy()


def test_operators_of_the_namespaces_are_recorded(library: Any, tmp_path: Path) -> None:
    """With their gradients; what they call inside is part of them."""
    before = torch.ops.msprobe_test.scale
    debugger_at(tmp_path, custom_op_namespaces=["msprobe_test"])
    x = X.clone().requires_grad_()
    data = recorded(tmp_path, lambda: torch.ops.msprobe_test.scale(x, by=3.0).sum().backward())
    names = ["torch.ops.msprobe_test.scale.0", "Tensor.sum.0"]
    assert set(data) == {f"{name}.{way}" for name in names for way in ("forward", "backward")}
    record = data[f"{names[0]}.forward"]
    assert record["input_kwargs"]["by"] == {"type": "float", "value": 3.0}
    assert record["output"][0]["Max"] == 12.0
    assert data[f"{names[0]}.backward"]["output"][0]["Max"] == 3.0
    assert torch.ops.msprobe_test.scale is before


def test_operators_of_other_namespaces_are_not_recorded(library: Any, tmp_path: Path) -> None:
    debugger_at(tmp_path)
    data = recorded(tmp_path, lambda: torch.ops.msprobe_test.scale(X))
    assert list(data) == ["Tensor.__mul__.0.forward"]


def test_an_operator_that_is_defined_late_is_found_at_the_next_start(
    library: Any, tmp_path: Path
) -> None:
    debugger_at(tmp_path, custom_op_namespaces=["msprobe_test", "absent"])
    recorded(tmp_path, lambda: F.relu(X))
    library.define("shift(Tensor x) -> Tensor")
    library.impl("shift", lambda x: x + 1, "CompositeImplicitAutograd")
    data = recorded(tmp_path, lambda: torch.ops.msprobe_test.shift(X))
    assert list(data) == ["torch.ops.msprobe_test.shift.0.forward"]


# ---- Triton


class JITFunction:
    """What of Triton's class of this name a launch goes through."""

    def __init__(self, fn: Callable[..., None]) -> None:
        self.fn = fn
        self.grids: list[Any] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        self.grids.append(grid)
        self.fn(*args, **kwargs)


def add_kernel(x: torch.Tensor, out: torch.Tensor, BLOCK: int = 1) -> None:
    out.copy_(x + BLOCK)


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("triton.runtime.jit")
    module.JITFunction = JITFunction  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", module)


@pytest.mark.usefixtures("triton")
def test_a_triton_launch_is_recorded_with_its_arguments_before_and_after(tmp_path: Path) -> None:
    """A kernel returns nothing: its output is what it has written into its arguments."""
    run, kernel, out = JITFunction.run, JITFunction(add_kernel), torch.zeros(2, 2)
    debugger_at(tmp_path)
    data = recorded(tmp_path, lambda: kernel[(1,)](X, out, BLOCK=5), lambda: kernel[(2,)](X, out))
    assert list(data) == ["Triton.add_kernel.0.forward", "Triton.add_kernel.1.forward"]
    first = data["Triton.add_kernel.0.forward"]
    assert [entry["Max"] for entry in first["input_args"]] == [4.0, 0.0]
    assert first["input_kwargs"]["BLOCK"] == {"type": "int", "value": 5}
    assert [entry["Max"] for entry in first["output"][:2]] == [4.0, 9.0]
    assert kernel.grids == [(1,), (2,)]
    assert JITFunction.run is run


@pytest.mark.usefixtures("triton")
def test_a_triton_launch_inside_an_api_is_part_of_it(my_ops: Any, tmp_path: Path) -> None:
    kernel, out = JITFunction(add_kernel), torch.zeros(2, 2)
    my_ops.compute = lambda: kernel[(1,)](X, out)
    debugger_at(tmp_path).register_custom_api(my_ops, "compute")
    assert list(recorded(tmp_path, lambda: my_ops.compute())) == ["my_ops.compute.0.forward"]


@pytest.mark.usefixtures("triton")
def test_triton_is_untouched_at_level_l0(tmp_path: Path) -> None:
    run = JITFunction.run
    debugger = debugger_at(tmp_path, "L0")
    debugger.start(make_net())
    assert JITFunction.run is run
    debugger.stop()


def test_without_triton_nothing_is_imported(tmp_path: Path) -> None:
    loaded = "triton" in sys.modules
    debugger_at(tmp_path)
    recorded(tmp_path, lambda: F.relu(X))
    assert ("triton" in sys.modules) == loaded
