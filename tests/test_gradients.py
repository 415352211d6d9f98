"""Gradients of function calls, against plain autograd in a run without the tool.

A backward record mirrors its forward: ``input[i]`` belongs to output i, ``output[i]`` to argument i
(positional, then keyword), null where no gradient flows. Gradients are compared bit by bit: both
runs compute them with the same operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers import Dump, collect, same

TOKENS = torch.tensor([[0, 2, 1], [2, 2, 0]])
CLASSES = torch.tensor([2, 0, 1])
MASK = torch.tensor([[True, False, True, False]])


class Api(NamedTuple):
    """A call, the shapes of its arguments that need gradients, and the record's section output."""

    record: str
    call: Callable[..., Any]
    shapes: Sequence[tuple[int, ...]]
    output: Callable[..., Any] = lambda *grads: list(grads)


SMALL = (3, 4)
LINEAR_2D = (3, 4), (5, 4), (5,)
LINEAR_3D = (2, 3, 4), (5, 4), (5,)

APIS = {
    "linear_2d": Api("Functional.linear", lambda x, w, b: F.linear(x, w, b), LINEAR_2D),
    "linear_3d": Api("Functional.linear", lambda x, w, b: F.linear(x, w, b), LINEAR_3D),
    "linear_no_bias": Api(
        "Functional.linear", lambda x, w: F.linear(x, w, None), LINEAR_3D[:2],
        lambda x, w: [x, w, None],
    ),
    "linear_keywords": Api(
        "Functional.linear", lambda x, w, b: F.linear(x, bias=b, weight=w), LINEAR_3D,
        lambda x, w, b: [x, b, w],
    ),
    "linear_frozen_weight": Api(
        "Functional.linear", lambda x, b: F.linear(x, torch.ones(5, 4), b), [(2, 3, 4), (5,)],
        lambda x, b: [x, None, b],
    ),
    "cross_entropy": Api(
        "Functional.cross_entropy", lambda x: F.cross_entropy(x, CLASSES), [SMALL],
        lambda x: [x, None],
    ),
    "cross_entropy_keywords": Api(
        "Functional.cross_entropy",
        lambda x: F.cross_entropy(
            input=x, target=CLASSES, weight=torch.ones(4), label_smoothing=0.1
        ),
        [SMALL],
        lambda x: [x, None, None, None],
    ),
    "matmul_broadcast": Api(
        "Torch.matmul", lambda a, b: torch.matmul(a, b), [(2, 1, 3, 4), (5, 4, 2)]
    ),
    "matmul_operator": Api("Tensor.__matmul__", lambda a, b: a @ b, [(3, 4), (4, 2)]),
    "einsum": Api(
        "Torch.einsum", lambda a, b: torch.einsum("ij,jk->ki", a, b), [(3, 4), (4, 2)],
        lambda a, b: [None, a, b],
    ),
    "layer_norm": Api(
        "Functional.layer_norm", lambda x, w, b: F.layer_norm(x, (4,), w, b), [SMALL, (4,), (4,)],
        lambda x, w, b: [x, [None], w, b],
    ),
    "batch_norm": Api(
        "Functional.batch_norm",
        lambda x, w, b: F.batch_norm(x, torch.zeros(4), torch.ones(4), w, b, training=True),
        [SMALL, (4,), (4,)],
        lambda x, w, b: [x, None, None, w, b, None],
    ),
    "conv2d": Api(
        "Functional.conv2d", lambda x, w, b: F.conv2d(x, w, b, padding=(1, 0)),
        [(2, 2, 4, 4), (3, 2, 3, 3), (3,)],
        lambda x, w, b: [x, w, b, [None, None]],
    ),
    "attention": Api(
        "Functional.scaled_dot_product_attention",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        [(1, 2, 3, 4)] * 3,
        lambda q, k, v: [q, k, v, None],
    ),
    "embedding": Api(
        "Functional.embedding", lambda w: F.embedding(TOKENS, w), [SMALL],
        lambda w: [None, w],
    ),
    "dropout": Api(
        "Functional.dropout", lambda x: F.dropout(x, 0.5, True), [SMALL],
        lambda x: [x, None, None],
    ),
    "where": Api(
        "Torch.where", lambda x, y: torch.where(MASK, x, y), [SMALL, SMALL],
        lambda x, y: [None, x, y],
    ),
    "number_times_tensor": Api("Tensor.__rmul__", lambda x: 2.5 * x, [SMALL], lambda x: [x, None]),
    "cat_list": Api(
        "Torch.cat", lambda a, b: torch.cat([a, torch.ones(3, 1), b], 1), [(3, 2), SMALL],
        lambda a, b: [[a, None, b], None],
    ),
    "stack_keyword_tuple": Api(
        "Torch.stack", lambda a, b: torch.stack(tensors=(a, b), dim=1), [SMALL, SMALL],
        lambda a, b: [[a, b], None],
    ),
    "same_tensor_twice": Api(
        "Torch.mul", lambda x: torch.mul(x, x), [SMALL], lambda x: [x, x]
    ),
    "same_tensor_in_list": Api(
        "Torch.stack", lambda x: torch.stack([x, x]), [SMALL], lambda x: [[x, x]]
    ),
    "several_outputs": Api(
        "Torch.split", lambda x: torch.split(x, 2, 1), [SMALL], lambda x: [x, None, None]
    ),
    "named_outputs": Api("Torch.sort", lambda x: torch.sort(x, 1), [SMALL], lambda x: [x, None]),
    "view": Api("Tensor.reshape", lambda x: x.reshape(4, 3), [SMALL], lambda x: [x, None, None]),
    "complex_numbers": Api(
        "Torch.fft.rfft", lambda x: torch.fft.rfft(x), [SMALL], lambda x: [x]
    ),
}

