"""The kinds of fault that people have reported of tools like this one, each in another shape.

The numbers are those of the reports: Bnn of the cases from the field, An and BBnn of the rows A
and B in the list of surprises that the observed tool had.
"""

from __future__ import annotations

import collections
import copy
import ctypes
import dataclasses
import enum
import functools
import gc
import io
import json
import logging
import os
import pickle
import signal
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
import torch._dynamo.eval_frame
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import msprobe
from helpers import Dump, collect, debugger, read_dump, read_json
from models import Function
from msprobe.pytorch import PrecisionDebugger
from recorded import LEVELS, rank_folder, read_beside, read_data
from runner import run_script

torch._dynamo.eval_frame.TorchPatcher.patch()  # as the first compilation does, for good

# Of torch's own compilers and transforms, and of fork beside threads.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    # Said by Dynamo in Python 3.13.0 only.
    pytest.mark.filterwarnings("ignore:Guards may run slower:RuntimeWarning"),
]

Build = Callable[[], tuple[nn.Module, Callable[[], Any]]]  # a model and one step of its training

levels = pytest.mark.parametrize("level", LEVELS)
module_levels = pytest.mark.parametrize("level", ["L0", "mix"])
mix = pytest.mark.parametrize("level", ["mix"])  # where the others would take too long


def bits(value: Any) -> Any:
    """``value`` with every tensor as bytes: NaN equals NaN, 0.0 differs from -0.0."""
    if isinstance(value, Tensor):
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return str(value.dtype), tuple(value.shape), raw.numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(part) for key, part in value.items()}
    return [bits(part) for part in value] if isinstance(value, (list, tuple)) else value


def outcome(build: Build, around: Callable[[nn.Module, Callable[[], Any]], Any]) -> Any:
    """Results, gradients and random state of a step."""
    torch.manual_seed(7)
    model, step = build()
    result = bits(around(model, step))
    grads = {name: bits(p.grad) for name, p in model.named_parameters()}
    return result, grads, bits(torch.get_rng_state())


def undisturbed(path: Path, build: Build, **config: Any) -> Dump:
    """What the tool writes about a step that it leaves the same, to the bit."""
    plain = outcome(build, lambda model, step: step())

    def watched(model: nn.Module, step: Callable[[], Any]) -> Any:
        watcher = debugger(path, **config)
        watcher.start(model)
        try:
            return step()
        finally:
            watcher.stop()
            watcher.step()

    assert outcome(build, watched) == plain
    dump = read_dump(path)
    assert dump.errors() == []
    return dump


def backward_of(model: nn.Module, *args: Any, **kwargs: Any) -> Callable[[], Tensor]:
    def step() -> Tensor:
        loss = model(*args, **kwargs).square().sum()
        loss.backward()
        return loss

    return step


def forwards(dump: Dump, part: str = "") -> list[str]:
    return [name for name in dump.names(".forward") if part in name]


# ---- in place: B01, B02, B03, A6, BB7 ----------------------------------------------------------

VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "flatten": lambda x: x.flatten(1),
    "transpose": lambda x: x.transpose(1, 2),
    "narrow": lambda x: x[:, 1:],
    "unsqueeze": lambda x: x.unsqueeze(0),
    "as_strided": lambda x: x.as_strided((2, 3), (12, 1)),
    "diagonal": lambda x: x.diagonal(dim1=1, dim2=2),
    "real": lambda x: x.to(torch.complex64).real,
}


@mix
@pytest.mark.parametrize("view", VIEWS)
def test_view_that_a_module_returns_may_be_changed_in_place(
    view: str, level: str, tmp_path: Path
) -> None:
    """B01. Every module is recorded, and so are the gradients around the change."""

    def build() -> tuple[nn.Module, Callable[[], Any]]:
        take = Function(lambda m, x: VIEWS[view](x))
        net = nn.Sequential(nn.Linear(4, 4), take, nn.ReLU6(inplace=True), nn.Softplus())
        x = torch.randn(2, 3, 4, requires_grad=True)
        return net, lambda: [backward_of(net, x)(), x.grad]

    dump = undisturbed(tmp_path, build, level=level)
    names = ["0.Linear", "1.Function", "2.ReLU6", "3.Softplus"]
    wanted = {f"Module.{name}.{way}.0" for name in names for way in ("forward", "backward")}
    # The change takes the view's own node out of the graph: nothing flows through it any more.
    assert wanted - set(dump.data) <= {"Module.1.Function.backward.0"}


IN_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "operator": lambda y: y.__iadd__(1.5),
    "power": lambda y: y.abs().__ipow__(2),
    "function": lambda y: F.elu(y, inplace=True),
    "dropout": lambda y: F.dropout(y, 0.5, inplace=True),
    "setitem": lambda y: y.__setitem__((slice(None), 1), 2.0) or y,
    "setitem by mask": lambda y: y.__setitem__(y > 0, 2.0) or y,
    "index_add_": lambda y: y.index_add_(1, torch.tensor([0, 0]), torch.ones(3, 2)),
    "part of a view": lambda y: y.view(-1)[1:3].mul_(3) is None or y,
    "copy_": lambda y: y.copy_(y.detach().flip(0)),
    "transpose_": lambda y: y.t_().mul_(2),
    "clamp of a column": lambda y: y[:, 0].clamp_(min=0) is None or y,
    "addmm_": lambda y: y.addmm_(torch.ones(3, 2), torch.ones(2, 4)),
}


@pytest.mark.parametrize("level", ["L0", "L1"])
@pytest.mark.parametrize("name", IN_PLACE)
def test_output_of_a_module_may_be_changed_by_any_call_in_place(
    name: str, level: str, tmp_path: Path
) -> None:
    """B02."""

    def build() -> tuple[nn.Module, Callable[[], Any]]:
        def forward(model: Any, x: Tensor) -> Tensor:
            return model.last(IN_PLACE[name](model.first(x)).exp())

        net = Function(forward, first=nn.Linear(4, 4, bias=False), last=nn.Identity())
        return net, backward_of(net, torch.randn(3, 4, requires_grad=True))

    dump = undisturbed(tmp_path, build, level=level)
    assert dump.names("Linear.backward" if level != "L1" else "Functional.linear.0.backward")


HARM: dict[str, Callable[[Tensor], Any]] = {
    "filled": lambda t: t.fill_(9.0),
    "replaced through data": lambda t: setattr(t, "data", torch.full_like(t, 9.0)),
    "written through numpy": lambda t: t.numpy().fill(9.0),
    "freed": lambda t: t.untyped_storage().resize_(0),
}


@pytest.mark.parametrize("async_dump", [False, True], ids=["at once", "async"])
@pytest.mark.parametrize("harm", HARM)
def test_values_are_those_of_the_moment_of_the_call(
    harm: str, async_dump: bool, tmp_path: Path
) -> None:
    """B03. Input, output, statistics, checksum and file, whatever happens to the memory later."""
    x = torch.arange(6.0).reshape(2, 3)
    want_x, want_y = x.clone(), x.exp()

    def step() -> None:
        y = torch.exp(x)
        HARM[harm](x)
        HARM[harm](y)

    config: dict[str, Any] = {"summary_mode": "md5", "list": ["Torch.exp"]}
    top = {"async_dump": async_dump}
    dump = collect(tmp_path, step, level="L1", task="tensor", top=top, **config)
    record = dump.data["Torch.exp.0.forward"]
    for (entry,), want in ((record["input_args"], want_x), (record["output"], want_y)):
        (saved,) = dump.tensors([entry])
        assert torch.equal(saved, want)
        assert entry["Max"] == want.max().item()
        # float32 over 6 elements
        assert entry["Norm"] == pytest.approx(want.double().norm().item(), rel=1e-6)


@pytest.mark.parametrize("split", ["chunk", "unbind", "split"])
@module_levels
def test_illegal_change_of_one_of_several_views_raises_what_torch_raises(
    split: str, level: str, tmp_path: Path
) -> None:
    """A6. The observed tool turned it into an internal assertion, or let it pass."""

    def build() -> tuple[nn.Module, Callable[[], Any]]:
        parts = Function(lambda m, x: getattr(x, split)(*([] if split == "unbind" else [2])))
        net = nn.Sequential(nn.Tanh(), parts)

        def step() -> str:
            with pytest.raises(
                RuntimeError, match="is a view and is being modified inplace"
            ) as error:
                net(torch.ones(4, 2, requires_grad=True))[0].mul_(2)
            return str(error.value)

        return net, step

    undisturbed(tmp_path, build, level=level)


def test_records_around_an_in_place_module_have_the_right_parents(tmp_path: Path) -> None:
    """BB7. Backward records of both are there, and what runs after them hangs where it belongs."""

    def build() -> tuple[nn.Module, Callable[[], Any]]:
        block = nn.Sequential(nn.BatchNorm1d(4), nn.ReLU(inplace=True))
        net = nn.Sequential(nn.Linear(4, 4), block, nn.Linear(4, 1))
        return net, backward_of(net, torch.randn(5, 4))

    dump = undisturbed(tmp_path, build, level="mix")
    parents = {
        "Functional.relu.0.backward": "Module.1.1.ReLU.backward.0",
        "Functional.batch_norm.0.backward": "Module.1.0.BatchNorm1d.backward.0",
        "Module.1.1.ReLU.backward.0": "Module.1.Sequential.backward.0",
        "Module.1.0.BatchNorm1d.backward.0": "Module.1.Sequential.backward.0",
        "Functional.linear.0.backward": "Module.0.Linear.backward.0",
        "Module.0.Linear.backward.0": None,
    }
    assert set(parents) <= set(dump.data)
    assert {name: dump.construct[name] for name in parents} == parents


# ---- compilers and tracers: B05, B09, B37, A5 --------------------------------------------------


class CountingBackend:
    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, module: Any, inputs: Any) -> Any:
        self.graphs += 1
        return module.forward


