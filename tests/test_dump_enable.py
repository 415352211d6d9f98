"""``dump_enable``: a running training is switched on and off through its configuration file."""

from __future__ import annotations

import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from msprobe.errors import UsageError
from msprobe.pytorch import PrecisionDebugger
from recorded import batch, make_net, read_data, step_names


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


class ConfigFile:
    """config.json; each `write` is seen as a change, however fast it follows."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "config.json"
        self.dump_path = folder / "dump"
        self._mtimes = itertools.count(1_700_000_000)

    def write(self, text: str | None = None, **keys: Any) -> None:
        content = {"task": "statistics", "level": "L1", "dump_path": str(self.dump_path), **keys}
        self.path.write_text(json.dumps(content) if text is None else text)
        mtime_s = next(self._mtimes)
        os.utime(self.path, (mtime_s, mtime_s))

    def steps(self) -> list[str]:
        return step_names(self.dump_path)


@pytest.fixture
def file(tmp_path: Path) -> ConfigFile:
    return ConfigFile(tmp_path)


def step(model: Any = None) -> None:
    PrecisionDebugger.start(model)
    F.relu(torch.ones(2)) if model is None else model(batch(0))
    PrecisionDebugger.stop()
    PrecisionDebugger.step()


def steps_a_second_apart(clock: Clock, count: int) -> None:
    for _ in range(count):
        clock.now_s += 1.01
        step()


def test_the_file_switches_collecting_on_and_off(file: ConfigFile, clock: Clock) -> None:
    """Step numbers go on meanwhile, and torch is as it was while it is off."""
    relu = F.relu
    file.write(dump_enable=False)
    PrecisionDebugger(str(file.path))
    steps_a_second_apart(clock, 2)
    file.write(dump_enable=True)
    steps_a_second_apart(clock, 2)
    file.write(dump_enable=False)
    steps_a_second_apart(clock, 2)
    file.write(dump_enable=True)
    steps_a_second_apart(clock, 1)
    assert file.steps() == ["step2", "step3", "step6"]
    assert list(read_data(file.dump_path, 6)) == ["Functional.relu.0.forward"]
    file.write(dump_enable=False)
    clock.now_s += 1.01
    PrecisionDebugger.start()
    assert vars(F)["relu"] is relu


def test_a_change_is_seen_after_a_second_and_not_before(file: ConfigFile, clock: Clock) -> None:
    file.write(dump_enable=True)
    PrecisionDebugger(str(file.path))
    clock.now_s += 1.01
    step()
    file.write(dump_enable=False)
    clock.now_s += 0.9
    step()
    clock.now_s += 0.2
    step()
    assert file.steps() == ["step0", "step1"]


def stats_of(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one with each look at the file."""
    seen: list[str] = []
    original = os.stat

    def stat(target: Any, *args: Any, **kwargs: Any) -> Any:
        if target == str(path):
            seen.append(target)
        return original(target, *args, **kwargs)

    monkeypatch.setattr(os, "stat", stat)
    return seen


