"""Whatever order frameworks call start, stop and step in, no record is lost and none stands twice.

Each order is compared, record by record, with plain start-stop-step runs of the same model on the
same data. Equality is exact: the same operations in the same process give the same bits.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from msprobe.pytorch import PrecisionDebugger
from msprobe.pytorch.dump.module_dump.parts import hookable, named_modules
from recorded import LEVELS, Net, batch, make_net, read_beside, read_data, step_names

Data = dict[str, Any]
STEPS = 3

levels = pytest.mark.parametrize("level", LEVELS)

_API = re.compile(r"(?P<base>.+)\.(?P<n>\d+)\.(?P<kind>forward|backward)")
_MODULE = re.compile(
    r"(?P<base>Module\..+)\.(?P<kind>forward|backward|parameters_grad)\.(?P<n>\d+)"
)


class Trainer:
    """A model that learns, so that each step has other numbers."""

    def __init__(self, seed: int = 0) -> None:
        self.net = make_net(seed)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def forward(self, number: int) -> torch.Tensor:
        return self.net(batch(number)).square().mean()

    def backward(self, loss: torch.Tensor) -> None:
        """Without an update, and without a trace in the gradients of the next backward."""
        loss.backward()
        self.optimizer.zero_grad()

    def train(self, number: int) -> None:
        self.forward(number).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def end_session() -> None:
    PrecisionDebugger._instance = None


def plain_run(level: str, model: Any, windows: Sequence[Callable[[], object]]) -> list[Data]:
    """The records of each window when it is a step of its own: start, run, stop, step."""
    with tempfile.TemporaryDirectory() as path:
        debugger = PrecisionDebugger(dump_path=path, level=level)
        for run in windows:
            debugger.start(model)
            run()
            debugger.stop()
            debugger.step()
        end_session()
        return [read_data(path, step) for step in range(len(windows))]


@functools.cache
def trained(level: str, seed: int = 0) -> list[Data]:
    """Three training steps, plainly."""
    trainer = Trainer(seed)
    windows = [functools.partial(trainer.train, i) for i in range(STEPS)]
    return plain_run(level, trainer.net, windows)


@pytest.fixture
def plain(level: str) -> list[Data]:
    return trained(level)


@functools.cache
def not_trained(level: str) -> list[Data]:
    """Three forwards and backwards, without an optimizer, so that the weights stay."""
    trainer = Trainer()
    windows = [lambda i=i: trainer.backward(trainer.forward(i)) for i in range(STEPS)]
    return plain_run(level, trainer.net, windows)


@pytest.fixture
def plain_without_update(level: str) -> list[Data]:
    return not_trained(level)


def merged(parts: Sequence[Data]) -> Data:
    """What one step must hold that consists of these parts: the counters go on."""
    begun: Counter[str] = Counter()
    whole: Data = {}
    for part in parts:
        numbers: dict[str, set[int]] = {}
        for name, record in part.items():
            match = _MODULE.fullmatch(name) or _API.fullmatch(name)
            assert match is not None
            gradient = ".parameters_grad" if match["kind"] == "parameters_grad" else ""
            counter, n = match["base"] + gradient, int(match["n"])
            numbers.setdefault(counter, set()).add(n)
            start, end = match.span("n")
            whole[f"{name[:start]}{n + begun[counter]}{name[end:]}"] = record
        for counter, found in numbers.items():
            begun[counter] += len(found)
    return whole


def assert_same(found: Data, expected: Data) -> None:
    assert list(found) == list(expected)
    assert found == expected


def read_whole(path: Path, step: int = 0) -> Data:
    """The records of a step, after a look at the files beside them: each forward has its stack."""
    data = read_data(path, step)
    stacks = read_beside(path, "stack.json", step).values()
    with_stack = [name for names, _ in stacks for name in names]
    forwards = [name for name in data if re.search(r"\.forward(\.\d+)?$", name)]
    assert sorted(with_stack) == sorted(forwards)
    return data


# ---- the orders A to J


BACKWARDS = {
    "L0": ["Module.fc2.Linear.backward.0", "Module.act.ReLU.backward.0",
           "Module.fc1.Linear.backward.0"],
    "L1": [f"{api}.backward" for api in (
        "Tensor.mean.0", "Tensor.square.0", "Functional.linear.1", "Tensor.__mul__.0",
        "Functional.gelu.0", "Functional.relu.0", "Functional.linear.0")],
}  # fmt: skip


@levels
def test_start_stop_step_per_train_step_gives_each_step_whole(level: str, tmp_path: Path) -> None:
    """Order A; vllm-ascend, SGLang, ms-swift. Names are written out, numbers are autograd's."""
    trainer, untouched = Trainer(), Trainer()
    debugger = PrecisionDebugger(dump_path=tmp_path, level=level)
    for number in range(STEPS):
        debugger.start(trainer.net)
        trainer.train(number)
        debugger.stop()
        debugger.step()
    assert step_names(tmp_path) == ["step0", "step1", "step2"]
    backwards = BACKWARDS["L0"] + BACKWARDS["L1"] if level == "mix" else BACKWARDS[level]
    for number in range(STEPS):
        data = read_whole(tmp_path, number)
        assert sorted(backwards) == sorted(name for name in data if ".backward" in name)
        loss = untouched.forward(number)
        loss.backward()
        assert_gradient_of_fc1(level, data, untouched.net.fc1.weight.grad)
        untouched.optimizer.step()
        untouched.optimizer.zero_grad()
        if level != "L0":
            # The value itself, printed with all its digits.
            assert data["Tensor.mean.0.forward"]["output"][0]["Max"] == loss.item()


