"""Every key of config.json, once: `DumpConfig`, whose fields carry their own documentation."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import Any

from msprobe.pytorch.dump import config_values as values
from msprobe.pytorch.dump.config_values import DATA_MODES, MAX_INDEX, Level, Parser, SliceRule

TASKS = ("statistics", "tensor", "structure", "acc_check", "overflow_check", "nan_check")


@dataclass(frozen=True, slots=True)
class Key:
    """How one key is read and documented; `example` is JSON text."""

    name: str
    parse: Parser
    type: str
    meaning: str
    example: str
    tasks: tuple[str, ...] = ()  # empty: a top-level key; else the tasks that use it
    shown_default: str = ""  # where it is not simply the field's default as JSON
    empty_string: bool = True  # whether "" in a file means the default, as null does


def _key(*description: Any, **more: Any) -> dict[str, Key]:
    return {"key": Key(*description, **more)}


def _choice(*choices: str) -> tuple[Parser, str]:
    return values.one_of(*choices), "one of " + ", ".join(choices)


_BOOLEAN = (values.of_type(bool), "true or false")
_STRING = (values.of_type(str), "a string")
_PATH = (values.path, "a path (string or os.PathLike)")
_DIRECTORY = (values.path, "an existing directory")
_STRINGS = (values.texts, "a list of strings")
_PATTERNS = (values.patterns, "a list of strings, of which name-regex(...) holds a valid regex")
_NUMBERS = (values.numbers, f'a list of integers and ranges "first-last", 0 to {MAX_INDEX}')
_COUNT = (values.count, "an integer, -1 or at least 1")
_LEVEL = (values.level, "one of " + ", ".join(Level))
_SCOPE = (
    values.scope,
    "an empty list or exactly two complete record names: Prefix.api.N.forward (or .backward) for"
    " an API, Module.name.Class.forward.N (or .backward.N) for a module",
)
_MODES = (values.data_mode, '["all"], or a list of ' + ", ".join(sorted(DATA_MODES)))
_SLICES = (
    values.slices,
    "a list of objects with the integers dim (at least 0), size (at least 0), begin, end",
)
_MEASURING = ("statistics", "tensor")


@dataclass(frozen=True, slots=True)
class DumpConfig:
    """A complete, valid configuration; made by `load_config`, changed by `dataclasses.replace`."""

    task: str = field(default="statistics", metadata=_key(
        "task", *_choice(*TASKS),
        "What is recorded; names the section that is read.", '"tensor"',
    ))
    level: Level = field(default=Level.L1, metadata=_key(
        "level", *_LEVEL,
        "Modules (L0), APIs (L1), both (mix), or only what `save` is given (debug).", '"mix"',
    ))
    dump_path: str = field(default="./dump_path", metadata=_key(
        "dump_path", *_PATH,
        "Directory of the results, created if missing. `~` is expanded.", '"./my_dump"',
        empty_string=False,
    ))
    rank: frozenset[int] = field(default=frozenset(), metadata=_key(
        "rank", *_NUMBERS,
        "Ranks that record; empty: all. Ranges include both ends.", '[0, "4-6"]',
    ))
    step: frozenset[int] = field(default=frozenset(), metadata=_key(
        "step", *_NUMBERS,
        "Steps that are recorded; empty: all. Ranges include both ends.", '[0, "100-102"]',
    ))
    async_dump: bool = field(default=False, metadata=_key(
        "async_dump", *_BOOLEAN,
        "Let 512 MB of tensors wait to be written instead of 64 MB.", "true",
    ))
    extra_info: bool = field(default=True, metadata=_key(
        "extra_info", *_BOOLEAN, "Write stack.json and construct.json.", "false",
    ))
    dump_enable: bool | None = field(default=None, metadata=_key(
        "dump_enable", *_BOOLEAN,
        "If present, a changed file is read again at the next step, at most once a second, and"
        " this key switches collecting on and off; absent: always on.",
        "true", shown_default="absent",
    ))
    precision: str = field(default="low", metadata=_key(
        "precision", *_choice("low", "high"),
        "Statistics in the dtype of the tensor (low) or in float32, float64 for float64 (high).",
        '"high"', empty_string=False,
    ))
    risk_level: str = field(default="ALL", metadata=_key(
        "risk_level", *_choice("ALL", "CORE", "FOCUS"),
        "Which APIs are recorded when neither `scope` nor `list` is given: all, or only those"
        " with more risk for precision.", '"FOCUS"',
    ))
    custom_op_namespaces: tuple[str, ...] = field(default=("_C_ascend",), metadata=_key(
        "custom_op_namespaces", *_STRINGS,
        "Namespaces of torch.ops whose operators are recorded.", '["_C_ascend", "my_ops"]',
    ))
    scope: tuple[str, ...] = field(default=(), metadata=_key(
        "scope", *_SCOPE,
        "Record from the first to the second of two records, both included: modules at L0, APIs"
        " at L1, either at mix.", '["Module.conv1.Conv2d.forward.0", "Module.fc.Linear.forward.0"]',
        tasks=TASKS,
    ))
    names: tuple[str, ...] = field(default=(), metadata=_key(
        "list", *_PATTERNS,
        "Record only names that contain one of these (case-sensitive), or match a"
        " `name-regex(...)`; at mix also what runs inside a matching module.",
        r'["relu", "name-regex(linear\\.[0-3]\\.)"]', tasks=TASKS,
    ))
    tensor_list: tuple[str, ...] = field(default=(), metadata=_key(
        "tensor_list", *_PATTERNS,
        "Records whose tensors are saved as .pt files too.", '["Functional.relu"]',
        tasks=("statistics",),
    ))
    data_mode: frozenset[str] = field(default=DATA_MODES, metadata=_key(
        "data_mode", *_MODES,
        "Which halves are recorded; no direction means both, no side means both.",
        '["forward", "output"]', tasks=TASKS, shown_default='["all"]',
    ))
    summary_mode: str = field(default="statistics", metadata=_key(
        "summary_mode", *_choice("statistics", "md5", "xor"),
        "What is recorded of a tensor: max, min, mean and norm; those and a CRC-32 (md5); or an"
        " XOR checksum alone.", '"md5"', tasks=_MEASURING,
    ))
    slices: tuple[SliceRule, ...] = field(default=(), metadata=_key(
        "slice", *_SLICES,
        "Parts of tensors to record, each rule applied to the result of the one before; skipped"
        " where the dimension does not exist or has another size.",
        '[{"dim": 0, "begin": 0, "end": 2}]', tasks=_MEASURING,
    ))
    request_id: str | None = field(default=None, metadata=_key(
        "request_id", *_STRING,
        "Record only the tokens of this request, located by `start(scheduled_tokens=...)`.",
        '"req-7"', tasks=_MEASURING, shown_default="none",
    ))
    bench_path: str | None = field(default=None, metadata=_key(
        "bench_path", *_DIRECTORY,
        "An earlier md5 dump to compare with while running; needs `summary_mode` md5.",
        '"./earlier_dump"', tasks=("tensor",), shown_default="none",
    ))
    diff_nums: int = field(default=1, metadata=_key(
        "diff_nums", *_COUNT,
        "With `bench_path`: stop after so many differing calls; -1: never.", "3",
        tasks=_MEASURING,
    ))
    white_list: tuple[str, ...] = field(default=(), metadata=_key(
        "white_list", *_STRINGS, "APIs to check; empty: all.", '["conv2d"]',
        tasks=("acc_check",),
    ))
    black_list: tuple[str, ...] = field(default=(), metadata=_key(
        "black_list", *_STRINGS, "APIs not to check.", '["dropout"]',
        tasks=("acc_check",),
    ))
    error_data_path: str = field(default="./", metadata=_key(
        "error_data_path", *_DIRECTORY, "Where data of failing checks goes.",
        '"./"', tasks=("acc_check",),
    ))
    overflow_nums: int = field(default=1, metadata=_key(
        "overflow_nums", *_COUNT,
        "Stop after so many calls that gave NaN or infinity; -1: never.", "5",
        tasks=("overflow_check",),
    ))
    source: str = field(default="<arguments>", compare=False)  # the file, for messages


KEYS: dict[str, Key] = {f.name: f.metadata["key"] for f in fields(DumpConfig) if f.metadata}
DEFAULTS = DumpConfig()
TOP_KEYS = {key.name: name for name, key in KEYS.items() if not key.tasks}
SECTION_KEYS = {key.name: name for name, key in KEYS.items() if key.tasks}

_FILTERS = ("names", "scope", "data_mode", "risk_level", "white_list", "black_list", "bench_path")


def filters_in(config: DumpConfig) -> list[str]:
    """Keys of the configuration that leave calls of a recorded step out of dump.json."""
    changed = [n for n in _FILTERS if getattr(config, n) != getattr(DEFAULTS, n)]
    return [KEYS[name].name for name in changed]


def reference_table() -> str:
    """The two Markdown tables of docs/config.md: top-level keys, keys of the task section."""
    top = [_row(name, KEYS[name]) for name in TOP_KEYS.values()]
    section = [f"{_row(name, KEYS[name])} {_tasks(KEYS[name])} |" for name in SECTION_KEYS.values()]
    head = "| key | type | default | meaning | example |"
    rule = "|---|---|---|---|---|"
    lines = ["### Top level", "", head, rule, *top, ""]
    lines += ["### Section of the task", "", f"{head} tasks |", f"{rule}---|", *section]
    return "\n".join(lines) + "\n"


def _row(name: str, key: Key) -> str:
    default = key.shown_default or _json(getattr(DEFAULTS, name))
    cells = (f"`{key.name}`", key.type, f"`{default}`", key.meaning, f"`{key.example}`")
    return f"| {' | '.join(cells)} |"


def _json(value: object) -> str:
    return json.dumps(sorted(value) if isinstance(value, frozenset) else value)


def _tasks(key: Key) -> str:
    return "all" if key.tasks == TASKS else ", ".join(key.tasks)
