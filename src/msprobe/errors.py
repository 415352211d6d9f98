"""The two exception classes of the library, and its warnings about the user's own lines."""

from __future__ import annotations

import os
import sys
import warnings

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


class ConfigError(ValueError):
    """A configuration is wrong. Says file, key, value found, what is accepted and an example.

    Raised at construction of ``PrecisionDebugger`` only, never later inside a forward.
    """


class UsageError(RuntimeError):
    """A call of the public API is wrong. Says what was called, the state, and the call to make."""


def warn_user(message: str) -> None:
    """A warning that names the line of the user's that led here, however deep we are."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