@module_levels
def test_compiled_function_is_compiled_once_whatever_windows_open_and_close(
    level: str, tmp_path: Path
) -> None:
    """B05, A5. Compiled before, used in, between and after the windows; no break, no recompile."""
    torch.compiler.reset()
    backend = CountingBackend()
    net = nn.Sequential(nn.Linear(3, 3), nn.GELU())

    def body(x: Tensor) -> Tensor:
        for _ in range(2):
            x = F.relu(net(x)) @ x.t() @ x
        return x.sum()

    compiled = torch.compile(body, backend=backend)
    x = torch.randn(2, 3)
    expected = body(x)
    watcher = debugger(tmp_path, level=level)
    results = [compiled(x)]
    for _ in range(2):
        watcher.start(net)
        results += [compiled(x), torch.tanh(compiled(x))]
        watcher.stop()
        watcher.step()
        results.append(compiled(x))
    assert backend.graphs == 1
    plain, through_tanh = expected.item(), expected.tanh().item()
    wanted = [plain, plain, through_tanh, plain, plain, through_tanh, plain]
    assert [r.item() for r in results] == pytest.approx(wanted, rel=1e-6)
    assert (level == "L0") == (forwards(read_dump(tmp_path), "Torch.tanh") == [])


@pytest.mark.parametrize("kind", ["script", "trace", "fx", "script inside a ModuleList"])
@module_levels
def test_module_made_by_a_compiler_runs_and_the_others_are_recorded(
    kind: str, level: str, tmp_path: Path
) -> None:
    """B09."""
    make: dict[str, Callable[[], nn.Module]] = {
        "script": lambda: torch.jit.script(nn.Linear(4, 4)),
        "trace": lambda: torch.jit.trace(nn.Linear(4, 4), torch.ones(1, 4)),
        "fx": lambda: torch.fx.symbolic_trace(nn.Linear(4, 4)),
        "script inside a ModuleList": lambda: nn.ModuleList([torch.jit.script(nn.Linear(4, 4))]),
    }

    def build() -> tuple[nn.Module, Callable[[], Any]]:
        odd = make[kind]()
        call = odd[0] if isinstance(odd, nn.ModuleList) else odd
        net = Function(lambda m, x: m.fc(call(x)), odd=odd, fc=nn.Linear(4, 2))
        return net, backward_of(net, torch.randn(3, 4))

    dump = undisturbed(tmp_path, build, level=level)
    assert "Module.fc.Linear.forward.0" in dump.data
    assert "Module.fc.Linear.backward.0" in dump.data


@levels
def test_tracing_in_a_window_gives_the_graph_of_torch(level: str, tmp_path: Path) -> None:
    """B05, B07. fx and jit.script see torch's own functions; nothing of a trace is recorded."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Softsign())

    def work(x: Tensor) -> Tensor:
        return F.gelu(torch.add(x, 1)).relu()

    plain = [n.target for n in torch.fx.symbolic_trace(work).graph.nodes]
    watcher = debugger(tmp_path, level=level)
    watcher.start(net)
    graph = torch.fx.symbolic_trace(work)
    scripted = torch.jit.script(nn.Softsign())
    watcher.stop()
    assert [n.target for n in graph.graph.nodes] == plain
    x = torch.randn(3)
    assert torch.equal(graph(x), work(x))
    assert torch.equal(scripted(x), F.softsign(x))
    assert read_data(tmp_path) == {}


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "grad": lambda f, x: torch.func.grad(f)(x[0]),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(f))(x),
    "vmap of vmap": lambda f, x: torch.func.vmap(torch.func.vmap(torch.tanh))(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x[0],), (x[1],)),
    "jacrev": lambda f, x: torch.func.jacrev(torch.sin)(x[0]),
    "jacfwd": lambda f, x: torch.func.jacfwd(torch.sin)(x[0]),
    "hessian": lambda f, x: torch.func.hessian(f)(x[0]),
    "functionalize": lambda f, x: torch.func.functionalize(f)(x[0]),
}


@pytest.mark.parametrize("task", ["tensor"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_function_transforms_give_the_same_and_recording_goes_on(
    transform: str, task: str, tmp_path: Path
) -> None:
    """B37, A2. Tensors inside of a transform can not be read."""

    def build() -> tuple[nn.Module, Callable[[], Any]]:
        net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        parameters = dict(net.named_parameters())
        x = torch.randn(3, 4)

        def f(v: Tensor) -> Tensor:
            return torch.func.functional_call(net, parameters, (v,)).mul(2).sum()

        return net, lambda: [TRANSFORMS[transform](f, x), torch.abs(x)]

    plain = outcome(build, lambda model, step: step())

    def watched(model: nn.Module, step: Callable[[], Any]) -> Any:
        result: list[Any] = []
        collect(tmp_path, lambda: result.append(step()), model, task=task)
        return result[0]

    assert outcome(build, watched) == plain
    record = read_data(tmp_path)["Torch.abs.0.forward"]
    assert record["output"][0]["Max"] is not None


CONSTANTS: dict[str, Tensor] = {
    "small": torch.randn(7),
    "large": torch.randn(50, 4001),
    "permuted": torch.randn(300, 40).t(),
    "with gaps": torch.randn(300, 80)[:, ::2],
    "integers": torch.arange(5),
    "halves": torch.randn(3000).half(),
    "parameter": nn.Parameter(torch.randn(60, 70)),
}


@pytest.mark.parametrize("transform", ["grad", "vmap of grad", "jvp", "functionalize"])
@pytest.mark.parametrize("kind", CONSTANTS)
def test_constants_inside_a_transform_have_their_numbers(
    kind: str, transform: str, tmp_path: Path
) -> None:
    """Only what the transform has wrapped has no numbers: it stands for many values, or none."""
    constant = CONSTANTS[kind]

    def f(v: Tensor) -> Tensor:
        return torch.mul(v, torch.sum(torch.abs(constant))).sum()

    def run() -> Any:
        torch.manual_seed(0)
        return TRANSFORMS[transform](f, torch.randn(2, 3))

    plain, results = run(), []
    collect(tmp_path, lambda: results.append(run()), nn.Identity())
    flat = [torch.utils._pytree.tree_flatten(found)[0] for found in (results, plain)]
    for got, wanted in zip(*flat, strict=True):
        assert torch.equal(got, wanted)
    (entry,) = read_data(tmp_path)["Torch.abs.0.forward"]["input_args"]
    values = constant.detach().double().numpy()
    assert entry["Max"] == pytest.approx(values.max(), rel=1e-3)  # of a half: its own rounding
    assert entry["Min"] == pytest.approx(values.min(), rel=1e-3)
    if constant.is_floating_point():
        assert entry["Norm"] == pytest.approx(np.sqrt((values**2).sum()), rel=1e-3)
    wrapped = read_data(tmp_path)["Torch.mul.0.forward"]["input_args"][0]
    assert wrapped["shape"] in ([3], [2, 3])
    assert wrapped["Max"] is None


@pytest.mark.skipif(
    not hasattr(torch._C._functorch, "is_legacy_batchedtensor"),
    reason="torch 2.1 can not tell such tensors from others",
)
@pytest.mark.parametrize("size", [3, 3000])
@pytest.mark.parametrize("summary", ["statistics", "md5", "xor"])
@pytest.mark.parametrize("task", ["statistics", "tensor"])
def test_gradients_of_several_passes_at_once_have_no_numbers(
    task: str, summary: str, size: int, tmp_path: Path
) -> None:
    """``is_grads_batched`` wraps gradients by a vmap of autograd's own."""
    x = torch.linspace(1, 2, size, requires_grad=True)
    seeds, results = torch.eye(2, size), []

    def run() -> None:
        results.append(torch.autograd.grad(x.sin().mul(2), x, seeds, is_grads_batched=True)[0])

    run()
    dump = collect(tmp_path, run, level="L1", task=task, summary_mode=summary)
    assert torch.equal(*results)
    for name in ("Tensor.mul.0.backward", "Tensor.sin.0.backward"):
        for entry in (dump.data[name]["input"][0], dump.data[name]["output"][0]):
            assert entry["shape"] == [size]
            assert {entry.get(f) for f in ("Max", "Norm", "md5", "data_name")} == {None}
    assert dump.errors()
    assert all("it has no elements of its own to read here" in line for line in dump.errors())


@pytest.mark.parametrize("task", ["statistics", "tensor"])
def test_functorch_is_not_asked_for_its_state(task: str, tmp_path: Path) -> None:
    """Nearly any question to it gives the thread a state that slows down all later graphs."""
    state_makers = {*dir(torch._C._functorch), "_are_functorch_transforms_active"}
    state_makers -= {"is_functorch_wrapped_tensor", "is_legacy_batchedtensor"}  # look at it only
    asked, ours = [], os.path.dirname(msprobe.__file__) + os.sep

    def profile(frame: types.FrameType, event: str, function: Any) -> None:
        name = getattr(function, "__name__", "")
        if event == "c_call" and name in state_makers and frame.f_code.co_filename.startswith(ours):
            asked.append((frame.f_code.co_qualname, name))

    net = nn.Sequential(nn.Embedding(9, 30), nn.Linear(30, 500), nn.Tanh())

    def step() -> None:
        net(torch.arange(9)).sum().backward()

    sys.setprofile(profile)
    try:
        collect(tmp_path, step, net, level="mix", task=task)
    finally:
        sys.setprofile(None)
    assert asked == []


# ---- functions and modules as objects: B06, B07, B25, B29, A9 ----------------------------------

USER_CODE = """
from torch import matmul, tanh as squash
from torch.nn.functional import gelu
import torch.nn.functional as functional

def run(x):
    return gelu(matmul(x, squash(x))), functional.softplus(x)
"""


@pytest.fixture
def user_module() -> Iterator[types.ModuleType]:
    module = types.ModuleType("users_own_module")
    exec(USER_CODE, module.__dict__)
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def test_functions_imported_by_name_are_recorded_under_any_alias(
    user_module: types.ModuleType, tmp_path: Path
) -> None:
    """B06, BB17."""
    before = dict(vars(user_module))
    dump = collect(tmp_path, lambda: user_module.run(torch.ones(2, 2)), level="L1")
    assert forwards(dump) == [
        "Torch.tanh.0.forward",
        "Torch.matmul.0.forward",
        "Functional.gelu.0.forward",
        "Functional.softplus.0.forward",
    ]
    assert vars(user_module) == before
    assert all(vars(user_module)[key] is value for key, value in before.items())


