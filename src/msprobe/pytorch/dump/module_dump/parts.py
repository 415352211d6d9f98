"""The modules of the models, with their names; which of them take hooks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

Part = tuple[int | None, str, nn.Module]  # index of its model in the list or None, fqn, module


def named_modules(models: list[nn.Module], listed: bool) -> list[Part]:
    """Every module of the models, as `nn.Module.named_modules` in a fifth of its time.

    The index is that of the model in its list, None for a single model.
    """
    parts: list[Part] = []
    for number, model in enumerate(models):
        index = number if listed else None
        named: dict[int, Part] = {id(model): (index, "", model)}
        _add_named(model, "", index, named)
        parts += named.values()
    return parts


def _add_named(module: nn.Module, prefix: str, index: int | None, named: dict[int, Part]) -> None:
    for name, part in module._modules.items():
        if part is not None and id(part) not in named:
            named[id(part)] = index, prefix + name, part
            if part._modules:
                _add_named(part, f"{prefix}{name}.", index, named)


def hookable(parts: list[Part]) -> tuple[list[Part], list[str]]:
    """Those of the `named_modules` that are recorded, and the names of those left to torch.

    The models themselves are not recorded. Scripted modules take no hooks of this kind. A
    TransformerEncoderLayer in eval mode takes none, nor do its parts: torch would leave its fused
    kernel, and the results would be others. Level L1 and mix record the kernel itself.
    """
    recorded: list[Part] = []
    fused: list[str] = []
    special = torch.jit.ScriptModule, nn.TransformerEncoderLayer
    inside = ""
    for part in parts:
        index, fqn, module = part
        if not fqn:
            inside = ""  # the next model
        elif inside and fqn.startswith(inside):
            continue
        elif not isinstance(module, special):
            recorded.append(part)
        elif _may_be_fused(module):
            inside = fqn + "."
            fused.append(fqn if index is None else f"{index}.{fqn}")
        elif not isinstance(module, torch.jit.ScriptModule):
            recorded.append(part)
    return recorded, fused


def _may_be_fused(module: nn.Module) -> bool:
    layer: Any = nn.TransformerEncoderLayer
    return isinstance(module, layer) and not module.training and (
        type(module).forward is layer.forward
    )
