"""The calls that draw random numbers, and wrappers that tell of each before it runs.

The names stand in ``random_apis.yaml``. Before such a call `seed_all` re-seeds and `random_save`
writes a row.
"""

from __future__ import annotations

import inspect
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from .dump.compilers import prime_torch_caches
from .dump.patches import Patches

OWNERS: dict[str, Any] = {
    "python_random": random,
    "numpy_random": np.random,
    "numpy_generator": np.random.Generator,
    "torch_random": torch,
    "tensor_random": torch.Tensor,
    "functional_random": torch.nn.functional,
    "vf_random": torch._VF,
}


@dataclass(frozen=True)  # no slots: Dynamo of torch 2.1 makes weak references to it
class RandomCall:
    """One function that draws: ``name`` in ``OWNERS[library]``."""

    library: str
    name: str
    original: Callable[..., Any]

    @property
    def title(self) -> str:
        """How the CSV names it: ``torch_random.rand``, ``numpy_random.Generator.integers``."""
        if self.library == "numpy_generator":
            return f"numpy_random.Generator.{self.name}"
        return f"{self.library}.{self.name}"


Before = Callable[[RandomCall, Sequence[Any], Mapping[str, Any]], None]
"""Told of each outermost random call, with its arguments, before it runs. Must not raise."""

# Absent before torch 2.3; Dynamo of those versions compiles the wrapper as it stands.
_is_compiling: Callable[[], bool] = getattr(torch.compiler, "is_compiling", lambda: False)


class _Thread(threading.local):
    inside = False


def load_random_calls() -> list[RandomCall]:
    """Return the functions of ``random_apis.yaml`` that exist here."""
    text = Path(__file__).with_name("random_apis.yaml").read_text(encoding="utf-8")
    return [
        RandomCall(library, name, getattr(OWNERS[library], name))
        for library, names in yaml.safe_load(text).items()
        for name in names
        if hasattr(OWNERS[library], name)
    ]


def install_wrappers(patches: Patches, before: Before) -> None:
    """Put wrappers around every random call; `before` hears of the outermost ones."""
    thread = _Thread()
    items: list[tuple[Any, str, Any]] = []
    methods: dict[str, Any] = {}
    for call in load_random_calls():
        wrapper = _wrap(call, before, thread)
        if call.library == "numpy_generator":
            methods[call.name] = wrapper
        else:
            items.append((OWNERS[call.library], call.name, wrapper))
    # Generator is a C type whose methods cannot be set; what default_rng returns is made ours.
    generator = type("Generator", (np.random.Generator,), methods)
    items.append((np.random, "default_rng", _default_rng(np.random.default_rng, generator)))
    install(patches, items)


def install(patches: Patches, items: Sequence[tuple[Any, str, Any]]) -> None:
    """Install `items` for the life of the process: torch's caches and TorchScript stay sane."""
    prime_torch_caches()
    script = torch.jit.script

    def script_without_wrappers(*args: Any, **kwargs: Any) -> Any:
        # TorchScript compiles what stands in the modules, and cannot compile a wrapper.
        with patches.suspended():
            return script(*args, **kwargs)

    dress(script_without_wrappers, script)
    patches.install([*items, (torch.jit, "script", script_without_wrappers)])


def dress(wrapper: Any, original: Any) -> None:
    """Give `wrapper` the name, text and signature of `original`.

    Not ``functools.wraps``: torch.jit and inspect would follow ``__wrapped__``.
    """
    for attr in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(wrapper, attr, getattr(original, attr, None) or getattr(wrapper, attr))
    try:
        wrapper.__signature__ = inspect.signature(original)
    except (TypeError, ValueError):  # most builtins have none
        return


def _wrap(call: RandomCall, before: Before, thread: _Thread) -> Callable[..., Any]:
    original = call.original
    overridable = call.library == "functional_random"

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _is_compiling() or thread.inside:
            return original(*args, **kwargs)
        thread.inside = True
        try:
            before(call, args, kwargs)
            if overridable:
                return call_overridable(original, args, kwargs)
            return original(*args, **kwargs)
        finally:
            thread.inside = False

    dress(wrapper, original)
    return wrapper


def call_overridable(
    original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Call a function of torch.nn.functional; subclasses and modes are told `original`.

    Left to itself, the function would name itself by what stands in its module: the wrapper.
    """
    relevant = (*args, *kwargs.values())
    if torch.overrides.has_torch_function(relevant):
        return torch.overrides.handle_torch_function(original, relevant, *args, **kwargs)
    return original(*args, **kwargs)


def _default_rng(original: Callable[..., Any], generator: type[Any]) -> Callable[..., Any]:
    def default_rng(seed: Any = None) -> Any:
        made = original(seed)
        return made if made is seed else generator(made.bit_generator)

    dress(default_rng, original)
    return default_rng


# Position and keyword of the probability, its default; the same for the training flag.
_P_TRAINING = ((1, "p", 0.5), (2, "training", True))
_P_NO_TRAINING = ((1, "p", 0.5), (2, "training", False))
_P_TRAIN = ((1, "p", 0.5), (2, "train", False))
_RRELU = (None, (3, "training", False))
_Condition = tuple[tuple[int, str, Any] | None, tuple[int, str, Any] | None]
_CONDITIONS: dict[tuple[str, str], _Condition] = {
    **{("functional_random", f"dropout{dims}"): _P_TRAINING for dims in ("", "1d", "2d", "3d")},
    ("functional_random", "alpha_dropout"): _P_NO_TRAINING,
    ("functional_random", "feature_alpha_dropout"): _P_NO_TRAINING,
    ("functional_random", "rrelu"): _RRELU,
    ("functional_random", "rrelu_"): _RRELU,
    ("functional_random", "scaled_dot_product_attention"): ((4, "dropout_p", 0.0), None),
    ("torch_random", "rrelu"): _RRELU,
    ("torch_random", "rrelu_"): _RRELU,
    **{
        ("torch_random", name): _P_TRAIN
        for name in (
            "dropout", "dropout_", "alpha_dropout", "alpha_dropout_", "feature_dropout",
            "feature_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_", "native_dropout",
        )
    },
}


def draws(call: RandomCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether this call draws numbers: dropout outside of training, or with p=0, does not."""
    if call.library == "vf_random":
        # lstm(input, hx, weights, bias, layers, dropout, train, ...), packed: one more in front.
        first = 5 if len(args) > 2 and isinstance(args[2], list) else 6
        return bool(len(args) > first + 1 and args[first] and args[first + 1])
    probability, training = _CONDITIONS.get((call.library, call.name), (None, None))
    return all(
        bool(args[place] if place < len(args) else kwargs.get(keyword, default))
        for place, keyword, default in filter(None, (probability, training))
    )
