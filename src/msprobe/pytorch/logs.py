"""Where the messages of the library go: standard logging, visible without any set-up."""

from __future__ import annotations

import logging
import os
import sys

from msprobe.errors import ConfigError

LOGGER = logging.getLogger("msprobe")
_LEVELS = ("debug", "info", "warning", "error", "critical")


class _Stderr(logging.Handler):
    """Writes to what ``sys.stderr`` is at the time of the message, not at construction."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one message; a stream that is closed or full costs the message only."""
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


def show_messages() -> None:
    """Make messages visible from the level in ``MSPROBE_LOG`` on.

    If it is not set, from the level that the program has given the logger, else from info. A
    program that has set up logging keeps its own handlers; else one on stderr is added. Called at
    construction, never at import.
    """
    asked = os.environ.get("MSPROBE_LOG", "").lower()
    name = asked or "info"
    if name not in _LEVELS:
        raise ConfigError(
            f"environment variable MSPROBE_LOG is {name!r}; expected one of {', '.join(_LEVELS)}."
            " Example: MSPROBE_LOG=warning."
        )
    if asked or LOGGER.level == logging.NOTSET:
        LOGGER.setLevel(name.upper())
    if not LOGGER.hasHandlers():
        handler = _Stderr()
        handler.setFormatter(logging.Formatter("[msprobe] %(message)s"))
        LOGGER.addHandler(handler)
        LOGGER.propagate = False  # a root handler that comes later would say everything twice
