"""Copies and parts of tensors, for saving them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

# Bound at import: these names are patched while a window is open.
_clone = torch.Tensor.clone
_contiguous = torch.Tensor.contiguous
_cpu = torch.Tensor.cpu
_narrow = torch.Tensor.narrow


def sliced(tensor: Any, slices: Sequence[Any], *, is_parameter: bool) -> Any:
    """``tensor`` cut by each rule in turn (a view); a rule that does not fit is passed over."""
    for rule in slices:
        if rule.dim >= tensor.ndim or (is_parameter and rule.tokens):
            continue
        size = tensor.shape[rule.dim]
        if rule.size is not None and rule.size != size:
            continue
        begin, end, _ = slice(rule.begin, rule.end).indices(size)
        tensor = _narrow(tensor, rule.dim, begin, max(end - begin, 0))
    return tensor


def host_copy(tensor: Any) -> Any:
    """``tensor`` as a CPU tensor for saving, contiguous if strided; itself if it is that.

    A numpy array as it is.
    """
    if isinstance(tensor, np.ndarray):
        return tensor
    if tensor.layout != torch.strided or tensor.is_quantized:
        return _cpu(tensor)
    return _contiguous(_cpu(tensor).resolve_conj().resolve_neg())


def snapshot(tensor: Any) -> Any:
    """A copy of a tensor or numpy array as it is now; None if torch can not copy its dtype."""
    if isinstance(tensor, np.ndarray):
        return tensor.copy()
    host = host_copy(tensor)
    try:
        return _clone(host) if host is tensor or _shares(host, tensor) else host
    except NotImplementedError:
        return None


def _shares(one: Any, other: Any) -> bool:
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return False
    return bool(one.device == other.device and one.data_ptr() == other.data_ptr())
