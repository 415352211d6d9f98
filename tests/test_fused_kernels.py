"""Hooks switch torch's fused kernels off; so modules that have one are left alone in eval mode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers import collect


def encoder(norm_first: bool) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=norm_first)
    stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(stack, nn.Linear(32, 2))


@pytest.mark.parametrize("norm_first", [False, True], ids=["norm last", "norm first"])
@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_encoder_in_eval_mode_computes_the_same_bits(
    level: str, norm_first: bool, tmp_path: Path
) -> None:
    net = encoder(norm_first).eval()
    x = torch.randn(4, 9, 32)
    results: list[Any] = []

    def run() -> None:
        with torch.no_grad():
            results.append(net(x))

    run()
    dump = collect(tmp_path, run, net, level=level)
    assert torch.equal(*results)
    if level != "L0":
        assert "Torch._transformer_encoder_layer_fwd.1.forward" in dump.data
    if level != "L1":
        coverage = json.loads((dump.folder / "coverage.json").read_text())
        left = ["0.layers.0", "0.layers.1"]
        assert coverage["modules_left_to_fused_kernels"] == left
        assert "Module.1.Linear.forward.0" in dump.data


def test_encoder_in_training_is_recorded_with_all_its_parts(tmp_path: Path) -> None:
    net = encoder(False)
    dump = collect(tmp_path, lambda: net(torch.randn(2, 3, 32)).sum().backward(), net, level="L0")
    assert "Module.0.layers.1.linear2.Linear.backward.0" in dump.data
