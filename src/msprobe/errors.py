"""The two exception classes of the library; everything else passes through."""

from __future__ import annotations


class ConfigError(ValueError):
    """A configuration is wrong. Says file, key, value found, what is accepted and an example.

    Raised at construction of ``PrecisionDebugger`` only, never later inside a forward.
    """


class UsageError(RuntimeError):
    """A call of the public API is wrong. Says what was called, the state, and the call to make."""
