"""Torch calls on tensors that no wrapper saw: counted for one step, on demand.

With the environment variable MSPROBE_COVERAGE set, the first recorded step runs under a
`Counting` mode. It hears of every call of a torch function or method from Python in its thread;
those inside a recorded call are known already.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import overrides
from torch.overrides import TorchFunctionMode, resolve_name

if TYPE_CHECKING:
    from .gate import Gate

_current_mode: Any = overrides._get_current_function_mode
VARIABLE = "MSPROBE_COVERAGE"
# They tell of a tensor, or of its graph, and compute nothing.
_TELLING = frozenset({
    "__dir__", "__format__", "__hash__", "__len__", "__repr__", "__setstate__", "backward",
    "data_ptr", "dim", "element_size", "get_device", "has_names", "is_complex", "is_contiguous",
    "is_floating_point", "is_inference", "is_leaf", "is_nonzero", "is_pinned", "is_same_size",
    "is_set_to", "is_shared", "is_signed", "is_tensor", "ndimension", "nelement", "numel",
    "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad",
    "size", "storage", "storage_offset", "stride", "type", "untyped_storage",
})


def wanted() -> bool:
    """Whether the environment asks for the count."""
    return os.environ.get(VARIABLE, "") not in ("", "0")


class Counting(TorchFunctionMode):
    """Counts by name the calls that are not part of a recorded call, while the gate is open.

    Calls that autograd or another thread makes are not heard of.
    """

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self._gate = gate
        self._entered = False
        self.counts: Counter[str] = Counter()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Make the call and count it; what it records by itself in its parts is not unseen."""
        kwargs = kwargs or {}
        gate = self._gate
        run = gate.run
        if not gate.open or run is None or gate.thread.state:
            return func(*args, **kwargs)
        before = run.journal.records
        result = func(*args, **kwargs)
        if run.journal.records == before and _computes(func, args, kwargs, result):
            self.counts[_name(func)] += 1
        return result

    def enter(self) -> None:
        """Begin to listen in this thread."""
        if not self._entered:
            self._entered = True
            self.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """Stop listening, unless the user has entered a mode since: then at the next call."""
        if self._entered and _current_mode() is self:
            self._entered = False
            self.__exit__(None, None, None)

    def found(self) -> dict[str, int]:
        """Name → number of calls, the most frequent first."""
        return dict(self.counts.most_common())


def _computes(func: Any, args: Any, kwargs: Any, result: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name in _TELLING or name == "__set__":
        return False
    if name == "__get__":
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        return attribute not in ("grad", "_grad") and isinstance(result, torch.Tensor)
    return any(map(_has_tensor, (*args, *kwargs.values())))


def _has_tensor(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(isinstance(part, torch.Tensor) for part in value)
    return isinstance(value, torch.Tensor)


def _name(func: Any) -> str:
    known: Any = resolve_name(func)
    if known is not None:
        return str(known)
    module, name = getattr(func, "__module__", None), getattr(func, "__qualname__", repr(func))
    name = str(name).removeprefix("_VariableFunctionsClass.")  # the home of torch.add and others
    return f"{module}.{name}" if module else name
