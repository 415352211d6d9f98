"""Training is bit for bit the same with the tool on and off, down to the operations it runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import debugger, read_dump
from models import ZOO, Case
from msprobe.pytorch import PrecisionDebugger

STEPS = 3


def train(build: Callable[[], Case], watcher: PrecisionDebugger | None = None) -> dict[str, bytes]:
    """Every number of a short training, by name, as bytes: so NaN equals NaN, 0.0 not -0.0."""
    seed()
    case = build()
    optimizer = case.optimizer(case.model.parameters())
    seen: dict[str, bytes] = {}
    for step in range(STEPS):
        if watcher is not None:
            watcher.start(case.model)
        loss = train_step(case, optimizer)
        if watcher is not None:
            watcher.stop()
            watcher.step()
        seen |= {f"step {step} {name}": bits(value) for name, value in state(case, loss)}
        seen |= {f"step {step} {name}": repr(value).encode() for name, value in generators()}
        optimizer.zero_grad()
    seen["optimizer"] = repr(as_bits(optimizer.state_dict())).encode()
    return seen


def train_step(case: Case, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    loss = case.loss(case.model, case.batch)
    (loss if case.scaler is None else case.scaler.scale(loss)).backward()
    if case.scaler is not None:
        case.scaler.unscale_(optimizer)
    if case.clip:
        torch.nn.utils.clip_grad_norm_(case.model.parameters(), 0.1)
    if case.scaler is None:
        optimizer.step()
    else:
        case.scaler.step(optimizer)
        case.scaler.update()
    return loss


def seed() -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)


def state(case: Case, loss: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    yield "loss", loss
    for name, parameter in case.model.named_parameters():
        yield name, parameter
        if parameter.grad is not None:
            yield f"gradient of {name}", parameter.grad
    yield from case.model.named_buffers()
    if isinstance(case.batch, torch.Tensor) and case.batch.grad is not None:
        yield "gradient of the batch", case.batch.grad


def generators() -> Iterator[tuple[str, Any]]:
    yield "torch's generator", bits(torch.get_rng_state())
    yield "Python's generator", random.getstate()
    kind, keys, *rest = np.random.get_state()
    yield "numpy's generator", (kind, keys.tobytes(), rest)


def bits(tensor: torch.Tensor) -> bytes:
    tensor = tensor.detach()
    if tensor.is_sparse:  # not coalesced: the order of the entries must be the same too
        return bits(tensor._indices()) + bits(tensor._values())
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + raw


def as_bits(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return bits(value)
    if isinstance(value, dict):
        return {key: as_bits(part) for key, part in value.items()}
    return [as_bits(part) for part in value] if isinstance(value, (list, tuple)) else value


@cache
def without_the_tool(name: str) -> dict[str, bytes]:
    return train(ZOO[name])


def differences(ours: dict[str, bytes], plain: dict[str, bytes]) -> list[str]:
    return [name for name in {**plain, **ours} if ours.get(name) != plain.get(name)]


def check(name: str, folder: Path, level: str, task: str) -> None:
    plain = without_the_tool(name)
    watched = train(ZOO[name], debugger(folder, level=level, task=task))
    assert differences(watched, plain) == []
    for step in range(STEPS):
        dump = read_dump(folder, step)
        assert dump.names("forward")
        assert dump.names("backward")
        assert dump.errors() == []


@pytest.mark.parametrize("name", ZOO)
def test_training_twice_without_the_tool_gives_the_same_bits(name: str) -> None:
    """Else the tests below would prove nothing, or fail for another reason."""
    assert differences(train(ZOO[name]), without_the_tool(name)) == []


@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
@pytest.mark.parametrize("name", ZOO)
def test_training_gives_the_same_bits_with_statistics(
    name: str, level: str, tmp_path: Path
) -> None:
    check(name, tmp_path, level, "statistics")


@pytest.mark.parametrize(
    "name",
    [
        "residual_cnn",
        "lstm",
        "views_in_place",
        "in_place_modules",
        "keyword_and_nested_inputs",
        "checkpoint_reentrant",
        "gradient_penalty",
        "sparse_embedding",
        "amp_with_scaler",
    ],
)
def test_training_gives_the_same_bits_with_tensors_saved(name: str, tmp_path: Path) -> None:
    check(name, tmp_path, "mix", "tensor")


class Operations(TorchDispatchMode):
    """A mode of the user's that notes every operation that torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """A mode of the user's that notes every function of torch that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


def seen_by(mode: Any, name: str, watcher: PrecisionDebugger | None = None) -> list[str]:
    """What ``mode`` sees of one forward and backward."""
    seed()
    case = ZOO[name]()
    if watcher is not None:
        watcher.start(case.model)
    with mode:
        case.loss(case.model, case.batch).backward()
    if watcher is not None:
        watcher.stop()
    return list(mode.seen)


@pytest.mark.parametrize("mode", [Operations, Functions])
@pytest.mark.parametrize("task", ["statistics", "tensor"])
@pytest.mark.parametrize(
    "name",
    [
        "residual_cnn",
        "gru",
        "views_in_place",
        "keyword_and_nested_inputs",
        "checkpoint_non_reentrant",
        "gradient_penalty",
        "amp_bfloat16",
        "random_in_forward",
    ],
)
def test_modes_of_the_user_see_what_they_see_without_the_tool(
    name: str, task: str, mode: Any, tmp_path: Path
) -> None:
    assert seen_by(mode(), name, debugger(tmp_path, task=task)) == seen_by(mode(), name)
