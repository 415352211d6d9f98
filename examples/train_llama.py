"""Train a small Llama-style decoder for two steps, record them, and look at the result.

    python examples/train_llama.py [DUMP_PATH] [--steps N] [--tied]

Only torch is needed. The lines that collect are marked with "msprobe".
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from msprobe.cli import main as msprobe_command
from msprobe.pytorch import PrecisionDebugger  # msprobe


@dataclass(frozen=True)
class Shape:
    vocabulary: int = 64
    width: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2  # grouped: two query heads share a key and a value head
    hidden: int = 128
    tied: bool = False  # whether the head uses the weight of the embedding


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return (x.float() * scale).type_as(x) * self.weight


def rotary_angles(length: int, width: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of shape (length, width) for the rotary position embedding."""
    frequencies = 10_000.0 ** (-torch.arange(0, width, 2).float() / width)
    angles = torch.outer(torch.arange(length).float(), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads = shape.heads, shape.kv_heads
        self.head_width = shape.width // shape.heads
        self.q_proj = nn.Linear(shape.width, shape.heads * self.head_width, bias=False)
        self.k_proj = nn.Linear(shape.width, shape.kv_heads * self.head_width, bias=False)
        self.v_proj = nn.Linear(shape.width, shape.kv_heads * self.head_width, bias=False)
        self.o_proj = nn.Linear(shape.heads * self.head_width, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = rotate(self.split(self.q_proj(x), self.heads), cos, sin)
        k = rotate(self.split(self.k_proj(x), self.kv_heads), cos, sin)
        v = self.split(self.v_proj(x), self.kv_heads)
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def split(self, x: Tensor, heads: int) -> Tensor:
        """(batch, length, heads * head_width) → (batch, heads, length, head_width)"""
        return x.unflatten(-1, (heads, self.head_width)).transpose(1, 2)


class SwiGLU(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down_proj = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.width)
        self.attention = Attention(shape)
        self.mlp_norm = RMSNorm(shape.width)
        self.mlp = SwiGLU(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_width = shape.width // shape.heads
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        if shape.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Token numbers (batch, length) → logits (batch, length, vocabulary)"""
        x = self.embedding(tokens)
        cos, sin = rotary_angles(tokens.shape[1], self.head_width)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


def counting_batch(shape: Shape, batch: int = 4, length: int = 32) -> Tensor:
    """Sequences that count up by 1, 2 or 3 from a random start: easy to learn."""
    start = torch.randint(shape.vocabulary, (batch, 1))
    stride = torch.randint(1, 4, (batch, 1))
    return (start + stride * torch.arange(length + 1)) % shape.vocabulary


def train(shape: Shape, steps: int, dump_path: str) -> list[float]:
    """Train, recording every step below `dump_path`; return the loss of each step."""
    torch.manual_seed(0)
    model = Llama(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    debugger = PrecisionDebugger(  # msprobe
        {"task": "statistics", "level": "mix", "dump_path": dump_path}
    )
    losses = []
    for step in range(steps):
        tokens = counting_batch(shape)
        debugger.start(model)  # msprobe
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        debugger.stop()  # msprobe
        debugger.step()  # msprobe
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step}: loss {losses[-1]:.4f}")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description="Record a training step of a small Llama.")
    parser.add_argument("dump_path", nargs="?", help="where to (default: a temporary directory)")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--tied", action="store_true", help="share embedding and head")
    arguments = parser.parse_args()
    dump_path = arguments.dump_path or tempfile.mkdtemp(prefix="msprobe-llama-")
    train(Shape(tied=arguments.tied), arguments.steps, dump_path)
    for command in (
        ["show", dump_path],
        ["show", dump_path, "Functional.scaled_dot_product_attention.0.forward", "--step", "0"],
    ):
        print(f"\n$ msprobe {' '.join(command)}", flush=True)
        msprobe_command(command)


if __name__ == "__main__":
    main()
