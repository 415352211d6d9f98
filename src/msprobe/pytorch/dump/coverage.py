"""Which modules of the models a step has recorded, and which not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class Coverage:
    """What was hooked in a step, and what of it has run."""

    def __init__(self) -> None:
        self.called: set[Any] = set()  # modules that have run: (index of the model, fqn)
        self.is_whole = True  # False: only a part of the step was listened to, on purpose
        self._fused: set[str] = set()  # modules whose fused kernel a hook would switch off
        self._hooked: dict[Any, type] = {}  # modules that could have run → their class

    def may_run(
        self, parts: Sequence[tuple[int | None, str, Any]], fused: Sequence[str]
    ) -> None:
        """Modules that are recorded if they run, and those that are left to fused kernels."""
        for index, fqn, module in parts:
            self._hooked[index, fqn] = type(module)
        self._fused.update(fused)

    def missing(self) -> dict[str, list[str]]:
        """Entries of coverage.json."""
        return {
            "modules_never_called": self._never_called(),
            "modules_left_to_fused_kernels": sorted(self._fused),
        }

    def said(self) -> list[str]:
        """The same in words, for the log."""
        said = []
        never = self._never_called()
        if len(never) == 1:
            said.append(f"1 module was never called ({never[0]})")
        elif never:
            first = ", ".join(never[:3]) + (", ..." if len(never) > 3 else "")
            said.append(f"{len(never)} modules were never called ({first})")
        if self._fused:
            first = ", ".join(sorted(self._fused)[:3])
            said.append(
                f"{len(self._fused)} TransformerEncoderLayer in eval mode ({first}): a hook would"
                " switch torch's fused kernel off and change the results"
            )
        return said

    def _never_called(self) -> list[str]:
        if not self.is_whole:
            return []  # nobody knows
        base = torch.nn.Module.forward  # a container without a forward can not be called
        return [
            fqn if index is None else f"{index}.{fqn}"
            for (index, fqn), kind in self._hooked.items()
            if (index, fqn) not in self.called
            and kind.forward is not base  # type: ignore[attr-defined]
        ]
