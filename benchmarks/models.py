"""The models that the measurements are made on, with their inputs and losses. Only torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Built = tuple[nn.Module, Callable[[], Tensor]]  # the model, and its forward up to the loss

_VOCABULARY = 1000


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of ``x``: (batch, heads, tokens, width)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(hidden, hidden, bias=False)
        self.k_proj = nn.Linear(hidden, hidden, bias=False)
        self.v_proj = nn.Linear(hidden, hidden, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, hidden = x.shape
        shape = (batch, tokens, self.heads, hidden // self.heads)
        q, k, v = (
            project(x).view(shape).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(
            _turned(q, cos, sin), _turned(k, cos, sin), v, is_causal=True
        )
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, tokens, hidden))


class MLP(nn.Module):
    def __init__(self, hidden: int, wide: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, wide, bias=False)
        self.up_proj = nn.Linear(hidden, wide, bias=False)
        self.down_proj = nn.Linear(wide, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, hidden: int, heads: int, wide: int) -> None:
        super().__init__()
        self.input_norm = RMSNorm(hidden)
        self.attention = Attention(hidden, heads)
        self.mlp_norm = RMSNorm(hidden)
        self.mlp = MLP(hidden, wide)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.input_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    def __init__(self, layers: int, hidden: int, heads: int, wide: int, tokens: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, hidden)
        self.layers = nn.ModuleList(DecoderLayer(hidden, heads, wide) for _ in range(layers))
        self.norm = RMSNorm(hidden)
        self.head = nn.Linear(hidden, _VOCABULARY, bias=False)
        width = hidden // heads
        rates = 10000.0 ** (-torch.arange(0, width, 2) / width)
        angles = torch.outer(torch.arange(tokens), rates).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.head(self.norm(x))


class ResidualBlock(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.shortcut = nn.Sequential()
        if inside != outside:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, widths: tuple[int, ...], blocks: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(widths[0])
        inputs = (widths[0], *widths[:-1])
        self.blocks = nn.Sequential(
            *(
                ResidualBlock(inside if i == 0 else width, width, 1 if inside == width or i else 2)
                for inside, width in zip(inputs, widths, strict=True)
                for i in range(blocks)
            )
        )
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.bn(self.stem(x))))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def _small() -> Built:
    layers = [part for _ in range(50) for part in (nn.Linear(32, 32), nn.ReLU())]
    model, x = nn.Sequential(*layers), torch.randn(8, 32)
    return model, lambda: model(x).pow(2).mean()


def _llama(wide: int) -> Built:
    model = Llama(layers=8, hidden=256, heads=4, wide=wide, tokens=256)
    tokens = torch.randint(_VOCABULARY, (2, 256))
    wanted = torch.randint(_VOCABULARY, (512,))
    return model, lambda: F.cross_entropy(model(tokens).flatten(0, 1), wanted)


def _resnet() -> Built:
    model, x = ResNet((32, 64, 128), blocks=2), torch.randn(16, 3, 32, 32)
    wanted = torch.randint(10, (16,))
    return model, lambda: F.cross_entropy(model(x), wanted)


def _wide() -> Built:
    layers = [part for _ in range(4) for part in (nn.Linear(2048, 2048), nn.GELU())]
    model, x = nn.Sequential(*layers), torch.randn(1024, 2048)
    return model, lambda: model(x).pow(2).mean()


def _many() -> Built:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8), nn.Dropout(0.1))

    model, x = nn.Sequential(*(block() for _ in range(100))), torch.randn(2, 8)
    return model, lambda: model(x).pow(2).mean()


MODELS: dict[str, Callable[[], Built]] = {
    "small": _small,  # 50 x (Linear 32 + ReLU), batch 8
    "llama": lambda: _llama(wide=688),
    "llama-wide": lambda: _llama(wide=2048),
    "resnet": _resnet,
    "wide": _wide,  # 4 x (Linear 2048 + GELU), batch 1024
    "many": _many,  # 500 modules
}


def build(name: str) -> Built:
    """The model ``name`` with seeded weights and data, and the function that gives its loss."""
    torch.manual_seed(0)
    return MODELS[name]()
