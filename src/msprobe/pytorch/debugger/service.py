"""What frameworks reach through ``debugger.config`` and ``debugger.service``."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from ..dump.config import DumpConfig, check_dump_path, load_config
from ..dump.session import Session


class ConfigView:
    """The session's configuration as an object with attributes, as frameworks read it."""

    level: str
    dump_path: str

    def __init__(self, session: Session) -> None:
        object.__setattr__(self, "_session", session)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._session.config, name)
        return str(value) if name == "level" else value

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "dump_path":
            value = os.path.expanduser(os.fspath(value))
            check_dump_path(value)
        elif name == "level":
            value = load_config({"level": value}).level
        elif name not in {field.name for field in dataclasses.fields(DumpConfig)}:
            raise AttributeError(f"the configuration has no {name!r}")
        else:
            raise AttributeError(
                f"{name!r} can not be changed on a live debugger; dump_path and level can, between"
                " two windows. Set PrecisionDebugger._instance = None and construct a new one."
            )
        self._session.override(**{name: value})


class Service:
    """What frameworks reach through ``debugger.service`` (verl, MindSpeed-RL, recipes)."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.config = ConfigView(session)
        self.first_start = True

    @property
    def should_stop_service(self) -> bool:
        """Whether collecting has ended for this process (the last wanted step is over)."""
        return self._session.over

    @property
    def current_iter(self) -> int:
        """Number of the current step."""
        return self._session.step_number

    def reset_status(self) -> None:
        """Write what has been recorded and begin anew at step 0, with counters at 0."""
        self._session.reset()

    _reset_status = reset_status
