"""Record a training step on every rank of DistributedDataParallel (gloo, two processes, CPU).

    torchrun --standalone --nproc_per_node 2 examples/ddp_torchrun.py DUMP_PATH
    python examples/ddp_torchrun.py [DUMP_PATH]      # starts torchrun itself

Each rank writes into its own folder, ``step0/rank<R>``. ``parameters_grad`` is the gradient after
DDP has averaged it, so it is the same on both ranks; the gradients of the activations are not.
"""

from __future__ import annotations

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.run import main as torchrun
from torch.nn.parallel import DistributedDataParallel

import msprobe
from msprobe.pytorch import PrecisionDebugger


def train(dump_path: str) -> None:
    """What each process of torchrun does."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)))
    torch.manual_seed(dist.get_rank())  # each rank has its own data
    debugger = PrecisionDebugger(level="mix", dump_path=dump_path)
    debugger.start(model)
    model(torch.randn(8, 4)).square().mean().backward()
    debugger.stop()
    debugger.step()
    dist.destroy_process_group()


def compare(dump_path: str) -> None:
    first, second = msprobe.read(dump_path).step(0)
    print(f"records: {len(first)} on {first.name}, {len(second)} on {second.name}")
    for name in (
        "Module.module.0.Linear.forward.0",
        "Module.module.2.Linear.backward.0",
        "Module.module.2.Linear.parameters_grad.0",
    ):
        print(f"{'equal' if first[name].raw == second[name].raw else 'differs'}: {name}")


def main() -> None:
    dump_path = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="msprobe-ddp-")
    if "RANK" in os.environ:
        train(dump_path)
        return
    torchrun(["--standalone", "--nproc_per_node", "2", __file__, dump_path])
    compare(dump_path)


if __name__ == "__main__":
    main()
