"""All that hears calls from start() to stop(), put in and taken back together."""

from __future__ import annotations

from typing import Any

from torch import nn

from . import unseen
from .api_dump.builtin import Builtin
from .api_dump.collectives import Works
from .api_dump.custom import CustomApis, triton_patch
from .config import DumpConfig, Level
from .forks import say_not_recorded
from .gate import Gate
from .module_dump.focus import Focus
from .module_dump.parts import hookable, named_modules
from .tokens import Tokens
from .window import Window

_WITH_APIS = (Level.L1, Level.MIX)


class Interception:
    """Wrappers, module hooks and the collectives under way of one session.

    ``off``: nothing will be recorded. ConfigError if the configuration names unknown functions.
    """

    def __init__(self, config: DumpConfig, *, off: bool) -> None:
        self.gate = Gate()
        self.focus = Focus(self.gate)
        self._tokens: Tokens | None = None
        self._window = Window(self.gate)
        self._works = Works()
        self._builtin = Builtin(self.gate, self._works)
        self._custom = CustomApis(self.gate, config.custom_op_namespaces)
        recorded = config.level in _WITH_APIS and not off
        self._unseen = unseen.Counting(self.gate) if recorded and unseen.wanted() else None
        if recorded:
            self._builtin.wrappers(config)

    def open(self, run: Any, config: DumpConfig, models: list[nn.Module], listed: bool) -> None:
        """Put everything in, for calls to be recorded by ``run``, and open the gate.

        A further model may come while it is open. After an error of ours nothing stays behind.
        """
        if self._window.is_open and not self.gate.open:
            self._window.close()  # an exception has interrupted the last stop()
        run.on_wait = self._works.unwaited.add
        if self.gate.run is not run:
            self._window.search_anew()
        self.gate.run = run
        opened = None
        try:
            self.gate.open = True
            opened = run.guard("start", self._install, run, config, models, listed)
        finally:
            if not opened:  # an error of ours, or an exception from a signal: nothing stays behind
                self.shut()

    def _install(
        self, run: Any, config: DumpConfig, models: list[nn.Module], listed: bool
    ) -> bool:
        further = self._window.is_open
        self._window.is_open = True  # from here on there is something to take back
        parts = named_modules(models, listed)
        modules = [module for _, _, module in parts]
        if config.level != Level.L0 and further:
            self._window.rebind(modules)  # a further model in the same window
        elif config.level != Level.L0:
            builtin = self._builtin.wrappers(config)
            custom = [*triton_patch(self.gate), *self._custom.wrappers()]
            self._window.open_apis(builtin, custom, modules, config.level == Level.MIX)
        if config.level != Level.L1:
            recorded, fused = hookable(parts)
            run.coverage.may_run(recorded, fused)
            self._window.open_modules(recorded)
        if self._unseen is not None:
            self._unseen.enter()
        return True

    def only_tokens(self, model: nn.Module, first: int, last: int) -> None:
        """Open the gate only from the ``first`` to the ``last`` call of ``model``."""
        if self.gate.open and self.gate.run is not None:
            self.gate.run.coverage.is_whole = False
            self._tokens = Tokens(first, last, self.gate)
            self._window.hold([self._tokens.watch(model)])

    def shut(self) -> None:
        """Take everything back, as it is: no more is recorded."""
        self.gate.open = False
        self._window.close()

    def close(self) -> str:
        """As `shut`, with an orderly end of what is under way. Why no token was recorded, or ""."""
        unmet = ""
        if self._unseen is not None:
            self._unseen.leave()
        if self._window.is_open:
            self.gate.open = False
            self.focus.end(forgotten=True)
            if self._tokens is not None:
                unmet, self._tokens = self._tokens.unmet(), None
            self._window.close()
        self._works.finish_all()
        return unmet

    def register(self, module: Any, api: Any, prefix: Any, config: DumpConfig) -> None:
        """Add a function of the user's, at once if a window is open."""
        known = self._custom.knows(module, api)
        entry = self._custom.register(module, api, prefix)
        if self._window.is_open and config.level in _WITH_APIS:
            if known:
                self._window.patches.undo(module, api)
            self._window.patches.replace(*entry)

    def restore(self, module: Any, api: str) -> None:
        """Take a function of the user's out again."""
        if self._custom.restore(module, api) and self._window.is_open:
            self._window.patches.undo(module, api)

    def notes(self) -> dict[str, Any]:
        """Entries of coverage.json. Calls that were not recorded are told once."""
        notes: dict[str, Any] = {"apis_not_in_this_torch": self._builtin.missing}
        if self._unseen is not None:  # the first step that is written has been listened to
            notes["torch_calls_not_recorded"] = self._unseen.found()
            self._unseen = None
        return notes

    def forget(self) -> None:
        """In a forked child: the first call that the parent would have recorded says so.

        In a data loader worker nothing is said.
        """
        self._works.forget()
        self.gate.run = None
        if self.gate.open:
            self.gate.forget(self._shut_in_child)
        else:
            self.gate.thread.begin()
            self._window.close()

    def _shut_in_child(self, by_call: bool) -> None:
        self._window.close()
        if by_call:
            say_not_recorded()
