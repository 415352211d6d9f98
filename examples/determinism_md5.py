"""Two runs of one program that should be equal: which call makes them differ?

    python examples/determinism_md5.py [DUMP_PATH]

``summary_mode`` md5 adds a CRC-32 of the bytes of every tensor. Names are equal in both dumps, so
the first record with another checksum in its outputs, and none in its inputs, is the answer.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import msprobe
from msprobe.pytorch import PrecisionDebugger


class Noisy(nn.Module):
    """Draws from a generator of its own, which nobody has seeded."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()
        self.generator.seed()

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.zeros_like(x).normal_(generator=self.generator)
        return torch.add(x, noise, alpha=1e-6)


def record(dump_path: Path) -> dict[str, dict[str, str]]:
    """Record name → place of a tensor in it → checksum."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), Noisy(), nn.Linear(8, 2))
    debugger = PrecisionDebugger(
        {"level": "L1", "dump_path": str(dump_path), "statistics": {"summary_mode": "md5"}}
    )
    debugger.start()
    F.cross_entropy(model(torch.randn(3, 4)), torch.tensor([0, 1, 1])).backward()
    debugger.stop()
    debugger.step()
    PrecisionDebugger._instance = None  # the second run begins anew
    (rank,) = msprobe.read(dump_path).ranks
    return {found.name: {tensor.place: tensor.md5 for tensor in found.tensors} for found in rank}


def main() -> None:
    base = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="msprobe-md5-"))
    first, second = record(base / "first"), record(base / "second")
    print(f"the same records in the same order: {list(first) == list(second)}")
    differing = [name for name in first if first[name] != second[name]]
    print(f"{len(differing)} of {len(first)} records differ; the first is {differing[0]}:")
    for place, checksum in first[differing[0]].items():
        print(f"  {place}: {checksum} and {second[differing[0]][place]}")


if __name__ == "__main__":
    main()
