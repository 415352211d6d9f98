"""Each row of the configuration's table of cases: value in, value, warning or error text out."""

from __future__ import annotations

import codecs
import json
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from msprobe.errors import ConfigError
from msprobe.pytorch.dump.config import (
    DumpConfig,
    Level,
    SliceRule,
    check_dump_path,
    load_config,
    reference_table,
)
from msprobe.pytorch.dump.config_keys import KEYS, TASKS

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "configs").glob("*.json"))
ALL_MODES = frozenset({"forward", "backward", "input", "output"})
MODULES = ["Module.act.ReLU.forward.0", "Module.fc2.Linear.backward.0"]
APIS = ["Functional.relu.0.forward", "Tensor.pow.0.backward"]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """For the tests in which a warning is expected."""
    return caplog


@pytest.fixture(autouse=True)
def _no_unexpected_warning(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    assert "log" in request.fixturenames or not caplog.get_records("call")


def in_section(key: str, value: object, task: str = "statistics", **top: object) -> dict:
    return {"task": task, task: {key: value}, **top}


def error_of(config: object, **arguments: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(config, **arguments)
    return str(caught.value)


# ---- defaults and precedence


@pytest.mark.parametrize("config_path", [None, ""], ids=["none", "empty"])
def test_no_path_loads_the_packaged_file_which_holds_the_defaults(config_path: object) -> None:
    config = load_config(config_path)
    assert config == DumpConfig()
    assert config.source.endswith(os.path.join("msprobe", "config.json"))


def test_defaults_are_those_of_the_design_document() -> None:
    config = load_config({})
    assert (config.task, config.level, config.dump_path) == ("statistics", Level.L1, "./dump_path")
    assert (config.rank, config.step) == (frozenset(), frozenset())
    assert (config.async_dump, config.extra_info, config.dump_enable) == (False, True, None)
    assert (config.risk_level, config.precision) == ("ALL", "low")
    assert config.data_mode == ALL_MODES
    assert config.source == "<dict>"


def test_arguments_beat_the_file_and_choose_its_section() -> None:
    content = {
        "task": "statistics",
        "level": "bad",  # never looked at
        "statistics": {"list": ["a"]},
        "tensor": {"list": ["b"]},
    }
    config = load_config(content, task="tensor", level="mix", dump_path="x", step=[1, "3-4"])
    assert (config.task, config.level, config.dump_path) == ("tensor", Level.MIX, "x")
    assert config.names == ("b",)
    assert config.step == {1, 3, 4}


def test_a_pathlib_path_and_a_str_load_the_same(tmp_path: Path) -> None:
    file = tmp_path / "a config.json"
    file.write_text('{"level": "L0"}')
    assert load_config(file) == load_config(str(file)) == load_config({"level": "L0"})
    assert load_config(file).source == str(file)


def test_config_is_frozen_hashable_and_compares_without_its_source() -> None:
    config = load_config({})
    with pytest.raises(FrozenInstanceError):
        config.task = "tensor"  # type: ignore[misc]
    assert hash(config) == hash(replace(config, source="elsewhere"))
    assert config == replace(config, source="elsewhere")


def test_level_prints_as_its_value() -> None:
    """vllm-ascend reads str(debugger.config.level).upper()."""
    assert [str(level) for level in Level] == ["L0", "L1", "mix", "debug"]
    assert f"{Level.MIX}".upper() == "MIX"


@pytest.mark.parametrize("key", [key.name for key in KEYS.values() if not key.tasks])
def test_null_means_the_default_at_the_top(key: str) -> None:
    assert load_config({key: None}) == DumpConfig()


@pytest.mark.parametrize("key", [key.name for key in KEYS.values() if key.tasks])
@pytest.mark.parametrize("task", ["statistics", "overflow_check"])
def test_null_means_the_default_in_a_section(key: str, task: str) -> None:
    assert load_config(in_section(key, None, task)) == DumpConfig(task=task)


@pytest.mark.parametrize("key", ["task", "level", "risk_level"])
def test_empty_string_in_a_file_means_the_default(key: str) -> None:
    assert load_config({key: ""}) == DumpConfig()


@pytest.mark.parametrize("task", TASKS)
def test_a_missing_or_null_section_is_empty(task: str) -> None:
    level = "mix" if task == "structure" else "L1"
    assert load_config({"task": task, "level": level}) == load_config(
        {"task": task, "level": level, task: None}
    )


# ---- good values


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([0], {0}),
        (["0"], {0}),
        (["1-3"], {1, 2, 3}),
        (["1-1"], {1}),
        ([" 1 "], {1}),
        (["1 - 3"], {1, 2, 3}),
        ([0, 0, "0-1"], {0, 1}),
        ([1_000_000], {1_000_000}),
        (["0001000000"], {1_000_000}),
        ((), set()),
        (range(2), {0, 1}),
    ],
    ids=str,
)
@pytest.mark.parametrize("key", ["rank", "step"])
def test_rank_and_step_accept(key: str, value: object, expected: set[int]) -> None:
    assert getattr(load_config({key: value}), key) == frozenset(expected)