def assert_gradient_of_fc1(level: str, data: Data, grad: torch.Tensor | None) -> None:
    assert grad is not None
    if level == "L1":
        entry = data["Functional.linear.0.backward"]["output"][1]
    else:
        (entry,) = data["Module.fc1.Linear.parameters_grad.0"]["weight"]
    exact = grad.numpy().astype(np.float64)
    assert entry["Max"] == exact.max()
    # float32 arithmetic over 20 elements: a few units in the last place, 1.2e-7 each.
    assert entry["Norm"] == pytest.approx(np.linalg.norm(exact), rel=1e-6)


@levels
def test_several_windows_before_one_step_go_into_that_step(
    level: str, tmp_path: Path, plain: list[Data]
) -> None:
    """Order B; MindSpeed-RL, slime, gradient accumulation."""
    trainer = Trainer()
    debugger = PrecisionDebugger(dump_path=tmp_path, level=level)
    for number in range(STEPS):
        debugger.start(trainer.net)
        trainer.train(number)
        debugger.stop()
    debugger.step()
    assert step_names(tmp_path) == ["step0"]
    assert_same(read_whole(tmp_path), merged(plain))


@levels
def test_windows_with_reset_status_and_never_a_step_are_complete_at_stop(
    level: str, tmp_path: Path, plain: list[Data]
) -> None:
    """Order C; verl: another dump path for each stage, files read while the process lives."""
    trainer = Trainer()
    debugger = PrecisionDebugger(dump_path=tmp_path / "unused", level=level)
    for number in range(STEPS):
        debugger.service.config.dump_path = str(tmp_path / f"stage{number}")
        debugger.start(trainer.net)
        trainer.train(number)
        debugger.stop()
        assert_same(read_whole(tmp_path / f"stage{number}"), plain[number])
        debugger.service.reset_status()
        assert_same(read_whole(tmp_path / f"stage{number}"), plain[number])


@levels
def test_step_before_stop_keeps_the_step(level: str, tmp_path: Path, plain: list[Data]) -> None:
    """Order D; an earlier verl calls both on the class, with the step first."""
    trainer = Trainer()
    PrecisionDebugger(dump_path=tmp_path, level=level)
    for number in range(STEPS):
        PrecisionDebugger.start(model=trainer.net)
        trainer.train(number)
        PrecisionDebugger.step()
        PrecisionDebugger.stop()
    assert step_names(tmp_path) == ["step0", "step1", "step2"]
    for number in range(STEPS):
        assert_same(read_whole(tmp_path, number), plain[number])


@levels
def test_one_window_over_many_optimizer_steps_is_one_step(
    level: str, tmp_path: Path, plain: list[Data]
) -> None:
    """Order E; Megatron-Bridge notes: one start around the whole of train()."""
    trainer = Trainer()
    debugger = PrecisionDebugger(dump_path=tmp_path, level=level)
    debugger.start(trainer.net)
    for number in range(STEPS):
        trainer.train(number)
    debugger.stop()
    debugger.step()
    assert step_names(tmp_path) == ["step0"]
    assert_same(read_whole(tmp_path), merged(plain))


