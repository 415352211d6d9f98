"""Inference: which steps of a generation loop, and which rows of a batch, are recorded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from msprobe.errors import UsageError

from .config import SliceRule
from .gate import Gate
from .module_dump.hooks import Hook


class Tokens:
    """Opens the gate from the ``first`` to the ``last`` call of a model."""

    def __init__(self, first: int, last: int, gate: Gate) -> None:
        self._first = first
        self._last = last
        self._gate = gate
        self._calls = 0
        gate.open = False

    def __call__(self, *_: Any) -> None:
        """The model is about to be called."""
        self._gate.open = self._first <= self._calls <= self._last
        self._calls += 1

    def watch(self, model: nn.Module) -> Any:
        """The handle of a hook before all others: what runs inside a token is recorded whole."""
        return model.register_forward_pre_hook(Hook(self), prepend=True)

    def unmet(self) -> str:
        """Why nothing was recorded; empty if the first token has come."""
        if self._calls > self._first:
            return ""
        return (
            f"token_range [{self._first}, {self._last}] was not reached: from start() to stop() the"
            f" model was called {self._calls} time(s), so that nothing of it is recorded"
        )


def request_slice(request_id: str | None, scheduled_tokens: Any) -> tuple[SliceRule, ...] | None:
    """Rows of one request in a batch of all scheduled tokens, as a slice of dimension 0.

    Empty when no request is asked for; None when it is not in this batch, so that there is
    nothing to record. Requests lie in the batch in the order of the dict.
    """
    if scheduled_tokens is None:
        return ()
    if not isinstance(scheduled_tokens, Mapping) or any(
        not isinstance(k, str) or type(n) is not int or n <= 0 for k, n in scheduled_tokens.items()
    ):
        raise UsageError(
            f"start(scheduled_tokens={scheduled_tokens!r}): expected a dict from request id (str)"
            ' to number of tokens (int > 0). Example: {"req-1": 7, "req-2": 1}.'
        )
    if request_id is None:
        return ()
    if request_id not in scheduled_tokens:
        return None
    begin = 0
    for name, count in scheduled_tokens.items():
        if name == request_id:
            break
        begin += count
    total = sum(scheduled_tokens.values())
    end = begin + scheduled_tokens[request_id]
    return (SliceRule(dim=0, size=total, begin=begin, end=end, tokens=True),)
