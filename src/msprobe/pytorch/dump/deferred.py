"""Numbers that are still on a device, and how many of them are read back in one copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_cat = torch.cat
_tolist = torch.Tensor.tolist


class CannotMeasure(Exception):
    """A number of a tensor cannot be had. The text is the reason, in one line."""


# What torch raises for a dtype, layout or wrapper that an operation does not know. Whatever the
# reason, the answer to the caller is the same: this tensor has no number.
TORCH_ERRORS = (ArithmeticError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)


def reason(error: BaseException) -> str:
    """The first line of an error's text, or its type when it has none."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


@dataclass(slots=True)
class Deferred:
    """Values that are not read back yet.

    ``values``: 1-D, a few elements, on the device. ``finish``: turns them, once they are Python
    numbers, into what was asked for. ``stream``: where they are computed, None for the CPU;
    `read_back` may run in a thread whose current stream is another one.
    """

    values: torch.Tensor
    finish: Callable[[list[Any]], list[Any]]
    stream: Any = None


def current_stream(device: torch.device) -> Any:
    """The stream that work on ``device`` goes to in this thread; None if the device has none."""
    ask = getattr(getattr(torch, device.type, None), "current_stream", None)
    return ask(device) if ask is not None and device.type != "cpu" else None


def read_back(deferred: Sequence[Deferred]) -> list[list[Any]]:
    """The finished values of each, in order. One device-to-host copy per device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, item in enumerate(deferred):
        groups.setdefault((item.values.device, item.values.dtype), []).append(index)
    for stream in {item.stream for item in deferred if item.stream is not None}:
        stream.synchronize()
    results: list[list[Any]] = [[]] * len(deferred)
    for indexes in groups.values():
        numbers = _tolist(_cat([deferred[i].values for i in indexes]))
        begin = 0
        for i in indexes:
            end = begin + deferred[i].values.shape[0]
            results[i] = deferred[i].finish(numbers[begin:end])
            begin = end
    return results
