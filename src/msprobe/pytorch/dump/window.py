"""What is installed between start() and stop(), and taken back to the last attribute."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

from torch import nn

from .api_dump.areas import area_hooks, clip_grad_wrappers
from .api_dump.wrap import is_wrapper, unwrapped
from .compilers import Compilers, prime_torch_caches, silenced
from .gate import Gate
from .module_dump.hooks import ModuleHook, add_hooks
from .patches import Patches

# References in these packages are torch's own business, or cannot be to torch functions.
_NOT_USER_CODE = frozenset(sys.stdlib_module_names - {"__main__"}) | {"torch", "msprobe", "numpy"}


class Window:
    """The wrappers, re-bound references, module hooks and compiler guards of one start()."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self.patches = Patches()
        self.is_open = False
        self._handles: list[Any] = []
        self._extra: list[Any] = []
        self._hooked: list[tuple[nn.Module, ModuleHook]] = []
        self._loaded = 0  # modules there were when the user's were picked
        self._user_modules: list[ModuleType] = []
        self._scanned: dict[int, int] = {}  # id of a module → number of names when it was searched
        self._areas = False
        self._found: list[tuple[dict[str, Any], str, Any]] = []
        self._compilers = Compilers(gate.thread, self._lift, self._put_back)

    def open_apis(
        self,
        builtin: Sequence[tuple[Any, str, Any]],
        custom: Sequence[tuple[Any, str, Any]],
        models: Iterable[nn.Module],
        mix: bool,
    ) -> None:
        """Put the wrappers in, the user's over ours; re-bind references to what they replace."""
        prime_torch_caches()
        wrappers = [(owner, name, _up_to_date(owner, name, w)) for owner, name, w in builtin]
        self.patches.install(wrappers)
        custom = [(owner, name, _up_to_date(owner, name, w)) for owner, name, w in custom]
        self.patches.install(custom)
        all_ = [*custom, *wrappers]
        originals = {id(w.original): w for _, _, w in reversed(all_) if is_wrapper(w)}
        if mix:
            self._areas = True
            self._handles += area_hooks(self._gate.thread)
            for owner, name, clip in clip_grad_wrappers(self._gate.thread):
                originals[id(self.patches.replace(owner, name, clip))] = clip
        printing: Any = sys.modules["torch._tensor_str"]
        self.patches.replace(printing, "_str", silenced(printing._str, self._gate.thread))
        self._compilers.install()
        for names, key, wrapper in self._references(originals, models):
            self.patches.replace_in(names, key, wrapper)

    def open_modules(self, hooks: Iterable[tuple[nn.Module, ModuleHook]]) -> None:
        """Register the hooks; modules hooked in this window already are passed over."""
        self._compilers.install()
        known = {id(module) for module, _ in self._hooked}
        for module, hook in hooks:
            if id(module) not in known:
                known.add(id(module))
                self._hooked.append((module, hook))
                self._handles += add_hooks(module, hook)

    def hold(self, handles: list[Any]) -> None:
        """Remove these handles with the others."""
        self._extra += handles

    def close(self) -> None:
        """Take everything back."""
        self._compilers.restore()
        self.patches.restore()
        for handle in (*self._handles, *self._extra):
            handle.remove()
        self._handles, self._extra = [], []
        self._hooked = []
        self.is_open = False
        self._areas = False
        self._gate.thread.area = None

    def _lift(self) -> None:
        """While a compiler is at work, torch and the modules are as without the tool."""
        self.patches.lift()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _put_back(self) -> None:
        for module, hook in self._hooked:
            self._handles += add_hooks(module, hook)
        if self._areas:
            self._handles += area_hooks(self._gate.thread)
        self.patches.put_back()

    # ---- references to torch functions that user code took before ----------------------------

    def _references(
        self, originals: dict[int, Any], models: Iterable[nn.Module]
    ) -> list[tuple[dict[str, Any], str, Any]]:
        if self._loaded != len(sys.modules):
            self._loaded = len(sys.modules)
            self._user_modules = [m for m in list(sys.modules.values()) if _is_user_code(m)]
        for module in self._user_modules:
            self._scan(module, originals)
        found = [
            (names, key, originals[id(original)])
            for names, key, original in self._found
            if names.get(key) is original and id(original) in originals
        ]
        for model in models:
            for part in model.modules():
                for key, value in vars(part).items():
                    if id(value) in originals:
                        found.append((vars(part), key, originals[id(value)]))
        return found

    def _scan(self, module: ModuleType, originals: dict[int, Any]) -> None:
        names = module.__dict__
        size = len(names)
        if self._scanned.get(id(module)) == size and module.__name__ != "__main__":
            return
        self._scanned[id(module)] = size
        known = {(id(d), key) for d, key, _ in self._found}
        for key, value in list(names.items()):
            if id(value) in originals and (id(names), key) not in known:
                self._found.append((names, key, value))


def _is_user_code(module: Any) -> bool:
    if not isinstance(module, ModuleType):
        return False
    return str(module.__dict__.get("__name__")).partition(".")[0] not in _NOT_USER_CODE


def _up_to_date(owner: Any, name: str, wrapper: Any) -> Any:
    """``wrapper``, of what stands there now: somebody may have patched torch since it was made."""
    if not is_wrapper(wrapper):
        return wrapper
    current = vars(owner).get(name)
    if current is None:
        current = getattr(owner, name)
    current = unwrapped(current)  # the user may have registered what we wrap anyway
    return wrapper if current is wrapper.original else wrapper.of(current)