@levels
def test_forward_backward_dump_end_keeps_the_gradients_of_what_was_recorded(
    level: str, tmp_path: Path, plain_without_update: list[Data]
) -> None:
    """Order F; the XLA trainer. What runs between it and stop() is not recorded."""
    trainer = Trainer()
    debugger = PrecisionDebugger(dump_path=tmp_path, level=level)
    for number in range(STEPS):
        debugger.start(trainer.net)
        loss = trainer.forward(number)
        debugger.forward_backward_dump_end()
        trainer.net(batch(number))
        trainer.backward(F.relu(loss))
        debugger.stop()
        debugger.step()
    for number in range(STEPS):
        assert_same(read_whole(tmp_path, number), plain_without_update[number])


@levels
def test_gradients_land_in_the_step_of_their_forward(
    level: str, tmp_path: Path, plain_without_update: list[Data]
) -> None:
    """Order G; Megatron's forward_step: all forwards and their step() come before the backwards."""
    trainer = Trainer()
    debugger = PrecisionDebugger(dump_path=tmp_path, level=level)
    losses = []
    for number in range(STEPS):
        debugger.start(trainer.net)
        losses.append(trainer.forward(number))
        debugger.stop()
        debugger.step()
    for loss in reversed(losses):
        trainer.backward(loss)
    end_session()
    assert step_names(tmp_path) == ["step0", "step1", "step2"]
    for number in range(STEPS):
        assert_same(read_whole(tmp_path, number), plain_without_update[number])


@levels
def test_gradients_of_a_stopped_window_arrive_while_the_next_is_open(
    level: str, tmp_path: Path, plain_without_update: list[Data]
) -> None:
    """Order G, interleaved as in pipeline schedules: forward 1 runs before backward 0."""
    trainer = Trainer()
    debugger = PrecisionDebugger(dump_path=tmp_path, level=level)
    waiting: torch.Tensor | None = None
    for number in range(STEPS):
        debugger.start(trainer.net)
        loss = trainer.forward(number)
        if waiting is not None:
            trainer.backward(waiting)
        debugger.stop()
        debugger.step()
        waiting = loss
    assert waiting is not None
    trainer.backward(waiting)
    end_session()
    for number in range(STEPS):
        assert_same(read_whole(tmp_path, number), plain_without_update[number])


