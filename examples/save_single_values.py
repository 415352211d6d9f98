"""Record single values by name, wherever they are made: level debug and ``save``.

    python examples/save_single_values.py [DUMP_PATH]

No ``start`` and no ``stop``: ``save`` writes what it is given, and the gradient when it arrives.
"""

from __future__ import annotations

import sys
import tempfile

import torch
from torch import Tensor

import msprobe
from msprobe.pytorch import PrecisionDebugger


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    PrecisionDebugger.save(scores, "scores")
    weights = torch.softmax(scores, -1)
    PrecisionDebugger.save({"weights": weights, "heads": q.shape[0]}, "attention")
    return weights @ v


def main() -> None:
    dump_path = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="msprobe-")
    torch.manual_seed(0)
    debugger = PrecisionDebugger(level="debug", dump_path=dump_path)
    q, k, v = torch.randn(3, 2, 5, 4, requires_grad=True).unbind()
    attention(q, k, v).square().mean().backward()
    debugger.step()
    for record in msprobe.read(dump_path).records():
        for tensor in record.tensors:
            print(f"{record.name}: shape {tensor.shape}, {tensor.min:.4f} to {tensor.max:.4f}")


if __name__ == "__main__":
    main()
