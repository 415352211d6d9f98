"""Each option that selects: what it keeps is what an unfiltered run records, names and numbers."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import re
import tempfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers import debugger
from msprobe.errors import UsageError
from msprobe.pytorch import PrecisionDebugger, module_dump
from recorded import LEVELS, batch, make_net, rank_folder, read_beside, read_data, step_names
from runner import run_script

Data = dict[str, Any]

levels = pytest.mark.parametrize("level", LEVELS)

FC1, ACT, FC2 = "Module.fc1.Linear", "Module.act.ReLU", "Module.fc2.Linear"
FORWARD_APIS = [
    f"{api}.forward"
    for api in (
        "Functional.linear.0", "Functional.relu.0", "Functional.gelu.0", "Tensor.__mul__.0",
        "Functional.linear.1", "Tensor.square.0", "Tensor.mean.0",
    )
]  # fmt: skip


def train_step() -> None:
    net = make_net()
    PrecisionDebugger.start(net)
    net(batch(0)).square().mean().backward()
    PrecisionDebugger.stop()


def record(
    path: Path,
    level: str,
    section: dict[str, Any] | None = None,
    *,
    run: Callable[[], object] = train_step,
    task: str = "statistics",
    **top: Any,
) -> Data:
    """The records of one step under this configuration; {} if there is no folder."""
    config = {"task": task, "level": level, task: section or {}, **top}
    PrecisionDebugger(config, dump_path=path)
    run()
    PrecisionDebugger.step()
    PrecisionDebugger._instance = None
    return read_data(path) if step_names(path) else {}


@functools.cache
def recorded_whole(level: str) -> Data:
    with tempfile.TemporaryDirectory() as path:
        return record(Path(path), level)


@pytest.fixture
def whole(level: str) -> Data:
    """The same step without any selection."""
    return recorded_whole(level)


def assert_selected(found: Data, names: Iterable[str], whole: Data) -> None:
    """Exactly these records, as they are in the unfiltered run and in its order."""
    assert set(found) == set(names)
    assert list(found) == [name for name in whole if name in found]
    assert found == {name: whole[name] for name in found}


def unmatched(path: Path) -> list[str]:
    found: list[str] = read_beside(path, "coverage.json")["selection_unmatched"]
    return found


# ---- rank


def test_rank_is_matched_with_the_rank_of_the_process(tmp_path: Path) -> None:
    net = make_net()
    for rank_id, path in ((2, "in"), (4, "out")):
        PrecisionDebugger({"rank": [0, "1-3"], "dump_path": str(tmp_path / path)})
        PrecisionDebugger.start(net, rank_id=rank_id)
        net(batch(0))
        PrecisionDebugger._instance = None
    assert rank_folder(tmp_path / "in").name == "rank2"
    assert step_names(tmp_path / "out") == []


@pytest.mark.parametrize(
    "top", [{"rank": [7]}, {"step": [1]}, {"dump_enable": False}], ids=["rank", "step", "off"]
)
def test_nothing_is_installed_where_nothing_is_wanted(top: Any, tmp_path: Path) -> None:
    linear, net = F.linear, make_net()
    PrecisionDebugger({"level": "mix", **top}, dump_path=tmp_path)
    PrecisionDebugger.start(net, rank_id=0)
    assert vars(F)["linear"] is linear
    assert not any(module._forward_hooks for module in net.modules())
    PrecisionDebugger.stop()
    PrecisionDebugger.step()
    assert step_names(tmp_path) == []


def test_rank_in_a_process_without_one_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    PrecisionDebugger({"rank": [0]}, dump_path=tmp_path)
    for _ in range(3):
        PrecisionDebugger.start()
        torch.ones(2).relu()
        PrecisionDebugger.stop()
        PrecisionDebugger.step()
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "no rank" in caplog.text
    assert step_names(tmp_path) == []


# ---- step


def test_steps_in_the_list_and_its_ranges_are_recorded(tmp_path: Path) -> None:
    net = make_net()
    PrecisionDebugger({"step": [1, "3-4"], "level": "L1"}, dump_path=tmp_path)
    for number in range(6):
        PrecisionDebugger.start()
        net(batch(number))
        PrecisionDebugger.stop()
        PrecisionDebugger.step()
    assert step_names(tmp_path) == ["step1", "step3", "step4"]
    assert {next(iter(read_data(tmp_path, n))) for n in (1, 3, 4)} == {
        "Functional.linear.0.forward"
    }


def test_steps_are_counted_from_set_init_step(tmp_path: Path) -> None:
    PrecisionDebugger({"step": ["101-102"], "level": "L1"}, dump_path=tmp_path)
    PrecisionDebugger.set_init_step(100)
    for _ in range(5):
        PrecisionDebugger.start()
        torch.ones(2).relu()
        PrecisionDebugger.stop()
        PrecisionDebugger.step()
    assert step_names(tmp_path) == ["step101", "step102"]


@pytest.mark.parametrize("step", [-1, 1.5, "1", True, None], ids=repr)
def test_a_bad_init_step_is_refused(step: Any, tmp_path: Path) -> None:
    PrecisionDebugger(dump_path=tmp_path)
    with pytest.raises(UsageError, match=rf"set_init_step\({re.escape(repr(step))}\)"):
        PrecisionDebugger.set_init_step(step)


# ---- scope


SCOPES = {
    "L0, forwards": (
        "L0",
        [f"{ACT}.forward.0", f"{FC2}.forward.0"],
        [f"{ACT}.forward.0", f"{FC2}.forward.0"],
    ),
    "L0, from a forward to a backward": (
        "L0",
        [f"{FC2}.forward.0", f"{FC2}.backward.0"],
        [f"{FC2}.forward.0", f"{FC2}.backward.0", f"{FC2}.parameters_grad.0"],
    ),
    "L1, forwards": (
        "L1",
        ["Functional.relu.0.forward", "Functional.linear.1.forward"],
        FORWARD_APIS[1:5],
    ),
    "L1, backwards": (
        "L1",
        ["Tensor.square.0.backward", "Functional.gelu.0.backward"],
        ["Tensor.square.0.backward", "Functional.linear.1.backward", "Tensor.__mul__.0.backward",
         "Functional.gelu.0.backward"],
    ),
    "L1, one record": ("L1", ["Functional.gelu.0.forward"] * 2, ["Functional.gelu.0.forward"]),
    "mix, one module with all that runs in it": (
        "mix",
        [f"{FC2}.forward.0"] * 2,
        [f"{FC2}.forward.0", "Functional.linear.1.forward"],
    ),
    "mix, from module to module": (
        "mix",
        [f"{ACT}.forward.0", f"{FC2}.forward.0"],
        [*FORWARD_APIS[1:5], f"{ACT}.forward.0", f"{FC2}.forward.0"],
    ),
    "mix, from API to module": (
        "mix",
        ["Functional.gelu.0.forward", f"{FC2}.forward.0"],
        [*FORWARD_APIS[2:5], f"{FC2}.forward.0"],
    ),
    "mix, from module to API": (
        "mix",
        [f"{ACT}.forward.0", "Functional.gelu.0.forward"],
        [*FORWARD_APIS[1:3], f"{ACT}.forward.0"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("level", "scope", "names"), SCOPES.values(), ids=SCOPES)
def test_scope_records_from_its_first_to_its_last_record(
    level: str, scope: list[str], names: list[str], whole: Data, tmp_path: Path
) -> None:
    assert_selected(record(tmp_path, level, {"scope": scope}), names, whole)
    assert unmatched(tmp_path) == []


def test_list_filters_within_the_scope(tmp_path: Path) -> None:
    section = {"scope": ["Functional.relu.0.forward", "Functional.linear.1.forward"],
               "list": ["linear", "gelu"]}  # fmt: skip
    names = ["Functional.gelu.0.forward", "Functional.linear.1.forward"]
    assert_selected(record(tmp_path, "L1", section), names, recorded_whole("L1"))


def test_scope_begins_anew_in_each_step(tmp_path: Path) -> None:
    scope = ["Functional.gelu.0.forward", "Tensor.__mul__.0.forward"]
    PrecisionDebugger({"level": "L1", "statistics": {"scope": scope}}, dump_path=tmp_path)
    for _ in range(2):
        train_step()
        PrecisionDebugger.step()
    assert list(read_data(tmp_path, 0)) == list(read_data(tmp_path, 1)) == scope


@pytest.mark.parametrize(
    ("scope", "names", "said"),
    [
        (
            ["Functional.gelu.0.forward", "Functional.gelu.9.forward"],
            "from gelu to the end",
            "scope never ended: there was no record 'Functional.gelu.9.forward'",
        ),
        (
            ["Functional.gelu.9.forward", "Functional.linear.1.forward"],
            "nothing",
            "scope never began: there was no record 'Functional.gelu.9.forward'",
        ),
    ],
    ids=["end never met", "begin never met"],
)
def test_an_end_of_the_scope_that_is_never_met_is_reported(
    scope: list[str], names: str, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = record(tmp_path, "L1", {"scope": scope})
    whole = recorded_whole("L1")
    expected = list(whole)[list(whole).index("Functional.gelu.0.forward") :]
    assert_selected(found, [] if names == "nothing" else expected, whole)
    assert unmatched(tmp_path) == [said]
    assert [r for r in caplog.records if said in r.getMessage()]
    assert said in (rank_folder(tmp_path) / "dump_error_info.log").read_text()


def test_a_scope_whose_end_comes_before_its_begin_is_reported(tmp_path: Path) -> None:
    scope = ["Functional.linear.1.forward", "Functional.relu.0.forward"]
    found = record(tmp_path, "L1", {"scope": scope})
    assert "Functional.linear.1.forward" in found
    assert "Functional.relu.0.forward" not in found
    assert len(unmatched(tmp_path)) == 1


# ---- list


def halves(module: str) -> list[str]:
    grads = [] if module == ACT else [f"{module}.parameters_grad.0"]
    return [f"{module}.forward.0", f"{module}.backward.0", *grads]


def both(*apis: str) -> list[str]:
    return [f"{api}.{direction}" for api in apis for direction in ("forward", "backward")]


LISTS = {
    "L1, substring": ("L1", ["relu"], both("Functional.relu.0")),
    "L1, two entries": (
        "L1", ["relu", "Tensor.mean"], both("Functional.relu.0", "Tensor.mean.0"),
    ),
    "L1, full name": ("L1", ["Functional.linear.1.forward"], ["Functional.linear.1.forward"]),
    "L1, number": ("L1", ["linear.1"], both("Functional.linear.1")),
    "L1, direction": ("L1", [".0.forward"], [n for n in FORWARD_APIS if ".0." in n]),
    "L0, substring": ("L0", ["fc2"], halves(FC2)),
    "L0, class": ("L0", ["Linear"], [*halves(FC1), *halves(FC2)]),
    "L0, full name": ("L0", [f"{FC2}.forward.0"], [f"{FC2}.forward.0"]),
    "L0, gradients of parameters": (
        "L0", [f"{FC1}.parameters_grad"], [f"{FC1}.parameters_grad.0"],
    ),
    "mix, module by substring": (
        "mix", ["fc1"], [*halves(FC1), *both("Functional.linear.0")],
    ),
    "mix, module forward": (
        "mix", [f"{FC2}.forward.0"], [f"{FC2}.forward.0", "Functional.linear.1.forward"],
    ),
    "mix, module backward": (
        "mix",
        [f"{FC2}.backward.0"],
        [f"{FC2}.backward.0", f"{FC2}.parameters_grad.0", "Functional.linear.1.backward"],
    ),
    "mix, API": ("mix", ["Functional.linear.1"], both("Functional.linear.1")),
    "regex, searched": ("L1", [r"name-regex(linear\.[1-9])"], both("Functional.linear.1")),
    "regex, anchored": ("L1", [r"name-regex(^Tensor\..*forward$)"],
                        [n for n in FORWARD_APIS if n.startswith("Tensor")]),
    "regex, beside a substring": (
        "L1", ["gelu", "name-regex((mean|square).0.back)"],
        [*both("Functional.gelu.0"), "Tensor.mean.0.backward", "Tensor.square.0.backward"],
    ),
    "regex, module at mix": (
        "mix", [r"name-regex(fc[2-9].*forward)"],
        [f"{FC2}.forward.0", "Functional.linear.1.forward"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("level", "entries", "names"), LISTS.values(), ids=LISTS)
def test_list_keeps_the_records_that_match(
    level: str, entries: list[str], names: list[str], whole: Data, tmp_path: Path
) -> None:
    assert_selected(record(tmp_path, level, {"list": entries}), names, whole)
    assert unmatched(tmp_path) == []


@levels
def test_an_empty_entry_matches_everything(level: str, whole: Data, tmp_path: Path) -> None:
    assert_selected(record(tmp_path, level, {"list": [""]}), whole, whole)


def test_list_expands_over_all_that_runs_inside_a_container(tmp_path: Path) -> None:
    """At mix: modules and APIs at any depth; what runs around it stays out."""
    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model = nn.Sequential(nn.Linear(4, 4), inner, nn.Linear(4, 4))

    def run() -> None:
        PrecisionDebugger.start(model)
        model(batch(0)).sum().backward()
        PrecisionDebugger.stop()

    found = record(tmp_path, "mix", {"list": ["Module.1.Sequential"]}, run=run)
    modules = ["Module.1.Sequential", "Module.1.0.Linear", "Module.1.1.ReLU"]
    expected = [f"{m}.{way}.0" for m in modules for way in ("forward", "backward")]
    expected += both("Functional.linear.1", "Functional.relu.0")
    assert set(found) == {*expected, "Module.1.0.Linear.parameters_grad.0"}


@pytest.mark.parametrize("entry", ["Relu", "functional.linear", "name-regex(^linear)"])
def test_an_entry_that_matches_nothing_is_reported(
    entry: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Case matters, as it does for those that match."""
    found = record(tmp_path, "L1", {"list": ["gelu", entry]})
    assert set(found) == set(both("Functional.gelu.0"))
    said = f"list entry {entry!r} matched no record"
    assert unmatched(tmp_path) == [said]
    assert said in caplog.text
    assert said in (rank_folder(tmp_path) / "dump_error_info.log").read_text()