@pytest.mark.parametrize(
    ("key", "value", "field", "expected"),
    [
        ("scope", [], "scope", ()),
        ("list", [""], "names", ("",)),
        ("list", ["a", "b"], "names", ("a", "b")),
        ("list", ["name-regex(a.*[0-9])"], "names", ("name-regex(a.*[0-9])",)),
        ("tensor_list", ["a"], "tensor_list", ("a",)),
        ("data_mode", [], "data_mode", ALL_MODES),
        ("data_mode", ["all"], "data_mode", ALL_MODES),
        ("data_mode", ["forward"], "data_mode", {"forward", "input", "output"}),
        ("data_mode", ["forward", "forward"], "data_mode", {"forward", "input", "output"}),
        ("data_mode", ["input"], "data_mode", {"forward", "backward", "input"}),
        ("data_mode", ["backward", "output"], "data_mode", {"backward", "output"}),
        ("data_mode", ["forward", "backward"], "data_mode", ALL_MODES),
        ("data_mode", sorted(ALL_MODES), "data_mode", ALL_MODES),
        ("summary_mode", "", "summary_mode", "statistics"),
        ("summary_mode", "md5", "summary_mode", "md5"),
        ("summary_mode", "xor", "summary_mode", "xor"),
        ("slice", {}, "slices", ()),
        ("slice", [{}], "slices", (SliceRule(0, None, 0, None),)),
        ("slice", [{"dim": 9}], "slices", (SliceRule(dim=9),)),
        ("slice", [{"begin": None, "size": 8}], "slices", (SliceRule(size=8),)),
        ("slice", [{"dim": 1, "begin": -3}], "slices", (SliceRule(1, None, -3, None),)),
        ("slice", [{"begin": 0, "end": 2}, {}], "slices", (SliceRule(end=2), SliceRule())),
        ("request_id", "", "request_id", None),
        ("request_id", "r1", "request_id", "r1"),
        ("diff_nums", -1, "diff_nums", -1),
        ("diff_nums", 7, "diff_nums", 7),
    ],
)
def test_section_accepts(key: str, value: object, field: str, expected: object) -> None:
    assert getattr(load_config(in_section(key, value)), field) == expected


@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_scope_of_two_complete_names_is_accepted_at_its_level(level: str) -> None:
    names = MODULES if level == "L0" else APIS
    config = load_config(in_section("scope", names, level=level))
    assert config.scope == tuple(names)


@pytest.mark.parametrize(("task", "example"), [("nan_check", "L1"), ("overflow_check", "L0")])
def test_example_in_the_error_of_a_level_is_one_that_works(task: str, example: str) -> None:
    wrong = {"task": task, "level": "mix" if task == "nan_check" else "debug"}
    with pytest.raises(ConfigError, match=f'Example: "level": "{example}"'):
        load_config(wrong)
    load_config({**wrong, "level": example})


def test_scope_at_mix_may_go_from_a_module_to_an_api() -> None:
    names = [MODULES[0], APIS[1]]
    assert load_config(in_section("scope", names, level="mix")).scope == tuple(names)


def test_bench_path_is_accepted_with_md5_and_a_directory(tmp_path: Path) -> None:
    section = {"summary_mode": "md5", "bench_path": str(tmp_path), "diff_nums": 2}
    config = load_config({"task": "tensor", "tensor": section})
    assert (config.bench_path, config.diff_nums) == (str(tmp_path), 2)


