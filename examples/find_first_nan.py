"""Find the call that made the first NaN, and the values it was given.

    python examples/find_first_nan.py [DUMP_PATH]

1. ``nan_check`` marks every record with ``is_nan``: the first 1 is where it began.
2. ``overflow_check`` keeps the tensors of the first such call, so that it can be run again.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from msprobe.pytorch import PrecisionDebugger


class Normalize(nn.Module):
    """Divides by the standard deviation and forgets that it may be 0."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.div(x - x.mean(1, keepdim=True), x.std(1, keepdim=True))


def record(task: str, dump_path: Path) -> tuple[Path, dict[str, Any]]:
    """Run one step under a task; the folder and the records of its dump."""
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
    (path,) = dump_path.glob("step0/*/dump.json")
    return path.parent, json.loads(path.read_text(encoding="utf-8"))["data"]


def main() -> None:
    base = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="msprobe-nan-"))

    _, data = record("nan_check", base / "nan_check")
    bad = [name for name, entry in data.items() if entry["is_nan"]]
    print(f"nan_check: {len(bad)} of {len(data)} records bring NaN or infinity; first: {bad[0]}")

    folder, data = record("overflow_check", base / "overflow_check")
    name = next(iter(data))
    files = [entry["data_name"] for entry in data[name]["input_args"]]
    inputs = [torch.load(folder / "dump_tensor_data" / file, weights_only=True) for file in files]
    print(f"overflow_check: {name} with {files}")
    print(f"its divisor: {inputs[1].flatten().tolist()}")
    again = torch.div(*inputs)
    print(f"run again: {int(again.isnan().sum())} of {again.numel()} results are NaN")


if __name__ == "__main__":
    main()
