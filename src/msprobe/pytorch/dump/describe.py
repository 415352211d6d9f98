"""Nested arguments and results → JSON-able entries (the only walker of nested values).

Encoding: dump-format "Encoding of values". Every leaf becomes an `Entry`, so that `places` can
tell tensors from mappings without a second walk over the values themselves.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import operator
import sys
import types
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

_parameter = torch.nn.Parameter
_MAX_DEPTH = 100  # below Python's own recursion limit with the frames of a deep model on the stack
_MAX_PARTS = 100_000  # of one argument: objects that refer to each other have endless paths


class Entry(dict[str, Any]):
    """The JSON object of one leaf."""

    __slots__ = ()


class TensorEntry(Entry):
    """The JSON object of one tensor; its place is where a gradient may stand later.

    ``bad`` (task nan_check, not written): the tensor holds NaN or infinity.
    """

    bad = False


OnTensor = Callable[[Any, str], Any]  # (tensor or array, path) → entry
Trail = tuple[Any, ...]  # how many parts there are so far, as a list of one; ids of what is around
Describer = Callable[[Any, str, OnTensor, Trail], Any]


def describe(value: Any, path: str, on_tensor: OnTensor, trail: Trail = ()) -> Any:
    """Entry of ``value``: a list for a list or tuple, an object for a mapping, else a leaf.

    ``path`` names the value (``Functional.relu.0.forward.input.0``); ``on_tensor`` is called for
    each tensor with the tensor and its path and returns its entry. A container that holds itself
    is cut where it repeats. One whose own methods raise is a leaf without a value.
    """
    kind = type(value)
    describer = _DESCRIBERS.get(kind)
    if describer is None:
        describer = _DESCRIBERS[kind] = _resolve(kind)
    return describer(value, path, on_tensor, trail)


def describe_output(value: Any, path: str, on_tensor: OnTensor) -> Any:
    """Section ``output``: a tuple gives one entry per element, any other value a list of one.

    ``torch.Size``, a named tuple and an empty tuple stand by themselves (dump-format §3).
    """
    if type(value) is tuple:
        return [describe(v, f"{path}.{i}", on_tensor) for i, v in enumerate(value)]
    if isinstance(value, tuple):
        return describe(value, path, on_tensor)
    return [describe(value, f"{path}.0", on_tensor)]


def describe_kwargs(kwargs: Mapping[str, Any], path: str, on_tensor: OnTensor) -> dict[str, Any]:
    """Section ``input_kwargs``. A ``device`` given as text or number is marked as a device."""
    entries: dict[str, Any] = {}
    for key, value in kwargs.items():
        if key == "device" and type(value) in (str, int):
            entries[key] = Entry(type="torch.device", value=value)
        else:
            entries[key] = describe(value, f"{path}.{key}", on_tensor)
    return entries


def places(entries: Any) -> Any:
    """The places of tensors in ``entries``: True for a tensor, None for any other leaf.

    What a call keeps until its gradients come: small, and free of the values.
    """
    kind = type(entries)
    if kind is dict:
        return {key: places(value) for key, value in entries.items()}
    if kind is not list:
        return True if kind is TensorEntry else None
    shape: list[Any] = []
    for value in entries:  # one frame for a flat list, which nearly every call has
        kind = type(value)
        if kind is TensorEntry:
            shape.append(True)
        else:
            shape.append(places(value) if kind is list or kind is dict else None)
    return tuple(shape)


def fill(shape: Any, path: str, gradient: Callable[[str], Any]) -> Any:
    """``shape`` (see `places`) with ``gradient(path)`` in the place of each tensor, in order."""
    if shape is True:
        return gradient(path)
    if type(shape) is tuple:
        return [fill(part, f"{path}.{i}", gradient) for i, part in enumerate(shape)]
    if type(shape) is dict:
        return {key: fill(part, f"{path}.{key}", gradient) for key, part in shape.items()}
    return None


def tensor_type(kind: type) -> str:
    """Field ``type``: ``torch.Tensor`` for a plain tensor, a parameter and ordinary subclasses.

    A subclass that brings its own dispatch (DTensor, FakeTensor, nested) has its own name.
    """
    if kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__:  # type: ignore[attr-defined]
        return "torch.Tensor"
    if kind.__name__ == "DTensor":
        return "torch.distributed.tensor.DTensor"  # one name for all torch versions
    return f"{kind.__module__}.{kind.__qualname__}"


def plain_tensor(value: Any) -> Any:
    """``value`` as a plain tensor without autograd, sharing its memory; a DTensor's local shard.

    Assumes that __torch_function__ of subclasses is off (see quiet.py).

    None if there are no elements of its own to read: fake and other wrapping subclasses, the
    result of a functional collective that nobody has waited for (we start no wait), and tensors
    that a functorch transform has wrapped.
    """
    kind = type(value)
    if kind is torch.Tensor or kind is _parameter:
        return value.detach() if value.requires_grad else value
    local = getattr(value, "_local_tensor", None)
    if local is not None:
        return plain_tensor(local)
    if kind.__name__ == "NestedTensor" and value.layout is not torch.strided:
        return plain_tensor(value._values)  # all elements, one part behind the other
    if kind.__name__ == "AsyncCollectiveTensor" and getattr(value, "completed", False):
        return plain_tensor(value.elem)
    if tensor_type(kind) != "torch.Tensor":
        return None
    return value.detach().as_subclass(torch.Tensor)


def unwaited(value: Any) -> Any:
    """The result of a functional collective that ``value`` is, or that is its local shard.

    None if it is none, or if somebody has waited for it.
    """
    local = getattr(value, "_local_tensor", None)
    if local is not None:
        return unwaited(local)
    is_result = type(value).__name__ == "AsyncCollectiveTensor"
    return value if is_result and not value.completed else None


def _scalar(value: Any, *_: Any) -> Entry:
    return Entry(type=type(value).__name__, value=value)


def _sequence(value: Any, path: str, on_tensor: OnTensor, trail: Trail) -> Any:
    # The elements themselves: a subclass's own methods are the user's code and do not run.
    iterate = list.__iter__ if isinstance(value, list) else tuple.__iter__
    parts = value if type(value) in (list, tuple) else list(iterate(value))
    inside = _inside(value, parts, trail)
    if inside is None:
        return _unknown(value)
    return [describe(v, f"{path}.{i}", on_tensor, inside) for i, v in enumerate(parts)]


def _asked(question: Callable[[Any], Any], value: Any) -> Any:
    """What the user's own methods answer; None if they raise."""
    try:
        return question(value)
    except Exception:
        return None


