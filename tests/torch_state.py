"""What a session may replace in torch, and how to see that it is as before."""

from __future__ import annotations

import copyreg
import sys
from types import ModuleType
from typing import Any

import torch
import torch._dynamo  # its import (by the first optimizer) replaces torch.manual_seed for good
import torch.distributed.distributed_c10d
import torch.nn.modules.module

_OWNERS: tuple[Any, ...] = (
    torch,
    torch.Tensor,
    torch._VF,
    torch._dynamo.eval_frame,
    torch._tensor_str,
    torch.distributed,
    torch.distributed.distributed_c10d,
    torch.export,
    torch.fft,
    torch.fx.Tracer,
    torch.jit,
    torch.linalg,
    torch.nn.functional,
    torch.nn.utils,
    torch.nn.utils.clip_grad,
    torch.optim.Optimizer,
    torch.special,
)
# The first torch.save of any tensor leaves the key __slotnames__, a cache, in these classes.
for _pickled in (torch.Tensor, torch.nn.Parameter):
    copyreg._slotnames(_pickled)  # type: ignore[attr-defined]
_GLOBAL_HOOKS = [
    (module, name)
    for module in (torch.nn.modules.module, sys.modules[torch.optim.Optimizer.__module__])
    for name in vars(module)
    if name.startswith("_global") and "hooks" in name
]


def torch_state() -> dict[str, dict[Any, Any]]:
    """Everything a session may replace, by owner, in order; holds the objects themselves."""
    state = {f"vars({owner.__name__})": dict(vars(owner)) for owner in _OWNERS}
    hooks = {f"{m.__name__}.{name}": dict(getattr(m, name)) for m, name in _GLOBAL_HOOKS}
    return state | hooks


def changes(before: dict[str, dict[Any, Any]], after: dict[str, dict[Any, Any]]) -> list[str]:
    """What differs, in words. Submodules that have been imported meanwhile are no difference."""
    found = []
    for owner, old in before.items():
        new = {key: v for key, v in after[owner].items() if key in old or not _is_imported(v)}
        found += [f"{owner}: {key} was added" for key in new if key not in old]
        found += [f"{owner}: {key} is missing" for key in old if key not in new]
        found += [f"{owner}: {key} is another object" for key in old if _differs(key, old, new)]
        if not found and list(old) != list(new):
            found.append(f"{owner}: the order of the keys has changed")
    return found


def _differs(key: Any, old: dict[Any, Any], new: dict[Any, Any]) -> bool:
    return key in new and new[key] is not old[key]


def _is_imported(value: Any) -> bool:
    return isinstance(value, ModuleType) and sys.modules.get(value.__name__) is value
