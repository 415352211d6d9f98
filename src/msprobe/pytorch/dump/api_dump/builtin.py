"""The wrappers of the functions in the tables; built again when torch has loaded more of them."""

from __future__ import annotations

from typing import Any

from msprobe.errors import ConfigError

from ..config import DumpConfig
from ..gate import Gate
from . import ops
from .collectives import Works, work_patch
from .wrap import build_wrappers

Wrappers = list[tuple[Any, str, Any]]  # owner, name of the attribute, what replaces it


class Builtin:
    """Keeps the wrappers of a session."""

    def __init__(self, gate: Gate, works: Works) -> None:
        self._gate = gate
        self._works = works
        self._wrappers: Wrappers = []
        self._loaded_late: list[str] = []  # modules with functions of the table, when it was read
        self.missing: list[str] = []  # functions of the table that this torch does not have

    def wrappers(self, config: DumpConfig) -> Wrappers:
        """The same list while the same modules are loaded.

        ConfigError for a name in white_list or black_list that no function has.
        """
        loaded = ops.late_modules()
        if not self._wrappers or loaded != self._loaded_late:
            self._loaded_late = loaded
            specs, self.missing = ops.load_specs()
            self._wrappers = build_wrappers(specs, self._gate, self._works)
            _check_lists(config, self._wrappers)
            self._wrappers = [*self._wrappers, *work_patch(self._works)]
        return self._wrappers


def _check_lists(config: DumpConfig, wrappers: Wrappers) -> None:
    """white_list and black_list of task acc_check name functions that are wrapped."""
    known = {wrapper.base.rpartition(".")[2] for _, _, wrapper in wrappers}
    for key in ("white_list", "black_list"):
        unknown = [name for name in getattr(config, key) if name not in known]
        if unknown:
            raise ConfigError(
                f"{config.source}: {key!r} has {unknown!r}, which no function in"
                " support_wrap_ops.yaml is called; expected names without prefix. Example:"
                f' "{key}": ["conv2d"].'
            )
