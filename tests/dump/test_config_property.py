"""Whatever a configuration holds, it loads or raises ConfigError that names the key."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msprobe.errors import ConfigError
from msprobe.pytorch.dump.config import DumpConfig, Level, SliceRule, load_config
from msprobe.pytorch.dump.config_keys import KEYS, TASKS

TOP = sorted(key.name for key in KEYS.values() if not key.tasks)
SECTION = sorted(key.name for key in KEYS.values() if key.tasks)


class Hostile:
    """No equality, no truth value, no hash, as some array types."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no equality")

    def __bool__(self) -> bool:
        raise RuntimeError("no truth value")

    __hash__ = None  # type: ignore[assignment]


def odd_value(kind: str) -> object:
    """What no JSON file, but a dict may hold; made late, because hypothesis prints its elements."""
    loop: list[object] = []
    loop.append(loop)
    return {
        "int": 10**5000,
        "bytes": b"x",
        "object": object(),
        "hostile": Hostile(),
        "set": {1},
        "path": Path("p"),
        "loop": loop,
    }[kind]


words = st.sampled_from(
    [
        *(*TASKS, *(level.value for level in Level), "L2", "all", "forward", "input", "md5", "xor"),
        *("low", "HIGH", "CORE", "3", "4-6", "6-4", " 1 - 2", "-1", "name-regex(a|b)", "", "."),
        *("name-regex((", "Module.fc.Linear.forward.0", "Functional.relu.0.backward", "~", "~x/y"),
        "\ud800",
    ]
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | words
    | st.sampled_from(["int", "bytes", "object", "hostile", "set", "path", "loop"]).map(odd_value)
)
rules = st.dictionaries(
    st.sampled_from(["dim", "size", "begin", "end", "foo"]), scalars, max_size=3
)
values = st.recursive(
    scalars | rules,
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3),
    max_leaves=5,
)
plausible = {
    "task": st.sampled_from(TASKS),
    "level": st.sampled_from([level.value for level in Level]),
    "step": st.lists(st.integers(0, 9) | st.sampled_from(["3", "4-6"]), max_size=3),
    "data_mode": st.lists(st.sampled_from(["forward", "backward", "input", "output"]), max_size=3),
    "slice": st.lists(rules, max_size=2),
}


def entries(names: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    """Dicts with some of the keys `names`, and some that are misspelt or foreign."""
    pairs = st.sampled_from(names).flatmap(
        lambda name: st.tuples(st.just(name), plausible.get(name, values) | values)
    )
    foreign = st.tuples(st.sampled_from(["leve", "seed", "_comment", "file_format"]), values)
    return st.lists(pairs | foreign, max_size=4).map(dict)


def load_or_error(config: object, **arguments: object) -> DumpConfig | str:
    """The configuration, or the text of its ConfigError; any other exception is a failure."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return load_config(config, **arguments)  # type: ignore[arg-type]
        except ConfigError as err:
            return str(err)


def assert_valid(config: DumpConfig) -> None:
    assert config.task in TASKS
    assert isinstance(config.level, Level)
    assert all(type(n) is int and 0 <= n <= 1_000_000 for n in config.rank | config.step)
    assert config.data_mode & {"forward", "backward"}
    assert config.data_mode & {"input", "output"}
    assert len(config.scope) in (0, 2)
    assert all(isinstance(rule, SliceRule) for rule in config.slices)
    assert type(config.async_dump) is type(config.extra_info) is bool
    assert isinstance(config.dump_path, str)
    assert config.dump_path
    hash(config)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(TOP), values)
def test_one_top_level_key_loads_or_is_named(key: str, value: object) -> None:
    result = load_or_error({key: value})
    if isinstance(result, DumpConfig):
        assert_valid(result)
    else:
        assert f"'{key}' is " in result
        assert "Expected " in result


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(TASKS), st.sampled_from(SECTION), values)
def test_one_section_key_loads_or_is_named(task: str, key: str, value: object) -> None:
    result = load_or_error({"task": task, task: {key: value}})
    if isinstance(result, DumpConfig):
        assert_valid(result)
    else:
        assert f"'{task}.{key}' is " in result
        assert "Expected " in result


@settings(max_examples=200, deadline=None)
@given(
    entries(TOP),
    st.dictionaries(st.sampled_from(TASKS), entries(SECTION) | values, max_size=2),
    st.fixed_dictionaries({}, optional={"task": values, "level": values, "step": values}),
)
def test_whole_config_loads_or_names_one_of_its_keys(
    top: dict[str, Any], sections: dict[str, Any], arguments: dict[str, Any]
) -> None:
    result = load_or_error({**top, **sections}, **arguments)
    if isinstance(result, DumpConfig):
        assert_valid(result)
        return
    named = [*top, *arguments, *sections]
    for task, section in sections.items():
        named += [f"{task}.{key}" for key in section] if isinstance(section, dict) else []
    assert any(f"'{key}' is " in result for key in named)
    assert result.startswith(("<dict>: ", "<arguments>: "))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | words.filter(str.isascii),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config") / "config.json"


@settings(max_examples=150, deadline=None)
@given(content=st.binary(max_size=40) | json_values.map(lambda value: json.dumps(value).encode()))
def test_any_file_loads_or_is_named(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    result = load_or_error(file)
    if isinstance(result, DumpConfig):
        assert_valid(result)
    else:
        assert result.startswith(f"{file}: ")
