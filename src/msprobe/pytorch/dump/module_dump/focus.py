"""module_dump: only one module is recorded, under a name of the user's."""

from __future__ import annotations

import logging

from torch import nn

from ..gate import Gate
from .hooks import HookPair, ModuleHook

_logger = logging.getLogger("msprobe")


class Focus:
    """Between `begin` and `end` all wrappers and other hooks are quiet."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._pair: HookPair | None = None

    def begin(self, module: nn.Module, name: str) -> None:
        """Record only ``module``, as ``Module.<name>.<Class>``; does nothing outside a window."""
        if not self._gate.open:
            return
        if self._gate.focus:
            _logger.warning("module_dump() inside module_dump(): the second call is ignored.")
            return
        self._pair = HookPair(module, ModuleHook(self._gate, None, name, focused=True))
        self._pair.put_in(module)
        self._gate.focus = True
        if self._gate.run is not None:
            self._gate.run.coverage.is_whole = False

    def end(self, *, forgotten: bool = False) -> None:
        """Record everything again."""
        if self._gate.focus and forgotten:
            _logger.warning(
                "module_dump() was not ended before stop(): only that module was recorded since."
                " Call module_dump_end() after it has run."
            )
        self._gate.focus = False
        module = None if self._pair is None else self._pair.module()
        if self._pair is not None and module is not None:
            self._pair.take_out(module)
        self._pair = None
