"""Checks of the arguments of the public calls: wrong ones raise UsageError at the call."""

from __future__ import annotations

from typing import Any

from torch import nn

from msprobe.errors import UsageError

from .config import Level


def check_models(model: Any, level: Level, *, needed: bool) -> tuple[list[nn.Module], bool]:
    """The models as a list, and whether they came as one (their names then have an index)."""
    if model is None:
        if needed or level in (Level.L0, Level.MIX):
            if needed:
                raise UsageError(
                    "start() got no model, and token_range needs one, whose calls it counts: call"
                    " debugger.start(model, token_range=[0, 3])."
                )
            raise UsageError(
                f"start() got no model, and level {level} needs one: call debugger.start(model),"
                " or use level L1 to record functions only."
            )
        return [], False
    listed = isinstance(model, (list, tuple))
    if listed and not model:
        raise UsageError(
            "start() got an empty list of models; expected at least one torch.nn.Module."
            " Example: debugger.start(model=[chunk_0, chunk_1])."
        )
    models = list(model) if listed else [model]
    for number, part in enumerate(models):
        if not isinstance(part, nn.Module):
            place = f"model[{number}]" if listed else "model"
            raise UsageError(
                f"start(): {place} is a {type(part).__name__}; expected a torch.nn.Module or a"
                " list or tuple of them. Example: debugger.start(model=net)."
            )
    return models, listed


def check_rank_id(rank_id: Any) -> None:
    """An integer >= 0 or None."""
    if rank_id is not None and (type(rank_id) is not int or rank_id < 0):
        raise UsageError(
            f"start(rank_id={rank_id!r}): expected an integer >= 0 that is unique among the"
            " processes that write to this dump_path, or None. Example: start(model, rank_id=3)."
        )


def check_token_range(token_range: Any) -> tuple[int, int] | None:
    """``[first, last]`` as a pair, None for None. UsageError for anything else."""
    if token_range is None:
        return None
    good = isinstance(token_range, (list, tuple)) and len(token_range) == 2
    if not good or any(type(n) is not int or n < 0 for n in token_range):
        raise UsageError(
            f"start(token_range={token_range!r}): expected [first, last], two integers >= 0."
            " Example: start(model, token_range=[1, 3])."
        )
    first, last = token_range
    if first > last:
        raise UsageError(
            f"start(token_range={token_range!r}): the first token is after the last."
            f" Example: start(model, token_range=[{last}, {first}])."
        )
    return first, last
