"""The public facade: checks arguments and forwards to the one session of the process."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torch import nn

from msprobe.errors import UsageError, warn_user

from .. import marks
from ..dump.config import DumpConfig, check_dump_path, load_config
from ..dump.saved import check_saved
from ..dump.session import Session
from ..logs import show_messages
from .service import ConfigView, Service

_session: Session | None = None

T = TypeVar("T")


class _OnePerProcess(type):
    """Makes ``PrecisionDebugger(...)`` return the one object, and ``_instance`` settable.

    Frameworks set ``PrecisionDebugger._instance = None`` to begin anew with another path.
    """

    def __call__(cls: type[T], *args: Any, **kwargs: Any) -> T:
        # -> T, not Any: else an editor knows nothing of `debugger = PrecisionDebugger(...)`.
        debugger: T
        if _session is not None and not _session.closed:
            debugger = _session.facade
            _session.facade._check_same(*args, **kwargs)
        else:
            debugger = type.__call__(cls, *args, **kwargs)
        return debugger

    @property
    def _instance(cls) -> Any:
        return None if _session is None else _session.facade

    @_instance.setter
    def _instance(cls, value: Any) -> None:
        global _session
        if value is None:
            if _session is not None:
                _session.close()
            _session = None
        elif _session is None or value is not _session.facade:
            raise UsageError(
                "PrecisionDebugger._instance can only be set to None (end the session); construct"
                " PrecisionDebugger(...) to begin a new one."
            )


class PrecisionDebugger(metaclass=_OnePerProcess):
    """Records what a PyTorch model computes, from `start` to `stop`, step by step.

    One per process: constructing it again returns the same object and warns if the arguments
    differ. Every method works on the class as well, so that another file needs no reference.

    Args:
        config_path: path of a config.json, or a dict of the same shape; None for the defaults.
        task, dump_path, level, step: override the file (see docs/config.md).
        model: the model that ``start()`` without a model records.

    Raises:
        ConfigError: the configuration is wrong, or ``dump_path`` can not be written.

    Construction changes nothing in torch; `start` does, and `stop` takes it back.

    >>> debugger = PrecisionDebugger(dump_path="./dump", level="mix")   # doctest: +SKIP
    >>> for batch in loader:                                            # doctest: +SKIP
    ...     debugger.start(model)
    ...     loss = model(batch).mean()
    ...     loss.backward()
    ...     debugger.stop()
    ...     debugger.step()
    """

    def __init__(
        self,
        config_path: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        task: str | None = None,
        dump_path: str | os.PathLike[str] | None = None,
        level: str | None = None,
        step: Sequence[int | str] | None = None,
        model: nn.Module | Sequence[nn.Module] | None = None,
    ) -> None:
        global _session
        show_messages()
        self._arguments = (config_path, task, dump_path, level, step)
        dump_path = marks.dump_path(dump_path)

        def load() -> DumpConfig:
            return load_config(config_path, task=task, dump_path=dump_path, level=level, step=step)

        config = load()
        off = os.environ.get("MSPROBE_OFF", "") not in ("", "0")
        if not off:
            check_dump_path(config.dump_path)
        _session = Session(config, load, model=model, facade=self, off=off)
        self._session = _session
        self.service = Service(_session)

    @property
    def config(self) -> ConfigView:
        """The configuration in force; ``dump_path`` and ``level`` can be set between windows."""
        return self.service.config

    @staticmethod
    def start(
        model: nn.Module | Sequence[nn.Module] | None = None,
        token_range: Sequence[int] | None = None,
        rank_id: int | None = None,
        scheduled_tokens: Mapping[str, int] | None = None,
    ) -> None:
        """Open a window: from here on calls are recorded.

        Args:
            model: a module, or a list or tuple of modules, whose submodules are recorded (levels
                L0 and mix need it; the model itself is not recorded). Different models may
                follow each other.
            token_range: ``[first, last]``, both included, counted from 0 in calls of the model:
                record only these steps of a generation loop.
            rank_id: names the folder ``rank<rank_id>``; None asks torch.distributed.
            scheduled_tokens: request id → number of its tokens in this batch (see ``request_id``).

        Raises:
            UsageError: an argument is wrong, or the debugger has not been constructed.
        """
        session = _current("start")
        marks.before_start(session, model)
        session.start(
            model, token_range=token_range, rank_id=rank_id, scheduled_tokens=scheduled_tokens
        )

    @staticmethod
    def stop() -> None:
        """Close the window and write what it recorded. More windows may follow in the same step.

        Gradients of recorded calls are still recorded when their backward runs later.
        """
        session = _current("stop")
        session.stop()
        marks.after_stop(session)

    @staticmethod
    def step(dump: bool = True) -> None:
        """End the step: write its files and go on with the next number.

        ``dump=False`` discards what the step has recorded (warm-up and dummy runs).
        """
        _current("step").step(dump)
        marks.after_step()

    @staticmethod
    def set_init_step(step: int) -> None:
        """Number of the first step; call it before the loop. UsageError unless an int >= 0."""
        if type(step) is not int or step < 0:
            raise UsageError(
                f"set_init_step({step!r}): expected an integer >= 0. Example: set_init_step(100)."
            )
        _current("set_init_step").step_number = step

    @staticmethod
    def forward_backward_dump_end() -> None:
        """Stop recording forwards; the gradients of what was recorded are kept."""
        _current("forward_backward_dump_end").stop()

    @staticmethod
    def save(variable: Any, name: str, save_backward: bool = True) -> None:
        """Record one value at level debug, in debug.json, and its gradient when it arrives.

        Args:
            variable: a tensor, int, float, str, or lists, tuples and dicts of these.
            name: names the record ``<name>.<count>.debug``.
            save_backward: also record ``<name>_grad.<count>.debug``.

        An argument that can not be saved gives a warning and is skipped.
        """
        session = _current("save")
        if check_saved(variable, name, save_backward):
            session.save(variable, name, save_backward)

    @staticmethod
    def register_custom_api(module: Any, api: str, api_prefix: str | None = None) -> None:
        """Record ``module.api`` like a torch function, as ``<api_prefix>.<api>.<n>``.

        ``module`` is a module or class; the prefix defaults to its ``__name__``. UsageError if
        there is no such function.
        """
        _current("register_custom_api").register(module, api, api_prefix)

    @staticmethod
    def restore_custom_api(module: Any, api: str) -> None:
        """Undo `register_custom_api`: the function is the user's own again."""
        _current("restore_custom_api").restore(module, api)

    def _check_same(
        self,
        config_path: Any = None,
        task: Any = None,
        dump_path: Any = None,
        level: Any = None,
        step: Any = None,
        model: Any = None,
    ) -> None:
        """A second construction: take the model over, warn if anything else differs."""
        if model is not None:
            self._session.model = model
        given = zip((config_path, task, dump_path, level, step), self._arguments, strict=True)
        if any(new is not None and new != old for new, old in given):
            warn_user(
                "PrecisionDebugger exists already in this process; the arguments of this second"
                " construction are ignored. To begin anew set PrecisionDebugger._instance = None"
                " first."
            )

    def _maybe_reload_config(self, force: bool = False) -> None:
        """Read the configuration file again if it has changed (``force``: without waiting)."""
        self._session.reload(force=force)


def module_dump(module: nn.Module, module_name: str) -> None:
    """Record only ``module``, as ``Module.<module_name>.<Class>``, until `module_dump_end`.

    Neither its submodules nor the functions it calls are recorded meanwhile. Works between start
    and stop, at levels L0, L1 and mix. UsageError for arguments of another type.
    """
    if not isinstance(module, nn.Module):
        kind = type(module).__name__
        raise UsageError(f"module_dump: module is a {kind}; expected a torch.nn.Module.")
    if not isinstance(module_name, str) or not module_name:
        raise UsageError(f"module_dump: module_name is {module_name!r}; expected a non-empty str.")
    _current("module_dump").focus.begin(module, module_name)


def module_dump_end() -> None:
    """End `module_dump`: everything is recorded again."""
    _current("module_dump_end").focus.end()


def _current(call: str) -> Session:
    if _session is None:
        raise UsageError(
            f"{call}() before PrecisionDebugger exists: construct it first, for example"
            ' PrecisionDebugger(config_path="./config.json").'
        )
    return _session
