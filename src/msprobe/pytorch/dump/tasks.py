"""What each task records of a tensor, and whether it keeps the tensor itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from . import small, stats
from .describe import Entry, OnTensor, TensorEntry, plain_tensor, tensor_type, unwaited
from .pieces import FREED, is_freed

_narrow = torch.Tensor.narrow
_clone = torch.Tensor.clone
_contiguous = torch.Tensor.contiguous
_cpu = torch.Tensor.cpu
_elements = small.elements
_usual = stats.usual
_single = torch.float32
_tensor = torch.Tensor
_parameter = torch.nn.Parameter


class Sink(Protocol):
    """Where a description goes: values to be read back later, tensors to keep, problems.

    ``small``: entries whose statistics are filled in together, with what `small.fill_in` needs.
    """

    small: deque[small.Waiting]

    def defer(self, deferred: Any, use: Callable[[Any], None]) -> None:
        """Call ``use`` with the values of ``deferred`` once they are read back."""

    def postpone(self, result: Any, path: str, fill: Callable[[], None]) -> bool:
        """``fill`` in a description once somebody waits for ``result``; False if none will tell."""

    def keep(self, path: str, tensor: Any) -> str:
        """Save a tensor and return its file name."""

    def problem(self, path: str, reason: str | Exception) -> None:
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

Fill = Callable[[TensorEntry, Any, str], None]  # (entry, plain tensor or None, path)

_interpreter: Any = getattr(torch._C._functorch, "peek_interpreter_stack", lambda: None)
_DTYPES = {t: str(t) for t in vars(torch).values() if isinstance(t, torch.dtype)}


def describer(
    mode: str, high: bool, slices: Sequence[Any], sink: Sink, keeps: bool
) -> OnTensor:
    """The function that describes one tensor or numpy array, for `describe`.

    ``mode`` is statistics, md5, xor, or nan for records that only tell NaN. Fields in the order
    of dump-format §3.1; ``keeps`` adds ``data_name`` and the file.
    """
    alone = _alone(mode, high, slices, sink, keeps)
    if mode != "statistics" or keeps or slices:
        return alone
    together, odd, wait = small.REDUCTIONS[high], _interpreter, sink.small.append

    def on_tensor(value: Any, path: str) -> Entry:
        kind = type(value)
        if (kind is _tensor or kind is _parameter) and not odd():
            dtype = value.dtype
            if dtype in together:
                width, reduction = together[dtype]
                copy = _elements(value, width)
                if copy is not None:
                    entry = _entry(value, dtype, _NO_VALUES)
                    wait((entry, reduction, copy))
                    return entry
            if dtype is _single:
                values = _usual(value)
                if values is not None:
                    return _entry(value, dtype, values)
        found: Entry = alone(value, path)
        return found

    return on_tensor


def _entry(value: Any, dtype: torch.dtype, numbers: Sequence[Any]) -> TensorEntry:
    top, low, mean, norm = numbers
    return TensorEntry(
        type="torch.Tensor",
        dtype=_DTYPES[dtype],
        # A tuple: once the garbage collector has seen it, it need not look at it again.
        shape=tuple(value.shape),
        Max=top,
        Min=low,
        Mean=mean,
        Norm=norm,
        requires_grad=value.requires_grad,
    )


def _alone(mode: str, high: bool, slices: Sequence[Any], sink: Sink, keeps: bool) -> OnTensor:
    """`describer` of tensors that are not measured together with others."""
    first, last = _FILLS[mode](high, sink)
    odd: Any = (lambda: True) if slices else _interpreter

    def on_tensor(value: Any, path: str) -> Entry:
        kind = type(value)
        if (kind is _tensor or kind is _parameter) and not odd():
            plain = value.detach() if value.requires_grad else value
            entry = TensorEntry(type="torch.Tensor", dtype=_DTYPES[value.dtype])
        elif isinstance(value, np.ndarray):
            return _array(value, path, sink, keeps)
        else:
            entry, plain = _place(value, slices)
        try:
            # A tuple: once the garbage collector has seen it, it need not look at it again.
            entry["shape"] = tuple(value.shape if plain is None else plain.shape)
            if plain is None:
                raise stats.CannotMeasure(_NOTHING_TO_READ)
            first(entry, plain, path)
        except Exception as reason:  # an odd tensor costs its numbers, not its record
            _without_numbers(entry, value, path, reason, sink, mode, on_tensor)
        entry["requires_grad"] = value.requires_grad
        if keeps:
            _keep(entry, plain, path, sink)
        if last is not None:
            last(entry, plain, path)
        return entry

    return on_tensor


def _without_numbers(
    entry: TensorEntry,
    value: Any,
    path: str,
    reason: Exception,
    sink: Sink,
    mode: str,
    describe_again: OnTensor,
) -> None:
    """Nulls: until somebody waits for a functional collective, or as the log says why."""
    if _comes_later(entry, value, path, sink, describe_again):
        entry.update(dict.fromkeys(_FIELDS[mode]))
    else:
        _say(entry, path, reason, sink, _FIELDS[mode])


def _comes_later(
    entry: TensorEntry, value: Any, path: str, sink: Sink, describe_again: OnTensor
) -> bool:
    """Whether the values of ``entry`` are there once somebody waits for a functional collective."""
    result = unwaited(value)

    def fill() -> None:
        described = describe_again(value, path)
        entry.clear()
        entry.update(described)

    return result is not None and sink.postpone(result, path, fill)


def _keep(entry: TensorEntry, plain: Any, path: str, sink: Sink) -> None:
    """Save the tensor if it has elements; where that fails, the log says why."""
    try:
        if plain is not None and plain.numel() and not plain.is_meta:
            if plain.layout is torch.strided and is_freed(plain):
                raise stats.CannotMeasure(FREED)  # FSDP takes the memory of tensors away
            entry["data_name"] = sink.keep(path, plain)
    except Exception as reason:
        sink.problem(path, reason)


_NUMBERS = ("Max", "Min", "Mean", "Norm")
_NO_VALUES = (None, None, None, None)
_FIELDS: dict[str, Sequence[str]] = {
    "statistics": _NUMBERS,
    "md5": _NUMBERS,
    "xor": ("md5",),
    "nan": (),
}
_NOTHING_TO_READ = "it has no elements of its own to read here"


def _say(
    entry: TensorEntry, path: str, reason: Exception, sink: Sink, fields: Sequence[str]
) -> None:
    entry.setdefault("shape", None)  # a nested tensor has none
    for field in fields:
        entry[field] = None
    sink.problem(path, f"no numbers of {entry['type']} {entry['dtype']}: {reason}")


def _place(value: Any, slices: Sequence[Any]) -> tuple[TensorEntry, Any]:
    """Type and dtype of a tensor, and the plain tensor to read (None: not to be read)."""
    kind = type(value)
    plain = plain_tensor(value)
    entry = TensorEntry(type=tensor_type(kind), dtype=_DTYPES[value.dtype])
    if hasattr(value, "_local_tensor"):
        _placements(entry, value)
    if _interpreter() is not None:
        plain = None  # inside vmap, grad, ...: reading would be part of the transform
    if slices and plain is not None:
        plain = sliced(plain, slices)
    return entry, plain


def _statistics(high: bool, sink: Sink) -> tuple[Fill, None]:
    measure, together = stats.statistics, small.REDUCTIONS[high]

    def fill(entry: TensorEntry, plain: Any, path: str) -> None:
        if plain.dtype in together:
            width, reduction = together[plain.dtype]
            copy = small.elements_of_any(plain, width)
            if copy is not None:
                _set_statistics(entry, _NO_VALUES)
                sink.small.append((entry, reduction, copy))
                return
        values = measure(plain, high)
        if type(values) is list:
            entry["Max"], entry["Min"], entry["Mean"], entry["Norm"] = values
        else:
            _set_statistics(entry, _NO_VALUES)
            sink.defer(values, lambda read: _set_statistics(entry, read))

    return fill, None


def _set_statistics(entry: Entry, values: Sequence[Any]) -> None:
    entry["Max"], entry["Min"], entry["Mean"], entry["Norm"] = values


def _checksum(compute: Callable[[Any], Any], sink: Sink) -> Fill:
    def fill(entry: TensorEntry, plain: Any, path: str) -> None:
        entry["md5"] = None
        value = compute(plain)
        if type(value) is str:
            entry["md5"] = value
        else:
            sink.defer(value, lambda read: entry.__setitem__("md5", read[0]))

    return fill


def _last(fill: Fill, sink: Sink) -> Fill:
    """``fill`` after the other fields: it says itself what it can not compute."""

    def attempt(entry: TensorEntry, plain: Any, path: str) -> None:
        if plain is None:
            entry["md5"] = None  # why, has been said for the statistics
            return
        try:
            fill(entry, plain, path)
        except Exception as reason:
            _say(entry, path, reason, sink, ("md5",))

    return attempt


def _nan(high: bool, sink: Sink) -> tuple[Fill, None]:
    def fill(entry: TensorEntry, plain: Any, path: str) -> None:
        if not (plain.is_floating_point() or plain.is_complex()):
            return
        values = stats.statistics(plain)
        if type(values) is list:
            _judge(entry, values)
        else:
            sink.defer(values, lambda read: _judge(entry, read))

    return fill, None


def _judge(entry: TensorEntry, values: Sequence[Any]) -> None:
    # x - x is 0 for finite x only; Max and Min carry every NaN and infinity.
    entry.bad = any(value is not None and value - value != 0 for value in values[:2])


# mode → (fills before requires_grad, fills after data_name)
_FILLS: dict[str, Callable[[bool, Sink], tuple[Fill, Fill | None]]] = {
    "statistics": _statistics,
    "md5": lambda high, sink: (
        _statistics(high, sink)[0],
        _last(_checksum(stats.crc32, sink), sink),
    ),
    "xor": lambda high, sink: (_checksum(stats.xor64, sink), None),
    "nan": _nan,
}


def blank(value: Any, path: str) -> TensorEntry:
    """The place of a tensor without any description."""
    return TensorEntry()


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
    """``tensor`` as a CPU tensor for saving, contiguous if strided; itself if it is that."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        return _cpu(tensor)
    return _contiguous(_cpu(tensor).resolve_conj().resolve_neg())