def test_acc_check_and_overflow_check_read_their_keys() -> None:
    lists = {"white_list": ["linear"], "black_list": ["relu"], "error_data_path": "./"}
    config = load_config({"task": "acc_check", "acc_check": lists})
    assert (config.white_list, config.black_list) == (("linear",), ("relu",))
    assert load_config(in_section("overflow_nums", -1, "overflow_check")).overflow_nums == -1


@pytest.mark.parametrize("value", [True, False], ids=str)
def test_dump_enable_holds_what_the_file_says(value: bool) -> None:
    assert load_config({"dump_enable": value}).dump_enable is value


def test_dump_path_expands_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert load_config({"dump_path": "~/d"}).dump_path == "/home/somebody/d"
    assert load_config({"dump_path": Path("a b;c|d")}).dump_path == "a b;c|d"


@pytest.mark.parametrize("summary_mode", ["md5", "xor"])
def test_async_dump_works_with_checksums(summary_mode: str) -> None:
    config = load_config(in_section("summary_mode", summary_mode, async_dump=True))
    assert config.async_dump
    assert config.summary_mode == summary_mode


# ---- bad values


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("task", "bad", "unknown"),
        ("task", 5, "not a string"),
        ("task", "STATISTICS", "did you mean 'statistics'?"),
        ("task", ["statistics"], "not a string"),
        ("task", "exception_dump", "unknown"),
        ("level", 1, "not a string"),
        ("level", "L3", "unknown"),
        ("level", "l1", "did you mean 'L1'?"),
        ("level", ["L1"], "not a string"),
        ("level", "L2", "needs Ascend's own stack"),
        ("dump_path", 5, "not a path"),
        ("dump_path", "", "empty"),
        ("dump_path", ["a"], "not a path"),
        ("dump_path", "a\0b", "NUL"),
        ("async_dump", "true", ""),
        ("async_dump", 1, ""),
        ("extra_info", 0, ""),
        ("extra_info", [], ""),
        ("dump_enable", "False", ""),
        ("dump_enable", 1, ""),
        ("precision", "HIGH", "did you mean 'high'?"),
        ("precision", "mid", "unknown"),
        ("precision", 1, "not a string"),
        ("precision", "", "unknown"),
        ("risk_level", "core", "did you mean 'CORE'?"),
        ("risk_level", "LOW", "unknown"),
        ("risk_level", 1, "not a string"),
        ("custom_op_namespaces", "_C_ascend", "not a list"),
        ("custom_op_namespaces", [1], "element 1 is not a string"),
    ],
)
def test_bad_top_level_value_is_refused(key: str, value: object, reason: str) -> None:
    text = error_of({key: value})
    assert text.startswith(f"<dict>: '{key}' is {value!r}")
    assert reason in text
    assert f"Expected {KEYS[key].type}" in text
    assert f'Example: "{key}": ' in text


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (5, "not a list"),
        ("0", "not a list"),
        ({}, "not a list"),
        (["3-1"], "range '3-1' begins after its end"),
        ([-1], "element -1 is outside 0 to 1000000"),
        (["-1"], "element '-1' is neither an integer nor a range"),
        ([1.5], "element 1.5 is neither"),
        ([True], "element True is neither"),
        (["a"], "element 'a' is neither"),
        (["1-"], "element '1-' is neither"),
        (["1,2"], "element '1,2' is neither"),
        ([None], "element None is neither"),
        ([[1]], "element [1] is neither"),
        ([1 << 40], f"element {1 << 40} is outside"),
        (["0-100000000"], "element '0-100000000' is outside"),
        (["²"], "element '²' is neither"),
    ],
    ids=str,
)
@pytest.mark.parametrize("key", ["rank", "step"])
def test_bad_rank_and_step_are_refused(key: str, value: object, reason: str) -> None:
    text = error_of({key: value})
    assert text.startswith(f"<dict>: '{key}' is {value!r}: {reason}")
    assert 'Expected a list of integers and ranges "first-last", 0 to 1000000' in text


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("scope", "relu", "not a list"),
        ("scope", 5, "not a list"),
        ("scope", {}, "not a list"),
        ("scope", [5], "element 5 is not a string"),
        ("scope", [""], "it has 1 element."),
        ("scope", ["a", "b", "c"], "it has 3 elements."),
        ("scope", ["a", "b"], "'a' is not a complete record name"),
        ("scope", [APIS[0], "Functional.relu"], "'Functional.relu' is not a complete record name"),
        ("scope", [APIS[0], MODULES[0]], "is not the name of an API, as level L1 needs"),
        ("list", "relu", "not a list"),
        ("list", 5, "not a list"),
        ("list", {}, "not a list"),
        ("list", [5], "element 5 is not a string"),
        ("list", ["name-regex(a[)"], "is not a valid regular expression"),
        ("list", ["name-regex(a"], "lacks the closing bracket"),
        ("tensor_list", "relu", "not a list"),
        ("tensor_list", [5], "element 5 is not a string"),
        ("data_mode", "forward", "not a list"),
        ("data_mode", 5, "not a list"),
        ("data_mode", {}, "not a list"),
        ("data_mode", [5], "element 5 is not a string"),
        ("data_mode", [""], "element '' is unknown"),
        ("data_mode", ["forwrd"], "did you mean 'forward'?"),
        ("data_mode", ["FORWARD"], "did you mean 'forward'?"),
        ("data_mode", ["forward", "all"], "'all' cannot be combined"),
        ("data_mode", ["all", "all"], "'all' cannot be combined"),
        ("summary_mode", "MD5", "did you mean 'md5'?"),
        ("summary_mode", "sha", "unknown"),
        ("summary_mode", 5, "not a string"),
        ("summary_mode", ["md5"], "not a string"),
        ("slice", "x", "not a list"),
        ("slice", {"dim": 0}, "not a list"),
        ("slice", [1], "element 1 is not an object"),
        ("slice", [{"dim": -1}], "dim -1 is negative"),
        ("slice", [{"dim": "0"}], "dim '0' is not an integer"),
        ("slice", [{"dim": True}], "dim True is not an integer"),
        ("slice", [{"size": -1}], "size -1 is negative"),
        ("slice", [{"begin": 1.5}], "begin 1.5 is not an integer"),
        ("slice", [{"end": 1 << 70}], "is not an integer of 64 bits"),
        ("request_id", 5, ""),
        ("request_id", ["a"], ""),
        ("bench_path", 5, "not a path"),
        ("diff_nums", 0, ""),
        ("diff_nums", -2, ""),
        ("diff_nums", 1.5, ""),
        ("diff_nums", "3", ""),
        ("diff_nums", True, ""),
        ("overflow_nums", 0, ""),
        ("overflow_nums", True, ""),
        ("white_list", "relu", "not a list"),
        ("black_list", [None], "element None is not a string"),
        ("error_data_path", 5, "not a path"),
    ],
)
def test_bad_section_value_is_refused(key: str, value: object, reason: str) -> None:
    text = error_of(in_section(key, value))
    assert text.startswith(f"<dict>: 'statistics.{key}' is ")
    assert reason in text
    assert "Expected " in text
    assert f'Example: "{key}": ' in text


