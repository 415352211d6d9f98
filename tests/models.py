"""Small models, each with something that a tool watching it could get wrong.

Each function of `ZOO` draws its weights and data from torch's generator and returns a `Case`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Loss = Callable[[nn.Module, Any], Tensor]


class Case(NamedTuple):
    """``loss(model, batch)`` is the loss of one step; the caller runs its backward."""

    model: nn.Module
    batch: Any
    loss: Loss
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.AdamW(p, lr=1e-2)
    clip: bool = False
    scaler: Any = None


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


class Function(nn.Module):
    """A model whose forward is a function of its parts."""

    def __init__(self, forward: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.calculate = forward
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.calculate(self, *args, **kwargs)


# ---- ordinary networks -----------------------------------------------------------------------


def mlp() -> Case:
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))
    batch = torch.randn(5, 4), torch.tensor([0, 2, 1, 1, 0])
    return Case(model, batch, lambda m, b: F.cross_entropy(m(b[0]), b[1]), clip=True)


class ResidualBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.conv(x))
        out += x
        return self.relu(out)


def residual_cnn() -> Case:
    stem = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    model = nn.Sequential(stem, ResidualBlock(), ResidualBlock(), nn.MaxPool2d(2), head)

    def momentum(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True)

    return Case(model, torch.randn(3, 2, 8, 8), squares, momentum)


def lstm() -> Case:
    layers = nn.LSTM(3, 4, num_layers=2, dropout=0.25, bidirectional=True, batch_first=True)

    def forward(model: Any, x: Tensor) -> Tensor:
        out, (h, c) = model.layers(x)
        return out.mean() + h.square().sum() + c.tanh().sum()

    return Case(Function(forward, layers=layers), torch.randn(2, 5, 3), squares)


def gru() -> Case:
    def forward(model: Any, x: Tensor) -> Tensor:
        out, hidden = model.layers(x)
        for t in range(3):
            hidden = model.cell(x[t], hidden[-1]).unsqueeze(0)
        return model.head(out[-1] * hidden[0])

    parts = {"layers": nn.GRU(3, 4), "cell": nn.GRUCell(3, 4), "head": nn.Linear(4, 1)}
    return Case(Function(forward, **parts), torch.randn(4, 2, 3), squares, clip=True)


def transformer_encoder() -> Case:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return Case(model, torch.randn(2, 4, 8), squares, clip=True)


def hand_made_attention() -> Case:
    def forward(model: Any, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = model.qkv(model.norm(x)).view(batch, length, 3, 2, width // 2).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + model.out(seen.transpose(1, 2).reshape(batch, length, width))
        weights = (q @ k.transpose(-2, -1) / 2).softmax(-1)
        return x + torch.einsum("bhij,bhjd->bihd", weights, v).flatten(2)

    parts = {"norm": nn.LayerNorm(8), "qkv": nn.Linear(8, 24), "out": nn.Linear(8, 8)}
    return Case(Function(forward, **parts), torch.randn(2, 4, 8), squares)


# ---- views and in-place operations -----------------------------------------------------------


def views_in_place() -> Case:
    def forward(model: Any, x: Tensor) -> Tensor:
        h = model.a(x)
        r = h * 2
        left, _right = h.clone().split(4, dim=1)
        h += r
        h[:, 1].mul_(3)
        h.view(-1, 2, 4)[:, 0].add_(left.detach()).neg_()
        h = h.masked_fill_(h > 2, 0.5)
        h[0] = r[1]
        gate, value = model.b(h).clone().t().t().tensor_split(2, dim=1)
        return gate.contiguous().tanh_() * value.squeeze(0).expand(3, 4)

    return Case(Function(forward, a=nn.Linear(4, 8), b=nn.Linear(8, 8)), torch.randn(3, 4), squares)


def chunk_then_in_place() -> Case:
    def forward(model: Any, x: Tensor) -> Tensor:
        gate, value = model.up(x).clone().unsafe_chunk(2, dim=-1)
        value = model.act(value)
        value.mul_(gate.sigmoid_())
        out = model.down(value)
        out.add_(x)
        return out

    parts = {"up": nn.Linear(4, 12), "act": nn.SiLU(inplace=False), "down": nn.Linear(6, 4)}
    return Case(Function(forward, **parts), torch.randn(3, 4), squares)


class Shift(nn.Module):
    """Changes its input in place and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.tensor([1.5, -0.5, 0.0, 0.25]))

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(self.offset).neg_()