class Holder(nn.Module):
    """Keeps functions as modules do: in the instance, deep in its children."""

    def __init__(self) -> None:
        super().__init__()
        self.act = F.silu
        self.inner = nn.Module()
        self.inner.reduce = torch.mean

    def forward(self, x: Tensor) -> Tensor:
        return self.inner.reduce(self.act(x))


def test_functions_that_modules_hold_are_recorded_and_given_back(tmp_path: Path) -> None:
    """B06."""
    net = nn.Sequential(Holder())
    dump = collect(tmp_path, lambda: net(torch.ones(2)), net, level="mix")
    assert {"Functional.silu.0.forward", "Torch.mean.0.forward"} <= set(dump.data)
    assert net[0].act is F.silu
    assert net[0].inner.reduce is torch.mean


OBJECTS: dict[str, Callable[[], Any]] = {
    "found in a set": lambda: (F.gelu in KNOWN, torch.matmul in KNOWN, Tensor.add in KNOWN),
    "key of a dict": lambda: {torch.relu: 1}[BEFORE_ALL[3]],
    "overridable": lambda: torch.overrides.resolve_name(F.gelu),
    "is a tensor method": lambda: torch.overrides.is_tensor_method_or_property(Tensor.add),
    "is builtin": lambda: [isinstance(f, types.BuiltinFunctionType) for f in (torch.add, F.gelu)],
    "is a function": lambda: [isinstance(f, types.FunctionType) for f in (F.silu, torch.add)],
    "module and name": lambda: [(f.__module__, f.__qualname__) for f in (F.silu, torch.relu)],
    "pickled": lambda: [pickle.loads(pickle.dumps(f)) == f for f in (F.silu, torch.matmul)],
    "text of a partial": lambda: repr(functools.partial(F.silu, inplace=True)),
    "weak reference": lambda: type(ctypes.py_object(F.silu).value),
    "unbound method": lambda: Tensor.add(torch.ones(1), 1).item(),
    "method of an instance": lambda: torch.ones(1).add.__name__,
    "map over a list": lambda: [f(torch.ones(1)).item() for f in (torch.relu, F.silu)],
}
BEFORE_ALL = [F.gelu, torch.matmul, Tensor.add, torch.relu]
KNOWN = set(BEFORE_ALL)


@pytest.mark.parametrize("question", OBJECTS)
def test_functions_answer_as_without_the_tool(question: str, tmp_path: Path) -> None:
    """B07, A9."""
    expected = OBJECTS[question]()
    watcher = debugger(tmp_path, level="L1")
    assert OBJECTS[question]() == expected
    watcher.start()
    during = OBJECTS[question]()
    watcher.stop()
    assert during == expected
    assert OBJECTS[question]() == expected
    assert [F.gelu, torch.matmul, Tensor.add, torch.relu] == BEFORE_ALL


@levels
@pytest.mark.parametrize("when", ["in the window", "inside of forward", "after stop"])
def test_model_can_be_copied_pickled_and_saved(when: str, level: str, tmp_path: Path) -> None:
    """B25, A9. The copy is a model of its own, with its own weights, and is not recorded."""
    copies: list[nn.Module] = []

    def copy_all() -> None:
        copies.append(copy.deepcopy(net))
        copies.append(pickle.loads(pickle.dumps(net)))
        buffer = io.BytesIO()
        torch.save(net, buffer)
        buffer.seek(0)
        copies.append(torch.load(buffer, weights_only=False))
        copies.append(copy.copy(net))

    net = nn.Sequential(
        nn.Linear(2, 2), CallsBack(copy_all if when == "inside of forward" else None)
    )
    watcher = debugger(tmp_path, level=level)
    watcher.start(net)
    x = torch.ones(1, 2)
    expected = net(x)
    if when == "in the window":
        copy_all()
    watcher.stop()
    if when == "after stop":
        copy_all()
    recorded = read_data(tmp_path)
    for other in copies[:3]:
        assert torch.equal(other(x), expected)
        with torch.no_grad():
            other[0].weight.zero_()
            other[0].bias.fill_(7.0)
        assert torch.equal(other(x), torch.full((1, 2), 7.0))
    assert torch.equal(net(x), expected)
    assert read_data(tmp_path) == recorded


class CallsBack(nn.Module):
    def __init__(self, work: Any = None) -> None:
        super().__init__()
        self._work = [work] if work else []

    def forward(self, x: Tensor) -> Tensor:
        while self._work:
            self._work.pop()()
        return x


@levels
def test_copy_made_in_the_window_is_not_recorded_in_it(level: str, tmp_path: Path) -> None:
    """B25. An average of the weights is such a copy."""
    net = nn.Sequential(nn.Linear(2, 2))
    watcher = debugger(tmp_path, level=level)
    watcher.start(net)
    net(torch.ones(1, 2))
    average = torch.optim.swa_utils.AveragedModel(net)
    average.update_parameters(net)
    average(torch.ones(1, 2))
    watcher.stop()
    assert len([n for n in read_data(tmp_path) if n.startswith("Module.0.Linear.forward")]) == (
        level != "L1"
    )


@module_levels
def test_hooks_of_others_work_whenever_they_come_and_go(level: str, tmp_path: Path) -> None:
    """B29. Of every kind, registered before and in the window, removed in it and after it."""
    calls: collections.Counter[str] = collections.Counter()

    def count(name: str, result: Any = None) -> Callable[..., Any]:
        def hook(*_: Any) -> Any:
            calls[name] += 1
            return result

        return hook

    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    x = torch.ones(1, 2, requires_grad=True)
    double = net[0].register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    watcher = debugger(tmp_path, level=level)
    watcher.start(net)
    handles = [
        net[0].register_forward_hook(count("forward")),
        net[0].register_forward_hook(count("kwargs"), with_kwargs=True, prepend=True),
        net[0].register_forward_hook(lambda m, a, out: out + 1),
        net[1].register_full_backward_pre_hook(count("backward pre")),
        net[1].register_full_backward_hook(count("backward")),
        nn.modules.module.register_module_forward_hook(count("global")),
    ]
    try:
        net(x).sum().backward()
        double.remove()
        net(x)
        watcher.stop()
        net(x)
    finally:
        for handle in handles:
            handle.remove()
    net(x)
    assert calls == {
        "forward": 3, "kwargs": 3, "backward pre": 1, "backward": 1, "global": 9,
    }  # fmt: skip
    data = read_data(tmp_path)
    first, second = (data[f"Module.0.Linear.forward.{i}"] for i in range(2))
    assert [r["input_args"][0]["Max"] for r in (first, second)] == [2.0, 1.0]


