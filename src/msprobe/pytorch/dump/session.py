"""Life cycle: which step is it, is it to be recorded, when do windows open and close."""

from __future__ import annotations

import atexit
import functools
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from . import device
from .arguments import check_models, check_rank_id, check_token_range
from .compilers import uncompiled
from .config import DumpConfig, Level
from .config_keys import filters_in
from .forks import call_in_children
from .interception import Interception
from .interrupts import interrupts_wait
from .passes import Passes
from .reload import ConfigFile
from .run import StepRun
from .runs import Runs, folder_of
from .saved import save
from .tokens import request_slice

_logger = logging.getLogger("msprobe")


Method = TypeVar("Method", bound=Callable[..., Any])


def _one_at_a_time(method: Method) -> Method:
    """Threads that open and close windows wait for each other."""

    @functools.wraps(method)
    def alone(self: Session, *args: Any, **kwargs: Any) -> Any:
        with self._life:
            return method(self, *args, **kwargs)

    return alone  # type: ignore[return-value]


class Session:
    """One debugger's state from construction to close."""

    def __init__(
        self,
        config: DumpConfig,
        load: Callable[[], DumpConfig],
        *,
        model: Any = None,
        facade: Any = None,
        off: bool = False,
    ) -> None:
        self.config = config
        self.model = model
        self.facade = facade
        self.step_number = 0
        self.closed = off  # nothing more will be recorded
        self.ended = False  # a task has seen what it was to see
        self.run: StepRun | None = None
        self._overrides: dict[str, Any] = {}  # set on debugger.config: stronger than the file
        self._interception = Interception(config, off=off)
        self.gate = self._interception.gate
        self.focus = self._interception.focus
        self._file = ConfigFile(config, load)
        self._runs = Runs(self.gate.thread, Passes(), self._end_collecting)
        self._life = threading.RLock()  # held by start, stop, step, reset and close
        self._said: set[str] = set()
        atexit.register(self.close)
        call_in_children(self.forget)

    # ---- start, stop, step -------------------------------------------------------------------

    @uncompiled()
    @_one_at_a_time
    def start(
        self,
        model: Any = None,
        *,
        token_range: Any = None,
        rank_id: int | None = None,
        scheduled_tokens: Any = None,
    ) -> None:
        """Open a window; on an unwanted step or rank nothing is installed."""
        self.gate.settle()
        self.reload()
        tokens = check_token_range(token_range)
        check_rank_id(rank_id)
        model = self.model if model is None else model
        models, listed = check_models(model, self.config.level, needed=tokens is not None)
        rows = request_slice(self.config.request_id, scheduled_tokens)
        if self.config.request_id is not None and scheduled_tokens is None:
            self._say_once(
                "'request_id' has no effect without start(scheduled_tokens={...}), which tells"
                " where the request is in the batch: whole tensors are recorded"
            )
        self.facade.service.first_start = False
        if not self._wants_step(rows) or self.config.level == Level.DEBUG:
            return
        rank = device.current_rank() if rank_id is None else rank_id
        if not self._wants_rank(rank):
            return
        with interrupts_wait() as came:
            run = self._open_run(rank)
            if run is None:
                return
            run.use_slices(rows or ())
            self._say_where(rank, run)
            self._interception.open(run, self.config, models, listed)
            if tokens is not None:
                self._interception.only_tokens(models[0], *tokens)
            if came:  # start() will raise, so stop() may never be called
                self._interception.shut()

    @uncompiled()
    @interrupts_wait()
    @_one_at_a_time
    def stop(self) -> None:
        """Close the window and write what it has collected."""
        unmet = self._interception.close()
        self._runs.flush()
        if unmet:
            self._say_once(unmet, key="token_range")  # a server has thousands of short requests

    @uncompiled()
    @interrupts_wait()
    @_one_at_a_time
    def step(self, dump: bool = True) -> None:
        """End the step. ``dump=False`` throws away what it has collected."""
        if self.gate.open:
            self._say_once(
                "step() has closed the window that was open: what follows is recorded after the"
                " next start()",
                logging.INFO,
                key="step in a window",
            )
        self.stop()
        self._close_runs(discard=not dump)
        self.step_number += 1

    @interrupts_wait()
    @_one_at_a_time
    def reset(self) -> None:
        """Back to step 0 with empty counters; what has been collected is written."""
        self.stop()
        self._close_runs()
        self.step_number = 0
        self.ended = False

    @interrupts_wait()
    @_one_at_a_time
    def close(self) -> None:
        """End the session: write everything, take everything back. Later calls do nothing."""
        if self.closed:
            return
        self.stop()
        self._close_runs()
        self._interception.shut()  # what another patch covered at stop() and has uncovered since
        self.closed = True
        self._runs.stop()
        atexit.unregister(self.close)

    def forget(self) -> None:
        """In a forked child: nothing is recorded or written.

        Its first call that the parent would have recorded says so, except in a data loader
        worker. A child that calls start() itself begins with a clean state and its own folder.
        """
        self._life = threading.RLock()  # another thread may have held it
        self._runs.forget()
        self.run = None
        self._interception.forget()

    def reload(self, *, force: bool = False) -> None:
        """Take a changed configuration file over, between steps only."""
        fresh = self._file.current(self.config, force=force)
        if not self._runs and fresh is not self.config:
            self.config = replace(fresh, **self._overrides)

    def override(self, **values: Any) -> None:
        """Change the configuration from the next start() on, whatever its file says later."""
        self._overrides.update(values)
        self.config = replace(self.config, **values)

    @property
    def over(self) -> bool:
        """Whether nothing more will be collected: the last wanted step is done."""
        last = max(self.config.step, default=self.step_number)
        return self.closed or self.ended or self.step_number > last

    # ---- what the user names one by one ---------------------------------------------------------

    def save(self, variable: Any, name: str, save_backward: bool) -> None:
        """Record one value (level debug); at other levels say once that nothing happens."""
        if self.config.level != Level.DEBUG:
            self._say_once('save() does nothing at this level; set "level": "debug" to use it.')
            return
        rank = device.current_rank()
        if self._wants_step(()) and self._wants_rank(rank):
            run = self._open_run(rank)
            if run is not None:
                run.guard(name, save, run, variable, name, save_backward)

    def register(self, module: Any, api: Any, prefix: Any) -> None:
        """Add a function of the user's, at once if a window is open."""
        self._interception.register(module, api, prefix, self.config)

    def restore(self, module: Any, api: str) -> None:
        """Take a function of the user's out again."""
        self._interception.restore(module, api)

    # ---- parts -------------------------------------------------------------------------------

    def _wants_step(self, rows: Any) -> bool:
        config = self.config
        if self.closed or self.ended or config.dump_enable is False:
            return False
        if rows is None:
            _logger.warning(
                "request_id %r is not among the scheduled tokens: step %d is not recorded",
                config.request_id, self.step_number,
            )
            return False
        return not config.step or self.step_number in config.step

    def _wants_rank(self, rank: int | None) -> bool:
        if not self.config.rank or rank in self.config.rank:
            return True
        if rank is None:
            self._say_once(
                "'rank' in the configuration selects ranks, but this process has no rank (no"
                " torch.distributed group, no rank_id in start()): nothing is collected here."
            )
        return False

    def _open_run(self, rank: int | None) -> StepRun | None:
        """The run of this step; None, with one warning, if its files can not be made."""
        try:
            self.run = self._runs.get(self.config, self.step_number, rank)
        except OSError as error:
            folder = folder_of(self.config, self.step_number, rank)
            self._say_once(f"nothing is recorded in {folder}: {error}")
            return None
        return self.run

    def _say_where(self, rank: int | None, run: StepRun) -> None:
        if rank in (None, 0):
            config = self.config
            self._say_once(
                f"recording level {config.level}, task {config.task}, to {run.writer.shown}",
                logging.INFO,
                key="recording",
            )

    def _close_runs(self, *, discard: bool = False) -> None:
        self.run = self.gate.run = None
        notes = self._notes() if self._runs and not discard else {}
        self._runs.close(notes, discard=discard)

    def _end_collecting(self, why: str) -> None:
        """A task has seen what it was to see. What is installed goes at the next stop()."""
        _logger.warning("%s", why)
        if self.run is not None:
            self.run.coverage.is_whole = False
        self.gate.open = False
        self.ended = True

    def _notes(self) -> dict[str, Any]:
        """Entries of coverage.json that belong to the session."""
        return {"filters": filters_in(self.config), **self._interception.notes()}

    def _say_once(self, text: str, level: int = logging.WARNING, key: str = "") -> None:
        if (key or text) not in self._said:
            self._said.add(key or text)
            _logger.log(level, "%s", text)
