"""Gradients of module calls and of parameters, against plain autograd in a run without the tool.

There the tensors that go into and come out of a module are kept; their gradients by
``torch.autograd.grad`` are what the records must hold, bit by bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from helpers import Dump, collect, read_dump, same
from models import Function, Mix, Prediction, Shift
from msprobe.pytorch import PrecisionDebugger


def gradients(loss: Tensor, *tensors: Tensor) -> list[Any]:
    found = torch.autograd.grad(loss, tensors, retain_graph=True, allow_unused=True)
    return [None if g is None else g.clone() for g in found]


def chain(model: nn.Sequential, x: Tensor) -> list[Tensor]:
    """The input of a chain and the output of each of its modules."""
    values = [x]
    for module in model:
        values.append(module(values[-1]))
    return values


def collect_l0(folder: Path, model: nn.Module, step: Callable[[], Any]) -> Dump:
    dump = collect(folder, step, model, level="L0", task="tensor")
    assert dump.errors() == []
    return dump


def a_chain(*, inplace: bool) -> nn.Sequential:
    torch.manual_seed(3)
    activations = nn.ReLU(inplace=inplace), nn.Hardtanh(inplace=inplace)
    return nn.Sequential(nn.Linear(4, 6), activations[0], nn.LayerNorm(6), activations[1])


@pytest.mark.parametrize("inplace", [False, True], ids=["plain", "inplace"])
def test_gradients_of_a_chain_of_modules_are_those_of_the_tensors_between(
    inplace: bool, tmp_path: Path
) -> None:
    """In-place modules compute the same numbers as plain ones, so these give the gradients."""
    x = torch.randn(3, 4, requires_grad=True)
    values = chain(a_chain(inplace=False), x)
    expected = gradients(values[-1].square().sum(), *values)

    model = a_chain(inplace=inplace)
    dump = collect_l0(tmp_path, model, lambda: model(x).square().sum().backward())

    records = [dump.gradients(name) for name in reversed(dump.names("backward"))]
    assert dump.names("backward") == [
        "Module.3.Hardtanh.backward.0",
        "Module.2.LayerNorm.backward.0",
        "Module.1.ReLU.backward.0",
        "Module.0.Linear.backward.0",
    ]
    pairs = zip(expected[1:], expected[:-1], strict=True)
    assert same(records, [{"input": [out], "output": [given]} for out, given in pairs])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


def test_residual_input_gets_the_sum_of_what_flows_inside_the_module(tmp_path: Path) -> None:
    """``x`` is used outside as well (``+ 3 * x``): that part is not the module's."""
    x = torch.randn(3, 4, requires_grad=True)
    model = Function(lambda m, v: m.block(v) + 3 * v, block=Block())
    out = copy.deepcopy(model.block)(x)
    (expected,) = torch.autograd.grad(out, x, torch.ones(3, 4))

    dump = collect_l0(tmp_path, model, lambda: model(x * 1).sum().backward())
    assert same(dump.gradients("Module.block.Block.backward.0"), {
        "input": [torch.ones(3, 4)], "output": [expected],
    })


def test_what_reaches_an_input_past_the_module_is_not_counted(tmp_path: Path) -> None:
    """The module uses a tensor that was computed from its input before the call."""
    kept: list[Tensor] = []
    inner = Function(lambda m, h: h.exp() + kept[0])

    def forward(m: Any, h: Tensor) -> Tensor:
        kept.append(h * 3)
        return m.inner(h)

    model, x = Function(forward, inner=inner), torch.randn(3, requires_grad=True)
    dump = collect_l0(tmp_path, model, lambda: model(x * 1).sum().backward())
    record = dump.gradients("Module.inner.Function.backward.0")
    assert same(record, {"input": [torch.ones(3)], "output": [x.detach().exp()]})