def test_number_of_hooks_and_records_is_the_same_in_every_window(tmp_path: Path) -> None:
    """B27. Also when a module is given twice, in a list, and as part of another model."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh()))
    watcher = debugger(tmp_path, level="mix")
    seen = []
    for _ in range(3):
        for model in (net, net, net[1], net):
            watcher.start(model)
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules())
        net(torch.ones(1, 2)).sum().backward()
        watcher.stop()
        watcher.step()
        seen.append((hooks, list(read_data(tmp_path, watcher.service.current_iter - 1))))
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][0] == 6
    assert len(set(seen[0][1])) == len(seen[0][1])
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules()) == 0


# ---- gradients: B10, B12, B14, B19, B20, B22, B23, B49, B55 ------------------------------------


def fan_out(model: Any, x: Tensor) -> Tensor:
    h = model.stem(x)
    branches = [model.a(h), model.b(model.norm(h)), h * 0.3, model.a(h + 1), h.flip(0)]
    return model.head(torch.stack(branches).sum(0) + h) + h.mean()


@levels
def test_order_in_which_gradients_are_added_up_is_kept(level: str, tmp_path: Path) -> None:
    """B10. A tensor used six times, a module used twice, and three losses."""

    def build() -> tuple[nn.Module, Callable[[], Any]]:
        sizes = {"stem": nn.Linear(33, 33), "a": nn.Linear(33, 33), "b": nn.Linear(33, 33)}
        net = Function(fan_out, **sizes, norm=nn.LayerNorm(33), head=nn.Linear(33, 33))
        x = torch.randn(9, 33)

        def step() -> Any:
            y = net(x)
            losses = [y.sum(), y.square().mean(), F.l1_loss(y, x)]
            torch.autograd.backward(losses)
            return losses

        return net, step

    assert undisturbed(tmp_path, build, level=level).names("backward")


@module_levels
def test_first_layers_without_a_gradient_of_their_input_have_their_backward(
    level: str, tmp_path: Path
) -> None:
    """B12. Tokens through an embedding, and keyword data, in the order of the backward pass."""

    def forward(model: Any, tokens: Tensor, *, more: Tensor) -> Tensor:
        return model.last(model.embed(tokens) + model.side(input=more))

    def build() -> tuple[nn.Module, Callable[[], Any]]:
        parts = {"embed": nn.Embedding(5, 3), "side": nn.Linear(2, 3), "last": nn.Linear(3, 1)}
        net = Function(forward, **parts)
        return net, backward_of(net, torch.tensor([1, 4]), more=torch.randn(2, 2))

    dump = undisturbed(tmp_path, build, level=level)
    order = [n for n in dump.names("Module.") if ".backward." in n]
    assert order[0] == "Module.last.Linear.backward.0"
    assert set(order[1:]) == {"Module.embed.Embedding.backward.0", "Module.side.Linear.backward.0"}
    for name in order[1:]:
        assert dump.data[name]["output"] == [None]
        assert dump.data[name]["input"][0]["shape"] == [2, 3]


@pytest.mark.parametrize("off", ["no_grad", "inference_mode", "set_grad_enabled", "frozen"])
@levels
def test_nothing_of_a_graph_appears_where_there_is_none(
    off: str, level: str, tmp_path: Path
) -> None:
    """B14."""

    def build() -> tuple[nn.Module, Callable[[], Any]]:
        net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))
        if off == "frozen":
            net.requires_grad_(False)
        context = {
            "no_grad": torch.no_grad,
            "inference_mode": torch.inference_mode,
            "set_grad_enabled": lambda: torch.set_grad_enabled(False),
            "frozen": torch.enable_grad,
        }[off]

        def step() -> Any:
            with context():
                y = net(torch.ones(1, 2))
            return [y, y.requires_grad, y.grad_fn, y.is_inference(), torch.is_grad_enabled()]

        return net, step

    dump = undisturbed(tmp_path, build, level=level)
    assert len(forwards(dump)) == (4 if level == "mix" else 2)
    assert dump.names("backward") == dump.names("parameters_grad") == []


def test_parameter_gradient_is_the_one_that_the_optimizer_gets(tmp_path: Path) -> None:
    """B19. After the user's hooks, with what was there before, of a parameter with two homes."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False), nn.Linear(3, 1))
    net[1].weight = net[0].weight
    net[2].bias.grad = torch.full((1,), 100.0)
    net[2].weight.register_hook(lambda grad: grad * 5)
    seen: list[str] = []
    net[2].bias.register_post_accumulate_grad_hook(lambda p: seen.append("post"))
    collect(tmp_path, lambda: net(torch.randn(4, 3)).square().sum().backward(), net, level="L0")
    data = read_data(tmp_path)
    for name, key in (("0.Linear", "weight"), ("0.Linear", "bias"), ("2.Linear", "weight")):
        (entry,) = data[f"Module.{name}.parameters_grad.0"][key]
        grad = net.get_submodule(name[0]).get_parameter(key).grad
        assert grad is not None
        assert (entry["Max"], entry["Min"]) == (grad.max().item(), grad.min().item())
    assert seen == ["post"]
    assert net[2].bias.grad.item() != 100.0


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]], ids=str)
def test_backward_of_each_micro_batch_has_the_number_of_its_forward(
    order: list[int], tmp_path: Path
) -> None:
    """B20. All forwards first, then the backwards in any order, as pipelines do."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    inputs = [torch.full((1, 2), i + 1.0, requires_grad=True) for i in range(3)]
    grads = [torch.full((1, 2), 10.0 * (i + 1)) for i in range(3)]

    def step() -> None:
        outputs = [net(x) for x in inputs]
        for i in order:
            outputs[i].backward(grads[i])

    dump = collect(tmp_path, step, net, level="mix")
    for i in range(3):
        assert dump.data[f"Module.0.Linear.forward.{i}"]["input_args"][0]["Max"] == i + 1.0
        for name in (f"Module.1.Tanh.backward.{i}", f"Torch.tanh.{i}.backward"):
            assert dump.data[name]["input"][0]["Max"] == 10.0 * (i + 1)
    assert [n for n in dump.data if n.startswith("Module.1.Tanh.backward")] == [
        f"Module.1.Tanh.backward.{i}" for i in order
    ]


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved tensors", "reentrant"])
@pytest.mark.parametrize("way", ["a part", "a sequence", "twice the same", "under no_grad"])
@mix
def test_checkpointed_call_has_one_number_and_the_tree_stays_a_tree(
    way: str, reentrant: bool, level: str, tmp_path: Path
) -> None:
    """B22, BB23."""

    def forward(model: Any, x: Tensor) -> Tensor:
        if way == "a sequence":
            return model.c(checkpoint_sequential(model.ab, 2, x, use_reentrant=reentrant))
        h = checkpoint(model.ab, x, use_reentrant=reentrant)
        if way == "twice the same":
            h = checkpoint(model.ab, h, use_reentrant=reentrant)
        if way == "under no_grad":
            with torch.no_grad():
                checkpoint(model.ab, x, use_reentrant=True)
        return model.c(h)

    def build() -> tuple[nn.Module, Callable[[], Any]]:
        parts = {"ab": nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.3)), "c": nn.Linear(2, 1)}
        net = Function(forward, **parts)
        return net, backward_of(net, torch.randn(3, 2, requires_grad=True))

    dump = undisturbed(tmp_path, build, level=level)
    calls = {"twice the same": 2, "under no_grad": 2}.get(way, 1)
    layer = [n for n in dump.data if n.startswith("Module.ab.0.Linear.")]
    assert [n for n in layer if ".forward." in n][:calls] == [
        f"Module.ab.0.Linear.forward.{i}" for i in range(calls)
    ]
    graphs = 2 if way == "twice the same" else 1
    assert len([n for n in layer if ".backward." in n]) == graphs
    assert [n for n in dump.data if n.startswith("Module.c.")] == [
        "Module.c.Linear.forward.0", "Module.c.Linear.backward.0",
        "Module.c.Linear.parameters_grad.0",
    ]  # fmt: skip
    for name in dump.construct:
        chain = [name]
        while chain[-1] is not None:
            assert len(chain) < 10, chain
            chain.append(dump.construct[chain[-1]])


def test_threads_keep_their_records_apart(tmp_path: Path) -> None:
    """B23, BB15. Forward and backward of one model in eight threads, the backward in another."""
    net = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Tanh())
    watcher = debugger(tmp_path, level="mix")
    barrier = threading.Barrier(4)
    inputs = [torch.full((2, 4), float(number), requires_grad=True) for number in range(12)]

    def work(number: int) -> Tensor:
        barrier.wait()
        return net(inputs[number]).sum()

    watcher.start(net)
    with ThreadPoolExecutor(4) as pool:
        losses = list(pool.map(work, range(12)))
        for done in [pool.submit(loss.backward) for loss in losses]:
            done.result()
    watcher.stop()
    watcher.step()
    dump = read_dump(tmp_path)
    # per call: two modules and their container, linear, tanh, sum
    assert len(dump.names(".forward")) == len(dump.names(".backward")) == 72
    seen = set()
    for name in forwards(dump, "Module.0.0.Linear"):
        record = dump.data[name]
        seen.add(record["input_args"][0]["Max"])
        assert record["output"][0]["shape"] == [2, 4]
        parent = dump.construct[name]
        assert parent.startswith("Module.0.Sequential.forward.")
        assert dump.data[parent]["input_args"] == record["input_args"]
    assert seen == set(map(float, range(12)))


PRODUCTS: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor], Any, Any]] = {
    "4-D matmul": ("Torch.matmul", lambda a, b: torch.matmul(a, b), (2, 1, 3, 4), (5, 4, 2)),
    "matmul with a vector": ("Torch.matmul", lambda a, b: torch.matmul(a, b), (2, 3, 4), (4,)),
    "operator": ("Tensor.__matmul__", lambda a, b: a @ b, (2, 3, 4), (4, 3)),
    "3-D linear": ("Functional.linear", lambda a, b: F.linear(a, b), (2, 3, 4), (5, 4)),
    "einsum": ("Torch.einsum", lambda a, b: torch.einsum("bij,kj->bki", a, b), (2, 3, 4), (5, 4)),
    "bilinear": (
        "Functional.bilinear",
        lambda a, b: F.bilinear(a, a.detach(), b),
        (3, 4),
        (2, 4, 4),
    ),
    "conv1d without batch": ("Functional.conv1d", lambda a, b: F.conv1d(a, b), (4, 9), (2, 4, 3)),
    "tensordot": ("Torch.tensordot", lambda a, b: torch.tensordot(a, b, 2), (2, 3, 4), (3, 4, 5)),
    "attention": (
        "Functional.scaled_dot_product_attention",
        lambda a, b: F.scaled_dot_product_attention(a, b, b.detach()),
        (2, 3, 4),
        (2, 5, 4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("product", PRODUCTS)
def test_gradients_of_both_factors_stand_at_their_places(product: str, tmp_path: Path) -> None:
    """B49, BB8. Equal to autograd's own, to the bit."""
    name, function, left, right = PRODUCTS[product]
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(s, generator=generator, requires_grad=True) for s in (left, right))
    # A second use outside of the call must not be counted.
    expected = torch.autograd.grad(function(a, b).square().sum(), (a, b))

    def step() -> None:
        (function(a, b).square().sum() + a.sum() + b.exp().sum()).backward()

    dump = collect(tmp_path, step, level="L1", task="tensor")
    got = dump.gradients(f"{name}.0.backward")["output"]
    found = [g for g in got if isinstance(g, Tensor)]
    assert [tuple(g.shape) for g in found] == [left, right]
    assert all(torch.equal(g, e) for g, e in zip(found, expected, strict=True))


@levels
def test_second_order_gradients_are_the_same_and_nothing_grows(level: str, tmp_path: Path) -> None:
    """B55. Two products with the Hessian over one graph, step after step."""

    def run(watcher: PrecisionDebugger | None) -> list[Any]:
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(3, 3), nn.Softplus(), nn.Linear(3, 1))
        x, v = torch.randn(2, 3), torch.randn(2, 3)
        results = []
        for _ in range(3):
            if watcher:
                watcher.start(net)
            y = x.clone().requires_grad_()
            (grad,) = torch.autograd.grad(net(y).square().sum(), y, create_graph=True)
            (first,) = torch.autograd.grad((grad * v).sum(), y, create_graph=True)
            (first.square().sum() + grad.norm()).backward()
            if watcher:
                watcher.stop()
                watcher.step()
            results += [bits([grad, first, *(p.grad for p in net.parameters())])]
        return results

    expected = run(None)
    watcher = debugger(tmp_path, level=level)
    assert run(watcher) == expected
    steps = [list(read_data(tmp_path, i)) for i in range(3)]
    assert steps[0] == steps[1] == steps[2]
    assert len(set(steps[0])) == len(steps[0])


# ---- arguments and results: B15, B17, B31, B33, B34, B42, B43, A1-A4, A8, BB24 -----------------


class Pair(NamedTuple):
    left: Tensor
    right: Any


