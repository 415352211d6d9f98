"""What identifies the state of a training run: checksums of tensors and of generators."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from .dump import device
from .dump.checksums import crc32
from .dump.deferred import CannotMeasure
from .dump.subclasses import plain_tensor

_ACCELERATORS = ("cuda", "npu", "xpu")


def leaves_of(roots: Sequence[Any]) -> Iterator[torch.Tensor]:
    """The leaves at the end of the graph above ``roots``, in an order fixed by the graph."""
    seen: set[Any] = set()
    waiting = [root.grad_fn for root in roots if isinstance(root, torch.Tensor)]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::AccumulateGrad":
            yield node.variable  # type: ignore[attr-defined]
        waiting.extend(following for following, _ in node.next_functions)


def fingerprint(tensor: Any) -> str | None:
    """CRC-32 of the elements; of a sparse tensor, of its indices and values."""
    if not isinstance(tensor, torch.Tensor):
        return None
    if tensor.layout is torch.sparse_coo:
        whole = tensor.coalesce()
        return f"{fingerprint(whole.indices())} {fingerprint(whole.values())}"
    plain = plain_tensor(tensor)
    try:
        return "unreadable" if plain is None else crc32(plain)
    except CannotMeasure as error:
        return str(error)


def rng_states() -> dict[str, Any]:
    """State of every generator that is in use, by its name.

    A generator that the script does not seed differs from run to run. Its place in the current
    block of numbers, which grows with each draw, does not.
    """
    numpy: Any = dict(np.random.get_state(legacy=False))["state"]  # of MT19937, unless replaced
    keys = np.asarray(numpy.get("key", 0))
    python = random.getstate()
    states: dict[str, Any] = {
        "torch": crc32(torch.get_rng_state()),
        "numpy": zlib.crc32(keys.tobytes() + repr(numpy).encode()),
        "numpy's place": int(numpy.get("pos", 0)),
        "python": zlib.crc32(repr(python).encode()),
        "python's place": python[1][-1],
    }
    for name, module in _in_use():
        states[name] = [crc32(state) for state in module.get_rng_state_all()]
    return states


def _in_use() -> Iterator[tuple[str, Any]]:
    for name in _ACCELERATORS:
        module = getattr(torch, name, None)
        if module is not None and getattr(module, "is_initialized", lambda: False)():
            yield name, module


def synchronize() -> None:
    """Wait for all accelerators in use, so that a clock tells the truth."""
    for name, _ in _in_use():
        device.synchronize(name)
