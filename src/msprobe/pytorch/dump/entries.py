"""What a description is made of: the entries of single values, and where tensors stand in it.

Every leaf is an `Entry`, so that `places` can tell tensors from mappings without a second walk
over the values themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

OnTensor = Callable[[Any, str], Any]  # (tensor or array, path) → entry


class Entry(dict[str, Any]):
    """The JSON object of one leaf."""

    __slots__ = ()


class TensorEntry(Entry):
    """The JSON object of one tensor; its place is where a gradient may stand later.

    ``bad`` (task nan_check, not written): the tensor holds NaN or infinity.
    """

    bad = False


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