@pytest.mark.parametrize("value", [5, [], "x", True], ids=str)
def test_a_section_that_is_no_object_is_refused(value: object) -> None:
    text = error_of({"statistics": value})
    assert text.startswith(f"<dict>: 'statistics' is {value!r}. Expected an object")


@pytest.mark.parametrize("key", [key.name for key in KEYS.values() if not key.tasks])
def test_a_value_without_repr_or_equality_is_refused(key: str) -> None:
    class Hostile:
        def __repr__(self) -> str:
            raise RuntimeError("no repr")

        def __eq__(self, other: object) -> bool:
            raise RuntimeError("no equality")

    assert f"'{key}' is <Hostile instance at" in error_of({key: Hostile()})


def test_scope_at_l0_must_name_modules() -> None:
    text = error_of(in_section("scope", APIS, level="L0"))
    assert f"{APIS[0]!r} is not the name of a module, as level L0 needs" in text


@pytest.mark.parametrize("task", ["acc_check", "nan_check"])
@pytest.mark.parametrize("level", ["L0", "mix", "debug"])
def test_tasks_of_level_l1_refuse_other_levels(task: str, level: str) -> None:
    text = error_of({"task": task, "level": level})
    assert text.startswith(f"<dict>: 'level' is '{level}': task {task} does not work")
    assert "Expected L1." in text
    assert error_of({"task": task}, level=level).startswith("<arguments>: 'level' is")