@pytest.mark.parametrize("enabled", [True, False], ids=["on", "off"])
def test_the_file_is_looked_at_once_a_second(
    enabled: bool, file: ConfigFile, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many steps there are; on a network file system a look is dear."""
    file.write(dump_enable=enabled)
    PrecisionDebugger(str(file.path))
    seen = stats_of(file.path, monkeypatch)
    for _ in range(50):
        clock.now_s += 0.1
        step()
    assert 4 <= len(seen) <= 5


def test_without_the_key_the_file_is_never_looked_at(
    file: ConfigFile, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write()
    PrecisionDebugger(str(file.path))
    file.write(dump_enable=False, level="L0")
    seen = stats_of(file.path, monkeypatch)
    steps_a_second_apart(clock, 3)
    PrecisionDebugger._instance._maybe_reload_config(force=True)
    steps_a_second_apart(clock, 1)
    assert seen == []
    assert file.steps() == ["step0", "step1", "step2", "step3"]


@pytest.mark.parametrize("enabled", [True, False], ids=["on", "off"])
def test_in_a_dict_the_key_is_a_plain_switch(enabled: bool, file: ConfigFile) -> None:
    PrecisionDebugger({"dump_enable": enabled}, dump_path=file.dump_path)
    step()
    assert file.steps() == (["step0"] if enabled else [])


def test_an_unchanged_file_is_not_read_again(
    file: ConfigFile, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    file.write(dump_enable=True)
    PrecisionDebugger(str(file.path))
    before = os.stat(file.path)
    file.path.write_text("x" * before.st_size)
    os.utime(file.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    steps_a_second_apart(clock, 3)
    assert file.steps() == ["step0", "step1", "step2"]
    assert caplog.records == []


# ---- a file that is broken, gone, or lacks the key


BROKEN = {
    "no JSON": ("{broken", "line 1, column 2"),
    "empty": ("", "the file is empty"),
    "half written": ('{"task": "statistics", "dump_enable": tr', "line 1, column 39"),
    "bad value": ('{"dump_enable": true, "level": "L9"}', "'level' is 'L9'"),
    "switch is no boolean": ('{"dump_enable": "yes"}', "'dump_enable' is 'yes'"),
}


@pytest.mark.parametrize(("text", "said"), BROKEN.values(), ids=BROKEN)
def test_a_broken_file_switches_off_with_one_warning_until_it_is_mended(
    text: str, said: str, file: ConfigFile, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    file.write(dump_enable=True)
    PrecisionDebugger(str(file.path))
    steps_a_second_apart(clock, 1)
    file.write(text)
    steps_a_second_apart(clock, 3)
    (warning,) = caplog.records
    assert warning.levelname == "WARNING"
    assert "collecting is off until" in warning.getMessage()
    assert said in warning.getMessage()
    assert str(file.path) in warning.getMessage()
    file.write(dump_enable=True)
    steps_a_second_apart(clock, 1)
    assert file.steps() == ["step0", "step4"]


def test_a_file_that_is_gone_switches_off_until_it_is_back(
    file: ConfigFile, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """An editor that writes by renaming leaves a moment without a file."""
    file.write(dump_enable=True)
    PrecisionDebugger(str(file.path))
    file.path.unlink()
    steps_a_second_apart(clock, 2)
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    file.write(dump_enable=True)
    steps_a_second_apart(clock, 1)
    assert file.steps() == ["step2"]


@pytest.mark.parametrize("enabled", [True, False], ids=["on", "off"])
def test_a_key_that_has_gone_keeps_its_state_and_may_come_back(
    enabled: bool, file: ConfigFile, clock: Clock
) -> None:
    file.write(dump_enable=enabled)
    PrecisionDebugger(str(file.path))
    steps_a_second_apart(clock, 1)
    file.write()
    steps_a_second_apart(clock, 2)
    assert file.steps() == (["step0", "step1", "step2"] if enabled else [])
    file.write(dump_enable=not enabled)
    steps_a_second_apart(clock, 1)
    assert file.steps() == (["step0", "step1", "step2"] if enabled else ["step3"])


# ---- what else the file says


def test_all_keys_are_read_again(file: ConfigFile, clock: Clock, tmp_path: Path) -> None:
    """Level, task, section and path: each from the next step on."""
    net = make_net()
    file.write(dump_enable=True)
    PrecisionDebugger(str(file.path))

    def later_step() -> None:
        clock.now_s += 1.01
        step(net)

    later_step()
    file.write(dump_enable=True, level="L0")
    later_step()
    file.write(dump_enable=True, level="mix", statistics={"list": ["fc2"], "summary_mode": "xor"})
    later_step()
    file.write(dump_enable=True, task="tensor", dump_path=str(tmp_path / "other"))
    later_step()
    assert len(read_data(file.dump_path, 0)) == 5
    assert len(read_data(file.dump_path, 1)) == 3
    third = read_data(file.dump_path, 2)
    assert set(third) == {
        "Module.fc2.Linear.forward.0", "Functional.linear.1.forward",
    }  # fmt: skip
    assert third["Functional.linear.1.forward"]["output"][0]["md5"].startswith("0x")
    fourth = read_data(tmp_path / "other", 3)
    assert "data_name" in fourth["Functional.linear.0.forward"]["output"][0]
    assert file.steps() == ["step0", "step1", "step2"]


def test_a_step_that_has_begun_keeps_its_configuration(file: ConfigFile, clock: Clock) -> None:
    """A second window of the step may not switch off what its first has recorded."""
    file.write(dump_enable=True)
    PrecisionDebugger(str(file.path))
    for number in range(2):
        clock.now_s += 1.01
        PrecisionDebugger.start()
        F.relu(torch.ones(2))
        PrecisionDebugger.stop()
        if number == 0:
            file.write(dump_enable=False)
    PrecisionDebugger.step()
    step()
    assert file.steps() == ["step0"]
    assert len(read_data(file.dump_path)) == 2


def test_steps_that_are_wanted_later_are_recorded_after_the_last_one(
    file: ConfigFile, clock: Clock
) -> None:
    """Collecting has ended with the last wanted step; the file may name further ones."""
    file.write(dump_enable=True, step=[0])
    PrecisionDebugger(str(file.path))
    steps_a_second_apart(clock, 2)
    file.write(dump_enable=True, step=[3])
    steps_a_second_apart(clock, 3)
    assert file.steps() == ["step0", "step3"]


def test_start_is_checked_against_what_the_file_says_now(file: ConfigFile, clock: Clock) -> None:
    """A level that needs a model, or needs none any more."""
    file.write(dump_enable=True, level="L0")
    PrecisionDebugger(str(file.path))
    file.write(dump_enable=True, level="L1")
    steps_a_second_apart(clock, 1)
    assert list(read_data(file.dump_path)) == ["Functional.relu.0.forward"]
    file.write(dump_enable=True, level="mix")
    clock.now_s += 1.01
    with pytest.raises(UsageError, match="level mix needs one"):
        PrecisionDebugger.start()


def test_arguments_of_the_constructor_stay_in_force(
    file: ConfigFile, clock: Clock, tmp_path: Path
) -> None:
    file.write(dump_enable=False)
    PrecisionDebugger(
        str(file.path), task="tensor", level="L0", step=[0, 2], dump_path=tmp_path / "mine"
    )
    file.write(dump_enable=True, task="structure", level="mix", step=[1], dump_path="/nowhere/x")
    net = make_net()
    for _ in range(4):
        clock.now_s += 1.01
        step(net)
    assert step_names(tmp_path / "mine") == ["step0", "step2"]
    data = read_data(tmp_path / "mine", 2)
    assert len(data) == 3
    assert "data_name" in data["Module.fc1.Linear.forward.0"]["output"][0]


def test_a_dump_path_that_was_set_stays_in_force(
    file: ConfigFile, clock: Clock, tmp_path: Path
) -> None:
    """verl redirects each stage through ``debugger.config``; a reload may not undo that."""
    file.write(dump_enable=False)
    debugger = PrecisionDebugger(str(file.path))
    debugger.config.dump_path = tmp_path / "stage"
    file.write(dump_enable=True)
    steps_a_second_apart(clock, 1)
    assert step_names(tmp_path / "stage") == ["step0"]
    assert file.steps() == []


# ---- _maybe_reload_config


def test_a_forced_reload_does_not_wait(file: ConfigFile, clock: Clock) -> None:
    """A dumper for vllm-ascend: an anomaly was seen, the next forward is to be recorded."""
    file.write(dump_enable=False)
    debugger = PrecisionDebugger(str(file.path))
    step()
    file.write(dump_enable=True)
    debugger._maybe_reload_config()
    step()
    debugger._maybe_reload_config(force=True)
    step()
    file.write(dump_enable=False)
    debugger._maybe_reload_config(force=True)
    step()
    assert file.steps() == ["step2"]


@pytest.mark.parametrize("first", [True, False], ids=["switched off", "switched on"])
def test_a_forced_reload_inside_a_step_holds_from_the_next_on(
    first: bool, file: ConfigFile, clock: Clock
) -> None:
    """The same dumper, called between start() and step()."""
    file.write(dump_enable=first)
    debugger = PrecisionDebugger(str(file.path))
    debugger.start()
    F.relu(torch.ones(2))
    file.write(dump_enable=not first)
    debugger._maybe_reload_config(force=True)
    debugger.stop()
    debugger.step()
    step()
    assert file.steps() == (["step0"] if first else ["step1"])
