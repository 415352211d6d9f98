"""torch.compile, torch.jit, torch.fx, torch.func and torch.export work as without the tool."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.utils
import torch.export
from torch import Tensor, nn
from torch.nn import functional as F

from helpers import collect, debugger, read_dump, same
from msprobe.pytorch import PrecisionDebugger
from recorded import LEVELS
from runner import run_script

# The first compilation of a process replaces torch.jit.trace and others for good.
torch.compile(nn.Identity(), backend="eager")(torch.ones(1))
torch._dynamo.reset()

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    # Dynamo looks at .grad of what a compiled part is given.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    # Said by Dynamo in Python 3.13.0 only.
    pytest.mark.filterwarnings("ignore:Guards may run slower:RuntimeWarning"),
]

Compiled = Callable[..., Any]
WHEN = ("before construction", "after construction", "inside the window")


@pytest.fixture(autouse=True)
def no_recompilation() -> Iterator[None]:
    """Compiling something a second time is an error, and so is a graph break (fullgraph)."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(self.act(self.fc(x)) + x)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), Inner(), nn.Linear(4, 2))


def batch(number: int) -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(number))


def train(model: nn.Module, call: Compiled, step: int) -> list[Tensor]:
    loss = call(batch(step)).square().mean()
    loss.backward()
    found = [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    model.zero_grad()
    return found


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("level", ["L0", "mix"])
def test_compiled_model_is_compiled_once_and_gives_the_same(
    level: str, when: str, backend: str, tmp_path: Path
) -> None:
    model, plain = build(), build()
    expected = [train(plain, torch.compile(plain, backend=backend), step) for step in range(4)]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    call: Compiled = model
    if when == WHEN[0]:
        call = torch.compile(model, backend=backend, fullgraph=True)
    watcher = debugger(tmp_path, level=level)
    if when == WHEN[1]:
        call = torch.compile(model, backend=backend, fullgraph=True)
    found = []
    for step in range(2):
        watcher.start(model)
        if when == WHEN[2] and step == 0:
            call = torch.compile(model, backend=backend, fullgraph=True)
        found.append(train(model, call, 2 * step))
        watcher.stop()
        watcher.step()
        found.append(train(model, call, 2 * step + 1))
    assert same(found, expected)
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1
    dump = read_dump(tmp_path)
    assert dump.errors() == []
    assert ("Tensor.square.0.forward" in dump.data) == (level == "mix")


@pytest.mark.parametrize("level", ["L0", "mix"])
def test_compiled_part_is_one_opaque_call_among_recorded_ones(level: str, tmp_path: Path) -> None:
    model = build()
    plain = build()(batch(0))
    model[1].compile(backend="eager", fullgraph=True)
    dump = collect(tmp_path, lambda: model(batch(0)).sum().backward(), model, level=level)
    assert "Module.0.Linear.forward.0" in dump.data
    assert "Module.2.Linear.backward.0" in dump.data
    assert dump.names("Module.1.fc") == dump.names("softplus") == []
    last = dump.data["Module.2.Linear.forward.0"]["output"][0]
    assert last["Max"] == plain.max().item()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_breaks_of_the_users_own_are_not_more_than_without_the_tool(tmp_path: Path) -> None:
    def function(x: Tensor) -> Tensor:
        x = torch.relu(x)
        torch._dynamo.graph_break()
        return torch.tanh(x)

    expected = torch.compile(function, backend="eager")(batch(0))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(function, backend="eager")
    collect(tmp_path, lambda: [compiled(batch(0)), torch.exp(batch(0))], level="L1")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert torch.equal(compiled(batch(0)), expected)


# ---- tracers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("when", WHEN[1:])
@pytest.mark.parametrize("level", ["L1", "mix"])
def test_backward_of_a_compiled_region_is_opaque_too(
    level: str, when: str, backend: str, tmp_path: Path
) -> None:
    """torch copies a gradient whose strides are not those expected, as the expanded one of sum."""
    model, buffer = nn.Sequential(nn.Identity()), torch.zeros(3, 4)
    x = torch.randn(3, 4, requires_grad=True)

    def work(call: Compiled) -> None:
        call(x).sum().backward()
        buffer.copy_(model(x.detach()))

    def region(v: Tensor) -> Tensor:
        return v.sin() * 2

    compiled = torch.compile(region, backend=backend)
    if when == "after construction":
        work(compiled)
    found = collect(tmp_path / "found", lambda: work(compiled), model, level=level)
    PrecisionDebugger._instance = None
    leaf = torch.randn(3, 4, requires_grad=True)
    wanted = collect(tmp_path / "wanted", lambda: work(lambda _: leaf), model, level=level)
    assert list(found.data) == list(wanted.data)
    assert found.names("Tensor.copy_") == ["Tensor.copy_.0.forward"]


def script(net: nn.Module) -> Any:
    return str(torch.jit.script(net).inlined_graph).splitlines()


def trace(net: nn.Module) -> Any:
    return str(torch.jit.trace(net, batch(0)).inlined_graph).splitlines()


def fx(net: nn.Module) -> Any:
    nodes = torch.fx.symbolic_trace(net).graph.nodes
    return [(node.op, str(node.target)) for node in nodes]


def export(net: nn.Module) -> Any:
    return [str(node.target) for node in torch.export.export(net, (batch(0),)).graph.nodes]


def functional(net: nn.Module) -> Any:
    parameters = dict(net.named_parameters())

    def loss(parameters: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(net, parameters, (x,)).square().mean()

    gradients = torch.func.grad(loss)(parameters, batch(0))
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, batch(0))
    return [*gradients.values(), *each.values()]


TRACERS: dict[str, Callable[[nn.Module], Any]] = {
    function.__name__: function for function in (script, trace, fx, export, functional)
}


@pytest.mark.parametrize("name", TRACERS)
@pytest.mark.parametrize("level", LEVELS)
def test_tracer_in_a_window_sees_what_it_sees_without_the_tool(
    level: str, name: str, tmp_path: Path
) -> None:
    net = build()
    tracer = TRACERS[name]
    expected, found = tracer(net), []

    def step() -> None:
        found.append(tracer(net))
        net(batch(1)).sum().backward()

    dump = collect(tmp_path, step, net, level=level)
    assert without_places(found[0]) == without_places(expected)
    assert any(name.endswith("backward.0") or name.endswith("backward") for name in dump.data)
    assert dump.errors() == [] or name == "functional"


def without_places(found: list[Any]) -> list[Any]:
    """Tensors as numbers; lines of a graph without what is new in each compilation."""
    return [value.tolist() if isinstance(value, Tensor) else _general(value) for value in found]


def _general(value: Any) -> Any:
    if isinstance(value, str):
        return re.sub(r"___torch_mangle_\d+\.", "", value.partition(" #")[0])
    return value


@pytest.mark.parametrize("make", [torch.jit.script, lambda net: torch.jit.trace(net, batch(0))],
                         ids=["script", "trace"])  # fmt: skip
@pytest.mark.parametrize("level", LEVELS)
def test_scripted_model_runs_in_a_window_as_without_the_tool(
    make: Any, level: str, tmp_path: Path
) -> None:
    scripted, plain = make(build()), make(build())
    train(plain, plain, 0)  # the very first run of a script in a process is rounded differently
    expected = train(plain, plain, 0)
    found: list[list[Tensor]] = []
    holder = nn.Sequential(scripted)
    dump = collect(tmp_path, lambda: found.append(train(scripted, holder, 0)), holder, level=level)
    assert same(found[0], expected)
    assert dump.errors() == []


@pytest.mark.parametrize("level", LEVELS)
def test_window_opened_or_closed_in_a_compiled_region_leaves_the_next_step_whole(
    level: str, tmp_path: Path
) -> None:
    """The exit of a region whose window closes within is not heard of; neither is its entrance."""
    watcher = debugger(tmp_path, level=level)
    net = build()

    @torch.compile(backend="eager")
    def closing(x: Tensor) -> Tensor:
        y = net(x)
        watcher.stop()
        return y.exp()

    @torch.compile(backend="eager")
    def opening(x: Tensor) -> Tensor:
        y = x.exp()
        watcher.start(net)
        return net(y)

    x = batch(0)
    for step in (lambda: net(x), lambda: closing(x), lambda: net(x), None, lambda: net(x)):
        if step is None:
            opening(x)
        else:
            watcher.start(net)
            step()
        watcher.stop()
        watcher.step()
    whole, *others = (read_dump(tmp_path, number).data for number in (0, 2, 4))
    assert others == [whole, whole]
    for number in range(5):
        assert read_dump(tmp_path, number).errors() == []


FIRST = """
import os, sys
import torch
from torch import nn
import msprobe
from msprobe.pytorch import PrecisionDebugger
from msprobe.pytorch.dump.api_dump.wrap import is_wrapper


def backend(module, inputs):
    # While a compiler is at work, code patches torch for good: as Dynamo does, and others.
    original = torch.tanh
    torch.tanh = lambda x: original(x)
    return module.forward


before = torch.jit.trace
PrecisionDebugger(dump_path=sys.argv[1], level=sys.argv[2])
net, other = nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)
PrecisionDebugger.start(net)
torch.compile(torch.exp, backend=backend)(torch.ones(2))
torch.jit.trace(other, torch.ones(1, 2))
torch.tanh(net(torch.ones(1, 2)))
PrecisionDebugger.stop()
PrecisionDebugger.step()
for function in (torch.jit.trace, torch.jit.trace_module, torch.fx.Tracer.trace, torch.tanh):
    code = getattr(function, "__code__", None)
    ours = code is not None and code.co_filename.startswith(os.path.dirname(msprobe.__file__))
    assert not ours, function
    assert not is_wrapper(function), function
assert torch.jit.trace is not before, "this torch patches nothing: the test shows nothing"
"""


@pytest.mark.parametrize("level", ["L0", "mix"])
def test_what_the_first_compilation_patches_for_good_is_kept_without_a_word(
    level: str, tmp_path: Path
) -> None:
    """In a process of its own, whose first compilation is within the window."""
    script = tmp_path / "script.py"
    script.write_text(FIRST)
    code, output = run_script(script, [str(tmp_path / "dump"), level], tmp_path, fresh=True)
    assert code == 0, output
    assert "[msprobe]" not in output
    expected = ["Functional.linear.0.forward", "Torch.tanh.0.forward"]
    names = [name for name in read_dump(tmp_path / "dump").data if not name.startswith("Module")]
    assert names == ([] if level == "L0" else expected)
