"""Checkpointing, accumulation and shared weights: which forward a backward belongs to."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import checkpoint

from helpers import Dump, collect, same
from models import ZOO, Function

CHECKPOINTS: dict[str, Callable[[], Any]] = {
    "none": lambda: lambda block, x: block(x),
    "reentrant": lambda: partial(checkpoint, use_reentrant=True),
    "non_reentrant": lambda: partial(checkpoint, use_reentrant=False),
    "selective": lambda: partial(checkpoint, use_reentrant=False, context_fn=keep_products()),
}


def keep_products() -> Any:
    """Products are kept, everything else is computed again (torch >= 2.4)."""
    products = {torch.ops.aten.addmm.default, torch.ops.aten.mm.default}
    policy = torch_checkpoint.CheckpointPolicy

    def choose(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        return policy.MUST_SAVE if operator in products else policy.PREFER_RECOMPUTE

    return partial(torch_checkpoint.create_selective_checkpoint_contexts, choose)


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    run = CHECKPOINTS[kind]()
    block = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.25), nn.Linear(6, 4))
    parts = {"stem": nn.Linear(4, 4), "block": block, "head": nn.Linear(4, 2)}
    return Function(lambda m, x: m.head(run(m.block, m.stem(x))), **parts)


def batch(size: int) -> Tensor:
    return torch.randn(size, 4, generator=torch.Generator().manual_seed(size))


def shapes(entries: Any) -> list[Any]:
    return [entry and entry["shape"] for entry in entries]


def forward_of(backward: str) -> str:
    return backward.replace(".backward", ".forward")


def assert_tree(dump: Dump) -> None:
    """Each record has one parent of its own direction, and from each one comes to the top."""
    expected = {name for name in dump.data if ".parameters_grad." not in name}
    assert set(dump.construct) == expected
    for name in dump.construct:
        seen, parent = {name}, dump.construct[name]
        while parent is not None:
            assert parent not in seen, f"{name} is within itself"
            assert (".backward" in parent) == (".backward" in name)
            seen.add(parent)
            parent = dump.construct[parent]


all_kinds = pytest.mark.parametrize("kind", CHECKPOINTS)


@all_kinds
@pytest.mark.parametrize("level", ["L0", "mix"])
def test_backward_pairs_with_the_forward_of_its_micro_batch(
    kind: str, level: str, tmp_path: Path
) -> None:
    """Each micro-batch has a size of its own, so a gradient tells to which it belongs."""
    model = build(kind)

    def step() -> None:
        for size in (1, 2, 3):
            model(batch(size)).square().sum().backward()

    dump = collect(tmp_path, step, model, level=level)
    backwards = dump.names("backward")
    # a level of modules has the stem, four parts of the block, the block, and the head
    assert len([name for name in backwards if name.startswith("Module.")]) == 3 * 7
    for name in backwards:
        assert shapes(dump.data[name]["input"]) == shapes(dump.data[forward_of(name)]["output"])
    assert_tree(dump)
    assert dump.errors() == []


@all_kinds
def test_backwards_in_reverse_order_pair_with_their_forwards(kind: str, tmp_path: Path) -> None:
    """As a pipeline that runs all forwards first."""
    model = build(kind)

    def step() -> None:
        losses = [model(batch(size)).square().sum() for size in (1, 2, 3)]
        for loss in reversed(losses):
            loss.backward()

    dump = collect(tmp_path, step, model)
    for name in dump.names("backward"):
        assert shapes(dump.data[name]["input"]) == shapes(dump.data[forward_of(name)]["output"])
    assert_tree(dump)


@pytest.mark.parametrize("name", ["checkpoint_nested", "shared_linear", "tied_embedding"])
def test_nested_and_shared_parts_give_a_tree(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    case = ZOO[name]()
    dump = collect(tmp_path, lambda: case.loss(case.model, case.batch).backward(), case.model)
    assert_tree(dump)
    for backward in dump.names("backward"):
        forward = dump.data[forward_of(backward)]
        assert shapes(dump.data[backward]["input"]) == shapes(forward["output"])


@pytest.mark.parametrize("kind", ["reentrant", "non_reentrant", "selective"])
def test_recomputed_forward_is_numbered_on_and_has_the_same_values(
    kind: str, tmp_path: Path
) -> None:
    model = build(kind)
    dump = collect(
        tmp_path, lambda: model(batch(3)).square().sum().backward(), model, summary_mode="md5"
    )
    for part in ("0.Linear", "1.Tanh", "2.Dropout"):
        first, again = (dump.data[f"Module.block.{part}.forward.{i}"] for i in (0, 1))
        assert first["output"][0]["md5"] == again["output"][0]["md5"]
    assert dump.names("Module.stem.Linear.forward") == ["Module.stem.Linear.forward.0"]


def test_recomputation_that_stops_early_leaves_its_inputs(tmp_path: Path) -> None:
    """torch raises when it has what it needs: the last calls have begun and never returned."""
    model = build("non_reentrant")
    dump = collect(tmp_path, lambda: model(batch(3)).square().sum().backward(), model)
    for name in ("Module.block.3.Linear.forward.1", "Module.block.Sequential.forward.1"):
        assert list(dump.data[name]) == ["input_args", "input_kwargs"]


@all_kinds
def test_gradients_under_recomputation_are_those_of_the_plain_model(
    kind: str, tmp_path: Path
) -> None:
    plain = build("none").eval()
    plain(batch(3)).square().sum().backward()
    model = build(kind).eval()
    step = collect(
        tmp_path,
        lambda: model(batch(3)).square().sum().backward(),
        model,
        level="L0",
        task="tensor",
    )
    found = {}
    for name in step.names("parameters_grad"):
        module = name.removeprefix("Module.").rpartition(".Linear.")[0]
        for parameter, (value,) in step.gradients(name).items():
            found[f"{module}.{parameter}"] = value
    assert same(found, {name: plain.get_parameter(name).grad for name in found})
    assert len(found) == len(list(plain.parameters()))


def test_weight_shared_by_two_modules_shows_its_whole_gradient_in_both(tmp_path: Path) -> None:
    torch.manual_seed(0)
    case = ZOO["tied_embedding"]()
    dump = collect(
        tmp_path, lambda: case.loss(case.model, case.batch).backward(), case.model, task="tensor"
    )
    weight = case.model.embedding.weight.grad
    for name in ("embedding.Embedding", "head.Linear"):
        record = dump.gradients(f"Module.{name}.parameters_grad.0")
        assert same(record, {"weight": [weight]})