def test_entries_that_match_the_same_records_are_all_met(tmp_path: Path) -> None:
    """A report of an entry that did match would send the user looking for a fault."""
    entries = ["linear", "Functional.linear", "name-regex(linear)", "linear.0.forward"]
    record(tmp_path, "L1", {"list": entries, "tensor_list": ["gelu", *entries]})
    assert unmatched(tmp_path) == ["tensor_list entry 'gelu' matched no record"]


@pytest.mark.parametrize("level", ["L0", "mix"])
def test_a_backward_entry_without_a_backward_pass_is_reported(level: str, tmp_path: Path) -> None:
    def run() -> None:
        net = make_net()
        PrecisionDebugger.start(net)
        with torch.no_grad():
            net(batch(0))
        PrecisionDebugger.stop()

    entry = f"{FC2}.backward.0"
    assert record(tmp_path, level, {"list": [entry]}, run=run) == {}
    assert unmatched(tmp_path) == [f"list entry {entry!r} matched no record"]


# ---- modules that were never called


def only_a_token(watcher: Any, model: nn.Module) -> None:
    watcher.start(model, token_range=[5, 6])
    model(torch.ones(1, 2))


def only_one_module(watcher: Any, model: Any) -> None:
    watcher.start(model)
    module_dump(model[0], "first")
    model(torch.ones(1, 2))