class Output(collections.OrderedDict[str, Any]):
    """Like the outputs of transformers: a mapping whose values are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Wrapped(collections.UserDict[str, Any]):
    """A mapping that is no dict, as the batches of transformers are."""


@dataclasses.dataclass
class Nested:
    pair: Pair
    more: list[Any]


STRUCTURES: dict[str, Callable[[Tensor], Any]] = {
    "named tuple": lambda y: Pair(y, None),
    "mapping with attributes": lambda y: Output(logits=y, cache=((y * 2, None),)),
    "mapping that is no dict": lambda y: Wrapped(y=y),
    "dataclass of a named tuple": lambda y: Nested(Pair(y, 1), [{"z": y.exp()}]),
    "list of dicts": lambda y: [{"a": y}, {"b": [y + 1]}],
    "tuple with text": lambda y: ("text", y),
    "dict keyed by numbers": lambda y: {0: y, (1, 2): y * 3},
    "result of topk": lambda y: torch.topk(y, 1),
}


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        value = [getattr(value, f.name) for f in dataclasses.fields(value)]
    if isinstance(value, collections.abc.Mapping):
        value = [value[key] for key in value]
    return [t for v in value for t in tensors_in(v)] if isinstance(value, (list, tuple)) else []


def described(value: Any) -> list[Any]:
    """The entries of tensors in a section, nulls included, in their order."""
    if isinstance(value, dict) and "dtype" not in value:
        return (
            [e for part in value.values() for e in described(part)] if "type" not in value else []
        )
    return [e for part in value for e in described(part)] if isinstance(value, list) else [value]


@pytest.mark.parametrize("structure", STRUCTURES)
@mix
def test_structured_output_passes_as_it_is_with_all_its_tensors_and_gradients(
    structure: str, level: str, tmp_path: Path
) -> None:
    """B15, BB9."""
    results: list[Any] = []

    def build() -> tuple[nn.Module, Callable[[], Any]]:
        inner = Function(lambda m, x: STRUCTURES[structure](m.fc(x)), fc=nn.Linear(2, 2))
        net = nn.Sequential(inner)

        def step() -> Any:
            result = net(torch.randn(3, 2))
            results.append(result)
            found = [t for t in tensors_in(result) if t.requires_grad]
            torch.stack([t.sum() for t in found]).sum().backward()
            return found

        return net, step

    dump = undisturbed(tmp_path, build, level=level)
    plain, watched = results
    assert type(plain) is type(watched)
    found = tensors_in(watched)
    entries = [e for e in described(dump.data["Module.0.Function.forward.0"]["output"]) if e]
    assert [e["shape"] for e in entries] == [list(t.shape) for t in found]
    grads = described(dump.data["Module.0.Function.backward.0"]["input"])
    assert len([g for g in grads if g]) == len([t for t in found if t.requires_grad])


class Tagged(Tensor):
    """A subclass with an attribute and its own idea of functions."""

    seen: ClassVar[collections.Counter[str]] = collections.Counter()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen[func.__name__] += 1
        return super().__torch_function__(func, types, args, kwargs or {})


@levels
def test_subclass_and_its_handler_see_what_they_see_without_the_tool(
    level: str, tmp_path: Path
) -> None:
    """B17."""

    def build() -> tuple[nn.Module, Callable[[], Any]]:
        net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

        def step() -> Any:
            Tagged.seen.clear()
            x = torch.ones(1, 2).as_subclass(Tagged)
            x.note = "mine"
            y = F.gelu(net(x) + 1)
            return [type(y).__name__, x.note, y.as_subclass(Tensor), dict(Tagged.seen)]

        return net, step

    undisturbed(tmp_path, build, level=level)


class OnlyDispatch(Tensor):
    """A wrapper around another tensor, without memory of its own."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnlyDispatch:
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [a.inner if isinstance(a, OnlyDispatch) else a for a in args]
        return cls(func(*plain, **(kwargs or {})))


@pytest.mark.parametrize("task", ["statistics", "tensor"])
def test_tensor_without_memory_of_its_own_is_told_by_type_and_shape(
    task: str, tmp_path: Path
) -> None:
    """B17, A2."""
    x = OnlyDispatch(torch.arange(4.0))
    results: list[Any] = []
    dump = collect(tmp_path, lambda: results.append(torch.exp(x)), level="L1", task=task)
    assert type(results[0]) is OnlyDispatch
    assert torch.equal(results[0].inner, torch.arange(4.0).exp())
    (entry,) = dump.data["Torch.exp.0.forward"]["output"]
    assert entry["type"].endswith("OnlyDispatch")
    assert (entry["shape"], entry["Max"], "data_name" in entry) == ([4], None, False)


class Apis:
    """Functions of the user's, to be registered."""

    @staticmethod
    def take(*args: Any, **kwargs: Any) -> Any:
        return args[0] if args else None

    @staticmethod
    def give(make: Any) -> Any:
        return make()


def take(path: Path, *args: Any, task: str = "statistics", **kwargs: Any) -> Dump:
    """What is recorded of a call with these arguments, and of the calls around it."""
    watcher = debugger(path, level="L1", task=task, **kwargs.pop("options", {}))
    watcher.register_custom_api(Apis, "take")
    watcher.start()
    torch.tanh(torch.ones(1))
    result = Apis.take(*args, **kwargs)
    assert result is (args[0] if args else None)
    torch.tanh(torch.ones(1))
    watcher.stop()
    watcher.step()
    dump = read_dump(path)
    assert forwards(dump) == [
        "Torch.tanh.0.forward", "Apis.take.0.forward", "Torch.tanh.1.forward",
    ]  # fmt: skip
    return dump


def dtypes() -> list[torch.dtype]:
    found = {d for d in vars(torch).values() if isinstance(d, torch.dtype)}
    return sorted(found, key=str)


def of_dtype(dtype: torch.dtype) -> Tensor | None:
    """Four elements of any dtype; None if torch can not make any."""
    names = {"qint8", "quint8", "qint32"}
    if str(dtype).removeprefix("torch.") in names:
        return torch.quantize_per_tensor(torch.arange(4.0), 0.5, 1, dtype)
    try:
        return torch.tensor([1, 0, 3, 2]).to(dtype)
    except (RuntimeError, TypeError, NotImplementedError):
        pass
    try:
        return torch.empty(4, dtype=dtype).untyped_storage() and torch.zeros(
            4, dtype=torch.uint8
        ).view(dtype)
    except (RuntimeError, TypeError, NotImplementedError):
        return None


@pytest.mark.parametrize(
    ("task", "mode"),
    [("statistics", "statistics"), ("statistics", "md5"), ("statistics", "xor"), ("tensor", "md5")],
    ids=["statistics", "md5", "xor", "tensor"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensor_of_any_dtype_is_recorded_and_left_as_it_is(
    task: str, mode: str, tmp_path: Path
) -> None:
    """B33, A1, A2, A8. All dtypes of this torch as the arguments of one call."""
    tensors = [t for t in map(of_dtype, dtypes()) if t is not None]
    assert len(tensors) > 20
    sizes = [t.untyped_storage().nbytes() for t in tensors]
    dump = take(tmp_path, *tensors, task=task, options={"summary_mode": mode})
    entries = dump.data["Apis.take.0.forward"]["input_args"]
    assert [e["dtype"] for e in entries] == [str(t.dtype) for t in tensors]
    assert [e["shape"] for e in entries] == [[*t.shape] for t in tensors]
    assert [t.untyped_storage().nbytes() for t in tensors] == sizes
    numbers = {e["dtype"]: e for e in entries}
    if mode != "xor":
        assert (numbers["torch.float8_e4m3fn"]["Max"], numbers["torch.int64"]["Max"]) == (3.0, 3)
    else:
        assert all(e["md5"] for e in entries if e["dtype"] in ("torch.float64", "torch.bool"))
    if task == "tensor":
        saved = dump.tensors([e for e in entries if e.get("data_name")])
        assert len(saved) > 15
        assert {str(t.dtype) for t in saved} <= {e["dtype"] for e in entries}


LAYOUTS: dict[str, Callable[[], Any]] = {
    "coo": lambda: torch.eye(2).to_sparse(),
    "coo, not coalesced": lambda: torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,)),
    "csr": lambda: torch.eye(2).to_sparse_csr(),
    "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    ),
    "quantized per channel": lambda: torch.quantize_per_channel(
        torch.eye(2), torch.ones(2), torch.zeros(2), 0, torch.qint8
    ),
    "mkldnn": lambda: torch.eye(2).to_mkldnn(),
    "meta": lambda: torch.empty(2, 2, device="meta"),
    "conjugate": lambda: torch.tensor([1 + 2j]).conj(),
    "negative view": lambda: torch.tensor([1 + 2j]).conj().imag,
    "expanded to terabytes": lambda: torch.ones(1).expand(1 << 20, 1 << 20),
    "storage freed": lambda: _freed(),
    "empty": lambda: torch.empty(0, 3),
    "0-dim complex": lambda: torch.tensor(1 + 2j),
    "overlapping": lambda: torch.arange(5.0).as_strided((3, 3), (1, 1)),
    "offset": lambda: torch.arange(9.0)[4:6],
    "negative zero and NaN": lambda: torch.tensor([-0.0, float("nan"), float("-inf")]),
}  # fmt: skip