def test_overflow_check_refuses_level_debug() -> None:
    assert "Expected L0 or L1 or mix." in error_of({"task": "overflow_check", "level": "debug"})


def test_nan_check_needs_outputs() -> None:
    text = error_of(in_section("data_mode", ["input"], "nan_check"))
    assert text.startswith("<dict>: 'nan_check.data_mode' is ")
    assert "nan_check looks at outputs" in text


def test_bench_path_needs_md5_and_an_existing_directory(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    section = {"bench_path": str(tmp_path)}
    text = error_of({"task": "tensor", "tensor": section})
    assert text.startswith(f"<dict>: 'tensor.bench_path' is {str(tmp_path)!r}")
    assert "it needs summary_mode md5, not statistics" in text
    section = {"bench_path": missing, "summary_mode": "md5"}
    assert "there is no such directory" in error_of({"task": "tensor", "tensor": section})


def test_error_data_path_must_be_a_directory(tmp_path: Path) -> None:
    text = error_of(in_section("error_data_path", str(tmp_path / "no"), "acc_check"))
    assert "'acc_check.error_data_path'" in text
    assert "there is no such directory" in text


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("task", "bad"),
        ("task", 5),
        ("task", ""),
        ("level", "bad"),
        ("level", 5),
        ("level", ""),
        ("level", "L2"),
        ("dump_path", 5),
        ("dump_path", ""),
        ("step", 5),
        ("step", ["a"]),
        ("step", [-1]),
    ],
)
def test_bad_argument_gets_the_text_of_the_file(argument: str, value: object) -> None:
    text = error_of({}, **{argument: value})
    assert text.startswith(f"<arguments>: '{argument}' is {value!r}")
    assert f"Expected {KEYS[argument].type}" in text


# ---- warnings


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        ({"leve": "L0"}, "'leve' (did you mean 'level'?)"),
        ({"Task": "tensor"}, "'Task' (did you mean 'task'?)"),
        ({"statistic": {}}, "'statistic' (did you mean 'statistics'?)"),
        ({"zzz": 1}, "'zzz'"),
        ({7: 1}, "'7'"),
        ({"list": ["relu"]}, "'list' (it belongs to the section 'statistics')"),
        (in_section("lst", []), "'statistics.lst' (did you mean 'list'?)"),
        (in_section("level", "L0"), "'statistics.level' (it belongs to the top level)"),
        (in_section("slice", [{"foo": 1}]), "'statistics.slice.foo'"),
    ],
    ids=str,
)
def test_unknown_key_warns_with_the_nearest(
    content: dict, fragment: str, log: pytest.LogCaptureFixture
) -> None:
    load_config(content)
    assert log.messages == [f"<dict>: unknown key {fragment}: ignored"]


def test_several_unknown_keys_give_one_warning(log: pytest.LogCaptureFixture) -> None:
    load_config({"leve": 1, "stp": 2})
    assert re.findall(r"'leve'.*'stp'.*: ignored", *log.messages)


@pytest.mark.parametrize("level", ["L1", "debug"])
def test_structure_at_another_level_warns_and_becomes_mix(
    level: str, log: pytest.LogCaptureFixture
) -> None:
    config = load_config({"task": "structure", "level": level})
    assert f"needs level L0 or mix, not {level}: mix is used" in log.text
    assert config.level is Level.MIX


@pytest.mark.parametrize("level", ["L0", "mix"])
def test_structure_keeps_its_own_levels(level: str) -> None:
    assert load_config({}, task="structure", level=level).level.value == level


@pytest.mark.parametrize(
    ("content", "field", "fragment"),
    [
        (in_section("tensor_list", ["a"], level="debug"), "tensor_list", "level debug"),
        (in_section("list", ["a"], level="debug"), "names", "level debug"),
        (in_section("scope", APIS, level="debug"), "scope", "level debug"),
        (in_section("data_mode", ["forward"], level="debug"), "data_mode", "level debug"),
        (in_section("slice", [{}], level="debug"), "slices", "level debug"),
        (in_section("slice", [{}], "structure", level="mix"), "slices", "task structure"),
        (in_section("tensor_list", ["a"], "tensor"), "tensor_list", "task tensor"),
        (in_section("bench_path", "/nope"), "bench_path", "task statistics"),
        (in_section("summary_mode", "md5", "nan_check"), "summary_mode", "task nan_check"),
        (in_section("overflow_nums", 4), "overflow_nums", "task statistics"),
    ],
    ids=str,
)
def test_key_without_effect_warns_and_is_ignored(
    content: dict, field: str, fragment: str, log: pytest.LogCaptureFixture
) -> None:
    config = load_config(content)
    assert f"has no effect with {fragment}: ignored" in log.text
    assert getattr(config, field) == getattr(DumpConfig(), field)