def in_place_modules() -> Case:
    first = nn.Linear(4, 4), Shift(), Shift(), nn.ReLU(inplace=True)
    second = nn.Linear(4, 4), nn.Dropout(0.5, inplace=True), Shift(), nn.Hardtanh(inplace=True)
    return Case(nn.Sequential(*first, *second), torch.randn(6, 4), squares)


def returns_its_input() -> Case:
    body = (nn.Identity(), nn.Linear(4, 4), nn.Identity(), nn.Dropout(0.0), nn.Flatten())
    model = nn.Sequential(nn.Identity(), *body, nn.Sequential())
    return Case(model, torch.randn(3, 4, requires_grad=True), squares)


# ---- what goes in and what comes out ---------------------------------------------------------


def dict_output() -> Case:
    def forward(model: Any, x: Tensor) -> dict[str, Any]:
        hidden = model.body(x)
        return {"logits": model.head(hidden), "aux": {"hidden": [hidden, hidden * 2]}, "none": None}

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        out = model(batch)
        return out["logits"].square().sum() + out["aux"]["hidden"][1].mean()

    inner = Function(forward, body=nn.Linear(4, 4), head=nn.Linear(4, 2))
    return Case(Function(lambda m, x: m.inner(x), inner=inner), torch.randn(3, 4), loss)


@dataclass
class Prediction:
    logits: Tensor
    hidden: Tensor | None = None
    name: str = "prediction"


def dataclass_output() -> Case:
    def predict(model: Any, x: Tensor) -> Prediction:
        hidden = F.relu(model.body(x))
        return Prediction(model.head(hidden), hidden)

    def forward(model: Any, x: Tensor) -> Tensor:
        prediction = model.inner(x)
        assert type(prediction) is Prediction
        return prediction.logits.sum(1, keepdim=True) + prediction.hidden

    inner = Function(predict, body=nn.Linear(4, 4), head=nn.Linear(4, 2))
    return Case(Function(forward, inner=inner), torch.randn(3, 4), squares)


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(
        self, *, pair: tuple[Tensor, Tensor], table: dict[str, list[Tensor]], scale: float = 1.0
    ) -> Tensor:
        parts = [pair[0] * self.weight, pair[1].exp(), *table["more"]]
        return torch.stack(parts).mean(0) * scale


def keyword_and_nested_inputs() -> Case:
    def forward(model: Any, *, x: Tensor, many: tuple[Tensor, ...]) -> Tensor:
        h = model.linear(input=x)
        return model.mix(pair=(h, x), table={"more": [h, *many]}, scale=0.5)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(**batch).square().sum()

    batch = {"x": torch.randn(3, 4), "many": (torch.randn(3, 4), torch.ones(3, 4))}
    return Case(Function(forward, linear=nn.Linear(4, 4), mix=Mix()), batch, loss)


def unused_output() -> Case:
    def split(model: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = model.linear(x)
        values, _ = h.topk(2)
        return values, h.argmax(1), h[:, :2] * 3

    def forward(model: Any, x: Tensor) -> Tensor:
        first, _, _ = model.inner(x)
        _, _, third = model.inner(x + 1)
        return first * third

    inner = Function(split, linear=nn.Linear(4, 6), unused=nn.Linear(2, 2))
    return Case(Function(forward, inner=inner), torch.randn(3, 4), squares)


# ---- shared parts ----------------------------------------------------------------------------


def shared_linear() -> Case:
    def forward(model: Any, x: Tensor) -> Tensor:
        x = model.again(model.linear(x).relu())
        return x + model.linear(x * 0.5)

    linear = nn.Linear(4, 4)
    return Case(Function(forward, linear=linear, again=linear), torch.randn(3, 4), squares)


def tied_embedding() -> Case:
    def forward(model: Any, tokens: Tensor) -> Tensor:
        return model.head(model.norm(model.embedding(tokens)))

    embedding, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    head.weight = embedding.weight
    model = Function(forward, embedding=embedding, norm=nn.LayerNorm(4), head=head)
    tokens = torch.tensor([[0, 1, 2, 1], [3, 4, 6, 0]])

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    return Case(model, tokens, loss, clip=True)


# ---- autograd beyond one plain backward ------------------------------------------------------


def _block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.25), nn.Linear(4, 4))


def checkpoint_reentrant() -> Case:
    def forward(model: Any, x: Tensor) -> Tensor:
        h = model.stem(x)
        return h + checkpoint(model.block, h, use_reentrant=True)

    model = Function(forward, stem=nn.Linear(4, 4), block=_block())
    return Case(model, torch.randn(3, 4), squares)


