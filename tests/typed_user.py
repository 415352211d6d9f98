"""A user's script as mypy --strict sees it: the public API is precise, not Any. Never run.

`files` of mypy in pyproject.toml has it, so that the mypy of .ci/run is the test.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from typing_extensions import assert_type

import msprobe
from msprobe.errors import ConfigError, UsageError
from msprobe.pytorch import (
    PrecisionDebugger,
    module_dump,
    module_dump_end,
    random_save,
    seed_all,
)
from msprobe.pytorch.debugger.service import ConfigView, Service
from msprobe.records import Dump, Rank, Record, Step
from msprobe.values import TensorValue


def record(model: nn.Sequential, batch: torch.Tensor) -> None:
    seed_all(1234, mode=True, rm_dropout=False, is_enhanced=False)
    random_save(Path("./output"))
    try:
        debugger = PrecisionDebugger(
            {"task": "statistics"}, dump_path=Path("./dump"), level="mix", step=[0], model=model
        )
    except (ConfigError, UsageError):
        return
    assert_type(debugger, PrecisionDebugger)
    assert_type(debugger.config, ConfigView)
    assert_type(debugger.service, Service)
    PrecisionDebugger.set_init_step(1)
    debugger.register_custom_api(torch, "mm", api_prefix="Mine")
    debugger.start([model, model], token_range=(0, 1), rank_id=0, scheduled_tokens={"a": 2})
    module_dump(model[0], "first")
    loss = model(batch).sum()
    module_dump_end()
    debugger.save({"loss": loss}, "values", save_backward=False)
    debugger.forward_backward_dump_end()
    debugger.stop()
    PrecisionDebugger.step(dump=True)
    debugger.service.reset_status()
    debugger.restore_custom_api(torch, "mm")
    PrecisionDebugger._instance = None


def read(path: Path) -> list[str]:
    dump = msprobe.read(path)
    assert_type(dump, Dump)
    assert_type(dump.steps, tuple[Step, ...])
    assert_type(dump.step(0).rank("rank0"), Rank)
    found: list[str] = []
    for step in dump:
        assert_type(step.number, int | None)
        for rank in step:
            assert_type(rank.names(), list[str])
            for record in rank:
                assert_type(record, Record)
                assert_type(record.parent, str | None)
                assert_type(record.stack, list[str])
                assert_type(record.tensors, tuple[TensorValue, ...])
                found += [tensor.place for tensor in record.tensors if not tensor.is_finite]
    value = dump.step(0).rank(0)["Torch.relu.0.forward"].tensor("output.0")
    assert_type(value, TensorValue)
    assert_type(value.shape, tuple[int, ...] | None)
    assert_type(value.norm, float | None)
    assert_type(value.load(), torch.Tensor)
    dump.to_pandas()
    return found
