"""What is installed between start() and stop(), and taken back to the last attribute."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from operator import is_
from types import ModuleType
from typing import Any

from torch import nn

from .api_dump.areas import area_hooks, clip_grad_wrappers
from .api_dump.wrap import is_wrapper, unwrapped
from .compilers import Compilers, prime_torch_caches
from .gate import Gate, silenced
from .module_dump.hooks import HookPair, ModuleHook, forget_left_over
from .patches import Patches, is_current, plan

# What these packages refer to is torch's own business, or is no function of torch.
_NOT_USER_CODE = frozenset(sys.stdlib_module_names - {"__main__"}) | {"torch", "msprobe", "numpy"}


class Window:
    """The wrappers, re-bound references, module hooks and compiler guards of one start()."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self.patches = Patches()
        self._rebound = Patches()
        self.is_open = False
        self._handles: list[Any] = []
        self._extra: list[Any] = []
        self._hooked: dict[int, nn.Module] = {}  # id of a module → itself
        self._dead: list[Any] = []  # hooked modules that are gone
        self._pairs: dict[int, HookPair] = {}  # id of a module → its hooks, kept between windows
        self._plan: Any = None  # of the wrappers, kept between windows
        self._planned_for: Any = None
        self._originals: dict[int, Any] = {}  # id of a builtin function → its wrapper
        self._functions: list[Any] = []  # these functions
        self._replaced: dict[int, Any] = {}  # id of a function → its wrapper in this window
        self._kinds: frozenset[type] = frozenset()  # types of these functions
        self._loaded: list[Any] = []  # the modules there were when the user's were picked
        self._user_modules: list[ModuleType] = []
        self._own_modules: list[ModuleType] = []  # those of them that are in no installed package
        self._scanned: dict[int, int] = {}  # id of a module → number of names when it was searched
        self._areas = False
        self._found: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
        self._compilers = Compilers(gate.thread, self._lift, self._put_back)

    def open_apis(
        self,
        builtin: Sequence[tuple[Any, str, Any]],
        custom: Sequence[tuple[Any, str, Any]],
        modules: Iterable[nn.Module],
        mix: bool,
    ) -> None:
        """Put the wrappers in, the user's over ours; re-bind references to what they replace."""
        prime_torch_caches()
        self._install_builtin(builtin)
        custom = [(owner, name, _up_to_date(owner, name, w)) for owner, name, w in custom]
        self.patches.install(custom)
        originals = {**self._originals, **_by_original(custom)}
        functions = [*self._functions, *(w.original for _, _, w in custom if is_wrapper(w))]
        if mix:
            self._areas = True
            self._handles += area_hooks(self._gate.thread)
            for owner, name, clip in clip_grad_wrappers(self._gate.thread):
                functions.append(self.patches.replace(owner, name, clip))
                originals[id(functions[-1])] = clip
        printing: Any = sys.modules["torch._tensor_str"]
        self.patches.replace(printing, "_str", silenced(printing._str, self._gate.thread))
        self._compilers.install()
        self._replaced = originals
        self._kinds = frozenset(map(type, functions))
        self.rebind(modules)

    def rebind(self, modules: Iterable[nn.Module]) -> None:
        """Exchange the references that user code and these modules took before the window."""
        for names, key, wrapper in self._references(self._replaced, modules):
            self._rebound.replace_in(names, key, wrapper)

    def search_anew(self) -> None:
        """Search the user's own modules at the next start(), once a step.

        Else only `__main__` and those whose number of names has changed; so it is always with
        installed packages, whose 40,000 names would take 3 ms.
        """
        for module in self._own_modules:
            self._scanned.pop(id(module), None)

    def _install_builtin(self, builtin: Sequence[tuple[Any, str, Any]]) -> None:
        # Nearly always torch is as it was at the last start(): then so is the plan.
        if self._planned_for is not builtin or not is_current(self._plan):
            wrappers = [(owner, name, _up_to_date(owner, name, w)) for owner, name, w in builtin]
            self._plan = plan(wrappers)
            self._planned_for = builtin
            self._originals = _by_original(wrappers)
            self._functions = [wrapper.original for wrapper in self._originals.values()]
        self.patches.install_plan(self._plan)

    def open_modules(self, parts: Iterable[tuple[int | None, str, nn.Module]]) -> None:
        """Put the hooks in; modules hooked in this window already are passed over."""
        forget_left_over(self._gate.thread.modules)
        self._compilers.install()
        self._forget_dead()
        hooked, pairs = self._hooked, self._pairs
        for index, fqn, module in parts:
            key = id(module)
            if key in hooked:
                continue
            pair = pairs.get(key)
            if pair is None or pair.module() is not module:
                hook = ModuleHook(self._gate, index, fqn)
                pair = pairs[key] = HookPair(module, hook, self._dead.append)
            pair.hook.name(index, fqn)
            hooked[key] = module
            pair.put_in(module)

    def _forget_dead(self) -> None:
        if self._dead:
            self._dead.clear()
            self._pairs = {k: pair for k, pair in self._pairs.items() if pair.module() is not None}

    def hold(self, handles: list[Any]) -> None:
        """Remove these handles with the others."""
        self._extra += handles

    def close(self) -> None:
        """Take everything back."""
        self._compilers.restore()
        self._rebound.restore()
        self.patches.restore()
        self._take_out_hooks()
        for handle in self._extra:
            handle.remove()
        self._extra = []
        self._hooked = {}
        self.is_open = False
        self._areas = False
        self._gate.thread.area = None

    def _take_out_hooks(self) -> None:
        for key, module in self._hooked.items():
            self._pairs[key].take_out(module)
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _lift(self) -> None:
        """While a compiler is at work, torch and the modules are as without the tool."""
        self._rebound.lift()
        self.patches.lift()
        self._take_out_hooks()

    def _put_back(self) -> None:
        for key, module in self._hooked.items():
            self._pairs[key].put_in(module)
        if self._areas:
            self._handles += area_hooks(self._gate.thread)
        # What a compiler has changed in torch is no business of the user's: no warning.
        self.patches.put_back(_renewed)
        self._rebound.put_back(lambda *_: None)

    # ---- references to torch functions that user code took before ----------------------------

    def _references(
        self, originals: dict[int, Any], modules: Iterable[nn.Module]
    ) -> list[tuple[dict[str, Any], str, Any]]:
        self._pick_user_modules()
        main, scanned = sys.modules.get("__main__"), self._scanned
        for user_module in self._user_modules:
            size = len(user_module.__dict__)
            if scanned.get(id(user_module)) != size or user_module is main:
                scanned[id(user_module)] = size
                self._scan(user_module.__dict__, originals)
        found = [
            (names, key, originals[id(original)])
            for names, key, original in self._found.values()
            if names.get(key) is original and id(original) in originals
        ]
        kinds = self._kinds
        for module in modules:
            names = module.__dict__
            if not kinds.isdisjoint(map(type, names.values())):  # half the time of asking for ids
                found += [
                    (names, key, originals[id(value)])
                    for key, value in names.items()
                    if id(value) in originals
                ]
        return found

    def _pick_user_modules(self) -> None:
        loaded = list(sys.modules.values())
        if len(loaded) == len(self._loaded) and all(map(is_, loaded, self._loaded)):
            return
        self._user_modules = [module for module in loaded if _is_user_code(module)]
        self._own_modules = [m for m in self._user_modules if not _is_installed(m)]
        # The id of one that has gone may soon be that of another.
        left = set(map(id, self._user_modules))
        self._scanned = {key: size for key, size in self._scanned.items() if key in left}
        self._loaded = loaded

    def _scan(self, names: dict[str, Any], originals: dict[int, Any]) -> None:
        if originals.keys().isdisjoint(map(id, list(names.values()))):
            return  # nearly always, and in a third of the time
        for key, value in list(names.items()):
            if id(value) in originals:
                self._found[id(names), key] = names, key, value


def _by_original(wrappers: Iterable[tuple[Any, str, Any]]) -> dict[int, Any]:
    """Wrapper by the id of what it replaces; of two with one original the first."""
    return {id(w.original): w for _, _, w in reversed(list(wrappers)) if is_wrapper(w)}


def _is_user_code(module: Any) -> bool:
    if not isinstance(module, ModuleType):
        return False
    return str(module.__dict__.get("__name__")).partition(".")[0] not in _NOT_USER_CODE


def _is_installed(module: ModuleType) -> bool:
    return "-packages" in str(module.__dict__.get("__file__"))  # site-packages, dist-packages


def _renewed(ours: Any, theirs: Any) -> Any:
    """Our wrapper around what has taken the place of its original."""
    return ours.of(theirs) if is_wrapper(ours) else None


def _up_to_date(owner: Any, name: str, wrapper: Any) -> Any:
    """``wrapper``, of what stands there now: somebody may have patched torch since it was made."""
    if not is_wrapper(wrapper):
        return wrapper
    current = vars(owner).get(name)
    if current is None:
        current = getattr(owner, name)
    current = unwrapped(current)  # the user may have registered what we wrap anyway
    return wrapper if current is wrapper.original else wrapper.of(current)