def snapshot(tensor: Any) -> Any:
    """A copy of a tensor or numpy array as it is now, for saving later."""
    if isinstance(tensor, np.ndarray):
        return tensor.copy()
    host = host_copy(tensor)
    return _clone(host) if host is tensor or _shares(host, tensor) else host


def _shares(one: Any, other: Any) -> bool:
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return False
    return bool(one.device == other.device and one.data_ptr() == other.data_ptr())


def _array(array: Any, path: str, sink: Sink, keeps: bool) -> Entry:
    try:
        return _array_entry(array, path, sink, keeps)
    except Exception as reason:  # an odd subclass costs its own entry only
        sink.problem(path, reason)
        kind = type(array)
        return Entry(type=f"{kind.__module__}.{kind.__qualname__}", value=None)


def _array_entry(array: Any, path: str, sink: Sink, keeps: bool) -> Entry:
    """Entry of a numpy array. Statistics in numpy's own arithmetic; null for text and empty."""
    entry = Entry(type="numpy.ndarray", dtype=_dtype_name(array), shape=list(array.shape))
    values: list[Any] = [None] * 4
    if array.size and array.dtype.kind in "biufc":
        magnitude = np.abs(array) if array.dtype.kind == "c" else array
        values = [magnitude.max(), magnitude.min(), magnitude.mean(), np.linalg.norm(magnitude)]
        # float: the item of a longdouble is no Python number.
        values = [float(v) if isinstance(v, np.longdouble) else v.item() for v in values]
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
