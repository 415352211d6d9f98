"""Record chosen steps of an ordinary training loop and look at what is there.

    python examples/train_loop.py [DUMP_PATH]

Steps 0 and 2 are recorded, at level L0: one record for each call of a module, one for its
gradients, one for the gradients of its parameters.
"""

from __future__ import annotations

import sys
import tempfile

import torch
from torch import nn

from msprobe.cli import main as msprobe_command
from msprobe.pytorch import PrecisionDebugger


def main() -> None:
    dump_path = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="msprobe-")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    debugger = PrecisionDebugger(level="L0", dump_path=dump_path, step=[0, 2])
    for step in range(4):
        x = torch.randn(32, 8)
        debugger.start(model)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        debugger.stop()
        debugger.step()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}", flush=True)
    print(f"\n$ msprobe show {dump_path}", flush=True)
    msprobe_command(["show", dump_path])
    print(f"\n$ msprobe show {dump_path} Module.3.Linear.parameters_grad --step 2", flush=True)
    msprobe_command(["show", dump_path, "Module.3.Linear.parameters_grad", "--step", "2"])


if __name__ == "__main__":
    main()