def checkpoint_non_reentrant() -> Case:
    def forward(model: Any, x: Tensor) -> Tensor:
        h = model.stem(x)
        return h + checkpoint(model.block, h, use_reentrant=False)

    model = Function(forward, stem=nn.Linear(4, 4), block=_block())
    return Case(model, torch.randn(3, 4), squares)


def checkpoint_nested() -> Case:
    def inner(model: Any, x: Tensor) -> Tensor:
        return model.last(checkpoint(model.block, x, use_reentrant=False)).relu()

    def forward(model: Any, x: Tensor) -> Tensor:
        return checkpoint(model.outer, model.stem(x), use_reentrant=False).sigmoid()

    outer = Function(inner, block=_block(), last=nn.Linear(4, 4))
    return Case(Function(forward, stem=nn.Linear(4, 4), outer=outer), torch.randn(3, 4), squares)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return factor * x**3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grads[0] * 3 * ctx.factor * x.square(), None


def custom_function() -> Case:
    def forward(model: Any, x: Tensor) -> Tensor:
        return model.b(Cube.apply(model.a(x), 0.5))

    return Case(Function(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 1)), torch.randn(3, 4), squares)


def gradient_accumulation() -> Case:
    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        for part in batch[:-1]:
            (squares(model, part) / len(batch)).backward()
        return squares(model, batch[-1]) / len(batch)

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    return Case(model, [torch.randn(2, 4) for _ in range(3)], loss)


def retained_graph() -> Case:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        out = model(batch)
        out.mean().backward(retain_graph=True)
        out.square().sum().backward(retain_graph=True)
        return out.exp().mean()

    return Case(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)), torch.randn(3, 4), loss)


def gradient_penalty() -> Case:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        x = batch.clone().requires_grad_()
        out = model(x).sum()
        (grad,) = torch.autograd.grad(out, x, create_graph=True)
        return out.square() + (grad.norm(2, dim=1) - 1).square().mean()

    model = nn.Sequential(nn.Linear(4, 6), nn.Softplus(), nn.Linear(6, 1))
    return Case(model, torch.randn(3, 4), loss)


def sparse_embedding() -> Case:
    model = nn.Sequential(nn.EmbeddingBag(9, 4, sparse=True), nn.Flatten())
    tokens = torch.tensor([[0, 1, 2, 1], [3, 4, 8, 0]])
    return Case(model, tokens, squares, lambda p: torch.optim.SparseAdam(list(p), lr=1e-2))


# ---- precision and randomness ----------------------------------------------------------------


def amp_bfloat16() -> Case:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(batch)
        return out.float().square().mean()

    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2))
    return Case(model, torch.randn(3, 4), loss)


def amp_with_scaler() -> Case:
    model, batch, loss, *_ = amp_bfloat16()
    # torch < 2.3 scales on CUDA only: the model then trains without a scaler
    make = getattr(torch.amp, "GradScaler", None)
    scaler = make and make("cpu", init_scale=256.0, growth_interval=2)
    return Case(model, batch, loss, clip=True, scaler=scaler)


def random_in_forward() -> Case:
    def forward(model: Any, x: Tensor) -> Tensor:
        x = x + torch.randn_like(x) * 0.1 + random.random() + float(np.random.rand())
        x = F.dropout(model.drop(model.a(x)), 0.5, training=True)
        return F.gumbel_softmax(model.b(F.rrelu(x, training=True))) * torch.rand(4)

    parts = {"a": nn.Linear(4, 4), "drop": nn.Dropout(0.5), "b": nn.Linear(4, 4)}
    return Case(Function(forward, **parts), torch.randn(3, 4), squares)


ZOO: dict[str, Callable[[], Case]] = {
    build.__name__: build
    for build in (
        mlp,
        residual_cnn,
        lstm,
        gru,
        transformer_encoder,
        hand_made_attention,
        views_in_place,
        chunk_then_in_place,
        in_place_modules,
        returns_its_input,
        dict_output,
        dataclass_output,
        keyword_and_nested_inputs,
        unused_output,
        shared_linear,
        tied_embedding,
        checkpoint_reentrant,
        checkpoint_non_reentrant,
        checkpoint_nested,
        custom_function,
        gradient_accumulation,
        retained_graph,
        gradient_penalty,
        sparse_embedding,
        amp_bfloat16,
        amp_with_scaler,
        random_in_forward,
    )
}
