"""Entries of values that hold no others: numbers, text, slices, process groups, the unknown.

Each function stands in the tables of `describe`, so it is given path and the rest as well.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .entries import Entry


def asked(question: Callable[[Any], Any], value: Any) -> Any:
    """What the user's own methods answer; None if they raise."""
    try:
        return question(value)
    except Exception:
        return None


def text_of(value: Any) -> str:
    """``value`` as text: the text itself, whatever its class; the class where str() raises."""
    text = str.__str__(value) if isinstance(value, str) else asked(str, value)
    return type(value).__name__ if text is None else text


def scalar_entry(value: Any, *_: Any) -> Entry:
    """Entry of a bool, int, float or str."""
    return Entry(type=type(value).__name__, value=value)


def slice_entry(value: slice, *_: Any) -> Entry:
    """Entry of a slice: its three bounds."""
    bounds = [_bound(v) for v in (value.start, value.stop, value.step)]
    return Entry(type="slice", value=bounds)


def _bound(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    # A 0-dim tensor is read only where that does not wait for a device.
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.ndim == 0:
        return value.item()
    return text_of(value)


def numpy_entry(value: Any, *_: Any) -> Entry:
    """Entry of a numpy scalar."""
    if isinstance(value, np.complexfloating):
        return Entry(type="complex", value=str(complex(value)).strip("()"))
    plain = value.item()
    name = "bool" if isinstance(value, np.bool_) else type(value).__name__
    if isinstance(plain, (bool, int, float, str)):
        return Entry(type=name, value=plain)
    return Entry(type=name, value=text_of(value))


def unknown_entry(value: Any, *_: Any) -> Entry:
    """Entry of anything else: its type, no value."""
    kind = type(value)
    name = kind.__qualname__
    if kind.__module__ != "builtins":
        name = f"{kind.__module__}.{name}"
    return Entry(type=name, value=None)


def group_entry(value: Any, *_: Any) -> Entry:
    """Entry of a process group; of one that torch does not know, without its ranks."""
    dist: Any = sys.modules["torch.distributed"]
    try:
        ranks = dist.get_process_group_ranks(value)
    except (ValueError, KeyError, RuntimeError):
        return Entry(type="torch.ProcessGroup", group_ranks=None, group_id=None)
    crc = zlib.crc32(str(ranks).encode("ascii"))
    return Entry(type="torch.ProcessGroup", group_ranks=ranks, group_id=f"{crc:08x}")


def reduce_op_entry(value: Any, *_: Any) -> Entry:
    """Entry of a reduction of torch.distributed."""
    return Entry(type="torch.distributed.ReduceOp", value=str(getattr(value, "op", value)))
