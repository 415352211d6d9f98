"""Rank of this process and the accelerators this torch knows."""

from __future__ import annotations

import sys
from typing import Any


def current_rank() -> int | None:
    """Rank in the default process group, None before ``init_process_group``.

    Looks ``torch.distributed`` up instead of importing it: a build without it has no rank.
    """
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return int(dist.get_rank())


def synchronize(device_type: str) -> None:
    """Wait for all work on the current device of this type; devices without streams return."""
    module: Any = getattr(sys.modules["torch"], device_type, None)
    wait = getattr(module, "synchronize", None)
    if wait is not None and device_type != "cpu":
        wait()