def test_keyword_and_nested_inputs_have_their_gradients_in_place(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = Function(lambda m, **kwargs: m.mix(**kwargs), mix=Mix())
    a, b, c = (torch.randn(2, 4, requires_grad=True) for _ in range(3))
    given = {"pair": (a, b), "table": {"more": [c, torch.ones(2, 4)]}, "scale": 0.5}
    ga, gb, gc = gradients(copy.deepcopy(model)(**given).exp().sum(), a, b, c)

    dump = collect_l0(tmp_path, model, lambda: model(**given).exp().sum().backward())
    record = dump.gradients("Module.mix.Mix.backward.0")
    assert same(record["output"], [[ga, gb], {"more": [gc, None]}, None])


def mapping(m: Any, x: Tensor) -> dict[str, Any]:
    return {"logits": m.linear(x), "aux": {"parts": [x * 2, x.detach()]}, "name": "a", "no": None}


def fields(m: Any, x: Tensor) -> Prediction:
    return Prediction(m.linear(x), x * 2)


def use_mapping(out: Any) -> Tensor:
    return out["logits"].square().sum() + out["aux"]["parts"][0].exp().sum()


def use_fields(out: Any) -> Tensor:
    return out.logits.square().sum() + out.hidden.exp().sum()


def as_mapping(logits: Tensor, other: Tensor) -> Any:
    return {"logits": logits, "aux": {"parts": [other, None]}, "name": None, "no": None}


def as_fields(logits: Tensor, other: Tensor) -> Any:
    return {"logits": logits, "hidden": other, "name": None}


@pytest.mark.parametrize(
    ("forward", "use", "shape"),
    [(mapping, use_mapping, as_mapping), (fields, use_fields, as_fields)],
    ids=["dict", "dataclass"],
)
def test_structured_output_has_its_gradients_in_place(
    forward: Any, use: Any, shape: Any, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    inner = Function(forward, linear=nn.Linear(4, 2))
    model = Function(lambda m, v: m.inner(v), inner=inner)
    x = torch.randn(3, 4, requires_grad=True)
    logits = inner.linear(x)
    other = x * 2
    loss = logits.square().sum() + other.exp().sum()
    gx, g_logits, g_other = gradients(loss, x, logits, other)

    dump = collect_l0(tmp_path, model, lambda: use(model(x)).backward())
    record = dump.gradients("Module.inner.Function.backward.0")
    assert same(record["input"], [shape(g_logits, g_other)])
    assert same(record["output"], [gx])


def test_each_call_of_a_shared_module_has_its_own_backward(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = Function(lambda m, v: m.shared(m.shared(v).tanh()), shared=nn.Linear(4, 4))
    model.add_module("again", model.shared)
    x = torch.randn(3, 4, requires_grad=True)
    first = model.shared(x)
    middle = first.tanh()
    second = model.shared(middle)
    gx, g1, gm, g2 = gradients(second.square().sum(), x, first, middle, second)

    dump = collect_l0(tmp_path, model, lambda: model(x).square().sum().backward())
    assert dump.names("backward") == [
        "Module.shared.Linear.backward.1", "Module.shared.Linear.backward.0",
    ]
    one = dump.gradients("Module.shared.Linear.backward.0")
    two = dump.gradients("Module.shared.Linear.backward.1")
    assert same(one, {"input": [g1], "output": [gx]})
    assert same(two, {"input": [g2], "output": [gm]})


@pytest.mark.parametrize(
    ("reentrant", "number"), [(True, 1), (False, 0)], ids=["reentrant", "non_reentrant"]
)
def test_backward_through_a_checkpoint_has_the_number_of_the_forward_that_made_the_graph(
    reentrant: bool, number: int, tmp_path: Path
) -> None:
    """Reentrant: the second forward, during backward. Else the first."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    x = torch.randn(3, 4, requires_grad=True)
    values = chain(copy.deepcopy(model), x)
    expected = gradients(values[-1].square().sum(), *values)

    def step() -> None:
        checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()

    dump = collect_l0(tmp_path, model, step)
    assert len(dump.names("backward")) == 3
    for position, name in enumerate(("0.Linear", "1.Tanh", "2.Linear")):
        record = dump.gradients(f"Module.{name}.backward.{number}")
        given = {"input": [expected[position + 1]], "output": [expected[position]]}
        assert same(record, given), name


def test_checkpoint_at_mix_gives_calls_the_gradients_of_the_plain_model(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
    x = torch.randn(3, 4, requires_grad=True)
    h = F.linear(x, model[0].weight, model[0].bias)
    gx, gw, gb = gradients(h.tanh().sum(), x, model[0].weight, model[0].bias)
    dump = collect(
        tmp_path, lambda: checkpoint(model, x, use_reentrant=False).sum().backward(), model,
        task="tensor",
    )
    assert same(dump.gradients("Functional.linear.0.backward")["output"], [gx, gw, gb])


# ---- parameters ------------------------------------------------------------------------------


def test_parameters_grad_holds_what_each_backward_has_accumulated(tmp_path: Path) -> None:
    """As the optimizer will see it: with the micro batches before."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    batches = [torch.randn(2, 4) for _ in range(3)]
    plain, expected = copy.deepcopy(model), []
    for x in batches:
        plain(x).square().sum().backward()
        expected.append({name: [p.grad.clone()] for name, p in plain[0].named_parameters()})

    def step() -> None:
        for x in batches:
            model(x).square().sum().backward()

    dump = collect_l0(tmp_path, model, step)
    assert len(dump.names("parameters_grad")) == 6
    found = [dump.gradients(f"Module.0.Linear.parameters_grad.{k}") for k in range(3)]
    assert same([by_name(record) for record in found], [by_name(record) for record in expected])


def by_name(record: dict[str, Any]) -> dict[str, Any]:
    return dict(sorted(record.items()))


def test_parameters_grad_of_a_shared_module_holds_the_sum_over_its_calls(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = Function(lambda m, v: m.shared(m.shared(v).tanh()), shared=nn.Linear(4, 4))
    x = torch.randn(3, 4)
    weight, bias = gradients(model(x).sum(), model.shared.weight, model.shared.bias)
    dump = collect_l0(tmp_path, model, lambda: model(x).sum().backward())
    assert dump.names("parameters_grad") == ["Module.shared.Linear.parameters_grad.0"]
    record = dump.gradients("Module.shared.Linear.parameters_grad.0")
    assert same(by_name(record), {"bias": [bias], "weight": [weight]})


def test_frozen_parameter_has_no_gradient(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].weight.requires_grad_(False)
    dump = collect_l0(tmp_path, model, lambda: model(torch.randn(3, 4)).sum().backward())
    record = dump.gradients("Module.0.Linear.parameters_grad.0")
    assert same(record, {"bias": [torch.full((4,), 3.0)]})


# ---- what has no gradient, and what has more than one -----------------------------------------


def test_input_without_a_gradient_is_null(tmp_path: Path) -> None:
    """Unused, not differentiable, or no tensor at all."""
    inner = Function(lambda m, x, unused, tokens, flag, options=None: x.exp() if flag else unused)
    model = Function(lambda m, *args: m.inner(*args, options={"a": 1}), inner=inner)
    x, unused = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)

    def step() -> None:
        model(x, unused, torch.tensor([1]), True).sum().backward()

    dump = collect_l0(tmp_path, model, step)
    record = dump.gradients("Module.inner.Function.backward.0")
    assert same(record["output"], [x.detach().exp(), None, None, None, {"a": None}])


def test_output_without_a_gradient_is_null(tmp_path: Path) -> None:
    inner = Function(lambda m, x: (x.exp(), x * 2, x.argmax()))
    model = Function(lambda m, x: m.inner(x)[0], inner=inner)
    x = torch.randn(3, requires_grad=True)
    dump = collect_l0(tmp_path, model, lambda: model(x).sum().backward())
    record = dump.gradients("Module.inner.Function.backward.0")
    assert same(record, {"input": [torch.ones(3), None, None], "output": [x.detach().exp()]})


def test_module_that_returns_its_input_shows_the_gradient_of_that_tensor(tmp_path: Path) -> None:
    """It has no node of its own, so what flows past it is part of it: here ``+ 3 * h``."""
    model = Function(lambda m, h: m.same(h).exp() + 3 * h, same=nn.Identity())
    x = torch.randn(3, requires_grad=True)
    expected = gradients(x.exp().sum() + (3 * x).sum(), x)
    dump = collect_l0(tmp_path, model, lambda: model(x * 1).sum().backward())
    record = dump.gradients("Module.same.Identity.backward.0")
    assert same(record, {"input": expected, "output": expected})


def test_input_that_is_returned_with_other_outputs_shows_all_of_its_gradient(
    tmp_path: Path,
) -> None:
    inner = Function(lambda m, h: (h.exp(), h.sin(), h))
    model = Function(lambda m, h: sum(m.inner(h)), inner=inner)
    x = torch.zeros(3, requires_grad=True)
    dump = collect_l0(tmp_path, model, lambda: model(x * 1).sum().backward())
    record = dump.gradients("Module.inner.Function.backward.0")
    one, all_of_it = torch.ones(3), torch.full((3,), 3.0)  # exp(0) + cos(0) + 1
    assert same(record, {"input": [one, one, all_of_it], "output": [all_of_it]})


def test_module_that_changes_its_input_in_place_has_the_gradient_of_what_it_was_given(
    tmp_path: Path,
) -> None:
    model = Function(lambda m, h: m.shift(h).square(), shift=Shift())
    x = torch.randn(3, 4, requires_grad=True)
    offset = model.shift.offset
    shifted = -(x + offset)
    g_shifted, gx, g_offset = gradients(shifted.square().sum(), shifted, x, offset)
    dump = collect_l0(tmp_path, model, lambda: model(x * 1).sum().backward())
    record = dump.gradients("Module.shift.Shift.backward.0")
    assert same(record, {"input": [g_shifted], "output": [gx]})
    assert same(dump.gradients("Module.shift.Shift.parameters_grad.0"), {"offset": [g_offset]})


def test_second_backward_of_a_retained_graph_repeats_the_records(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Tanh())
    x = torch.randn(3, requires_grad=True)
    (once,) = gradients(x.tanh().sum(), x)

    def step() -> None:
        y = model(x)
        y.backward(torch.ones(3), retain_graph=True)
        y.backward(torch.full((3,), 2.0))

    dump = collect_l0(tmp_path, model, step)
    assert dump.names("backward") == ["Module.0.Tanh.backward.0", "Module.0.Tanh.backward.0.1"]
    first, second = (dump.gradients(name) for name in dump.names("backward"))
    assert same(first, {"input": [torch.ones(3)], "output": [once]})
    assert same(second, {"input": [torch.full((3,), 2.0)], "output": [once * 2]})


def test_backward_after_the_step_goes_to_the_files_of_that_step(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Tanh())
    x = torch.randn(3, requires_grad=True)
    kept: list[Tensor] = []
    early = collect_l0(tmp_path, model, lambda: kept.append(model(x)))
    assert early.names("backward") == []
    kept[0].sum().backward()
    PrecisionDebugger._instance = None  # writes what has come since
    late = read_dump(tmp_path).gradients("Module.0.Tanh.backward.0")
    assert same(late, {"input": [torch.ones(3)], "output": gradients(x.tanh().sum(), x)})
