"""What each task records of a tensor, and whether it keeps the tensor itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from . import stats
from .describe import Entry, OnTensor, TensorEntry, plain_tensor, tensor_type

_narrow = torch.Tensor.narrow
_clone = torch.Tensor.clone
_contiguous = torch.Tensor.contiguous
_cpu = torch.Tensor.cpu
_interpreter: Any = getattr(torch._C._functorch, "peek_interpreter_stack", lambda: None)


class Sink(Protocol):
    """Where a description goes: values to be read back later, tensors to keep, problems."""

    def defer(self, deferred: Any, use: Callable[[Any], None]) -> None:
        """Call ``use`` with the values of ``deferred`` once they are read back."""

    def keep(self, path: str, tensor: Any) -> str:
        """Save a tensor and return its file name."""

    def problem(self, path: str, reason: str) -> None:
        """Log why the value at ``path`` could not be computed."""


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

def _set_statistics(entry: Entry, values: Sequence[Any]) -> None:
    entry["Max"], entry["Min"], entry["Mean"], entry["Norm"] = values


def _statistics(entry: TensorEntry, tensor: Any, path: str, high: bool, sink: Sink) -> None:
    entry["Max"] = entry["Min"] = entry["Mean"] = entry["Norm"] = None
    if tensor is None:
        sink.problem(path, f"no statistics of a {entry['type']}: it has no elements to read here")
        return
    try:
        values = stats.statistics(tensor, high)
    except stats.CannotMeasure as reason:
        sink.problem(path, f"no statistics of {entry['dtype']}: {reason}")
        return
    if type(values) is list:
        entry["Max"], entry["Min"], entry["Mean"], entry["Norm"] = values
    else:
        sink.defer(values, lambda read: _set_statistics(entry, read))


def _watch_nan(entry: TensorEntry, tensor: Any, path: str, sink: Sink) -> None:
    """Set ``bad`` of the entry. A tensor that can not be read counts as good, and is logged."""
    entry.bad = False
    if tensor is None or not (tensor.is_floating_point() or tensor.is_complex()):
        return

    def judge(values: Sequence[Any]) -> None:
        entry.bad = any(value is not None and value - value != 0 for value in values[:2])

    try:
        values = stats.statistics(tensor)
    except stats.CannotMeasure as reason:
        sink.problem(path, f"is_nan does not cover {entry['dtype']}: {reason}")
        return
    if type(values) is list:
        judge(values)
    else:
        sink.defer(values, judge)


def _checksum(
    entry: TensorEntry, tensor: Any, path: str, sink: Sink, compute: Callable[[Any], Any]
) -> None:
    entry["md5"] = None
    if tensor is None:
        sink.problem(path, f"no checksum of a {entry['type']}: it has no elements to read here")
        return
    try:
        value = compute(tensor)
    except stats.CannotMeasure as reason:
        sink.problem(path, f"no checksum of {entry['dtype']}: {reason}")
        return
    if type(value) is str:
        entry["md5"] = value
    else:
        sink.defer(value, lambda read: entry.__setitem__("md5", read[0]))


def describer(
    mode: str, high: bool, slices: Sequence[Any], sink: Sink, keeps: bool
) -> OnTensor:
    """The function that describes one tensor or numpy array, for `describe`.

    ``mode`` is statistics, md5, xor, or nan for a record that only tells NaN. Fields in the order of dump-format §3.1; ``keeps`` adds ``data_name`` and the file.
    """

    def on_tensor(value: Any, path: str) -> Entry:
        if type(value) is np.ndarray or isinstance(value, np.ndarray):
            return _array_entry(value, path, sink, keeps)
        plain = None if _interpreter() is not None else plain_tensor(value)
        shown = value if plain is None else plain
        if slices and plain is not None:
            shown = plain = sliced(plain, slices)
        entry = TensorEntry(type=tensor_type(type(value)), dtype=str(value.dtype))
        entry["shape"] = list(shown.shape)
        if mode == "nan":
            _watch_nan(entry, plain, path, sink)
        elif mode == "xor":
            _checksum(entry, plain, path, sink, stats.xor64)
        else:
            _statistics(entry, plain, path, high, sink)
        entry["requires_grad"] = value.requires_grad
        if hasattr(value, "_local_tensor"):
            _placements(entry, value)
        if keeps and plain is not None and plain.numel() and plain.device.type != "meta":
            entry["data_name"] = sink.keep(path, plain)
        if mode == "md5":
            _checksum(entry, plain, path, sink, stats.crc32)
        return entry

    return on_tensor


def blank(value: Any, path: str) -> TensorEntry:
    """The place of a tensor without any description."""
    return TensorEntry()


def bare_entry(value: Any) -> TensorEntry:
    """What can be said of a tensor whose description has failed."""
    entry = TensorEntry(type=tensor_type(type(value)), dtype=str(value.dtype))
    entry["shape"] = list(value.shape)
    entry["Max"] = entry["Min"] = entry["Mean"] = entry["Norm"] = None
    entry["requires_grad"] = value.requires_grad
    entry.bad = False
    return entry


def sliced(tensor: Any, slices: Sequence[Any]) -> Any:
    """``tensor`` cut by each rule in turn (a view); a rule that does not fit is passed over."""
    for rule in slices:
        if rule.dim >= tensor.ndim:
            continue
        size = tensor.shape[rule.dim]
        if rule.size is not None and rule.size != size:
            continue
        begin, end, _ = slice(rule.begin, rule.end).indices(size)
        tensor = _narrow(tensor, rule.dim, begin, max(end - begin, 0))
    return tensor


def host_copy(tensor: Any) -> Any:
    """``tensor`` as a contiguous CPU tensor whose storage holds nothing else, for saving.

    Shares the memory only if the tensor already is one.
    """
    if tensor.layout != torch.strided or tensor.is_quantized:
        return _cpu(tensor)
    host = _contiguous(_cpu(tensor).resolve_conj().resolve_neg())
    if host.untyped_storage().nbytes() != host.numel() * host.element_size():
        host = _clone(host)
    return host


def _array_entry(array: Any, path: str, sink: Sink, keeps: bool) -> Entry:
    """Entry of a numpy array. Statistics in numpy's own arithmetic; null for text and empty."""
    entry = Entry(type="numpy.ndarray", dtype=_dtype_name(array), shape=list(array.shape))
    values: list[Any] = [None] * 4
    if array.size and array.dtype.kind in "biufc":
        magnitude = np.abs(array) if array.dtype.kind == "c" else array
        values = [magnitude.max(), magnitude.min(), magnitude.mean(), np.linalg.norm(magnitude)]
        values = [value.item() for value in values]
    _set_statistics(entry, values)
    if keeps and array.size and array.dtype.kind in "biufcSU":
        entry["data_name"] = sink.keep(path, array)
    return entry


def _dtype_name(array: Any) -> str:
    return array.dtype.str if array.dtype.kind in "SUV" else str(array.dtype)


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
