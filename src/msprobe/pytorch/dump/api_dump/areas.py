"""Where torch itself calls functions: ``optimizer`` and ``clip_grad`` in construct.json."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch

from ..gate import ThreadState

_CLIPPING = ("clip_grad_norm_", "clip_grad_norm", "clip_grad_value_")


def area_hooks(thread: ThreadState) -> list[Any]:
    """Register torch's global optimizer hooks; the handles that remove them."""
    optimizer: Any = sys.modules["torch.optim.optimizer"]

    def enter(*_: Any) -> None:
        thread.area = "optimizer"

    def leave(*_: Any) -> None:
        thread.area = None

    try:
        return [
            optimizer.register_optimizer_step_pre_hook(enter),
            optimizer.register_optimizer_step_post_hook(leave),
        ]
    except BaseException:  # Ctrl-C: nobody knows the handles
        for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
            table = getattr(optimizer, name)
            for number in [n for n, hook in table.items() if hook in (enter, leave)]:
                del table[number]
        raise


def clip_grad_wrappers(thread: ThreadState) -> Iterator[tuple[Any, str, Any]]:
    """(owner, attribute, function) that mark the area ``clip_grad``."""
    utils: Any = torch.nn.utils
    module: Any = sys.modules["torch.nn.utils.clip_grad"]
    for name in _CLIPPING:
        clip = getattr(module, name, None)
        if clip is not None:
            marked = _marked(clip, thread)
            yield module, name, marked
            if getattr(utils, name, None) is clip:
                yield utils, name, marked


def _marked(clip: Any, thread: ThreadState) -> Any:
    @functools.wraps(clip)
    def clip_grad(*args: Any, **kwargs: Any) -> Any:
        before, thread.area = thread.area, "clip_grad"
        try:
            return clip(*args, **kwargs)
        finally:
            thread.area = before

    return clip_grad
