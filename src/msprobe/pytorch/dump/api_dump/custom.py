"""Functions that the user adds: register_custom_api, custom_wrap_ops.yaml, torch.ops, Triton."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from msprobe.errors import UsageError

from ..gate import Gate
from . import ops
from .wrap import Wrapper, unwrapped, wrap

_DEFAULT_NAMESPACES = ("_C_ascend",)
_logger = logging.getLogger("msprobe")


class CustomApis:
    """The custom functions of a session: (owner, attribute, what stands in for it)."""

    def __init__(self, gate: Gate, namespaces: Sequence[str]) -> None:
        self._gate = gate
        self._namespaces = namespaces
        self._table = ops.load_custom()
        self._known: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        self._unfit: set[str] = set()
        self._modules = 0
        self._ops: list[tuple[str, str]] = []

    def register(self, module: Any, api: Any, prefix: Any = None) -> tuple[Any, str, Any]:
        """Add ``module.api``, recorded as ``<prefix>.<api>``; the prefix is the module's name."""
        if not isinstance(api, str):
            raise UsageError(
                f"register_custom_api: api is {api!r}; expected the name of a function as a str."
                ' Example: register_custom_api(my_ops, "compute").'
            )
        if prefix is not None and not isinstance(prefix, str):
            raise UsageError(f"register_custom_api: api_prefix is {prefix!r}; expected a str.")
        name = getattr(module, "__name__", type(module).__name__)
        if not hasattr(module, api):
            raise UsageError(
                f"register_custom_api: {name} has no {api!r}. Pass the module or class that holds"
                " the function, and the function's name."
            )
        if not callable(getattr(module, api)):
            kind = type(getattr(module, api)).__name__
            raise UsageError(
                f"register_custom_api: {name}.{api} is a {kind}, not a function that could be"
                " recorded."
            )
        entry = module, api, stand_in(module, api, f"{prefix or name}.{api}", self._gate)
        self._known[id(module), api] = entry
        return entry

    def knows(self, module: Any, api: Any) -> bool:
        """Whether ``module.api`` is registered."""
        return (id(module), api) in self._known

    def restore(self, module: Any, api: str) -> bool:
        """Forget ``module.api``; whether it was known."""
        return self._known.pop((id(module), api), None) is not None

    def wrappers(self) -> list[tuple[Any, str, Any]]:
        """All that can be installed now; modules of the yaml table that load late come later."""
        for owner, api in [*self._from_table(), *self._from_namespaces()]:
            if (id(owner), api) not in self._known:
                self.register(owner, api)
        return list(self._known.values())

    def _from_table(self) -> Iterator[tuple[Any, str]]:
        for path, names in self._table.items():
            owner = ops.find_owner(path)
            for name in names if owner is not None else ():
                if callable(getattr(owner, name, None)):
                    yield owner, name
                elif f"{path}.{name}" not in self._unfit:
                    self._unfit.add(f"{path}.{name}")
                    _logger.warning("custom_wrap_ops.yaml: %s has no function %r", path, name)

    def _from_namespaces(self) -> Iterator[tuple[Any, str]]:
        list_all: Any = getattr(torch._C, "_dispatch_get_all_op_names", None)
        if not self._namespaces or list_all is None:
            return
        # The default namespace comes with an import; one that the user names may come any time.
        if self._modules != len(sys.modules) or self._namespaces != _DEFAULT_NAMESPACES:
            self._modules = len(sys.modules)
            self._ops = [
                (namespace, op)
                for namespace, _, op in (name.partition("::") for name in sorted(list_all()))
                if namespace in self._namespaces and "." not in op
            ]
        for namespace, op in self._ops:
            yield getattr(torch.ops, namespace), op


def stand_in(owner: Any, api: str, base: str, gate: Gate) -> Any:
    """A wrapper of ``owner.api``, as a static or class method where that is one."""
    raw = vars(owner).get(api) if hasattr(owner, "__dict__") else None
    if isinstance(raw, (staticmethod, classmethod)):
        wrapper = _wanted(wrap(unwrapped(raw.__func__), base, gate))
        return type(raw)(wrapper)
    return _wanted(wrap(unwrapped(raw if callable(raw) else getattr(owner, api)), base, gate))


def _wanted(wrapper: Wrapper) -> Wrapper:
    wrapper.risk = "CORE"  # what a user registers is wanted at every risk level
    return wrapper


def triton_patch(gate: Gate) -> list[tuple[Any, str, Any]]:
    """The patch that records launches of Triton kernels as ``Triton.<kernel>``, if it is loaded.

    A kernel writes into its arguments, so the record's output is all of them after the launch.
    """
    jit: Any = getattr(sys.modules.get("triton.runtime.jit"), "JITFunction", None)
    if jit is None:
        return []
    launch = jit.run
    wrappers: dict[str, Wrapper] = {}

    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        name = getattr(getattr(kernel, "fn", None), "__name__", type(kernel).__name__)
        wrapper = wrappers.get(name)
        if wrapper is None:
            wrapper = wrappers[name] = _wanted(wrap(launch, f"Triton.{name}", gate))
            wrapper.writes_arguments = True
        # The kernel itself is bound: it is no argument of the record.
        return wrapper.of(functools.partial(launch, kernel))(*args, **kwargs)

    return [(jit, "run", run)]
