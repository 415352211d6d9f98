"""From config.json and constructor arguments to one frozen, validated `DumpConfig`."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from msprobe.errors import ConfigError
from msprobe.pytorch.dump.config_file import check_dump_path, read_config
from msprobe.pytorch.dump.config_keys import (
    DEFAULTS,
    KEYS,
    SECTION_KEYS,
    TASKS,
    TOP_KEYS,
    DumpConfig,
    reference_table,
)
from msprobe.pytorch.dump.config_values import (
    SLICE_KEYS,
    Level,
    SliceRule,
    did_you_mean,
    record_kind,
    show,
)

__all__ = [
    "DumpConfig",
    "Level",
    "SliceRule",
    "check_dump_path",
    "load_config",
    "reference_table",
]

_logger = logging.getLogger("msprobe")
# Keys at any place that published configurations hold and that mean nothing here.
TOLERATED_KEYS = {
    "check_mode": "overflow_check of older versions",
    "diff_check": "the original, internal task",
    "enable_dataloader": "older versions",
    "exception_dump": "the original, MindSpore",
    "file_format": "older versions, MindSpore",
    "free_benchmark": "another tool of the same file",
    "grad_probe": "another tool of the same file",
    "is_deterministic": "older versions; now seed_all(mode=True)",
    "load": "the original, replaces module inputs",
    "run_ut": "another tool of the same file",
    "seed": "older versions; now seed_all(seed=...)",
}
TASK_LEVELS = {
    "structure": (Level.L0, Level.MIX),
    "acc_check": (Level.L1,),
    "nan_check": (Level.L1,),
    "overflow_check": (Level.L0, Level.L1, Level.MIX),
}
# level debug
_UNUSED_BY_SAVE = ("names", "scope", "data_mode", "tensor_list", "slices", "request_id")
_SCOPE_KINDS = {Level.L0: "module", Level.L1: "api"}


def load_config(
    config_path: object = None,
    *,
    task: object = None,
    dump_path: object = None,
    level: object = None,
    step: object = None,
) -> DumpConfig:
    """The configuration of a file or dict, in which arguments that are not None win.

    `config_path`: path, dict of the same shape as the JSON, or None or "" for the packaged
    `msprobe/config.json`. null stands for the default everywhere. Raises `ConfigError` for any
    bad content, existence of `dump_path` aside (`check_dump_path`); tells the logger of unknown
    keys and of keys without effect.
    Example: ``load_config({"statistics": {"list": ["relu"]}}, level="mix", step=[0, "4-6"])``.
    """
    content, source = read_config(config_path)
    given = {"task": task, "dump_path": dump_path, "level": level, "step": step}
    arguments = {name: value for name, value in given.items() if value is not None}
    top = {name: value for name, value in content.items() if name not in arguments}
    values = _parse(top, TOP_KEYS, source)
    values |= _parse(arguments, TOP_KEYS, "<arguments>", empty_string=False)
    task_name = values.get("task", DEFAULTS.task)
    section = _section(content, task_name, source)
    values |= _parse(section, SECTION_KEYS, source, prefix=f"{task_name}.")
    config = DumpConfig(**values, source=source)
    notes = _unknown_keys(content, section, config)
    config, more = _fit_level(config, "<arguments>" if level is not None else source)
    notes += more
    config, more = _drop_unused(config)
    notes += more + _advice(config)
    _check_scope(config)
    _check_modes(config)
    _check_directories(config)
    for note in notes:  # not `warnings`: training scripts often ignore those, or raise them
        _logger.warning("%s: %s", source, note)
    return config


def _error(
    source: str,
    name: str,
    value: object,
    reason: str = "",
    *,
    prefix: str = "",
    expected: str = "",
    example: str = "",
) -> ConfigError:
    key = KEYS[name]
    because = f": {reason}" if reason else ""
    shown = f'"{example}"' if example else key.example
    return ConfigError(
        f"{source}: '{prefix}{key.name}' is {show(value)}{because}."
        f' Expected {expected or key.type}. Example: "{key.name}": {shown}.'
    )


def _section(content: Mapping[Any, Any], task: str, source: str) -> Mapping[Any, Any]:
    section = content.get(task)
    if section is None:
        return {}
    if isinstance(section, Mapping):
        return section
    raise ConfigError(
        f"{source}: '{task}' is {show(section)}. Expected an object with the keys of the task."
        f' Example: "{task}": {{"list": ["relu"]}}.'
    )


def _parse(
    given: Mapping[Any, Any],
    known: Mapping[str, str],
    source: str,
    *,
    prefix: str = "",
    empty_string: bool = True,
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key_name, name in known.items():
        value = given.get(key_name)
        is_empty = isinstance(value, str) and not value
        if value is None or (is_empty and empty_string and KEYS[name].empty_string):
            continue
        try:
            values[name] = KEYS[name].parse(value)
        except ValueError as err:
            raise _error(source, name, value, str(err), prefix=prefix) from err
    return values


def _unknown_keys(
    content: Mapping[Any, Any], section: Mapping[Any, Any], config: DumpConfig
) -> list[str]:
    found = _unknown(content, [*TOP_KEYS, *TASKS], "", SECTION_KEYS, f"section '{config.task}'")
    found += _unknown(section, SECTION_KEYS, f"{config.task}.", TOP_KEYS, "top level")
    for rule in section.get("slice") or ():
        found += _unknown(rule, SLICE_KEYS, f"{config.task}.slice.", (), "")
    return [f"unknown key {', '.join(found)}: ignored"] if found else []


def _unknown(
    given: Mapping[Any, Any],
    known: Iterable[str],
    prefix: str,
    elsewhere: Iterable[str],
    place: str,
) -> list[str]:
    found = []
    for key in given:
        name = key if isinstance(key, str) else show(key)
        if name in known or name in TOLERATED_KEYS or name.startswith("_"):
            continue
        hint = f" (it belongs to the {place})" if name in elsewhere else None
        found.append(f"'{prefix}{name}'{hint or did_you_mean(name, known)}")
    return found


def _fit_level(config: DumpConfig, source: str) -> tuple[DumpConfig, list[str]]:
    levels = TASK_LEVELS.get(config.task, tuple(Level))
    if config.level in levels:
        return config, []
    expected = " or ".join(levels)
    if config.task != "structure":
        reason = f"task {config.task} does not work at this level"
        raise _error(
            source, "level", config.level.value, reason, expected=expected, example=levels[0]
        )
    note = f"task structure needs level {expected}, not {config.level}: mix is used"
    return replace(config, level=Level.MIX), [note]


def _drop_unused(config: DumpConfig) -> tuple[DumpConfig, list[str]]:
    notes, defaults = [], {}
    for name in SECTION_KEYS.values():
        if getattr(config, name) == getattr(DEFAULTS, name):
            continue
        if config.task not in KEYS[name].tasks:
            cause = f"task {config.task}"
        elif config.level is Level.DEBUG and name in _UNUSED_BY_SAVE:
            cause = "level debug"
        else:
            continue
        defaults[name] = getattr(DEFAULTS, name)
        notes.append(f"'{KEYS[name].name}' has no effect with {cause}: ignored")
    return replace(config, **defaults), notes


def _advice(config: DumpConfig) -> list[str]:
    notes = []
    saves_all = config.task == "tensor" and config.level is not Level.DEBUG and not config.names
    if config.async_dump and saves_all:
        notes.append(
            "'async_dump' with task tensor and an empty 'list' keeps up to 512 MB of copies in"
            " memory, and training waits beyond; name what you need in 'list'"
        )
    for rule in config.slices:
        end = rule.end
        if end is not None and (rule.begin < 0) == (end < 0) and rule.begin >= end:
            notes.append(f"'slice' from {rule.begin} to {end} selects nothing")
    return notes


def _check_scope(config: DumpConfig) -> None:
    wanted = _SCOPE_KINDS.get(config.level)
    for name in config.scope:
        if wanted and record_kind(name) != wanted:
            kind = "a module" if wanted == "module" else "an API"
            reason = f"{show(name)} is not the name of {kind}, as level {config.level} needs"
            prefix = f"{config.task}."
            raise _error(config.source, "scope", list(config.scope), reason, prefix=prefix)


def _check_modes(config: DumpConfig) -> None:
    if config.task == "nan_check" and "output" not in config.data_mode:
        reason = "nan_check looks at outputs"
        found = sorted(config.data_mode)
        raise _error(config.source, "data_mode", found, reason, prefix="nan_check.")


def _check_directories(config: DumpConfig) -> None:
    if config.bench_path is not None and config.summary_mode != "md5":
        reason = f"it needs summary_mode md5, not {config.summary_mode}"
        raise _error(config.source, "bench_path", config.bench_path, reason, prefix="tensor.")
    for name in ("bench_path", "error_data_path"):
        value = getattr(config, name)
        if value != getattr(DEFAULTS, name) and not os.path.isdir(value):
            reason = "there is no such directory"
            raise _error(config.source, name, value, reason, prefix=f"{config.task}.")
