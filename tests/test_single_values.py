"""Values that the user names one by one (`save`), and modules (`module_dump`)."""

from __future__ import annotations

import logging
import re
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from msprobe.errors import UsageError
from msprobe.pytorch import PrecisionDebugger, module_dump, module_dump_end
from recorded import LEVELS, batch, make_net, rank_folder, read_data, read_json, step_names
from runner import run_script

Data = dict[str, Any]

levels = pytest.mark.parametrize("level", LEVELS)


def debugging(path: Path, task: str = "statistics", section: Any = None, **top: Any) -> Any:
    config = {"task": task, "level": "debug", task: section or {}, **top}
    return PrecisionDebugger(config, dump_path=path)


def saved(path: Path, step: int = 0) -> Data:
    PrecisionDebugger._instance = None
    return read_data(path, step, "debug.json")


def statistics(values: Any) -> dict[str, float]:
    exact = np.asarray(values, dtype=np.float64)
    found = exact.max(), exact.min(), exact.mean(), np.linalg.norm(exact)
    # Results of at most 12 float32 additions: a few units in the last place, 6e-8 each.
    return {k: pytest.approx(v, rel=1e-6) for k, v in zip(STATISTICS, found, strict=True)}


STATISTICS = ("Max", "Min", "Mean", "Norm")


def numbers_of(entry: Any) -> dict[str, Any]:
    return {key: entry[key] for key in STATISTICS}


# ---- save: values


def test_save_records_values_as_they_are_nested(tmp_path: Path) -> None:
    debugger = debugging(tmp_path)
    y = torch.tensor([[1.5, -2.0, 0.0]])
    variable = {"a": y, "b": [y.int(), 1, 2.5, "s", None, True], "c": (y * 2, {"d": []})}
    debugger.save(variable, "nested", save_backward=False)
    debugger.step()
    found = saved(tmp_path)["nested.0.debug"]
    assert list(found) == ["a", "b", "c"]
    assert (found["a"]["type"], found["a"]["dtype"], found["a"]["shape"]) == (
        "torch.Tensor", "torch.float32", [1, 3],
    )  # fmt: skip
    assert numbers_of(found["a"]) == statistics(y)
    assert (found["b"][0]["Max"], found["b"][0]["Min"]) == (1, -2)
    assert found["b"][1:] == [
        {"type": "int", "value": 1}, {"type": "float", "value": 2.5},
        {"type": "str", "value": "s"}, None, {"type": "bool", "value": True},
    ]  # fmt: skip
    assert numbers_of(found["c"][0]) == statistics(y * 2)
    assert found["c"][1] == {"d": []}


def test_only_debug_json_is_written(tmp_path: Path) -> None:
    debugging(tmp_path).save(1, "i")
    PrecisionDebugger.step()
    assert {file.name for file in rank_folder(tmp_path).iterdir()} <= {
        "debug.json", "coverage.json",
    }  # fmt: skip
    header = read_json(rank_folder(tmp_path) / "debug.json")
    assert (header["task"], header["level"], header["framework"]) == (
        "statistics", "debug", "pytorch",
    )  # fmt: skip


def test_a_saved_value_is_that_of_the_moment(tmp_path: Path) -> None:
    debugger = debugging(tmp_path)
    x = torch.ones(3)
    debugger.save([x], "x")
    x.add_(1)
    debugger.step()
    assert saved(tmp_path)["x.0.debug"][0]["Max"] == 1.0


def test_counts_are_per_name_and_begin_anew_in_each_step(tmp_path: Path) -> None:
    """A gradient has the number of its value, also where other calls took none."""
    debugger = debugging(tmp_path)
    for _ in range(2):
        debugger.save(torch.ones(1), "x")
        debugger.save(torch.ones(1), "x", save_backward=False)
        debugger.save(torch.ones(1), "other")
        debugger.save(torch.ones(1), "x")
        debugger.step()
    for step in range(2):
        names = set(read_data(tmp_path, step, "debug.json"))
        assert names == {
            "x.0.debug", "x_grad.0.debug", "x.1.debug", "other.0.debug", "other_grad.0.debug",
            "x.2.debug", "x_grad.2.debug",
        }  # fmt: skip