def _freed() -> Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("mode", ["statistics", "md5", "xor"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensor_of_any_layout_is_recorded_and_does_not_stop_the_next_call(
    layout: str, mode: str, tmp_path: Path
) -> None:
    """B34, A2, A8."""
    if layout == "expanded to terabytes" and mode != "statistics":
        mode = "statistics"  # its bytes could not be read in a lifetime
    value = LAYOUTS[layout]()
    dump = take(tmp_path, value, options={"summary_mode": mode})
    (entry,) = dump.data["Apis.take.0.forward"]["input_args"]
    assert entry["dtype"] == str(value.dtype)
    if layout not in ("nested", "jagged"):
        assert entry["shape"] == list(value.shape)


def test_tensor_without_memory_is_not_saved_and_does_not_end_the_process(tmp_path: Path) -> None:
    """A1, A8. As FSDP leaves its parameters: they have a shape, and reading them is a crash."""
    script = """
import sys, torch
from msprobe.pytorch import PrecisionDebugger

gone = torch.ones(4)
gone.untyped_storage().resize_(0)
section = {"summary_mode": "md5"}
PrecisionDebugger({"task": "tensor", "level": "L1", "dump_path": sys.argv[1], "tensor": section})
PrecisionDebugger.start()
gone.t()
PrecisionDebugger.stop()
PrecisionDebugger.step()
"""
    (tmp_path / "script.py").write_text(script)
    code, output = run_script(tmp_path / "script.py", [str(tmp_path / "dump")], tmp_path)
    assert code == 0, output
    (entry,) = read_data(tmp_path / "dump")["Tensor.t.0.forward"]["input_args"]
    assert (entry["shape"], entry["Max"], entry["md5"], "data_name" in entry) == (
        [4],
        None,
        None,
        False,
    )


def test_keyword_arguments_are_recorded_with_their_gradients(tmp_path: Path) -> None:
    """B42. Nested, after positional ones, defaults not invented."""

    def forward(
        model: Any, a: Tensor, /, b: Tensor, *rest: Tensor, scale: float = 2.0, **k: Any
    ) -> Any:
        return a * b + k["table"]["c"][1] * scale + sum(r.sum() for r in rest)

    net = nn.Sequential(nn.Identity())
    net.layer = Function(forward)
    a, b, c, d = (torch.full((2,), i + 1.0, requires_grad=True) for i in range(4))

    def step() -> None:
        net.layer(a, b, d, table={"c": [None, c]}, flag=True).sum().backward()

    dump = collect(tmp_path, step, net, level="L0", task="tensor")
    record = dump.data["Module.layer.Function.forward.0"]
    assert [e["Max"] for e in record["input_args"]] == [1.0, 2.0, 4.0]
    assert list(record["input_kwargs"]) == ["table", "flag"]
    assert record["input_kwargs"]["table"]["c"][1]["data_name"] == (
        "Module.layer.Function.forward.0.kwargs.table.c.1.pt"
    )
    *positional, table, flag = dump.gradients("Module.layer.Function.backward.0")["output"]
    assert [g.tolist() for g in positional] == [[2.0, 2.0], [1.0, 1.0], [2.0, 2.0]]
    assert (table["c"][0], table["c"][1].tolist(), flag) == (None, [2.0, 2.0], None)


def test_names_of_nested_arguments_follow_their_nesting(tmp_path: Path) -> None:
    """B43."""
    x = torch.ones(1)
    value = [x, (x, {"k": [x], 3: x}), [[[x]]], Pair(x, x)]
    dump = take(tmp_path, value, task="tensor")
    (tree,) = dump.data["Apis.take.0.forward"]["input_args"]
    stem = "Apis.take.0.forward.input.0"
    assert [e["data_name"].removeprefix(stem) for e in described(tree)] == [
        ".0.pt", ".1.0.pt", ".1.1.k.0.pt", ".1.1.3.pt", ".2.0.0.0.pt", ".3.left.pt", ".3.right.pt",
    ]  # fmt: skip


class Color(enum.Enum):
    RED = 1


ODD: dict[str, tuple[Any, Any]] = {
    "complex": (1 + 2j, {"type": "complex", "value": "1+2j"}),
    "numpy complex": (np.complex64(1 + 2j), {"type": "complex", "value": "1+2j"}),
    "NaN": (float("nan"), {"type": "float", "value": "NaN"}),
    "numpy infinity": (np.float32("-inf"), {"type": "float32", "value": "-Infinity"}),
    "huge": (1 << 70, {"type": "int", "value": 1 << 70}),
    "enum": (Color.RED, {"type": f"{__name__}.Color", "value": None}),
    "set": ({1}, {"type": "set", "value": None}),
    "bytes": (b"\xff", {"type": "bytes", "value": None}),
    "range": (range(3), {"type": "range", "value": None}),
    "dtype": (torch.float16, {"type": "torch.dtype", "value": "torch.float16"}),
    "device": (torch.device("cpu"), {"type": "torch.device", "value": "cpu"}),
    "surrogate": ("\ud800", {"type": "str", "value": "\ud800"}),
    "slice of odd things": (slice(None, 2.5, "x"), {"type": "slice", "value": [None, 2.5, "x"]}),
    "tuple key": ({(1, 2): 3}, {"(1, 2)": {"type": "int", "value": 3}}),
    "None key": ({None: None}, {"None": None}),
    "function": (len, {"type": "builtin_function_or_method", "value": None}),
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_argument_has_its_entry(kind: str, tmp_path: Path) -> None:
    """A3, BB24, B31, B34."""
    value, expected = ODD[kind]
    dump = take(tmp_path, value, option=value)
    record = dump.data["Apis.take.0.forward"]
    assert record["input_args"] == record["output"] == [expected]
    assert record["input_kwargs"] == {"option": expected}


class RefusingArray(np.ndarray[Any, Any]):
    def max(self, *_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("no maximum")


@pytest.mark.parametrize("task", ["statistics", "tensor"])
def test_value_that_can_not_be_described_costs_its_own_entry_only(
    task: str, tmp_path: Path
) -> None:
    """A2, BB29."""
    odd = np.ones(2).view(RefusingArray)
    dump = take(tmp_path, [odd, 1], 2, task=task, first=odd, second=[3, odd], third=torch.ones(1))
    record = dump.data["Apis.take.0.forward"]
    (first, one), two = record["input_args"]
    assert first["type"].endswith("RefusingArray")
    assert (one["value"], two["value"]) == (1, 2)
    assert list(record["input_kwargs"]) == ["first", "second", "third"]
    assert record["input_kwargs"]["second"][0] == {"type": "int", "value": 3}
    assert record["input_kwargs"]["third"]["Max"] == 1.0
    assert any("no maximum" in line for line in dump.errors())


def test_argument_whose_parts_are_reached_on_endless_paths_is_cut(tmp_path: Path) -> None:
    """Objects that refer to each other: little memory, 2**60 paths, and a tensor at the end."""
    value: list[Any] = [torch.ones(1)]
    for _ in range(60):
        value = [value, value]
    dump = take(tmp_path, torch.ones(2), value, torch.ones(3))
    entries = dump.data["Apis.take.0.forward"]["input_args"]
    assert (entries[0]["shape"], entries[2]["shape"]) == ([2], [3])
    assert (dump.folder / "dump.json").stat().st_size < 50_000_000


RESULTS: dict[str, Callable[[], Any]] = {
    "empty dict": dict,
    "dict without tensor": lambda: {"n": 5},
    "dict of lists": lambda: {"a": [torch.ones(1)]},
    "dict of dicts": lambda: {"a": {"b": torch.ones(1)}},
    "generator": lambda: (i for i in range(3)),
    "module": lambda: nn.Linear(1, 1),
    "class": lambda: Color,
    "itself": lambda: [Ellipsis],
}


@pytest.mark.parametrize("kind", RESULTS)
def test_any_result_of_a_registered_function_passes(kind: str, tmp_path: Path) -> None:
    """A4."""
    results: list[Any] = []
    watcher = debugger(tmp_path, level="L1")
    watcher.register_custom_api(Apis, "give")
    watcher.start()
    results.append(Apis.give(RESULTS[kind]))
    torch.tanh(torch.ones(1))
    watcher.stop()
    assert type(results[0]) is type(RESULTS[kind]())
    data = read_data(tmp_path)
    assert list(data)[-1] == "Torch.tanh.0.forward"
    assert "output" in data["Apis.give.0.forward"]


def test_nan_and_infinity_are_texts_wherever_they_stand(tmp_path: Path) -> None:
    """B31, BB4. Arguments, keywords, results, parameters, gradients; `read_json` is strict."""
    net = nn.Sequential(nn.Linear(2, 2))
    with torch.no_grad():
        net[0].weight.fill_(float("inf"))
        net[0].bias.fill_(float("nan"))

    def step() -> None:
        out = net(torch.ones(1, 2))
        F.threshold(out, threshold=float("-inf"), value=float("nan")).sum().backward()
        (torch.ones(1, requires_grad=True) * 1e38 * 1e38).log().sum().backward()

    dump = collect(tmp_path, step, net, level="mix")
    parameters = dump.data["Module.0.Linear.forward.0"]["parameters"]
    assert (parameters["weight"]["Max"], parameters["bias"]["Max"]) == ("Infinity", "NaN")
    given = dump.data["Functional.threshold.0.forward"]["input_kwargs"]
    assert (given["threshold"]["value"], given["value"]["value"]) == ("-Infinity", "NaN")


# ---- modules that are called in unusual ways: B39, B40, B54, BB16, BB18 ------------------------


@pytest.mark.parametrize("how", ["padding mask", "attention alone", "two layers"])
def test_fused_path_of_torch_is_left_alone_and_recorded(how: str, tmp_path: Path) -> None:
    """B39, BB18. The fused call gives the same bits; what was not called is told."""

    def build() -> tuple[nn.Module, Callable[[], Any]]:
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        net = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)).eval()
        x = torch.randn(2, 3, 8)
        mask = torch.tensor([[False, False, True], [False, False, False]])
        calls = {
            "padding mask": lambda: net[0](x, src_key_padding_mask=mask),
            "attention alone": lambda: net[0].layers[0].self_attn(x, x, x, need_weights=False)[0],
            "two layers": lambda: net(x),
        }

        def step() -> Any:
            with torch.inference_mode():
                return calls[how]().clone()

        return net, step

    plain = outcome(build, lambda model, step: step())

    def watched(model: nn.Module, step: Callable[[], Any]) -> Any:
        result: list[Any] = []
        collect(tmp_path, lambda: result.append(step()), model, level="mix")
        return result[0]

    # torch itself takes the slow path when modules have hooks: the same to rounding, 8 numbers
    # added in another order in float32.
    got, want = (
        torch.frombuffer(bytearray(r[0][2]), dtype=torch.float32)
        for r in (outcome(build, watched), plain)
    )
    assert torch.allclose(got, want, atol=1e-5)
    names = list(read_data(tmp_path))
    fused = ("encoder_layer_fwd", "multi_head_attention", "self_attn", "native_multi_head")
    assert any(part in name for name in names for part in fused), names


class ByHand(nn.Module):
    """Calls its parts without ``__call__``, and one that it has not registered."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.list = nn.ModuleList([nn.Linear(2, 2)])
        self.unused = nn.Linear(2, 2)
        self._hidden = [nn.Linear(2, 2)]

    def forward(self, x: Tensor) -> Tensor:
        x = nn.Linear.forward(self.fc, x)
        x = F.linear(x, self.list[0].weight, self.list[0].bias)
        return self._hidden[0](x)


def test_modules_whose_call_is_passed_by_are_told_and_what_they_do_is_recorded(
    tmp_path: Path,
) -> None:
    """B40."""
    net = nn.Sequential(ByHand())
    dump = collect(tmp_path, lambda: net(torch.ones(1, 2)).sum().backward(), net, level="mix")
    assert len(forwards(dump, "Functional.linear")) == 3
    assert len(dump.names("Functional.linear")) == 6
    never = read_beside(tmp_path, "coverage.json")["modules_never_called"]
    assert {"0.fc", "0.list.0", "0.unused"} <= set(never)
    assert "0" not in never


LAZY: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: nn.Sequential(nn.LazyConv2d(2, 3), nn.Flatten(), nn.LazyLinear(1)),
    "norm": lambda: nn.Sequential(nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(1)),
}


@pytest.mark.parametrize("kind", LAZY)
@module_levels
def test_lazy_module_is_recorded_from_its_first_call_on(
    kind: str, level: str, tmp_path: Path
) -> None:
    """B54. Under the name of the class that it becomes."""

    def build() -> tuple[nn.Module, Callable[[], Any]]:
        net = nn.Sequential(LAZY[kind]())
        x = torch.randn(2, 3, 4, 4)
        return net, lambda: [backward_of(net, x)() for _ in range(2)]

    dump = undisturbed(tmp_path, build, level=level)
    first, second = forwards(dump, "Module.0.2.")
    assert second == "Module.0.2.Linear.forward.1" or "Lazy" in first
    for name in (first, second):
        assert dump.data[name]["parameters"]["weight"]["shape"][0] == 1


def test_recurrent_layers_are_recorded_at_l1(tmp_path: Path) -> None:
    """BB18."""
    rnn, cell = nn.LSTM(2, 3), nn.GRUCell(2, 3)
    dump = collect(tmp_path, lambda: (rnn(torch.ones(4, 1, 2)), cell(torch.ones(1, 2))), level="L1")
    assert len(forwards(dump, "lstm")) == len(forwards(dump, "gru_cell")) == 1


def test_parts_added_to_a_model_between_steps_are_recorded(tmp_path: Path) -> None:
    """BB16. And those that were taken away are forgotten; other models share no names."""
    net = nn.Sequential(nn.Tanh())
    watcher = debugger(tmp_path, level="L0")
    for number in range(3):
        if number == 1:
            net.append(nn.Sigmoid())
        if number == 2:
            del net[0]
        watcher.start(net)
        net(torch.ones(1))
        watcher.stop()
        watcher.step()
    tanh, sigmoid = "Module.0.Tanh.forward.0", "Module.1.Sigmoid.forward.0"
    assert [list(read_data(tmp_path, i)) for i in range(3)] == [
        [tanh], [tanh, sigmoid], ["Module.0.Sigmoid.forward.0"],
    ]  # fmt: skip


# ---- files and their places: B36, B45, B46, B48, BB6, BB13, BB19, BB20, BB21, BB29, BB30 -------

NAMES = [
    "with blank",
    "50%d{x}",
    "\u6570\u636e-\U0001f600",
    "quote\"and'",
    "back\\slash",
    "-rf",
    "new\nline",
    "trailing.",
    "n" * 200,
    "deep/er/than/before/../here",
]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:20])
def test_any_legal_path_is_written_to(name: str, tmp_path: Path) -> None:
    """B48."""
    dump = collect(tmp_path / name, lambda: torch.tanh(torch.ones(1)), level="L1", task="tensor")
    assert list(dump.data) == ["Torch.tanh.0.forward"]
    assert Path(dump.header["dump_data_dir"]).is_dir()
    assert len(dump.tensors([*dump.data.values()])) == 1


def test_relative_path_stays_where_the_process_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B48."""
    monkeypatch.chdir(tmp_path)
    watcher = debugger(Path("here/"), level="L1")
    for _ in range(2):
        watcher.start()
        torch.tanh(torch.ones(1))
        watcher.stop()
        watcher.step()
    assert [list(read_data("here", i)) for i in range(2)] == [["Torch.tanh.0.forward"]] * 2


def test_nothing_is_left_over_from_an_earlier_stage(tmp_path: Path) -> None:
    """B45. Another model, level and path, after an unfinished backward and an open module."""
    watcher = debugger(tmp_path / "first", level="mix")
    net = nn.Sequential(CallsBack(), nn.Tanh())
    watcher.start(net)
    loss = net(torch.ones(1, requires_grad=True)).sum()
    watcher.stop()
    watcher.service.reset_status()
    watcher.config.dump_path = str(tmp_path / "second")
    watcher.start(nn.Sequential(net[1]))
    net[1](torch.ones(1))
    loss.backward()
    watcher.stop()
    watcher.service._reset_status()
    PrecisionDebugger._instance = None  # late gradients are written within a second, or now
    assert list(read_data(tmp_path / "second")) == [
        "Torch.tanh.0.forward", "Module.0.Tanh.forward.0",
    ]  # fmt: skip
    assert "Torch.tanh.0.backward" in read_data(tmp_path / "first")


RANKS = """
import os, sys, torch
from msprobe.pytorch import PrecisionDebugger

children = []
for number in range(6):
    pid = os.fork()
    if not pid:
        PrecisionDebugger(dump_path=sys.argv[1], level="L1", task="tensor")
        for _ in range(3):
            PrecisionDebugger.start(rank_id=number if number < 3 else None)
            torch.tanh(torch.full((3,), float(number)))
            PrecisionDebugger.stop()
            PrecisionDebugger.step()
        os._exit(0)
    children.append(pid)
assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 6
"""


def test_processes_that_write_to_one_path_do_not_meet(tmp_path: Path) -> None:
    """B46."""
    (tmp_path / "script.py").write_text(RANKS)
    code, output = run_script(tmp_path / "script.py", [str(tmp_path / "dump")], tmp_path)
    assert code == 0, output
    for step in range(3):
        folders = sorted((tmp_path / "dump" / f"step{step}").iterdir())
        assert [f.name[:4] for f in folders] == ["proc"] * 3 + ["rank"] * 3
        values = set()
        for folder in folders:
            data = read_json(folder / "dump.json")["data"]
            values.add(data["Torch.tanh.0.forward"]["input_args"][0]["Max"])
        assert values == set(map(float, range(6)))


def test_files_can_be_read_while_they_are_written(tmp_path: Path) -> None:
    """BB6. A reader that never sleeps beside windows that write as fast as they can.

    A file that is written twice while it is being read may be read as a mix of the two: the reader
    of the test loses the processor for milliseconds, in which several windows end. It reads again.
    """
    watcher = debugger(tmp_path, level="L1")
    x = torch.ones(3)
    watcher.start()
    folder = rank_folder(tmp_path)
    over = threading.Event()
    read: list[int] = []
    problems: list[str] = []

    def look() -> None:
        while not over.is_set():
            for path in folder.glob("*.json"):
                errors: list[Exception] = []
                while len(errors) < 10:
                    try:
                        read.append(len(read_json(path)))
                        break
                    except Exception as error:
                        errors.append(error)
                else:
                    problems.append(f"{path}: {errors}")

    looking = threading.Thread(target=look)
    looking.start()
    windows = 0
    while windows < 50 or (len(read) < 10 and windows < 5000):
        for _ in range(10):
            torch.tanh(x)
        watcher.stop()
        watcher.start()
        windows += 1
    watcher.stop()
    over.set()
    looking.join()
    assert problems == []
    assert len(read) >= 10
    assert len(read_data(tmp_path)) == 10 * windows


def test_calls_after_step_are_not_recorded_and_not_spoken_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """BB13."""
    watcher = debugger(tmp_path, level="L1")
    watcher.start()
    torch.tanh(torch.ones(1))
    watcher.step()
    torch.tanh(torch.ones(1))
    watcher.stop()
    assert len(read_data(tmp_path)) == 1
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


PRINTS: dict[str, Callable[[Tensor], Any]] = {
    "print": lambda x: print(x),
    "format": lambda x: f"{x} {x.sum().detach():.3f}"[:0],
    "repr of a list": lambda x: repr([x, {"k": x}]),
    "repr of a parameter": lambda x: repr(nn.Parameter(x)),
    "repr of a model": lambda x: repr(MODEL),
    "logging": lambda x: logging.getLogger("mine").warning("%s", x),
    "assertion message": lambda x: str(AssertionError(x)),
}


MODEL = nn.Sequential(nn.Linear(2, 2), nn.ReLU())


@pytest.mark.parametrize("way", PRINTS)
@pytest.mark.parametrize("size", [2000])
def test_formatting_a_tensor_shifts_no_number(way: str, size: int, tmp_path: Path) -> None:
    """BB19. Small and abbreviated, with numbers that need a scale."""
    x = torch.linspace(-1e-3, 1e6, size, dtype=torch.float64)

    def run(talk: bool) -> list[str]:
        def step() -> None:
            for function in (torch.abs, torch.isfinite, torch.ceil, torch.masked_select):
                if talk:
                    PRINTS[way](x)
                function(x, x > 0) if function is torch.masked_select else function(x)

        path = tmp_path / str(talk)
        names = list(collect(path, step, level="L1").data)
        PrecisionDebugger._instance = None
        return names

    silent = [n for n in run(False)]
    expected = ["Torch.sum", "Tensor.sum"] if way == "format" else []
    assert [n for n in run(True) if not n.startswith(tuple(expected) or "-")] == silent


def test_second_run_in_the_same_folder_leaves_nothing_of_the_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """BB21. Files of others stay."""

    def run(name: str) -> Dump:
        watcher = debugger(tmp_path, level="L1", task="tensor")
        watcher.start(rank_id=3)
        getattr(torch, name)(torch.ones(1))
        watcher.stop()
        watcher.step()
        PrecisionDebugger._instance = None
        return read_dump(tmp_path)

    first = run("tanh")
    for folder in (first.folder, first.folder / "dump_tensor_data"):
        (folder / "notes.txt").write_text("mine")
    second = run("exp")
    names = {p.name for p in (second.folder / "dump_tensor_data").iterdir()}
    assert names == {
        "Torch.exp.0.forward.input.0.pt", "Torch.exp.0.forward.output.0.pt", "notes.txt",
    }  # fmt: skip
    assert (second.folder / "notes.txt").read_text() == "mine"
    assert len([r for r in caplog.records if "earlier run" in r.message]) == 1


def test_what_could_not_be_collected_is_in_the_log_with_its_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """BB29. Once as a warning, however often it happens."""
    x = torch.ones(3, dtype=torch.uint8).view(torch.bits8)
    watcher = debugger(tmp_path, level="L1")
    watcher.register_custom_api(Apis, "take")
    watcher.start()
    for _ in range(5):
        Apis.take(x)
    watcher.stop()
    log = (rank_folder(tmp_path) / "dump_error_info.log").read_text()
    assert log.count("bits8") >= 5
    assert "Apis.take.4.forward" in log
    assert len([r for r in caplog.records if "bits8" in r.message]) == 1


class Rows(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.tanh(torch.full((2,), float(index))).reshape(2)


def test_workers_forked_inside_of_the_window_record_nothing(tmp_path: Path) -> None:
    """BB30."""
    net = nn.Sequential(nn.Linear(2, 1))

    def step() -> None:
        for rows in torch.utils.data.DataLoader(Rows(), batch_size=4, num_workers=2):
            net(rows)

    dump = collect(tmp_path, step, net, level="mix")
    assert forwards(dump, "Torch.tanh") == []
    assert len(forwards(dump, "Module.0.Linear")) == 2
    assert len(list((tmp_path / "step0").iterdir())) == 1


def test_common_functions_are_recorded_by_default(tmp_path: Path) -> None:
    """BB32. All of which the observed tool left out."""
    x = torch.randn(2, 4)

    def step() -> None:
        torch.stack([x, x])
        torch.cat([x, x])
        x.split(2, 1)
        x.reshape(4, 2)
        torch.fft.fft(x)
        torch.special.erf(x)
        _ = -x

    names = " ".join(forwards(collect(tmp_path, step, level="L1")))
    for name in ("stack", "cat", "split", "reshape", "fft", "erf", "neg"):
        assert name in names
    assert PrecisionDebugger._instance.config.risk_level == "ALL"


# ---- the state of the process: B58 -------------------------------------------------------------


def process_state() -> dict[str, Any]:
    return {
        "threads of torch": torch.get_num_threads(),
        "interop threads": torch.get_num_interop_threads(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "random": bits(torch.get_rng_state()),
        "print options": copy.copy(torch._tensor_str.PRINT_OPTS),
        "warnings": list(warnings.filters),
        "loggers": [(type(h), h.level) for h in logging.getLogger().handlers],
        "level": logging.getLogger().level,
        "hook of exceptions": sys.excepthook,
        "hook of threads": threading.excepthook,
        "recursion": sys.getrecursionlimit(),
        "profile": sys.getprofile(),
        "trace": sys.gettrace(),
        "switch interval": sys.getswitchinterval(),
        "signals": [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)],
        "environment": dict(os.environ),
        "folder": Path.cwd(),
        "gc": (gc.isenabled(), gc.get_threshold(), len(gc.callbacks)),
        "umask": _umask(),
        "numpy": np.geterr(),
        "json": json.dumps,
    }


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@levels
def test_state_of_the_process_is_not_changed_by_construction_nor_in_a_window(
    level: str, tmp_path: Path
) -> None:
    """B58."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    x = torch.ones(1, 2)
    before = process_state()
    watcher = debugger(tmp_path, level=level)
    assert process_state() == before
    watcher.start(net)
    net(x).sum().backward()
    assert process_state() == before
    with torch.device("meta"):
        assert nn.Linear(2, 2).weight.is_meta
        assert torch.ones(1).is_meta
    watcher.stop()
    watcher.step()
    assert process_state() == before


# ---- several processes: B35, B36, B51, A7, BB20, BB28 ------------------------------------------

GROUP = """
import os, sys, traceback, warnings
import torch, torch.distributed as dist
from torch import nn
from msprobe.pytorch import PrecisionDebugger

warnings.simplefilter("ignore")
folder = sys.argv[1]

def join(rank):
    store = dist.FileStore(folder + "/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)

def both(work, joined=True):
    children = []
    for rank in range(2):
        pid = os.fork()
        if not pid:
            code = 1
            try:
                torch.set_num_threads(1)
                if joined:
                    join(rank)
                work(rank)
                dist.barrier()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0]

def debugger(**config):
    return PrecisionDebugger({"dump_path": folder + "/dump", **config})
"""


def in_a_group(folder: Path, script: str) -> list[Dump]:
    """Run ``script``, which calls ``both(work)``; what each rank that wrote has written."""
    (folder / "script.py").write_text(GROUP + script)
    code, output = run_script(folder / "script.py", [str(folder)], folder, timeout_s=100)
    assert code == 0, output
    folders = sorted((folder / "dump" / "step0").iterdir())
    dumps = []
    for place in folders:
        header = read_json(place / "dump.json")
        construct = read_json(place / "construct.json")
        dumps.append(Dump(place, header, header["data"], {}, construct))
    return dumps


@pytest.mark.distributed
def test_parameter_gradients_of_sharded_modules_are_those_of_the_local_shard(
    tmp_path: Path,
) -> None:
    """B35."""
    script = """
from torch.distributed.fsdp import fully_shard

def work(rank):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
    watcher = debugger(level="L0", task="tensor")
    watcher.start(net)
    net(torch.full((3, 4), rank + 1.0)).square().sum().backward()
    watcher.stop()
    watcher.step()
    grads = {n: p.grad.to_local().clone() for n, p in net.named_parameters()}
    torch.save(grads, f"{folder}/grads{rank}.pt")

both(work)
"""
    dumps = in_a_group(tmp_path, script)
    assert [d.folder.name for d in dumps] == ["rank0", "rank1"]
    for rank, dump in enumerate(dumps):
        grads = torch.load(tmp_path / f"grads{rank}.pt", weights_only=True)
        for name, grad in grads.items():
            layer, key = name.split(".")
            (record,) = [n for n in dump.names("parameters_grad") if f"Module.{layer}." in n]
            (saved,) = dump.gradients(record)[key]
            assert torch.equal(saved, grad)


@pytest.mark.distributed
def test_statistics_of_distributed_tensors_need_no_other_rank(tmp_path: Path) -> None:
    """B36. Only rank 1 records, of three placements; no rank waits for it, none communicates."""
    script = """
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

class Watch(TorchDispatchMode):
    seen = []
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "c10d" in func.namespace:
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))

def work(rank):
    mesh = init_device_mesh("cpu", (2,))
    net = nn.Sequential(nn.Identity())
    watcher = debugger(level="mix", rank=[1])
    local = torch.full((2,), rank + 1.0)
    watcher.start(net)
    with Watch():
        for placement in (Shard(0), Replicate(), Partial()):
            net(DTensor.from_local(local, mesh, [placement], run_check=False))
    watcher.stop()
    watcher.step()
    assert Watch.seen == []

both(work)
"""
    (dump,) = in_a_group(tmp_path, script)
    assert dump.folder.name == "rank1"
    entries = [dump.data[f"Module.0.Identity.forward.{i}"]["output"][0] for i in range(3)]
    assert [e["Max"] for e in entries] == [2.0] * 3
    assert [list(e["placements"][0]) for e in entries] == [["Shard"], ["Replicate"], ["Partial"]]


@pytest.mark.distributed
def test_results_of_asynchronous_collectives_are_the_finished_ones(tmp_path: Path) -> None:
    """B51, A7, BB28. Waited for late, out of order, through a future, or never."""
    script = """
def work(rank):
    watcher = debugger(level="L1")
    t = [torch.full((1 << 18,), rank + 1.0) for _ in range(4)]
    got = [torch.zeros(1 << 18) for _ in range(2)]
    watcher.start()
    reduced = dist.all_reduce(t[0], async_op=True)
    sent = dist.broadcast(t[1], src=1, async_op=True)
    gathered = dist.all_gather(got, t[2], async_op=True)
    assert gathered.wait() is True and sent.wait() is True and reduced.wait() is True
    peer = 1 - rank
    back = torch.zeros(4)
    works = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, torch.full((4,), rank + 10.0), peer),
        dist.P2POp(dist.irecv, back, peer),
    ])
    assert [w.wait() for w in works] == [True, True]
    assert back[0] == peer + 10.0
    never = dist.all_reduce(t[3], async_op=True)
    torch.tanh(torch.ones(1))
    watcher.stop()
    watcher.step()
    never.wait()

