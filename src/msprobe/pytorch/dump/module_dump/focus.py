"""module_dump: only one module is recorded, under a name of the user's."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from ..gate import Gate
from .hooks import ModuleHook, add_hooks

_logger = logging.getLogger("msprobe")


class Focus:
    """Between `begin` and `end` all wrappers and other hooks are quiet."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._handles: list[Any] = []

    def begin(self, module: nn.Module, name: str) -> None:
        """Record only ``module``, as ``Module.<name>.<Class>``; does nothing outside a window."""
        if not self._gate.open:
            return
        if self._gate.focus:
            _logger.warning("module_dump() inside module_dump(): the second call is ignored.")
            return
        self._gate.focus = True
        self._handles = add_hooks(module, ModuleHook(self._gate, None, name, focused=True))

    def end(self, *, forgotten: bool = False) -> None:
        """Record everything again."""
        if self._gate.focus and forgotten:
            _logger.warning(
                "module_dump() was not ended before stop(): only that module was recorded since."
                " Call module_dump_end() after it has run."
            )
        self._gate.focus = False
        for handle in self._handles:
            handle.remove()
        self._handles = []