IN_PLACE = {
    "relu_function": Api(
        "Functional.relu", lambda x: F.relu(x, inplace=True), [SMALL], lambda x: [x, None]
    ),
    "relu_underscore": Api("Torch.relu_", lambda x: torch.relu_(x), [SMALL]),
    "add_": Api("Tensor.add_", lambda x, y: x.add_(y), [SMALL, (4,)]),
    "add_with_alpha": Api(
        "Tensor.add_", lambda x, y: x.add_(y, alpha=3), [SMALL, SMALL], lambda x, y: [x, y, None]
    ),
    "mul_itself": Api("Tensor.__imul__", lambda x, y: x.__imul__(y), [SMALL, SMALL]),
    "masked_fill_": Api(
        "Tensor.masked_fill_", lambda x: x.masked_fill_(MASK, 0.5), [SMALL],
        lambda x: [x, None, None],
    ),
    "copy_": Api("Tensor.copy_", lambda x, y: x.copy_(y), [SMALL, SMALL]),
    "index_fill_": Api(
        "Tensor.index_fill_", lambda x: x.index_fill_(1, CLASSES, 2.0), [SMALL],
        lambda x: [x, None, None, None],
    ),
}


def tensors_of(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


class Run:
    """One forward and backward of a call, with the same numbers each time."""

    def __init__(self, api: Api, *, computed: bool) -> None:
        torch.manual_seed(3)
        self.leaves = [torch.randn(shape, requires_grad=True) for shape in api.shapes]
        self.arguments = [x.clone() for x in self.leaves] if computed else self.leaves
        self.results = tensors_of(api.call(*self.arguments))
        self.differentiable = [t for t in self.results if t.requires_grad]
        self.cotangents = [torch.randn_like(t) for t in self.differentiable]

    def gradients(self) -> list[Tensor | None]:
        """By plain autograd."""
        found = torch.autograd.grad(
            self.differentiable, self.leaves, self.cotangents, allow_unused=True
        )
        return list(found)

    def backward(self) -> None:
        torch.autograd.backward(self.differentiable, self.cotangents)


def check(api: Api, folder: Path, *, computed: bool) -> None:
    plain = Run(api, computed=computed)
    expected = api.output(*plain.gradients())
    cotangents = iter(plain.cotangents)
    outputs = [next(cotangents) if t.requires_grad else None for t in plain.results]

    dump = collect(
        folder, lambda: Run(api, computed=computed).backward(), level="L1", task="tensor"
    )

    record = dump.gradients(f"{api.record}.0.backward")
    assert same(record, {"input": outputs, "output": expected}), record
    assert dump.errors() == []


@pytest.mark.parametrize("computed", [False, True], ids=["leaves", "computed"])
@pytest.mark.parametrize("name", APIS)
def test_gradients_of_a_call_stand_at_its_arguments(
    name: str, computed: bool, tmp_path: Path
) -> None:
    check(APIS[name], tmp_path, computed=computed)


@pytest.mark.parametrize("name", IN_PLACE)
def test_gradients_of_an_in_place_call_stand_at_its_arguments(name: str, tmp_path: Path) -> None:
    check(IN_PLACE[name], tmp_path, computed=True)


# ---- numbers ---------------------------------------------------------------------------------


def linear_gradients(folder: Path, precision: str) -> tuple[Dump, list[Any]]:
    api = APIS["linear_3d"]
    run = lambda: Run(api, computed=False)  # noqa: E731
    dump = collect(folder, lambda: run().backward(), level="L1", top={"precision": precision})
    return dump, run().gradients()


@pytest.mark.parametrize("precision", ["low", "high"])
def test_statistics_of_gradients_equal_those_of_numpy(precision: str, tmp_path: Path) -> None:
    """Max and Min exactly; Mean and Norm as sums of at most 24 float32 numbers, rounded each
    time: relative to the sum of magnitudes less than 24 * 2**-24 = 1.5e-6."""
    dump, gradients = linear_gradients(tmp_path, precision)
    entries = dump.data["Functional.linear.0.backward"]["output"]
    assert len(entries) == len(gradients)
    for entry, gradient in zip(entries, gradients, strict=True):
        exact = gradient.numpy().astype(np.float64)
        assert entry["Max"] == exact.max()
        assert entry["Min"] == exact.min()
        rounding = 1.5e-6 * np.abs(exact).mean()
        assert entry["Mean"] == pytest.approx(exact.mean(), rel=0, abs=rounding)
        assert entry["Norm"] == pytest.approx(np.linalg.norm(exact), rel=1.5e-6)
        assert entry["shape"] == list(exact.shape)
        assert entry["dtype"] == "torch.float32"
        assert entry["requires_grad"] is False


# ---- which pass, which graph -----------------------------------------------------------------


def test_second_backward_of_a_retained_graph_gets_its_own_record(tmp_path: Path) -> None:
    x = torch.randn(3, 4, requires_grad=True)

    def twice() -> None:
        y = torch.exp(x)
        y.backward(torch.ones(3, 4), retain_graph=True)
        y.backward(torch.full((3, 4), 2.0))

    dump = collect(tmp_path, twice, level="L1", task="tensor")
    assert dump.names("backward") == ["Torch.exp.0.backward", "Torch.exp.0.backward.1"]
    assert same(dump.gradients("Torch.exp.0.backward")["output"], [x.detach().exp()])
    assert same(dump.gradients("Torch.exp.0.backward.1")["output"], [x.detach().exp() * 2])


def test_gradient_that_was_not_asked_for_is_null(tmp_path: Path) -> None:
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    dump = collect(
        tmp_path, lambda: torch.autograd.grad(F.linear(x, w).sum(), x), level="L1", task="tensor"
    )
    expected = torch.ones(3, 5) @ w.detach()
    assert same(dump.gradients("Functional.linear.0.backward")["output"], [expected, None])


def test_gradient_of_an_output_that_was_not_used_is_null(tmp_path: Path) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    dump = collect(
        tmp_path, lambda: torch.split(x, 2, 1)[1].exp().sum().backward(), level="L1", task="tensor"
    )
    record = dump.gradients("Torch.split.0.backward")
    gradient = x.detach()[:, 2:].exp()
    expected = torch.cat([torch.zeros(3, 2), gradient], 1)
    assert same(record, {"input": [None, gradient], "output": [expected, None, None]})


def test_argument_used_elsewhere_too_shows_what_flows_through_the_call(tmp_path: Path) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    dump = collect(
        tmp_path, lambda: (torch.exp(x) + x * 5).sum().backward(), level="L1", task="tensor"
    )
    assert same(dump.gradients("Torch.exp.0.backward")["output"], [x.detach().exp()])


def test_call_without_a_graph_has_no_backward_record(tmp_path: Path) -> None:
    x = torch.randn(3, 4, requires_grad=True)

    def forward() -> None:
        with torch.no_grad():
            torch.exp(x)
        torch.exp(x.detach())
        torch.exp(x).sum().backward()

    dump = collect(tmp_path, forward, level="L1")
    assert len(dump.names("Torch.exp.")) == 4
    assert "Torch.exp.2.backward" in dump.data


def test_higher_order_gradients_are_those_of_the_first_pass(tmp_path: Path) -> None:
    x = torch.randn(3, 4, requires_grad=True)

    def penalty() -> None:
        (grad,) = torch.autograd.grad(torch.exp(x).sum(), x, create_graph=True)
        grad.square().sum().backward()

    dump = collect(tmp_path, penalty, level="L1", task="tensor")
    assert same(dump.gradients("Torch.exp.0.backward")["output"], [x.detach().exp()])


def test_gradients_of_an_autocast_call_have_the_dtype_of_the_arguments(tmp_path: Path) -> None:
    def run() -> tuple[list[Tensor], Tensor]:
        torch.manual_seed(3)
        leaves = [torch.randn(shape, requires_grad=True) for shape in LINEAR_2D]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = F.linear(*leaves)
        return leaves, out.float().square().sum()

    leaves, loss = run()
    expected = list(torch.autograd.grad(loss, leaves))
    dump = collect(tmp_path, lambda: run()[1].backward(), level="L1", task="tensor")
    assert same(dump.gradients("Functional.linear.0.backward")["output"], expected)
    assert [e["dtype"] for e in dump.data["Functional.linear.0.backward"]["input"]] == [
        "torch.bfloat16"
    ]


def test_weight_used_twice_under_autocast_has_the_gradient_of_each_call(tmp_path: Path) -> None:
    """Autocast keeps one cast of a weight for the whole region, made by the first call."""
    x, w = torch.randn(3, 4), torch.randn(4, 4, requires_grad=True)

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            (F.linear(x, w) + F.linear(2 * x, w)).float().sum().backward()

    def one_call(given: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.autograd.grad(F.linear(given, w).float().sum(), w)[0]

    dump = collect(tmp_path, step, level="L1", task="tensor")
    assert same(dump.gradients("Functional.linear.0.backward")["output"], [None, one_call(x)])
    assert same(dump.gradients("Functional.linear.1.backward")["output"], [None, one_call(2 * x)])


def test_gradients_of_a_recurrent_call_are_nested_like_its_arguments(tmp_path: Path) -> None:
    torch.manual_seed(3)
    layer = nn.LSTM(3, 4)
    leaves = [torch.randn(shape, requires_grad=True) for shape in [(5, 2, 3), (1, 2, 4), (1, 2, 4)]]

    def loss() -> Tensor:
        x, h, c = leaves
        out, (_, last) = layer(x, (h, c))
        return out.square().sum() + last.sum()

    x, h, c, *weights = torch.autograd.grad(loss(), [*leaves, *layer.parameters()])
    dump = collect(tmp_path, lambda: loss().backward(), level="L1", task="tensor")
    first, states, flat, *numbers = dump.gradients("VF.lstm.0.backward")["output"]
    assert same([first, states, flat], [x, [h, c], list(weights)])
    assert set(numbers) == {None}