def _inside(value: Any, parts: Any, trail: Trail) -> Trail | None:
    """The trail for the parts of a container; None if it is not to be entered."""
    if parts is None or id(value) in trail or len(trail) > _MAX_DEPTH:
        return None
    trail = trail or ([0],)
    trail[0][0] += len(parts)
    return (*trail, id(value)) if trail[0][0] <= _MAX_PARTS else None


def _items(
    items: Sequence[tuple[Any, Any]] | None,
    owner: Any,
    path: str,
    on_tensor: OnTensor,
    trail: Trail,
) -> Any:
    inside = _inside(owner, items, trail)
    if inside is None or items is None:
        return _unknown(owner)
    entries: dict[str, Any] = {}
    for key, value in items:
        text = key if type(key) is str else _key_text(key)
        while text in entries:  # 1 and "1"
            text = f"{text} ({type(key).__name__})"
        entries[text] = describe(value, f"{path}.{text}", on_tensor, inside)
    return entries


def _key_text(key: Any) -> str:
    text = str.__str__(key) if isinstance(key, str) else _asked(str, key)
    return type(key).__name__ if text is None else text


def _mapping(value: Any, path: str, on_tensor: OnTensor, trail: Trail) -> Any:
    return _items(list(dict.items(value)), value, path, on_tensor, trail)


def _wrapped_mapping(value: Any, path: str, on_tensor: OnTensor, trail: Trail) -> Any:
    # UserDict (BatchEncoding of transformers) and mapping proxies: what they wrap.
    inner = vars(value).get("data") if isinstance(value, collections.UserDict) else dict(value)
    if not isinstance(inner, dict):
        return _unknown(value)
    return _items(list(dict.items(inner)), value, path, on_tensor, trail)


def _named_tuple(value: Any, path: str, on_tensor: OnTensor, trail: Trail) -> Any:
    fields = type(value)._fields
    items = list(zip(fields, tuple.__iter__(value), strict=False))
    return _items(items, value, path, on_tensor, trail)


def _structseq(value: Any, path: str, on_tensor: OnTensor, trail: Trail) -> Any:
    # torch.return_types.* name their fields in __match_args__, not in _fields.
    items = list(zip(type(value).__match_args__, value, strict=False))
    return _items(items, value, path, on_tensor, trail)


def _dataclass(value: Any, path: str, on_tensor: OnTensor, trail: Trail) -> Any:
    names = [f.name for f in dataclasses.fields(value)]
    items = [(n, _asked(operator.attrgetter(n), value)) for n in names]
    return _items(items, value, path, on_tensor, trail)


def _tensor(value: Any, path: str, on_tensor: OnTensor, _: Trail) -> Any:
    return on_tensor(value, path)


def _array(value: Any, path: str, on_tensor: OnTensor, _: Trail) -> Any:
    return on_tensor(value, path)


def _slice(value: slice, *_: Any) -> Entry:
    bounds = [_bound(v) for v in (value.start, value.stop, value.step)]
    return Entry(type="slice", value=bounds)