both(work)
"""
    for rank, dump in enumerate(in_a_group(tmp_path, script)):
        data = dump.data
        (out, *_) = data["Distributed.all_reduce.0.forward"]["output"]
        assert (out["Max"], out["Min"]) == (3.0, 3.0)
        assert data["Distributed.broadcast.0.forward"]["output"][0]["Max"] == 2.0
        gathered = data["Distributed.all_gather.0.forward"]["output"][0]
        assert [e["Max"] for e in gathered] == [1.0, 2.0]
        (name,) = dump.names("batch_isend_irecv")
        text = json.dumps(data[name]["output"])
        assert f'"Max": {1 - rank + 10.0}' in text
        assert "Torch.tanh.0.forward" in data
        for entry in data["Distributed.all_reduce.1.forward"].get("output", [])[:1]:
            assert entry["Max"] == 3.0


@pytest.mark.distributed
def test_step_that_begins_before_the_process_group_ends_under_its_rank(tmp_path: Path) -> None:
    """BB20."""
    script = """
def work(rank):
    watcher = debugger(level="L1")
    for step in range(2):
        watcher.start()
        torch.tanh(torch.ones(1))
        watcher.stop()
        if step == 0:
            join(rank)
        watcher.step()

both(work, joined=False)
"""
    dumps = in_a_group(tmp_path, script)
    assert [d.folder.name for d in dumps] == ["rank0", "rank1"]
    assert sorted(p.name for p in (tmp_path / "dump" / "step1").iterdir()) == ["rank0", "rank1"]


class Drawing(collections.abc.Mapping[str, Any]):
    """A mapping whose look-up draws random numbers, as lazy batches do."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __getitem__(self, key: str) -> Any:
        return self.x + torch.randn_like(self.x)

    def __iter__(self) -> Any:
        return iter(["x"])

    def __len__(self) -> int:
        return 1


def test_own_methods_of_a_mapping_do_not_run(tmp_path: Path) -> None:
    """The user's code would draw random numbers that training then misses."""

    class Encoder(nn.Module):
        def forward(self, batch: Any) -> Tensor:
            return batch["x"].sum()

    def build() -> tuple[nn.Module, Callable[[], Any]]:
        net = nn.Sequential(Encoder())
        return net, lambda: net(Drawing(torch.ones(2)))

    undisturbed(tmp_path, build, level="L0")