def test_async_tensor_without_list_is_accepted_with_a_warning(
    log: pytest.LogCaptureFixture,
) -> None:
    config = load_config({"task": "tensor", "async_dump": True})
    assert config.async_dump
    load_config(in_section("list", ["relu"], "tensor", async_dump=True))
    load_config({"task": "tensor", "async_dump": True, "level": "debug"})
    (message,) = log.messages
    assert "'async_dump' with task tensor and an empty 'list'" in message


@pytest.mark.parametrize(("begin", "end"), [(5, 2), (-2, -3), (0, 0)])
def test_slice_that_selects_nothing_warns(
    begin: int, end: int, log: pytest.LogCaptureFixture
) -> None:
    load_config(in_section("slice", [{"begin": begin, "end": end}]))
    assert f"'slice' from {begin} to {end} selects nothing" in log.text


# ---- tolerated keys


def test_published_configs_of_other_versions_load_in_silence() -> None:
    """The keys that MindSpeed, SGLang and ModelArts publish."""
    config = load_config(
        {
            "task": "tensor",
            "dump_path": "/home/data_dump",
            "rank": [0],
            "step": [0],
            "level": "L1",
            "seed": 1234,
            "is_deterministic": False,
            "enable_dataloader": False,
            "async_dump": False,
            "tensor": {"scope": [], "list": [], "data_mode": ["all"], "file_format": "npy"},
            "statistics": {"scope": [], "list": [], "anything": 1},
            "overflow_check": {"overflow_nums": 1, "check_mode": "all"},
            "acc_check": {"white_list": [], "black_list": [], "error_data_path": "./"},
            "run_ut": {"white_list": []},
            "grad_probe": {"grad_level": "L1"},
            "free_benchmark": {"scope": []},
            "load": {"path": "x"},
        }
    )
    assert config.task == "tensor"


def test_a_config_with_few_keys_loads(tmp_path: Path) -> None:
    """vllm-ascend publishes task, level, dump_path and one list; verl leaves dump_path out."""
    content = {"task": "statistics", "level": "L0", "dump_path": "p", "statistics": {"list": []}}
    assert load_config(content) == DumpConfig(level=Level.L0, dump_path="p")
    assert load_config({"level": "mix"}, dump_path=tmp_path).dump_path == str(tmp_path)


def test_check_mode_is_tolerated_in_its_section() -> None:
    section = {"overflow_nums": 2, "check_mode": "aicore"}
    assert load_config({"task": "overflow_check", "overflow_check": section}).overflow_nums == 2


def test_keys_with_a_leading_underscore_are_comments() -> None:
    content = {"_comment": ["a"], "statistics": {"_why": 1, "slice": [{"_": 1}]}}
    assert load_config(content).slices == (SliceRule(),)


