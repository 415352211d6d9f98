"""``dump_enable``: read the configuration file again when it has changed."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable

from msprobe.errors import ConfigError

from .config import DumpConfig

_logger = logging.getLogger("msprobe")
_PERIOD_S = 1.0  # at most one stat of the file in this time


class ConfigFile:
    """The file a session was configured from, if it has the key ``dump_enable``."""

    def __init__(self, config: DumpConfig, load: Callable[[], DumpConfig]) -> None:
        self._load = load
        self._path = config.source
        self.watched = config.dump_enable is not None and os.path.isfile(config.source)
        self._latest: DumpConfig | None = None  # what the changed file says, once it has changed
        self._stamp = self._look()
        self._looked = time.monotonic()

    def current(self, config: DumpConfig, *, force: bool = False) -> DumpConfig:
        """The configuration in force: ``config``, or what the changed file says.

        A file that can not be read switches collecting off, with one warning, until it is mended.
        A key that has gone keeps its last state. Constructor arguments stay in force.
        """
        now = time.monotonic()
        if not self.watched or (not force and now - self._looked < _PERIOD_S):
            return self._latest or config
        self._looked = now
        stamp = self._look()
        if stamp == self._stamp:
            return self._latest or config
        self._stamp = stamp
        self._latest = self._read(self._latest or config)
        return self._latest

    def _read(self, config: DumpConfig) -> DumpConfig:
        try:
            fresh = self._load()
        except ConfigError as error:
            _logger.warning("collecting is off until the configuration is mended: %s", error)
            return dataclasses.replace(config, dump_enable=False)
        if fresh.dump_enable is None:
            fresh = dataclasses.replace(fresh, dump_enable=config.dump_enable)
        _logger.info("%s: read again, dump_enable is %s", self._path, fresh.dump_enable)
        return fresh

    def _look(self) -> tuple[int, int] | None:
        try:
            seen = os.stat(self._path)
        except OSError:
            return None
        return seen.st_mtime_ns, seen.st_size