def test_steps_are_selected_and_begin_at_set_init_step(tmp_path: Path) -> None:
    debugger = debugging(tmp_path, step=[4, "6-7"])
    debugger.set_init_step(3)
    for number in range(6):
        debugger.save(number, "i")
        debugger.step()
    assert step_names(tmp_path) == ["step4", "step6", "step7"]
    assert read_data(tmp_path, 6, "debug.json")["i.0.debug"]["value"] == 3


RANKS = """
import sys
import torch
from msprobe.pytorch import PrecisionDebugger

torch.distributed.init_process_group(
    "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
)
for rank in (0, 1):
    config = {"level": "debug", "rank": [rank], "dump_path": f"{sys.argv[1]}/filter{rank}"}
    PrecisionDebugger(config).save(1, "i")
    PrecisionDebugger.step()
    PrecisionDebugger._instance = None
"""


@pytest.mark.distributed
def test_the_rank_filter_holds_for_save(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(RANKS)
    code, output = run_script(script, [str(tmp_path)])
    assert code == 0, output
    assert rank_folder(tmp_path / "filter0").name == "rank0"
    assert step_names(tmp_path / "filter1") == []


def test_the_rank_filter_in_a_process_without_rank_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    debugger = debugging(tmp_path, rank=[0])
    debugger.save(1, "i")
    debugger.save(2, "i")
    assert step_names(tmp_path) == []
    assert caplog.text.count("selects ranks") == 1


def test_values_are_on_disk_without_a_step(tmp_path: Path) -> None:
    """The design document's example of save() needs neither start, stop nor step."""
    debugging(tmp_path).save(3, "i")
    assert saved(tmp_path)["i.0.debug"] == {"type": "int", "value": 3}


def test_start_and_stop_do_nothing_at_level_debug(tmp_path: Path) -> None:
    linear, net = F.linear, make_net()
    debugger = debugging(tmp_path)
    debugger.start(net)
    assert vars(F)["linear"] is linear
    net(batch(0))
    debugger.save(net(batch(0)), "y", save_backward=False)
    debugger.stop()
    debugger.step()
    assert list(saved(tmp_path)) == ["y.0.debug"]


def test_save_at_another_level_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    debugger = PrecisionDebugger(dump_path=tmp_path, level="L1")
    debugger.save(torch.ones(1), "x")
    debugger.save(torch.ones(1), "x")
    assert caplog.text.count('set "level": "debug"') == 1
    assert step_names(tmp_path) == []


# ---- save: gradients


def test_gradients_stand_in_the_places_of_the_tensors(tmp_path: Path) -> None:
    """Of leaves and of results, null where no gradient can come; numbers are worked out by hand."""
    debugger = debugging(tmp_path)
    leaf = torch.tensor([1.0, 2.0], requires_grad=True)
    data = torch.tensor([3.0, 4.0])
    hidden = leaf * data
    variable = {"hidden": hidden, "rest": [leaf, data, 1, None, "s", (hidden.detach(),)]}
    debugger.save(variable, "v")
    (hidden**2).sum().backward()
    debugger.step()
    grad_hidden = [2 * 3.0, 2 * 8.0]
    grad_leaf = [6.0 * 3.0, 16.0 * 4.0]
    found = saved(tmp_path)["v_grad.0.debug"]
    assert numbers_of(found["hidden"]) == statistics(grad_hidden)
    assert found["hidden"]["requires_grad"] is False
    assert numbers_of(found["rest"][0]) == statistics(grad_leaf)
    assert found["rest"][1:] == [None, None, None, None, [None]]


def test_a_value_without_gradients_has_a_record_of_nulls(tmp_path: Path) -> None:
    debugger = debugging(tmp_path)
    debugger.save({"a": torch.ones(1), "b": [1, {}], "c": []}, "v")
    debugger.save(3, "i")
    debugger.step()
    found = saved(tmp_path)
    assert found["v_grad.0.debug"] == {"a": None, "b": [None, {}], "c": []}
    assert found["i_grad.0.debug"] is None


def test_gradients_of_a_parameter_that_is_saved_before_its_use(tmp_path: Path) -> None:
    """A leaf has no node of its own in any graph yet when it is saved."""
    debugger = debugging(tmp_path)
    net = nn.Linear(2, 1, bias=False)
    debugger.save(net.weight, "weight")
    x = torch.tensor([[1.0, -2.0], [3.0, 5.0]])
    net(x).sum().backward()
    debugger.step()
    assert numbers_of(saved(tmp_path)["weight_grad.0.debug"]) == statistics([[4.0, 3.0]])


def test_one_tensor_saved_under_two_names_has_both_gradients(tmp_path: Path) -> None:
    debugger = debugging(tmp_path)
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    debugger.save(y, "first")
    debugger.save([y, y], "second")
    (y * 3).sum().backward()
    found = saved(tmp_path)
    assert found["first_grad.0.debug"]["Max"] == 3.0
    assert [entry["Max"] for entry in found["second_grad.0.debug"]] == [3.0, 3.0]


def test_a_gradient_after_step_lands_in_the_step_of_its_value(tmp_path: Path) -> None:
    debugger = debugging(tmp_path)
    losses = []
    for number in range(2):
        y = torch.full((2,), float(number), requires_grad=True) * 2
        debugger.save(y, "y")
        losses.append((y * (number + 5)).sum())
        debugger.step()
    for loss in reversed(losses):
        loss.backward()
    PrecisionDebugger._instance = None
    for number in range(2):
        found = read_data(tmp_path, number, "debug.json")
        assert found["y_grad.0.debug"]["Max"] == number + 5.0


def test_saving_changes_no_gradient(tmp_path: Path) -> None:
    def gradients(debugger: Any) -> list[torch.Tensor]:
        net = make_net()
        y = net(batch(0))
        if debugger is not None:
            debugger.save([y, *net.parameters()], "all")
        y.square().mean().backward()
        return [p.grad.clone() for p in net.parameters() if p.grad is not None]

    with_save = gradients(debugging(tmp_path))
    assert all(map(torch.equal, with_save, gradients(None)))


# ---- save: files, checksums, names


def test_task_tensor_saves_values_and_gradients_as_files(tmp_path: Path) -> None:
    debugger = debugging(tmp_path, task="tensor")
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = x * 2
    debugger.save({"a": [y]}, "v")
    debugger.save(y, "y")
    (y * torch.tensor([5.0, 7.0])).sum().backward()
    found = saved(tmp_path)
    folder = rank_folder(tmp_path) / "dump_tensor_data"
    names = {entry["data_name"] for entry in (found["v.0.debug"]["a"][0], found["y.0.debug"])}
    assert names == {"v.0.debug.a.0.pt", "y.0.debug.pt"}
    value = torch.load(folder / "v.0.debug.a.0.pt", weights_only=True)
    assert torch.equal(value, torch.tensor([2.0, 4.0]))
    assert found["v_grad.0.debug"]["a"][0]["data_name"] == "v_grad.0.debug.a.0.pt"
    grad = torch.load(folder / found["y_grad.0.debug"]["data_name"], weights_only=True)
    assert torch.equal(grad, torch.tensor([5.0, 7.0]))


def xor64(data: bytes) -> str:
    words = np.frombuffer(data + b"\0" * (-len(data) % 8), dtype="<u8")
    return f"0x{np.bitwise_xor.reduce(words):016x}"


@pytest.mark.parametrize(
    ("mode", "checksum"),
    [("md5", lambda data: f"{zlib.crc32(data):08x}"), ("xor", xor64)],
    ids=["md5", "xor"],
)
@pytest.mark.parametrize("task", ["statistics", "tensor"])
def test_checksums_are_of_the_bytes_of_value_and_gradient(
    task: str, mode: str, checksum: Any, tmp_path: Path
) -> None:
    debugger = debugging(tmp_path, task, {"summary_mode": mode})
    x = torch.tensor([1.5, -2.0, 0.25], requires_grad=True)
    y = x * 3
    debugger.save(y, "y")
    weights = torch.tensor([0.1, 0.2, 0.3])
    (y * weights).sum().backward()
    found = saved(tmp_path)
    assert found["y.0.debug"]["md5"] == checksum(y.detach().numpy().tobytes())
    assert found["y_grad.0.debug"]["md5"] == checksum(weights.numpy().tobytes())
    assert ("Max" in found["y.0.debug"]) == (mode == "md5")


NAMES = {
    "separators": "layer/1\\attn",
    "300 characters": "n" * 300,
    "300 characters, another end": "n" * 299 + "m",
    "dots and spaces": "a.b c",
    "unicode": "注意力",
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_any_name_is_accepted_and_its_files_are_found(name: str, tmp_path: Path) -> None:
    """A name that no file can have is changed for the file only; data_name tells."""
    debugger = debugging(tmp_path, task="tensor")
    x = torch.tensor([1.0], requires_grad=True)
    debugger.save([x * 2, x * 3], name)
    debugger.step()
    entries = saved(tmp_path)[f"{name}.0.debug"]
    folder = rank_folder(tmp_path) / "dump_tensor_data"
    values = [torch.load(folder / e["data_name"], weights_only=True).item() for e in entries]
    assert values == [2.0, 3.0]
    assert not (rank_folder(tmp_path) / "dump_error_info.log").exists()


def test_names_that_differ_beyond_the_length_of_a_file_name_have_files_of_their_own(
    tmp_path: Path,
) -> None:
    debugger = debugging(tmp_path, task="tensor")
    for number, end in enumerate("mn/_"):
        debugger.save(torch.tensor([float(number)]), "n" * 299 + end, save_backward=False)
    entries = list(saved(tmp_path).values())
    folder = rank_folder(tmp_path) / "dump_tensor_data"
    values = [torch.load(folder / e["data_name"], weights_only=True).item() for e in entries]
    assert values == [0.0, 1.0, 2.0, 3.0]


def nested(depth: int) -> Any:
    value: Any = torch.ones(2)
    for _ in range(depth):
        value = [value]
    return value


def holding_itself() -> Any:
    value: list[Any] = [torch.ones(2)]
    value.append(value)
    return value


def shared(depth: int) -> Any:
    value: Any = [torch.ones(2)]
    for _ in range(depth):
        value = [value, value]
    return value


@pytest.mark.parametrize(
    "make", [holding_itself, lambda: nested(50), lambda: nested(5000), lambda: shared(40)],
    ids=["holds itself", "deep", "deeper than Python can", "shared many times"],
)
def test_a_value_of_any_depth_is_no_reason_to_raise(make: Any, tmp_path: Path) -> None:
    debugger = debugging(tmp_path)
    debugger.save(make(), "x")
    debugger.save(torch.ones(1), "after")
    assert next(iter(saved(tmp_path))) == "x.0.debug"
    assert "after.0.debug" in saved(tmp_path)


# ---- save: bad arguments


BAD_ARGUMENTS = {
    "name is a number": ((1, 5), "name is 5; expected a non-empty str"),
    "name is empty": ((1, ""), "name is ''"),
    "name is None": ((1, None), "name is None"),
    "save_backward is a number": ((1, "x", 1), "save_backward is 1; expected True or False"),
    "a set": (({1}, "x"), "of type set"),
    "a complex number": ((1j, "x"), "of type complex"),
    "an object deep inside": (([{"a": (object(),)}], "x"), "of type object"),
    "a dict with a number as key": (({1: 2}, "x"), "a dict has the key 1"),
    "a numpy array": ((np.ones(2), "x"), "of type ndarray"),
}


@pytest.mark.parametrize(("arguments", "said"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_a_bad_argument_warns_and_the_call_is_skipped(
    arguments: Any, said: str, tmp_path: Path
) -> None:
    debugger = debugging(tmp_path)
    with pytest.warns(UserWarning, match=f"save\\(\\) skipped: .*{re.escape(said)}") as caught:
        debugger.save(*arguments)
    assert caught[0].filename == __file__
    debugger.save(1, "x")
    assert set(saved(tmp_path)) == {"x.0.debug", "x_grad.0.debug"}


def test_a_bad_argument_does_not_raise_where_warnings_are_errors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    debugger = debugging(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        debugger.save({1}, "x")
    assert "save() skipped: it holds an object of type set" in caplog.text


# ---- module_dump


@contextmanager
def window(path: Path, level: str, model: nn.Module, task: str = "statistics") -> Iterator[None]:
    debugger = PrecisionDebugger(task=task, dump_path=path, level=level)
    debugger.start(model)
    yield
    debugger.stop()
    debugger.step()


@levels
def test_module_dump_records_only_that_module_until_its_end(level: str, tmp_path: Path) -> None:
    """Neither its parts nor the functions it calls, but its gradients, and all else after it."""
    model, net = nn.Sequential(make_net()), make_net(1)
    with window(tmp_path, level, model):
        module_dump(net, "mine")
        hidden = net(batch(0))
        model(batch(0))
        F.relu(hidden)
        module_dump_end()
        loss = model(batch(0)).sum() + hidden.sum()
        loss.backward()
    data = read_data(tmp_path)
    mine = [name for name in data if "mine" in name]
    assert mine == ["Module.mine.Net.forward.0", "Module.mine.Net.backward.0"]
    assert next(iter(data)) == "Module.mine.Net.forward.0"
    own = [name for name in data if name.startswith("Module.0.") and ".forward" in name]
    apis = [name for name in data if not name.startswith("Module.") and ".forward" in name]
    assert len(own) == (0 if level == "L1" else 4)
    assert len(apis) == (0 if level == "L0" else 8)
    forward = data["Module.mine.Net.forward.0"]
    assert numbers_of(forward["input_args"][0]) == statistics(batch(0))
    assert numbers_of(forward["output"][0]) == statistics(hidden.detach())
    assert data["Module.mine.Net.backward.0"]["input"][0]["Max"] == 1.0


@levels
def test_module_dump_of_a_module_with_parameters_records_them_and_their_gradients(
    level: str, tmp_path: Path
) -> None:
    """The module is hooked already at L0 and mix: it has one record, under the name given."""
    net = make_net()
    with window(tmp_path, level, net):
        module_dump(net.fc2, "head")
        loss = net(batch(0)).sum()
        module_dump_end()
        loss.backward()
    data = {n: r for n, r in read_data(tmp_path).items() if n.startswith("Module.")}
    assert list(data)[0] == "Module.head.Linear.forward.0"  # noqa: RUF015
    assert set(data) == {
        "Module.head.Linear.forward.0", "Module.head.Linear.backward.0",
        "Module.head.Linear.parameters_grad.0",
    }  # fmt: skip
    parameters = data["Module.head.Linear.forward.0"]["parameters"]
    assert numbers_of(parameters["weight"]) == statistics(net.fc2.weight.detach())
    (grad,) = data["Module.head.Linear.parameters_grad.0"]["bias"]
    assert numbers_of(grad) == statistics(net.fc2.bias.grad)


@levels
def test_module_dump_can_follow_module_dump(level: str, tmp_path: Path) -> None:
    """Each with its end; a name that comes again is counted on."""
    net = make_net()
    with window(tmp_path, level, net), torch.no_grad():
        for name in ("a", "b", "a"):
            module_dump(net, name)
            net(batch(0))
            module_dump_end()
    assert list(read_data(tmp_path)) == [
        "Module.a.Net.forward.0", "Module.b.Net.forward.0", "Module.a.Net.forward.1",
    ]  # fmt: skip


@levels
def test_module_dump_inside_module_dump_is_ignored_and_said(
    level: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = make_net()
    with window(tmp_path, level, net), torch.no_grad():
        module_dump(net, "outer")
        module_dump(net.fc1, "inner")
        net(batch(0))
        module_dump_end()
    assert list(read_data(tmp_path)) == ["Module.outer.Net.forward.0"]
    assert "module_dump() inside module_dump()" in caplog.text


@levels
def test_a_forgotten_end_is_said_and_the_next_window_is_whole(
    level: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = make_net()
    debugger = PrecisionDebugger(dump_path=tmp_path, level=level)
    for step in range(2):
        debugger.start(net)
        if step == 0:
            module_dump(net, "mine")
        with torch.no_grad():
            net(batch(0))
        debugger.stop()
        debugger.step()
    assert list(read_data(tmp_path, 0)) == ["Module.mine.Net.forward.0"]
    expected = {"L0": 3, "L1": 5, "mix": 8}[level]
    assert len(read_data(tmp_path, 1)) == expected
    assert caplog.text.count("module_dump() was not ended before stop()") == 1
    assert not any(module._forward_hooks for module in net.modules())


@levels
def test_module_dump_survives_an_exception_of_the_module(level: str, tmp_path: Path) -> None:
    net = make_net()
    with window(tmp_path, level, net), torch.no_grad():
        module_dump(net, "mine")
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            net(torch.ones(2, 9))
        net(batch(0))
        module_dump_end()
    data = read_data(tmp_path)
    assert set(data) == {"Module.mine.Net.forward.0", "Module.mine.Net.forward.1"}
    assert "output" not in data["Module.mine.Net.forward.0"]
    assert "output" in data["Module.mine.Net.forward.1"]


def test_module_dump_end_without_module_dump_does_nothing(tmp_path: Path) -> None:
    net = make_net()
    with window(tmp_path, "mix", net):
        module_dump_end()
        net(batch(0))
    assert len(read_data(tmp_path)) == 8


def test_module_dump_outside_of_a_window_records_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    net = make_net()
    PrecisionDebugger(dump_path=tmp_path, level="L0", step=[5])
    PrecisionDebugger.start(net)
    module_dump(net, "mine")
    net(batch(0))
    module_dump_end()
    PrecisionDebugger.stop()
    assert step_names(tmp_path) == []
    assert caplog.records == []
    assert not net._forward_hooks


def test_a_module_name_with_separators_names_its_files(tmp_path: Path) -> None:
    net = make_net()
    with window(tmp_path, "L1", net, task="tensor"), torch.no_grad():
        module_dump(net, "stage/1.block")
        net(batch(0))
        module_dump_end()
    entry = read_data(tmp_path)["Module.stage/1.block.Net.forward.0"]["input_args"][0]
    path = rank_folder(tmp_path) / "dump_tensor_data" / entry["data_name"]
    assert torch.equal(torch.load(path, weights_only=True), batch(0))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((F.relu, "x"), "module is a function; expected a torch.nn.Module"),
        (("net", "x"), "module is a str"),
        ((nn.ReLU(), 5), "module_name is 5; expected a non-empty str"),
        ((nn.ReLU(), ""), "module_name is ''"),
    ],
    ids=["function", "text", "number as name", "empty name"],
)
def test_bad_arguments_of_module_dump_are_refused(
    arguments: Any, said: str, tmp_path: Path
) -> None:
    PrecisionDebugger(dump_path=tmp_path)
    with pytest.raises(UsageError, match=re.escape(said)):
        module_dump(*arguments)


@pytest.mark.parametrize(
    "call", [lambda: module_dump(nn.ReLU(), "x"), module_dump_end], ids=["begin", "end"]
)
def test_module_dump_needs_a_debugger(call: Any) -> None:
    with pytest.raises(UsageError, match="construct it first"):
        call()


# ---- forked children


CHILDREN = """
import os
import sys
import torch
import torch.nn.functional as F
from msprobe.pytorch import PrecisionDebugger

def in_child(work):
    pid = os.fork()
    if pid == 0:
        work()
        # as a worker of a data loader ends: atexit functions do not run
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    return pid

def silent():
    F.gelu(torch.ones(2))
    PrecisionDebugger.stop()
    PrecisionDebugger.step()
    F.gelu(torch.ones(2))

def own_window():
    F.gelu(torch.ones(2))
    debugger.start()
    F.softplus(torch.ones(2))
    debugger.stop()
    debugger.step()

debugger = PrecisionDebugger(dump_path=sys.argv[1], level="L1")
debugger.start()
F.relu(torch.ones(2))
in_child(silent)
child = in_child(own_window)
F.elu(torch.ones(2))
debugger.stop()
debugger.step()
print(os.getpid(), child)
"""


def test_a_forked_child_writes_nothing_unless_it_starts_a_window_itself(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(CHILDREN)
    code, output = run_script(script, [str(tmp_path / "dump")])
    assert code == 0, output
    parent, child = output.split()[-2:]
    folders = {folder.name: folder for folder in (tmp_path / "dump" / "step0").iterdir()}
    assert set(folders) == {f"proc{parent}", f"proc{child}"}
    data = {name: list(read_json(f / "dump.json")["data"]) for name, f in folders.items()}
    assert data[f"proc{parent}"] == ["Functional.relu.0.forward", "Functional.elu.0.forward"]
    assert data[f"proc{child}"] == ["Functional.softplus.0.forward"]


WORKERS = """
import sys
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from msprobe.pytorch import PrecisionDebugger

class Numbers(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return F.gelu(torch.full((2,), float(index)))

debugger = PrecisionDebugger(dump_path=sys.argv[1], level="L1")
debugger.start()
workers = DataLoader(Numbers(), batch_size=2, num_workers=2, multiprocessing_context="fork")
total = sum(F.relu(batch).sum() for batch in workers)
debugger.stop()
debugger.step()
"""


def test_workers_of_a_data_loader_leave_no_trace(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WORKERS)
    code, output = run_script(script, [str(tmp_path / "dump")])
    assert code == 0, output
    names = list(read_data(tmp_path / "dump"))
    assert [name for name in names if "relu" in name] == [
        f"Functional.relu.{n}.forward" for n in range(3)
    ]
    assert not any("gelu" in name for name in names)
