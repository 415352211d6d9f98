"""`seed_all`: the same random numbers, and deterministic kernels, in every run."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from msprobe.errors import warn_user

from .dump.patches import Patches
from .random_calls import RandomCall, call_overridable, dress, install, install_wrappers

MAX_SEED = 2**32 - 1  # what numpy.random.seed and PYTHONHASHSEED take
OLD_KEYWORDS = frozenset({"is_gpu"})
DROPOUTS = ("dropout", "dropout2d", "dropout3d")


@dataclass
class _Effects:
    """What `seed_all` changed in this process, and how to take it back."""

    seed: int = 0
    done: set[str] = field(default_factory=set)
    undo: ExitStack = field(default_factory=ExitStack)

    def once(self, name: str) -> bool:
        if name in self.done:
            return False
        self.done.add(name)
        return True


_effects = _Effects()


def seed_all(
    seed: int = 1234,
    mode: bool = False,
    rm_dropout: bool = False,
    is_enhanced: bool = False,
    **old: Any,
) -> None:
    """Fix the randomness of Python, numpy and torch, and on request choose deterministic kernels.

    Args:
        seed: 0 to 4294967295, for ``random``, ``numpy.random``, torch on every device, and
            ``PYTHONHASHSEED`` (which Python processes started from here obey).
        mode: call ``torch.use_deterministic_algorithms(True)``; in builds for CUDA also
            set ``CUBLAS_WORKSPACE_CONFIG`` unless it is set. Slower.
        rm_dropout: ``F.dropout``, ``dropout2d``, ``dropout3d`` and the modules that use them
            (``nn.Dropout``, ``Dropout2d``, ``Dropout3d``) drop nothing, as with ``p=0``.
        is_enhanced: every call that draws (``random_apis.yaml``, dropout included) re-seeds its
            generator first, so the same call returns the same numbers each time.
        **old: ``is_gpu`` of earlier versions is ignored with a warning.

    In builds of torch for CUDA or ROCm, cuDNN is switched off and set to deterministic, without
    benchmark; where there is an NPU, ``HCCL_DETERMINISTIC`` is set. A later call changes the seed
    and can switch more on, never off; `undo_seed_all` takes all back. Functions bound by ``from x
    import f`` and code inside ``torch.compile`` are out of reach of `rm_dropout` and `is_enhanced`.

    Raises TypeError or ValueError for a wrong argument.

    >>> seed_all(1234)
    >>> round(torch.rand(1).item(), 4)
    0.029
    """
    _check(seed, {"mode": mode, "rm_dropout": rm_dropout, "is_enhanced": is_enhanced}, old)
    _effects.seed = int(seed)
    _set_environment("PYTHONHASHSEED", str(int(seed)))
    _seed_generators(int(seed))
    if _is_built_for_cuda():
        _set_cudnn()
    if _npu() is not None:
        _set_environment("HCCL_DETERMINISTIC", "True")
    if mode:
        _set_deterministic()
    if rm_dropout and _effects.once("rm_dropout"):
        _remove_dropout(_new_patches())
    if is_enhanced and _effects.once("is_enhanced"):
        install_wrappers(_new_patches(), _seed_before)


def undo_seed_all() -> None:
    """Take back what `seed_all` changed: patches, flags, environment. Generators stay seeded."""
    global _effects
    effects, _effects = _effects, _Effects()
    effects.undo.close()


def _check(seed: Any, switches: Mapping[str, Any], old: Mapping[str, Any]) -> None:
    unknown = sorted(set(old) - OLD_KEYWORDS)
    if unknown:
        raise TypeError(
            f"seed_all() got an unexpected keyword argument {unknown[0]!r}; it takes seed, "
            f"{', '.join(switches)}. Example: seed_all(1234, mode=True)."
        )
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise TypeError(f"seed_all: seed is {seed!r}; expected an integer. Example: seed=1234.")
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed_all: seed is {seed}; expected 0 to {MAX_SEED}. Example: seed=1234.")
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise TypeError(f"seed_all: {name} is {value!r}; expected True or False.")
    for name in sorted(old):
        warn_user(
            f"seed_all: {name!r} belongs to an earlier version and has no effect; leave it out."
        )


def _is_built_for_cuda() -> bool:
    """Whether there may be CUDA.

    Asking for a device would start the driver, and processes forked afterwards could not use it.
    """
    return bool(torch.version.cuda or torch.version.hip)


def _npu() -> Any:
    """``torch.npu`` if torch_npu was imported and sees a device, else None."""
    npu = getattr(torch, "npu", None)
    return npu if npu is not None and npu.is_available() else None


def _seed_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # the CPU and every accelerator that torch itself knows
    npu = _npu()
    if npu is not None:
        npu.manual_seed(seed)
        npu.manual_seed_all(seed)


def _set_environment(name: str, value: str) -> None:
    if _effects.once(name):
        before = os.environ.get(name)
        if before is None:
            _effects.undo.callback(os.environ.pop, name, None)
        else:
            _effects.undo.callback(os.environ.__setitem__, name, before)
    os.environ[name] = value


def _set_cudnn() -> None:
    cudnn: Any = torch.backends.cudnn
    for flag, value in (("enabled", False), ("benchmark", False), ("deterministic", True)):
        if _effects.once(f"cudnn.{flag}"):
            _effects.undo.callback(setattr, cudnn, flag, getattr(cudnn, flag))
        setattr(cudnn, flag, value)


def _set_deterministic() -> None:
    if _is_built_for_cuda() and "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
        _set_environment("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if _effects.once("mode"):
        _effects.undo.callback(
            torch.use_deterministic_algorithms,
            torch.are_deterministic_algorithms_enabled(),
            warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        )
    torch.use_deterministic_algorithms(True)


def _new_patches() -> Patches:
    patches = Patches()
    _effects.undo.callback(patches.restore)
    return patches


def _remove_dropout(patches: Patches) -> None:
    functional: Any = torch.nn.functional
    install(
        patches,
        [(functional, name, _without_dropout(getattr(functional, name))) for name in DROPOUTS],
    )


def _without_dropout(original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(input: Any, p: float = 0.5, *args: Any, **kwargs: Any) -> Any:
        return call_overridable(original, (input, 0.0, *args), kwargs)

    dress(wrapper, original)
    return wrapper


def _seed_before(call: RandomCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    seed = _effects.seed
    if call.library == "python_random":
        random.seed(seed)
    elif call.library == "numpy_random":
        np.random.seed(seed)
    elif call.library == "numpy_generator":
        bits = args[0].bit_generator
        bits.state = type(bits)(seed).state
    elif kwargs.get("generator") is not None:
        kwargs["generator"].manual_seed(seed)
    else:
        _seed_torch(seed)


def _seed_torch(seed: int) -> None:
    # torch.manual_seed formats a stack trace for each device that is not initialised yet (75 µs);
    # those have the seed waiting from seed_all.
    torch.default_generator.manual_seed(seed)
    for name in ("cuda", "npu", "xpu"):
        device = getattr(torch, name, None)
        if device is not None and device.is_initialized():
            device.manual_seed_all(seed)