def until_the_first_bad_call(watcher: Any, model: Any) -> None:
    watcher.start(model)
    model(torch.full((1, 2), torch.nan))


@pytest.mark.parametrize(
    ("part", "task"),
    [
        (only_a_token, "statistics"),
        (only_one_module, "statistics"),
        (until_the_first_bad_call, "overflow_check"),
    ],
)
def test_where_only_a_part_was_listened_to_nothing_is_said_to_be_never_called(
    part: Any, task: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watcher = debugger(tmp_path, level="mix", task=task)
    part(watcher, nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    watcher.stop()
    watcher.step()
    (path,) = tmp_path.rglob("coverage.json")
    assert json.loads(path.read_text())["modules_never_called"] == []
    assert "never called" not in caplog.text
    reached = "token_range [5, 6] was not reached: from start() to stop() the model was called 1"
    assert (reached in caplog.text) == (part is only_a_token)


def test_modules_never_called_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = make_net()
    net.spare = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    def run() -> None:
        PrecisionDebugger.start(net)
        net(batch(0))
        PrecisionDebugger.stop()

    record(tmp_path, "L0", run=run)
    coverage = read_beside(tmp_path, "coverage.json")
    assert coverage["modules_never_called"] == ["spare", "spare.0", "spare.1"]
    assert "3 modules were never called (spare, spare.0, spare.1)" in caplog.text


# ---- tensor_list


def files(path: Path) -> set[str]:
    return {file.name for file in (rank_folder(path) / "dump_tensor_data").iterdir()}


def test_tensor_list_adds_files_to_the_records_that_match(tmp_path: Path) -> None:
    """The others keep their statistics; a module that matches does not take its APIs along."""
    whole = recorded_whole("mix")
    section = {"tensor_list": ["fc2", "relu", "name-regex(mean.*backward)"]}
    found = record(tmp_path, "mix", section)
    assert list(found) == list(whole)
    matching = [n for n in whole if "fc2" in n or "relu" in n or n == "Tensor.mean.0.backward"]
    with_files = [name for name in found if "data_name" in repr(found[name])]
    assert with_files == matching
    assert without_files(found) == whole
    assert files(tmp_path) == set(re.findall(r"'data_name': '([^']+)'", repr(found)))
    assert unmatched(tmp_path) == []
    weight = torch.load(
        rank_folder(tmp_path) / "dump_tensor_data" / f"{FC2}.forward.0.parameters.weight.pt",
        weights_only=True,
    )
    assert torch.equal(weight, make_net().fc2.weight)


def without_files(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_files(v) for k, v in value.items() if k != "data_name"}
    return [without_files(v) for v in value] if isinstance(value, list) else value


def test_tensor_list_that_matches_nothing_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record(tmp_path, "L1", {"tensor_list": ["Relu"]})
    assert unmatched(tmp_path) == ["tensor_list entry 'Relu' matched no record"]
    assert "tensor_list entry 'Relu'" in caplog.text
    assert files(tmp_path) == set()


def test_tensor_list_with_md5_saves_what_the_checksum_is_of(tmp_path: Path) -> None:
    section = {"tensor_list": ["gelu"], "summary_mode": "md5"}
    found = record(tmp_path, "L1", section)
    entry = found["Functional.gelu.0.forward"]["output"][0]
    tensor = torch.load(
        rank_folder(tmp_path) / "dump_tensor_data" / entry["data_name"], weights_only=True
    )
    assert entry["md5"] == f"{zlib.crc32(tensor.numpy().tobytes()):08x}"


# ---- data_mode


DIRECTIONS = [(), ("forward",), ("backward",), ("forward", "backward")]
SIDES = [(), ("input",), ("output",), ("input", "output")]
MODES = [["all"], *([*d, *s] for d, s in itertools.product(DIRECTIONS, SIDES))]


def pruned(whole: Data, mode: Sequence[str]) -> Data:
    """What data_mode leaves of a full run; parameters go with the forward's output."""
    directions = {"forward", "backward"} & set(mode) or {"forward", "backward"}
    sides = {"input", "output"} & set(mode) or {"input", "output"}
    sections = {"input": {"input", "input_args", "input_kwargs"},
                "output": {"output", "parameters"}}  # fmt: skip
    kept = set().union(*(sections[side] for side in sides))
    left: Data = {}
    for name, record_ in whole.items():
        if ".parameters_grad." in name:
            if "backward" in directions:
                left[name] = record_
        elif any(f".{direction}" in name for direction in directions):
            left[name] = {k: v for k, v in record_.items() if k in kept}
    return left


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "+".join(mode) or "empty")
def test_data_mode_leaves_these_directions_and_sides(mode: list[str], tmp_path: Path) -> None:
    found = record(tmp_path, "mix", {"data_mode": mode})
    assert found == pruned(recorded_whole("mix"), mode)


@levels
def test_data_mode_of_one_direction_is_the_same_at_each_level(
    level: str, whole: Data, tmp_path: Path
) -> None:
    mode = ["backward", "output"]
    assert record(tmp_path, level, {"data_mode": mode}) == pruned(whole, mode)


@pytest.mark.parametrize(("mode", "other"), [("forward", "backward"), ("backward", "forward")])
def test_a_list_entry_for_the_direction_left_out_is_reported(
    mode: str, other: str, tmp_path: Path
) -> None:
    section = {"data_mode": [mode], "list": [f"{FC2}.{other}.0"]}
    assert record(tmp_path, "L0", section) == {}
    assert unmatched(tmp_path) == [f"list entry '{FC2}.{other}.0' matched no record"]


# ---- risk_level


def calls_of_each_risk() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    PrecisionDebugger.start(model)
    x = model(torch.ones(1, 2))
    F.softmax(torch.cat([x, x]).relu(), dim=0)
    PrecisionDebugger.stop()


RISKS = {
    "CORE": ["linear", "softmax"],
    "FOCUS": ["linear", "relu", "softmax"],
    "ALL": ["linear", "cat", "relu", "softmax"],
}


@pytest.mark.parametrize(("risk", "apis"), RISKS.items(), ids=RISKS)
def test_risk_level_keeps_apis_of_its_class_and_all_modules(
    risk: str, apis: list[str], tmp_path: Path
) -> None:
    found = record(tmp_path, "mix", run=calls_of_each_risk, risk_level=risk)
    assert [n.split(".")[1] for n in found if not n.startswith("Module")] == apis
    assert [n for n in found if n.startswith("Module")] == ["Module.0.Linear.forward.0"]


def test_risk_level_shifts_no_counter(tmp_path: Path) -> None:
    """Calls that are left out are counted, so a name means the same call at every level."""
    whole = recorded_whole("mix")
    found = record(tmp_path, "mix", risk_level="CORE")
    apis = [name for name in whole if not name.startswith("Module") and "linear" not in name]
    assert_selected(found, [name for name in whole if name not in apis], whole)


@pytest.mark.parametrize(
    "section",
    [{"list": ["gelu"]}, {"scope": ["Functional.gelu.0.forward", "Functional.gelu.0.backward"]}],
    ids=["list", "scope"],
)
def test_risk_level_is_not_asked_where_records_are_named(section: Any, tmp_path: Path) -> None:
    assert "Functional.gelu.0.forward" in record(tmp_path, "L1", section, risk_level="CORE")


# ---- slice


def sliced_add(dtype: torch.dtype = torch.float32) -> None:
    PrecisionDebugger.start()
    grown = torch.arange(24, dtype=dtype).reshape(3, 8).requires_grad_()
    torch.add(grown, torch.arange(8, dtype=dtype)).backward(torch.ones(3, 8))
    PrecisionDebugger.stop()


RULES = [{"dim": 0, "begin": 0, "end": 2}, {"dim": 1, "size": 8, "begin": -3}]


def test_slice_rules_apply_in_turn_to_all_that_is_said_of_a_tensor(tmp_path: Path) -> None:
    """Shape, statistics and file are of the part; a rule that does not fit is passed over."""
    found = record(tmp_path, "L1", {"slice": RULES}, run=sliced_add, task="tensor")
    forward = found["Torch.add.0.forward"]
    first, second = forward["input_args"]
    part = torch.arange(24.0).reshape(3, 8)[:2, -3:]
    assert (first["shape"], first["Max"], first["Min"]) == ([2, 3], 15.0, 5.0)
    assert first["Mean"] == part.double().mean().item()
    assert first["requires_grad"] is True
    # dim 0 has 8 elements: the first rule fits; the second needs a dimension 1.
    assert (second["shape"], second["Max"]) == ([2], 1.0)
    assert found["Torch.add.0.backward"]["output"][0]["shape"] == [2, 3]
    saved = torch.load(
        rank_folder(tmp_path) / "dump_tensor_data" / first["data_name"], weights_only=True
    )
    assert torch.equal(saved, part)
    assert saved.untyped_storage().nbytes() == 6 * 4


def test_a_slice_rule_for_another_size_or_dimension_is_passed_over(tmp_path: Path) -> None:
    rules = [{"dim": 1, "size": 7, "end": 1}, {"dim": 5, "end": 1}]
    found = record(tmp_path / "cut", "L1", {"slice": rules}, run=sliced_add)
    assert found == record(tmp_path / "whole", "L1", run=sliced_add)


def test_an_empty_slice_gives_null(tmp_path: Path) -> None:
    rules = [{"dim": 1, "begin": 100}]
    found = record(tmp_path, "L1", {"slice": rules}, run=sliced_add)
    entry = found["Torch.add.0.forward"]["output"][0]
    assert (entry["shape"], entry["Max"], entry["Norm"]) == ([3, 0], None, None)


def test_slice_applies_to_parameters_and_their_gradients(tmp_path: Path) -> None:
    found = record(tmp_path, "L0", {"slice": [{"dim": 0, "size": 5, "end": 1}]})
    assert found[f"{FC1}.forward.0"]["parameters"]["weight"]["shape"] == [1, 4]
    assert found[f"{FC1}.parameters_grad.0"]["bias"][0]["shape"] == [1]
    # Two rows, not five.
    assert found[f"{FC1}.forward.0"]["input_args"][0]["shape"] == [2, 4]


@pytest.mark.parametrize("mode", ["md5", "xor"])
def test_slice_is_what_the_checksum_is_of(mode: str, tmp_path: Path) -> None:
    found = record(tmp_path / "cut", "L1", {"slice": RULES, "summary_mode": mode}, run=sliced_add)
    entry = found["Torch.add.0.forward"]["input_args"][0]

    def part_alone() -> None:
        PrecisionDebugger.start()
        torch.arange(24.0).reshape(3, 8)[:2, -3:].contiguous().relu()
        PrecisionDebugger.stop()

    section = {"summary_mode": mode, "list": ["relu"]}
    alone = record(tmp_path / "alone", "L1", section, run=part_alone)
    assert entry["md5"] == alone["Tensor.relu.0.forward"]["input_args"][0]["md5"]


# ---- request_id


def scheduled(tokens: Any, rows: int = 5) -> Callable[[], None]:
    def run() -> None:
        PrecisionDebugger.start(scheduled_tokens=tokens)
        torch.arange(rows * 2.0).reshape(rows, 2) + torch.ones(2)
        PrecisionDebugger.stop()

    return run


TOKENS = {"a": 2, "b": 1, "c": 2}


def test_parameters_are_no_tokens_of_a_request(tmp_path: Path) -> None:
    head = nn.Linear(4, sum(TOKENS.values()))

    def run() -> None:
        PrecisionDebugger.start(head, scheduled_tokens=TOKENS)
        head(torch.ones(sum(TOKENS.values()), 4))
        PrecisionDebugger.stop()

    found = record(tmp_path, "L1", {"request_id": "a"}, run=run)
    data, weight, bias = found["Functional.linear.0.forward"]["input_args"]
    assert (data["shape"], weight["shape"], bias["shape"]) == ([2, 4], [5, 4], [5])


def test_request_id_without_scheduled_tokens_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record(tmp_path, "L1", {"request_id": "a"}, run=scheduled(None))
    assert "'request_id' has no effect without start(scheduled_tokens={...})" in caplog.text



@pytest.mark.parametrize(
    ("request_id", "rows"), [("a", (0, 2)), ("b", (2, 3)), ("c", (3, 5))], ids=["a", "b", "c"]
)
def test_request_id_takes_its_rows_of_the_batch(
    request_id: str, rows: tuple[int, int], tmp_path: Path
) -> None:
    """Requests lie in the batch in the order of the dict; tensors of another height stay whole."""
    found = record(tmp_path, "L1", {"request_id": request_id}, run=scheduled(TOKENS))
    whole_batch, other = found["Tensor.__add__.0.forward"]["input_args"]
    part = torch.arange(10.0).reshape(5, 2)[slice(*rows)]
    assert whole_batch["shape"] == list(part.shape)
    assert (whole_batch["Max"], whole_batch["Min"]) == (part.max().item(), part.min().item())
    assert other["shape"] == [2]


def test_a_batch_of_another_height_stays_whole(tmp_path: Path) -> None:
    found = record(tmp_path, "L1", {"request_id": "a"}, run=scheduled(TOKENS, rows=6))
    assert found["Tensor.__add__.0.forward"]["input_args"][0]["shape"] == [6, 2]


def test_slice_is_applied_before_the_rows_of_the_request(tmp_path: Path) -> None:
    section = {"request_id": "b", "slice": [{"dim": 1, "end": 1}]}
    found = record(tmp_path, "L1", section, run=scheduled(TOKENS))
    assert found["Tensor.__add__.0.forward"]["input_args"][0]["shape"] == [1, 1]


def test_a_request_that_is_not_in_the_batch_leaves_the_step_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert record(tmp_path, "L1", {"request_id": "z"}, run=scheduled(TOKENS)) == {}
    assert step_names(tmp_path) == []
    assert "request_id 'z' is not among the scheduled tokens" in caplog.text


@pytest.mark.parametrize(
    ("section", "tokens"),
    [({"request_id": "b"}, None), ({}, TOKENS)],
    ids=["no tokens given", "no request asked for"],
)
def test_without_one_of_the_two_tensors_stay_whole(
    section: Any, tokens: Any, tmp_path: Path
) -> None:
    found = record(tmp_path, "L1", section, run=scheduled(tokens))
    assert found["Tensor.__add__.0.forward"]["input_args"][0]["shape"] == [5, 2]


def test_each_window_has_its_own_batch(tmp_path: Path) -> None:
    """vllm: the requests change from one forward to the next, here within one step."""
    PrecisionDebugger({"level": "L1", "statistics": {"request_id": "b"}}, dump_path=tmp_path)
    scheduled({"a": 2, "b": 3})()
    scheduled({"b": 1, "a": 4})()
    PrecisionDebugger.step()
    found = read_data(tmp_path)
    shapes = [found[f"Tensor.__add__.{n}.forward"]["input_args"][0]["shape"] for n in (0, 1)]
    assert shapes == [[3, 2], [1, 2]]


@pytest.mark.parametrize(
    "tokens", [[("a", 1)], {1: 2}, {"a": "2"}, {"a": 0}, {"a": True}], ids=repr
)
def test_bad_scheduled_tokens_are_refused_at_start(tokens: Any, tmp_path: Path) -> None:
    PrecisionDebugger(dump_path=tmp_path)
    with pytest.raises(UsageError, match=r"scheduled_tokens=.*Example"):
        PrecisionDebugger.start(scheduled_tokens=tokens)
    assert not hasattr(F.linear, "original")


# ---- token_range


@levels
def test_token_range_records_these_calls_of_the_model(
    level: str, whole: Data, tmp_path: Path
) -> None:
    """Both ends included; numbers begin at 0 with the first call that is recorded."""
    net = make_net()

    def run() -> None:
        PrecisionDebugger.start(net, token_range=[1, 2])
        with torch.no_grad():
            for token in range(5):
                net(batch(token))
        PrecisionDebugger.stop()

    found = record(tmp_path, level, run=run)
    own = [n for n in whole if ".forward" in n and n not in FORWARD_APIS[5:]]
    assert len(found) == 2 * len(own)
    assert set(own) <= set(found)
    first = "Functional.linear.0.forward" if level == "L1" else f"{FC1}.forward.0"
    assert found[first]["input_args"][0]["Max"] == batch(1).max().item()


def test_token_range_counts_calls_of_the_first_model_alone(tmp_path: Path) -> None:
    first, second = make_net(), make_net(1)

    def run() -> None:
        PrecisionDebugger.start([first, second], token_range=[1, 1])
        with torch.no_grad():
            for model in (first, second, second, first, second, first):
                model(batch(0))
        PrecisionDebugger.stop()

    names = list(record(tmp_path, "L0", run=run))
    assert names == [
        f"Module.{index}.{part}.forward.0"
        for index in (0, 1)
        for part in ("fc1.Linear", "act.ReLU", "fc2.Linear")
    ]


@pytest.mark.parametrize(
    "token_range", [[1], [1, 2, 3], [2, 1], [-1, 1], [0.0, 1], [True, 2], "12", 3, []], ids=repr
)
def test_a_bad_token_range_is_refused_at_start(token_range: Any, tmp_path: Path) -> None:
    PrecisionDebugger(dump_path=tmp_path)
    with pytest.raises(UsageError, match="token_range"):
        PrecisionDebugger.start(make_net(), token_range=token_range)


def test_token_range_needs_a_model(tmp_path: Path) -> None:
    PrecisionDebugger(dump_path=tmp_path, level="L1")
    with pytest.raises(UsageError, match="token_range needs one"):
        PrecisionDebugger.start(token_range=[0, 0])


# ---- builtin_ignore_ops.yaml


COLLECTIVES = """
import sys
import torch
import torch.distributed as dist
from msprobe.pytorch import PrecisionDebugger

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
debugger = PrecisionDebugger(dump_path=sys.argv[1], level="L1")
debugger.start()
dist.all_gather([torch.zeros(2)], torch.ones(2))
dist.all_gather(tensor_list=[torch.zeros(2)], tensor=torch.ones(2))
dist.all_gather_into_tensor(torch.zeros(2), torch.ones(2))
dist.all_reduce(torch.ones(2))
debugger.stop()
debugger.step()
dist.destroy_process_group()
"""


@pytest.mark.distributed
def test_ignored_arguments_are_null_and_the_others_are_recorded(tmp_path: Path) -> None:
    """A receive buffer says nothing before the call. The two spellings of an argument differ."""
    script = tmp_path / "script.py"
    script.write_text(COLLECTIVES)
    code, output = run_script(script, [str(tmp_path / "dump")])
    assert code == 0, output
    data = read_data(tmp_path / "dump")
    by_position, by_keyword = (data[f"Distributed.all_gather.{n}.forward"] for n in (0, 1))
    assert by_position["input_args"][0] is None
    assert by_position["input_args"][1]["Max"] == 1.0
    assert by_position["output"][0][0]["Max"] == 1.0
    assert by_keyword["input_kwargs"]["tensor_list"][0]["Max"] == 0.0
    into = data["Distributed.all_gather_into_tensor.0.forward"]
    assert into["input_args"][0] is None
    assert data["Distributed.all_reduce.0.forward"]["input_args"][0]["Max"] == 1.0


def test_a_run_that_matched_everything_says_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    record(tmp_path, "mix")
    assert caplog.records == []
    assert not (rank_folder(tmp_path) / "dump_error_info.log").exists()
    coverage = read_beside(tmp_path, "coverage.json")
    assert coverage["modules_never_called"] == coverage["selection_unmatched"] == []