# ---- the file


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("", "line 1, column 1: the file is empty. Expected one JSON object"),
        (" \n", "the file is empty"),
        ("hello", "line 1, column 1: expected a value (string"),
        ('{"task" "x"}', "line 1, column 9: expected ':' between key and value, found '\"'"),
        ('{\n  "a": 1\n  "b": 2}', "line 3, column 3: expected ',' or a closing bracket"),
        ('{"a": 1,}', "There is no comma after the last element"),
        ('{"a": [1,]}', "There is no comma after the last element"),
        ('{"a": 1 // x\n}', "JSON has no comments: use a key that begins with '_'"),
        ("{'a': 1}", "Strings and keys stand in double quotes"),
        ('{"a": True}', "column 7: expected a value"),
        ('{"a": True}', "found 'True'. JSON writes true, false and null"),
        ('{"a": "NaN", "b":\n NaN}', "line 2, column 2: expected a value"),
        ('{"a": NaN}', "found 'NaN'. JSON has no NaN and no infinity"),
        ('{"a": -Infinity}', "found '-Infinity'. JSON has no NaN"),
        ('{"a": 1', "found the end of the file"),
        ('{"a": "x', "expected valid JSON (Unterminated string"),
        ("{} {}", "line 1, column 4: expected the end of the file, found '{'"),
        ("[1]", "the file holds [1]. Expected one JSON object"),
        ("null", "the file holds None. Expected one JSON object"),
        ("[" * 200_000, "not usable as a configuration"),
        ('{"a": ' + "9" * 5000 + "}", "not usable as a configuration"),
    ],
    ids=range(21),
)
def test_bad_file_says_where_and_what_was_expected(
    tmp_path: Path, text: str, fragment: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    message = error_of(file)
    assert message.startswith(f"{file}: ")
    assert fragment in message


def test_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(codecs.BOM_UTF8 + b'{"level": "L0"}')
    assert load_config(file).level is Level.L0


def test_file_in_another_encoding_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes('{"level": "L0"}'.encode("utf-16"))
    assert "Save the file as UTF-8" in error_of(file)


def test_missing_file_and_directory_are_named(tmp_path: Path) -> None:
    missing = tmp_path / "c.json"
    assert error_of(missing).startswith(f"{missing}: 'config_path' cannot be read: No such file")
    assert "Is a directory" in error_of(tmp_path)


@pytest.mark.parametrize("value", [5, b"x", ["a"], "a\0b"], ids=repr)
def test_config_path_of_another_kind_is_refused(value: object) -> None:
    message = error_of(value)
    assert message.startswith(f"<arguments>: 'config_path' is {value!r}")
    assert 'Example: config_path="./config.json"' in message


def test_error_in_a_file_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"statistics": {"list": 5}}')
    assert error_of(file).startswith(f"{file}: 'statistics.list' is 5: not a list")


# ---- the dump directory


def test_dump_path_is_created_and_left_empty(tmp_path: Path) -> None:
    directory = tmp_path / "a b;c" / "数据"
    check_dump_path(str(directory))
    check_dump_path(str(directory))
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("/proc/nope/x", "choose a directory that can be created"),
        ("/dev/null/x", "a part of the path is a file"),
        ("x" * 300, "choose shorter names"),
        ("a\0b", "choose a directory that can be created"),
        ("\ud800", "choose a directory that can be created"),
    ],
    ids=["missing-parent", "file-in-the-way", "too-long", "nul", "surrogate"],
)
def test_unusable_dump_path_says_why_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, advice: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="nothing can be written there") as caught:
        check_dump_path(path)
    assert str(caught.value).startswith(f"'dump_path' is {path!r}")
    assert f"To fix it: {advice}" in str(caught.value)


# ---- shipped files and documentation


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_each_example_file_loads_and_explains_itself(file: Path) -> None:
    config = load_config(file)
    content = json.loads(file.read_text())
    assert next(iter(content)) == "_comment"
    assert config.task == content["task"]


def test_there_is_an_example_for_every_task() -> None:
    assert {load_config(file).task for file in EXAMPLES} == set(TASKS)
    assert any(load_config(file).level is Level.DEBUG for file in EXAMPLES)


@pytest.mark.parametrize("name", KEYS)
def test_the_documented_example_of_a_key_loads(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "earlier_dump").mkdir()
    key = KEYS[name]
    value = json.loads(key.example)
    task = key.tasks[0] if key.tasks else "statistics"
    section = {"summary_mode": "md5"} if name == "bench_path" else {}
    content = {task: {**section, key.name: value}} if key.tasks else {key.name: value}
    level = "mix" if name == "scope" else "L1"
    config = load_config({"task": task, "level": level, **content})
    assert getattr(config, name) != getattr(DumpConfig(), name) or name == "error_data_path"


def test_reference_page_holds_the_generated_table() -> None:
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert reference_table() in page
    assert all(f"| `{key.name}` |" in reference_table() for key in KEYS.values())


def test_json_block_of_the_reference_page_loads() -> None:
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    block = page.split("```json\n")[1].split("```")[0]
    assert load_config(json.loads(block)).step == {0, 10, 11, 12}
