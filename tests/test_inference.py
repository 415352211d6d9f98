"""Servers and generation loops: no gradients, many short windows, hooks of others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers import collect, debugger, read_dump
from recorded import LEVELS, batch, make_net


class Speaker(nn.Module):
    """A language model with a loop, as ``generate()`` has."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.mixer = nn.GRU(4, 4, batch_first=True)
        self.head = nn.Linear(4, 9)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.mixer(self.embedding(tokens))[0][:, -1])

    @torch.inference_mode()
    def generate(self, tokens: Tensor, new: int) -> Tensor:
        for _ in range(new):
            tokens = torch.cat([tokens, self(tokens).argmax(-1, keepdim=True)], dim=1)
        return tokens


@pytest.fixture
def speaker() -> Speaker:
    torch.manual_seed(0)
    return Speaker().eval()


PROMPT = torch.tensor([[1, 2], [3, 4]])


def test_range_that_is_not_reached_is_said_once(
    speaker: Speaker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watcher = debugger(tmp_path, level="L1")
    for new in (2, 1, 8):
        watcher.start(model=speaker, token_range=[5, 6])
        speaker.generate(PROMPT, new)
        watcher.stop()
        watcher.step()
    said = [r.message for r in caplog.records if "was not reached" in r.message]
    assert len(said) == 1
    assert "[5, 6] was not reached: from start() to stop() the model was called 2 time" in said[0]
    assert read_dump(tmp_path, 2).data


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("token_range", "lengths"),
    [([0, 0], [2]), ([1, 2], [3, 4]), ([3, 99], [5, 6])],
    ids=["prefill", "middle", "open end"],
)
def test_token_range_selects_forwards_of_the_model(
    token_range: list[int], lengths: list[int], level: str, speaker: Speaker, tmp_path: Path
) -> None:
    expected = speaker.generate(PROMPT, 5)
    watcher = debugger(tmp_path, level=level)
    watcher.start(model=speaker, token_range=token_range)
    assert torch.equal(speaker.generate(PROMPT, 5), expected)
    watcher.stop()
    watcher.step()
    dump = read_dump(tmp_path)
    name = "Functional.embedding.{}.forward" if level == "L1" else "Module.embedding.{}.forward.{}"
    call = [name.format(*(["Embedding", i] if level != "L1" else [i])) for i in range(len(lengths))]
    assert dump.names("mbedding" if level == "L1" else "Module.embedding") == call
    assert [dump.data[one]["input_args"][0]["shape"] for one in call] == [[2, n] for n in lengths]


@pytest.mark.parametrize(
    "mode", [torch.inference_mode, torch.no_grad], ids=["inference", "no_grad"]
)
@pytest.mark.parametrize("task", ["statistics", "tensor"])
def test_inference_is_recorded_without_gradients(
    mode: Callable[[], Any], task: str, tmp_path: Path
) -> None:
    net = make_net()
    with mode():
        expected = F.linear(batch(0), net.fc1.weight, net.fc1.bias)
        dump = collect(tmp_path, lambda: net(batch(0)), net, task=task, summary_mode="md5")
    assert dump.names("backward") == []
    entry = dump.data["Functional.linear.0.forward"]["output"][0]
    assert entry["Max"] == expected.max().item()
    assert not entry["requires_grad"]
    assert dump.errors() == []


def test_tensor_made_in_inference_mode_is_still_one(tmp_path: Path) -> None:
    net = make_net()
    made = []
    with torch.inference_mode():
        collect(tmp_path, lambda: made.append(net(batch(0))), net, task="tensor")
    assert made[0].is_inference()


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


WINDOWS = 1000


@pytest.mark.parametrize("level", ["L0", "mix"])
def test_a_thousand_windows_leave_nothing_behind(level: str, tmp_path: Path) -> None:
    """As a server does around each forward; only the first and the last are wanted."""
    net = make_net()
    x = batch(0)
    watcher = debugger(tmp_path, level=level, top={"step": [0, 1, WINDOWS - 1]})

    with torch.inference_mode():
        for _ in range(WINDOWS):
            watcher.start(model=net)
            net(x)
            watcher.stop()
            watcher.step()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step0",
        "step1",
        f"step{WINDOWS - 1}",
    ]
    first, last = read_dump(tmp_path, 0), read_dump(tmp_path, WINDOWS - 1)
    assert first.data == last.data
    assert hooks_of(net) == 0


@pytest.mark.parametrize("level", ["L0", "mix"])
def test_hooks_of_others_stay_and_run_in_their_order(level: str, tmp_path: Path) -> None:
    net = make_net()
    heard: list[str] = []
    net.fc2.register_forward_pre_hook(lambda m, a: heard.append("before"))
    net.fc2.register_forward_hook(lambda m, a, out: heard.append("after"))
    everywhere = nn.modules.module.register_module_forward_hook(
        lambda m, a, out: heard.append("everywhere") if m is net.fc2 else None
    )
    net.fc2.register_full_backward_hook(lambda m, grads_in, grads_out: heard.append("backward"))
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    before = [dict(getattr(module, table)) for module in net.modules() for table in tables]
    net(batch(0)).sum().backward()
    expected, heard[:] = list(heard), []
    try:
        dump = collect(tmp_path, lambda: net(batch(0)).sum().backward(), net, level=level)
    finally:
        everywhere.remove()
    assert heard == expected == ["before", "everywhere", "after", "backward"]
    assert "Module.fc2.Linear.forward.0" in dump.data
    after = [dict(getattr(module, table)) for module in net.modules() for table in tables]
    assert after == before


def test_hook_of_another_that_changes_the_output_is_seen_as_the_module_around_sees_it(
    tmp_path: Path,
) -> None:
    net = make_net()
    net.fc1.register_forward_hook(lambda m, a, out: out * 0 + 7)
    dump = collect(tmp_path, lambda: net(batch(0)), net, level="L0")
    assert dump.data["Module.fc1.Linear.forward.0"]["output"][0]["Max"] == 7
    assert dump.data["Module.act.ReLU.forward.0"]["input_args"][0]["Min"] == 7
