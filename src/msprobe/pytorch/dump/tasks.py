"""What each task records of a tensor, and whether it keeps the tensor itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from . import copies, small, stats
from .arrays import array_entry
from .entries import Entry, OnTensor, TensorEntry
from .fills import FIELDS, FILLS, Sink, say
from .pieces import FREED, is_freed
from .quiet import in_transform, transforms_off
from .subclasses import is_wrapped, plain_tensor, tensor_type, unwaited

_elements = small.elements
_usual = stats.usual
_single = torch.float32
_tensor = torch.Tensor
_parameter = torch.nn.Parameter


@dataclass(frozen=True, slots=True)
class Task:
    """A task.

    ``records``: it writes to dump.json at all. ``keeps_all``: every tensor as a file.
    ``only_bad``: only calls that bring NaN or infinity are recorded, with their tensors.
    ``marks_nan``: instead of statistics a record tells whether it brings NaN or infinity.
    """

    records: bool = True
    keeps_all: bool = False
    only_bad: bool = False
    marks_nan: bool = False


TASKS: dict[str, Task] = {
    "statistics": Task(),
    "tensor": Task(keeps_all=True),
    "structure": Task(records=False),
    "acc_check": Task(),
    "overflow_check": Task(only_bad=True),
    "nan_check": Task(marks_nan=True),
}

_DTYPES = {t: str(t) for t in vars(torch).values() if isinstance(t, torch.dtype)}


def describer(
    mode: str, high: bool, slices: Sequence[Any], sink: Sink, keeps: bool
) -> OnTensor:
    """The function that describes one tensor or numpy array, for `describe`.

    ``mode`` is statistics, md5, xor, or nan for records that only tell NaN. Fields in the order
    of dump-format §3.1; ``keeps`` adds ``data_name`` and the file.
    """
    alone = _Describer(mode, high, slices, sink, keeps)
    if mode != "statistics" or keeps or slices:
        return alone
    together, wait = small.REDUCTIONS[high], sink.small.append

    def on_tensor(value: Any, path: str) -> Entry:
        kind = type(value)
        if kind is not _tensor and kind is not _parameter:
            return alone(value, path)
        dtype = value.dtype
        values: Any = None
        reduction: Any = None
        copy: Any = None
        if dtype in together:
            width, reduction = together[dtype]
            copy = _elements(value, width)
        if copy is None:
            values = _usual(value) if dtype is _single and not in_transform() else None
            if values is None:
                return alone(value, path)
        entry = TensorEntry(_PLAIN)
        entry["dtype"] = _DTYPES[dtype]
        # A tuple: once the garbage collector has seen it, it need not look at it again.
        entry["shape"] = tuple(value.shape)
        entry["requires_grad"] = value.requires_grad
        if values is None:
            wait((entry, reduction, copy))
        else:
            entry["Max"], entry["Min"], entry["Mean"], entry["Norm"] = values
        return entry

    return on_tensor


# The fields of a plain tensor in their order: copying them is faster than naming them.
_PLAIN = {
    "type": "torch.Tensor", "dtype": None, "shape": None,
    "Max": None, "Min": None, "Mean": None, "Norm": None, "requires_grad": None,
}  # fmt: skip


class _Describer:
    """`describer` of tensors of any kind."""

    def __init__(
        self, mode: str, high: bool, slices: Sequence[Any], sink: Sink, keeps: bool
    ) -> None:
        self._first, self._last = FILLS[mode](high, sink)
        self._fields = FIELDS[mode]
        self._slices = slices
        self._sink = sink
        self._keeps = keeps

    def __call__(self, value: Any, path: str) -> Entry:
        if in_transform():
            with transforms_off():
                return self._described(value, path)
        return self._described(value, path)

    def _described(self, value: Any, path: str) -> Entry:
        kind = type(value)
        plain_kind = kind is _tensor or kind is _parameter
        if plain_kind and not self._slices and not is_wrapped(value):
            plain = value.detach() if value.requires_grad else value
            entry = TensorEntry(type="torch.Tensor", dtype=_DTYPES[value.dtype])
        elif isinstance(value, np.ndarray):
            return array_entry(value, path, self._sink, self._keeps)
        else:
            entry, plain = _place(value, self._slices)
        self._complete(entry, value, plain, path)
        return entry

    def _complete(self, entry: TensorEntry, value: Any, plain: Any, path: str) -> None:
        try:
            entry["shape"] = _shape(value, plain)
            if plain is None:
                raise stats.CannotMeasure(_NOTHING_TO_READ)
            self._first(entry, plain, path)
        except Exception as reason:  # an odd tensor costs its numbers, not its record
            if self._comes_later(entry, value, path):
                entry.update(dict.fromkeys(self._fields))
            else:
                say(entry, path, reason, self._sink, self._fields)
        entry["requires_grad"] = value.requires_grad
        if self._keeps:
            if value.is_nested:
                self._sink.problem(path, "not saved: a nested tensor has no file")
            else:
                _keep(entry, plain, path, self._sink)
        if self._last is not None:
            self._last(entry, plain, path)

    def _comes_later(self, entry: TensorEntry, value: Any, path: str) -> bool:
        """Whether its values are there once somebody waits for a functional collective."""
        result = unwaited(value)
        return result is not None and self._sink.postpone(
            result,
            path,
            lambda: self._complete(entry, value, _place(value, self._slices)[1], path),
        )


def _shape(value: Any, plain: Any) -> tuple[int, ...] | None:
    if value.is_nested:
        return tuple(value.shape) if value.layout is not torch.strided else None  # it has none
    # A tuple: once the garbage collector has seen it, it need not look at it again.
    return tuple(value.shape if plain is None else plain.shape)


def _keep(entry: TensorEntry, plain: Any, path: str, sink: Sink) -> None:
    """Save the tensor if it has elements; where that fails, the log says why."""
    try:
        if plain is not None and plain.numel() and not plain.is_meta:
            if plain.layout is torch.strided and is_freed(plain):
                raise stats.CannotMeasure(FREED)  # FSDP takes the memory of tensors away
            entry["data_name"] = sink.keep(path, plain)
    except Exception as reason:
        sink.problem(path, reason)


_NOTHING_TO_READ = "it has no elements of its own to read here"


def _place(value: Any, slices: Sequence[Any]) -> tuple[TensorEntry, Any]:
    """Type and dtype of a tensor, and the plain tensor to read (None: not to be read)."""
    kind = type(value)
    plain = plain_tensor(value)
    entry = TensorEntry(type=tensor_type(kind), dtype=_DTYPES[value.dtype])
    if hasattr(value, "_local_tensor"):
        _placements(entry, value)
    if slices and plain is not None:
        is_parameter = isinstance(value, _parameter)
        plain = copies.sliced(plain, slices, is_parameter=is_parameter)
    return entry, plain


def blank(value: Any, path: str) -> Entry:
    """The place of a tensor or array without any description."""
    return Entry() if isinstance(value, np.ndarray) else TensorEntry()


def _placements(entry: TensorEntry, value: Any) -> None:
    """Fields of a DTensor: what of the whole the statistics of its local shard stand for."""
    mesh = getattr(value, "device_mesh", None)
    if mesh is None:
        return
    entry["device_mesh"] = mesh.mesh.tolist()
    entry["placements"] = [_placement(placement) for placement in value.placements]


def _placement(placement: Any) -> dict[str, Any]:
    if placement.is_shard():
        return {"Shard": {"dim": placement.dim}}
    if placement.is_replicate():
        return {"Replicate": {}}
    if placement.is_partial():
        return {"Partial": {"reduce_op": str(placement.reduce_op)}}
    return {type(placement).__name__: {}}
