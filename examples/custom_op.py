"""Record a function of your own, with its gradients, like a function of torch.

    python examples/custom_op.py [DUMP_PATH]
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
from torch import Tensor

import msprobe
from msprobe.pytorch import PrecisionDebugger


class _Swish(torch.autograd.Function):
    """A hand-written kernel stands here in practice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(x)
        return grad * gate * (1 + x * (1 - gate))


def fused_swish(x: Tensor) -> Tensor:
    result: Tensor = _Swish.apply(x)
    return result


def main() -> None:
    dump_path = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="msprobe-")
    debugger = PrecisionDebugger(level="L1", dump_path=dump_path)
    debugger.register_custom_api(sys.modules[__name__], "fused_swish", "MyOps")
    x = torch.linspace(-2, 2, 5, requires_grad=True)
    debugger.start()
    fused_swish(x).sum().backward()
    debugger.stop()
    debugger.step()
    (rank,) = msprobe.read(dump_path).ranks
    print(f"records: {rank.names()}")
    assert x.grad is not None
    recorded = rank["MyOps.fused_swish.0.backward"]["output"][0].norm
    print(f"norm of the gradient: {recorded:.6f} recorded, {x.grad.norm().item():.6f} in x.grad")
    debugger.restore_custom_api(sys.modules[__name__], "fused_swish")


if __name__ == "__main__":
    main()