@levels
def test_gradients_of_an_earlier_step_are_on_disk_after_the_next_stop(
    level: str, tmp_path: Path, plain_without_update: list[Data], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only when the thread that writes once a second comes round."""
    monkeypatch.setattr("msprobe.pytorch.dump.flusher.PERIOD_S", 1000)
    trainer = Trainer()
    debugger = PrecisionDebugger(dump_path=tmp_path, level=level)
    debugger.start(trainer.net)
    loss = trainer.forward(0)
    debugger.stop()
    debugger.step()
    trainer.backward(loss)
    debugger.start(trainer.net)
    debugger.stop()
    assert_same(read_whole(tmp_path, 0), plain_without_update[0])
    end_session()


@levels
def test_construction_in_each_step_goes_on_with_the_one_debugger(
    level: str, tmp_path: Path, plain: list[Data]
) -> None:
    """Order H; ms-swift's recipe, which gives the model to the constructor."""
    trainer = Trainer()
    for number in range(STEPS):
        debugger = PrecisionDebugger(dump_path=str(tmp_path), level=level, model=trainer.net)
        try:
            debugger.start()
            trainer.train(number)
        finally:
            debugger.stop()
            debugger.step()
    assert step_names(tmp_path) == ["step0", "step1", "step2"]
    for number in range(STEPS):
        assert_same(read_whole(tmp_path, number), plain[number])


@levels
def test_start_twice_hooks_once(level: str, tmp_path: Path, plain: list[Data]) -> None:
    """Order I."""
    trainer = Trainer()
    debugger = PrecisionDebugger(dump_path=tmp_path, level=level)
    for number in range(STEPS):
        debugger.start(trainer.net)
        debugger.start(trainer.net)
        trainer.train(number)
        debugger.stop()
        debugger.step()
    for number in range(STEPS):
        assert_same(read_whole(tmp_path, number), plain[number])


@levels
def test_start_in_the_middle_of_an_open_window_changes_nothing(
    level: str, tmp_path: Path, plain: list[Data]
) -> None:
    """Order I, with recorded calls between the two: they are in the same step."""
    trainer = Trainer()
    debugger = PrecisionDebugger(dump_path=tmp_path, level=level)
    debugger.start(trainer.net)
    trainer.train(0)
    debugger.start(trainer.net)
    trainer.train(1)
    debugger.stop()
    debugger.step()
    assert_same(read_whole(tmp_path), merged(plain[:2]))


@levels
def test_instance_set_to_none_writes_all_and_allows_a_new_one(
    level: str, tmp_path: Path, plain: list[Data]
) -> None:
    """Order J; an earlier verl moves to another dump path this way, without stop and step."""
    trainer = Trainer()
    for number in range(STEPS):
        PrecisionDebugger(dump_path=tmp_path / str(number), level=level)
        debugger = PrecisionDebugger._instance
        debugger.start(trainer.net)
        trainer.train(number)
        PrecisionDebugger._instance = None
        assert_same(read_whole(tmp_path / str(number)), plain[number])


# ---- windows of other models, with other dump paths


def stages(level: str) -> dict[str, tuple[Any, Callable[[int], object], list[Data]]]:
    """Stage → (model, what it runs in iteration i, its records in a plain run of its own)."""
    actor, critic, reference = Trainer(1), Trainer(2), make_net(3)

    def infer(number: int) -> None:
        with torch.no_grad():
            reference(batch(number))

    windows = [functools.partial(infer, i) for i in range(STEPS)]
    return {
        "ref": (reference, infer, plain_run(level, reference, windows)),
        "actor": (actor.net, actor.train, trained(level, 1)),
        "critic": (critic.net, critic.train, trained(level, 2)),
    }


@levels
def test_models_of_one_step_in_one_path_are_counted_on(level: str, tmp_path: Path) -> None:
    """Actor, critic and reference of one class share their names, so the counters tell them."""
    all_stages = stages(level).values()
    debugger = PrecisionDebugger(dump_path=tmp_path, level=level)
    for number in range(2):
        for model, run, _ in all_stages:
            debugger.start(model)
            run(number)
            debugger.stop()
        debugger.step()
    for number in range(2):
        expected = merged([data[number] for _, _, data in all_stages])
        assert_same(read_whole(tmp_path, number), expected)


@levels
def test_verl_stages_each_have_their_dump_path_and_no_step(level: str, tmp_path: Path) -> None:
    """verl: one debugger, redirected to ``step_<n>/<stage>`` before each start, reset after it."""
    all_stages = stages(level)
    debugger = PrecisionDebugger({"task": "statistics"}, dump_path=tmp_path / "first", level=level)
    for number in range(2):
        for stage, (model, run, _) in all_stages.items():
            path = tmp_path / f"step_{number}" / stage
            path.mkdir(parents=True)
            if hasattr(debugger, "service") and hasattr(debugger.service, "config"):
                debugger.service.config.dump_path = str(path)
            debugger.start(model)
            run(number)
            debugger.stop()
            debugger.service.reset_status()
    for number in range(2):
        for stage, (_, _, data) in all_stages.items():
            assert_same(read_whole(tmp_path / f"step_{number}" / stage), data[number])


def test_mindspeed_rl_tags_are_reset_and_one_step_ends_the_iteration(tmp_path: Path) -> None:
    """MindSpeed-RL: sets ``first_start`` for new models and reads it back, level L0."""
    all_stages = stages("L0")
    debugger = PrecisionDebugger(
        task="statistics", level="L0", step=["0-2"], dump_path=str(tmp_path / "root")
    )
    hooked: list[nn.Module] = []
    for number in range(2):
        for tag, (model, run, _) in all_stages.items():
            debugger.service.first_start = model not in hooked
            debugger.service.config.dump_path = str(tmp_path / f"{number}" / tag)
            debugger.start(model=model)
            assert debugger.service.first_start is False
            hooked.append(model)
            run(number)
            debugger.stop()
            debugger.service.reset_status()
        debugger.step()
    for number in range(2):
        for tag, (_, _, data) in all_stages.items():
            path = tmp_path / f"{number}" / tag
            (step,) = step_names(path)
            assert_same(read_whole(path, int(step.removeprefix("step"))), data[number])


@levels
def test_slime_windows_share_one_step_with_a_path_each(
    level: str, tmp_path: Path, plain: list[Data]
) -> None:
    """slime: ref, old log-prob and train, redirected in turn; models in a list; one step()."""
    trainer = Trainer()

    def infer(number: int) -> None:
        with torch.no_grad():
            trainer.net(batch(number))

    windows: dict[str, Callable[[int], object]] = {
        "ref": infer, "old_log_prob": infer, "train": trainer.train,
    }  # fmt: skip
    debugger = PrecisionDebugger(dump_path=tmp_path, level=level)
    for number in range(2):
        for tag, run in windows.items():
            debugger.service.config.dump_path = str(tmp_path / tag)
            debugger.start(model=[trainer.net])
            run(number)
            debugger.stop()
        debugger.step()
    for number in range(2):
        expected = {in_list(name): record for name, record in plain[number].items()}
        assert_same(read_whole(tmp_path / "train", number), expected)
        loss = ("Tensor.square.", "Tensor.mean.", "Tensor.add_.")
        forwards = {
            name: without_gradient(record)
            for name, record in expected.items()
            if ".forward" in name and not name.startswith(loss)
        }
        for tag in ("ref", "old_log_prob"):
            data = read_whole(tmp_path / tag, number)
            assert_same({n: without_gradient(r) for n, r in data.items()}, forwards)


def in_list(name: str) -> str:
    return re.sub(r"^Module\.", "Module.0.", name)


def without_gradient(value: Any) -> Any:
    """An entry without the field that says whether a graph was being built."""
    if isinstance(value, dict):
        return {k: without_gradient(v) for k, v in value.items() if k != "requires_grad"}
    return [without_gradient(v) for v in value] if isinstance(value, list) else value


@levels
def test_a_path_that_comes_again_in_the_same_step_is_continued(
    level: str, tmp_path: Path, plain: list[Data]
) -> None:
    """Two stages in turn: a later window must not empty the files of an earlier one."""
    trainer = Trainer()
    debugger = PrecisionDebugger(dump_path=tmp_path, level=level)
    for number, tag in enumerate(["a", "b", "a"]):
        debugger.config.dump_path = str(tmp_path / tag)
        debugger.start(trainer.net)
        trainer.train(number)
        debugger.stop()
    debugger.step()
    assert_same(read_whole(tmp_path / "b"), plain[1])
    assert_same(read_whole(tmp_path / "a"), merged([plain[0], plain[2]]))


# ---- exceptions, and start() from inside


@contextlib.contextmanager
def broken(module: nn.Module, error: Exception) -> Iterator[None]:
    def forward(*_: Any) -> None:
        raise error

    module.forward = forward  # type: ignore[assignment]
    try:
        yield
    finally:
        del module.forward


@levels
def test_stop_in_finally_after_an_exception_leaves_the_next_steps_whole(
    level: str, tmp_path: Path, plain: list[Data]
) -> None:
    """verl, ms-swift, TorchTitan. The user's exception passes as it is."""
    trainer = Trainer()
    debugger = PrecisionDebugger(dump_path=tmp_path, level=level)
    error = ValueError("the user's own")

    def step(number: int) -> None:
        try:
            debugger.start(trainer.net)
            trainer.train(number)
        finally:
            debugger.stop()
            debugger.step()

    step(0)
    with broken(trainer.net.fc2, error), pytest.raises(ValueError, match="own") as caught:
        step(1)
    assert caught.value is error
    step(1)
    step(2)
    for number, place in ((0, 0), (1, 2), (2, 3)):
        assert_same(read_whole(tmp_path, place), plain[number])
    before = ["Tensor.__mul__.0.forward"] if level == "L1" else ["Module.act.ReLU.forward.0"]
    failed = read_whole(tmp_path, 1)
    expected = dict(list(plain[1].items())[: len(failed)])
    if level != "L1":
        last = "Module.fc2.Linear.forward.0"
        inputs = {k: v for k, v in plain[1][last].items() if k.startswith("input")}
        assert failed.pop(last) == inputs
        expected = {name: record for name, record in expected.items() if name in failed}
    assert before[0] in failed
    assert_same(failed, expected)


class SelfStarting(nn.Module):
    """As in the design document: the file that holds the model opens the window in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(8, 4)
        self.linear_2 = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        PrecisionDebugger.start()
        x1 = self.linear_1(x)
        PrecisionDebugger.stop()
        return F.relu(self.linear_2(x1))


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("L0", {"Module.linear_1.Linear.forward.0", "Module.linear_1.Linear.backward.0",
                "Module.linear_1.Linear.parameters_grad.0"}),
        ("L1", {"Functional.linear.0.forward", "Functional.linear.0.backward"}),
        ("mix", {"Module.linear_1.Linear.forward.0", "Module.linear_1.Linear.backward.0",
                 "Module.linear_1.Linear.parameters_grad.0", "Functional.linear.0.forward",
                 "Functional.linear.0.backward"}),
    ],
)  # fmt: skip
def test_start_in_forward_through_the_class_records_what_lies_between(
    level: str, expected: set[str], tmp_path: Path
) -> None:
    """The second file needs no reference to the debugger; the backward runs after stop()."""
    net = SelfStarting()
    PrecisionDebugger(dump_path=tmp_path, level=level, model=None if level == "L1" else net)
    net(torch.ones(10, 8)).sum().backward()
    end_session()
    assert set(read_whole(tmp_path)) == expected


@levels
def test_start_in_a_submodule_that_already_runs_records_its_parts(
    level: str, tmp_path: Path
) -> None:
    """The modules around the start() began before it: they have no record and are no parents."""

    class Opening(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            PrecisionDebugger.start(model=whole)
            out = super().forward(x)
            PrecisionDebugger.stop()
            return out

    whole = nn.Sequential()
    whole.add_module("inner", Opening())
    PrecisionDebugger(dump_path=tmp_path, level=level)
    for _ in range(2):
        whole(batch(0))
        PrecisionDebugger.step()
    for step in range(2):
        data = read_whole(tmp_path, step)
        modules = [name for name in data if name.startswith("Module.")]
        apis = [name for name in data if not name.startswith("Module.")]
        own = ["inner.fc1.Linear", "inner.act.ReLU", "inner.fc2.Linear"]
        assert modules == ([] if level == "L1" else [f"Module.{m}.forward.0" for m in own])
        assert len(apis) == (0 if level == "L0" else 5)
        parents = read_beside(tmp_path, "construct.json", step)
        assert all(parents[name] is None for name in modules)


# ---- many windows


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def hooks(net: nn.Module) -> int:
    return sum(
        len(table)
        for module in net.modules()
        for table in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    )


def many_windows(path: Path, level: str, count: int) -> list[tuple[int, int, int]]:
    """Runs a session; after each window: hooks on the model, open files, threads."""
    net, x = make_net(), batch(0)
    debugger = PrecisionDebugger(dump_path=path, level=level)
    states = []
    for _ in range(count):
        debugger.start(net)
        with torch.inference_mode():
            net(x)
        debugger.stop()
        debugger.step()
        states.append((hooks(net), open_files(), threading.active_count()))
    end_session()
    return states


@levels
def test_two_hundred_windows_leave_no_hook_file_or_thread(level: str, tmp_path: Path) -> None:
    """vllm-ascend and SGLang start, stop and step once per forward, thousands of times.

    test_resources.py counts the objects, in a process of its own.
    """
    states = many_windows(tmp_path / "run", level, 200)
    assert len(set(states[5:])) == 1
    assert states[-1][0] == 0
    assert len(step_names(tmp_path / "run")) == 200
    assert read_data(tmp_path / "run", 199) == read_data(tmp_path / "run", 0)


def test_two_hundred_windows_in_one_step_are_all_there(tmp_path: Path) -> None:
    """One step of very many micro batches; files stay open between the windows, but only once."""
    net, x = make_net(), batch(0)
    debugger = PrecisionDebugger(dump_path=tmp_path, level="mix")
    states = []
    for _ in range(200):
        debugger.start(net)
        with torch.no_grad():
            net(x)
        debugger.stop()
        states.append((hooks(net), open_files(), threading.active_count()))
    debugger.step()
    # Each of the three json files has no, one or two descriptors, by when the last flush was.
    opened = [files for _, files, _ in states[5:]]
    assert max(opened) - min(opened) <= 6
    assert {(hooks_left, threads) for hooks_left, _, threads in states[5:]} == {(0, states[-1][2])}
    data = read_whole(tmp_path)
    assert len(data) == 200 * 8
    assert "Module.fc2.Linear.forward.199" in data
    assert "Functional.linear.399.forward" in data


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit.script
def test_modules_have_the_names_that_torch_gives_them() -> None:
    """Shared modules, None, empty containers, scripted ones and a module that holds itself."""
    shared = nn.Linear(2, 2)
    inner = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, nn.ReLU(), nn.Sequential())})
    model = nn.Sequential(inner, shared, torch.jit.script(nn.ReLU()), nn.ModuleList([nn.ReLU()]))
    model.register_module("nothing", None)
    inner.parent = model
    parts, _ = hookable(named_modules([model], listed=False))
    expected = [
        (name, id(module))
        for name, module in model.named_modules()
        if name and not isinstance(module, torch.jit.ScriptModule)
    ]
    assert [(name, id(module)) for _, name, module in parts] == expected
