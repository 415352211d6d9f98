"""Nested arguments and results → JSON-able entries (the only walker of nested values).

Encoding: dump-format "Encoding of values". Every leaf becomes an `Entry`: tensors by the function
that the caller gives, the others by `leaf_entries`.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .entries import Entry, OnTensor
from .leaf_entries import (
    asked,
    group_entry,
    numpy_entry,
    reduce_op_entry,
    scalar_entry,
    slice_entry,
    text_of,
    unknown_entry,
)

_MAX_DEPTH = 100  # below Python's own recursion limit with the frames of a deep model on the stack
_MAX_PARTS = 100_000  # of one argument: objects that refer to each other have endless paths

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


def _sequence(value: Any, path: str, on_tensor: OnTensor, trail: Trail) -> Any:
    # The elements themselves: a subclass's own methods are the user's code and do not run.
    iterate = list.__iter__ if isinstance(value, list) else tuple.__iter__
    parts = value if type(value) in (list, tuple) else list(iterate(value))
    inside = _inside(value, parts, trail)
    if inside is None:
        return unknown_entry(value)
    return [describe(v, f"{path}.{i}", on_tensor, inside) for i, v in enumerate(parts)]


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
        return unknown_entry(owner)
    entries: dict[str, Any] = {}
    for key, value in items:
        text = key if type(key) is str else text_of(key)
        while text in entries:  # 1 and "1"
            text = f"{text} ({type(key).__name__})"
        entries[text] = describe(value, f"{path}.{text}", on_tensor, inside)
    return entries


def _mapping(value: Any, path: str, on_tensor: OnTensor, trail: Trail) -> Any:
    return _items(list(dict.items(value)), value, path, on_tensor, trail)


def _wrapped_mapping(value: Any, path: str, on_tensor: OnTensor, trail: Trail) -> Any:
    # UserDict (BatchEncoding of transformers) and mapping proxies: what they wrap.
    inner = vars(value).get("data") if isinstance(value, collections.UserDict) else dict(value)
    if not isinstance(inner, dict):
        return unknown_entry(value)
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
    items = [(n, asked(operator.attrgetter(n), value)) for n in names]
    return _items(items, value, path, on_tensor, trail)


def _tensor(value: Any, path: str, on_tensor: OnTensor, _: Trail) -> Any:
    return on_tensor(value, path)


def _array(value: Any, path: str, on_tensor: OnTensor, _: Trail) -> Any:
    return on_tensor(value, path)


def _p2p_op(value: Any, path: str, on_tensor: OnTensor, trail: Trail) -> Any:
    group = group_entry(value.group) if value.group is not None else {"group_id": None}
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
    return unknown_entry


_DESCRIBERS: dict[type, Describer] = {
    torch.Tensor: _tensor,
    torch.nn.Parameter: _tensor,
    type(None): lambda *_: None,
    bool: scalar_entry,
    int: scalar_entry,
    float: scalar_entry,
    str: scalar_entry,
    complex: lambda v, *_: Entry(type="complex", value=str(v).strip("()")),
    list: _sequence,
    tuple: _sequence,
    dict: _mapping,
    slice: slice_entry,
    type(...): lambda *_: Entry(type="ellipsis", value="..."),
    torch.Size: lambda v, *_: Entry(type="torch.Size", value=list(v)),
    torch.dtype: lambda v, *_: Entry(type="torch.dtype", value=str(v)),
    torch.device: lambda v, *_: Entry(type="torch.device", value=str(v)),
    torch.memory_format: lambda v, *_: Entry(
        type="torch.memory_format", format=str(v).removeprefix("torch.")
    ),
    np.ndarray: _array,
}


def _is_plain_enum(kind: type) -> bool:
    return issubclass(kind, enum.Enum) and not issubclass(kind, enum.IntEnum)


def _below(base: type) -> Callable[[type], bool]:
    return lambda kind: issubclass(kind, base)


def _of_torch(*names: str) -> Callable[[type], bool]:
    """Classes of torch.distributed by how their names begin: it may not be built in."""
    return lambda kind: kind.__name__.startswith(names) and kind.__module__.startswith("torch")


_BY_BASE: list[tuple[Callable[[type], bool], Describer]] = [
    (_below(torch.Tensor), _tensor),
    (_below(np.ndarray), _array),
    (_below(np.generic), numpy_entry),
    (_is_plain_enum, unknown_entry),
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
    (_of_torch("RedOpType", "ReduceOp"), reduce_op_entry),
    (_of_torch("ProcessGroup"), group_entry),
]
