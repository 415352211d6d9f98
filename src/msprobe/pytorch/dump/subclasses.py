"""Tensor subclasses: what they are called, and the plain tensor that is in them."""

from __future__ import annotations

from typing import Any

import torch

_parameter = torch.nn.Parameter
_is_of_transform: Any = torch._C._functorch.is_functorch_wrapped_tensor
# Of the vmap that autograd itself uses for ``is_grads_batched``; torch 2.1 can not tell.
_is_of_autograd: Any = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda _: False)


def is_wrapped(value: Any) -> bool:
    """Whether vmap, grad or another transform has wrapped a tensor: it stands for others."""
    return bool(_is_of_transform(value) or _is_of_autograd(value))


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
    if is_wrapped(value):
        return None
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