def _bound(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    # A 0-dim tensor is read only where that does not wait for a device.
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.ndim == 0:
        return value.item()
    return _key_text(value)


def _numpy_scalar(value: Any, *_: Any) -> Entry:
    if isinstance(value, np.complexfloating):
        return Entry(type="complex", value=str(complex(value)).strip("()"))
    plain = value.item()
    name = "bool" if isinstance(value, np.bool_) else type(value).__name__
    if isinstance(plain, (bool, int, float, str)):
        return Entry(type=name, value=plain)
    return Entry(type=name, value=_key_text(value))


def _unknown(value: Any, *_: Any) -> Entry:
    kind = type(value)
    name = kind.__qualname__
    if kind.__module__ != "builtins":
        name = f"{kind.__module__}.{name}"
    return Entry(type=name, value=None)


def _process_group(value: Any, *_: Any) -> Entry:
    dist: Any = sys.modules["torch.distributed"]
    try:
        ranks = dist.get_process_group_ranks(value)
    except (ValueError, KeyError, RuntimeError):
        return Entry(type="torch.ProcessGroup", group_ranks=None, group_id=None)
    crc = zlib.crc32(str(ranks).encode("ascii"))
    return Entry(type="torch.ProcessGroup", group_ranks=ranks, group_id=f"{crc:08x}")


def _reduce_op(value: Any, *_: Any) -> Entry:
    return Entry(type="torch.distributed.ReduceOp", value=str(getattr(value, "op", value)))


def _p2p_op(value: Any, path: str, on_tensor: OnTensor, trail: Trail) -> Any:
    group = _process_group(value.group) if value.group is not None else {"group_id": None}
    return {
        "class_type": "torch.distributed.P2POp",
        "tensor": describe(value.tensor, path, on_tensor, trail),
        "op": value.op.__name__,
        "peer": value.peer,
        "tag": value.tag,
        "group_id": group["group_id"],
    }


def _resolve(kind: type) -> Describer:
    """The describer of a type that is not in the table: by its nearest known base."""
    for fits, describer in _BY_BASE:
        if fits(kind):
            return describer
    return _unknown


_DESCRIBERS: dict[type, Describer] = {
    torch.Tensor: _tensor,
    torch.nn.Parameter: _tensor,
    type(None): lambda *_: None,
    bool: _scalar,
    int: _scalar,
    float: _scalar,
    str: _scalar,
    complex: lambda v, *_: Entry(type="complex", value=str(v).strip("()")),
    list: _sequence,
    tuple: _sequence,
    dict: _mapping,
    slice: _slice,
    type(...): lambda *_: Entry(type="ellipsis", value="..."),
    torch.Size: lambda v, *_: Entry(type="torch.Size", value=list(v)),
    torch.dtype: lambda v, *_: Entry(type="torch.dtype", value=str(v)),
    torch.device: lambda v, *_: Entry(type="torch.device", value=str(v)),
    torch.memory_format: lambda v, *_: Entry(
        type="torch.memory_format", format=str(v).removeprefix("torch.")
    ),
    np.ndarray: _array,
}


def _below(base: type) -> Callable[[type], bool]:
    return lambda kind: issubclass(kind, base)


def _of_torch(*names: str) -> Callable[[type], bool]:
    """Classes of torch.distributed by how their names begin: it may not be built in."""
    return lambda kind: kind.__name__.startswith(names) and kind.__module__.startswith("torch")


_BY_BASE: list[tuple[Callable[[type], bool], Describer]] = [
    (_below(torch.Tensor), _tensor),
    (_below(np.ndarray), _array),
    (_below(np.generic), _numpy_scalar),
    (lambda kind: issubclass(kind, enum.Enum) and not issubclass(kind, enum.IntEnum), _unknown),
    # Methods of the base: those of the subclass are the user's and may do anything.
    (_below(int), lambda v, *_: Entry(type=type(v).__name__, value=int.__pos__(v))),
    (_below(float), lambda v, *_: Entry(type=type(v).__name__, value=float.__pos__(v))),
    (_below(str), lambda v, *_: Entry(type=type(v).__name__, value=str.__str__(v))),
    (_below(list), _sequence),
    (_below(dict), _mapping),
    (_below(collections.UserDict), _wrapped_mapping),
    (_below(types.MappingProxyType), _wrapped_mapping),
    (lambda kind: hasattr(kind, "n_sequence_fields"), _structseq),
    (lambda kind: issubclass(kind, tuple) and hasattr(kind, "_fields"), _named_tuple),
    (_below(tuple), _sequence),
    (dataclasses.is_dataclass, _dataclass),
    (_of_torch("P2POp"), _p2p_op),
    (_of_torch("RedOpType", "ReduceOp"), _reduce_op),
    (_of_torch("ProcessGroup"), _process_group),
]
