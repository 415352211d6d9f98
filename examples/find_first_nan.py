"""Find the call that made the first NaN, and the values it was given.

    python examples/find_first_nan.py [DUMP_PATH]

1. ``nan_check`` marks every record with ``is_nan``: the first 1 is where it began.
2. ``overflow_check`` keeps the tensors of the first such call, so that it can be run again.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import msprobe
from msprobe.pytorch import PrecisionDebugger
from msprobe.records import Rank


class Normalize(nn.Module):
    """Divides by the standard deviation and forgets that it may be 0."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.div(x - x.mean(1, keepdim=True), x.std(1, keepdim=True))


def record(task: str, dump_path: Path) -> Rank:
    """Run one step under a task; its dump."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Normalize(), nn.Linear(4, 1))
    x = torch.randn(3, 4)
    with torch.no_grad():
        model[0].bias.fill_(-9.0)  # nothing passes the ReLU: each row is constant
    debugger = PrecisionDebugger({"task": task, "level": "L1", "dump_path": str(dump_path)})
    debugger.start(model)
    model(x).sum().backward()
    debugger.stop()
    debugger.step()
    PrecisionDebugger._instance = None  # the next task begins anew
    (rank,) = msprobe.read(dump_path).ranks
    return rank


def main() -> None:
    base = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="msprobe-nan-"))

    dump = record("nan_check", base / "nan_check")
    bad = [found.name for found in dump if found.raw["is_nan"]]
    print(f"nan_check: {len(bad)} of {len(dump)} records bring NaN or infinity; first: {bad[0]}")

    first = next(iter(record("overflow_check", base / "overflow_check")))
    inputs = [tensor.load() for tensor in first["input_args"]]
    print(f"overflow_check: {first.name}, called {first.stack[0].split(', ')[2]}")
    print(f"its divisor: {inputs[1].flatten().tolist()}")
    again = torch.div(*inputs)
    print(f"run again: {int(again.isnan().sum())} of {again.numel()} results are NaN")


if __name__ == "__main__":
    main()
