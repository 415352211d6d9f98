"""Record two tokens out of a generation loop: ``start(model, token_range=[3, 4])``.

    python examples/generate_token_range.py [DUMP_PATH]

Calls of the model are counted from 0 since ``start()``; both ends of the range are recorded.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from msprobe.pytorch import PrecisionDebugger


class Decoder(nn.Module):
    """A next-token model with a state instead of a key-value cache."""

    def __init__(self, vocabulary: int = 32, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.cell = nn.GRUCell(width, width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, token: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = self.cell(self.embedding(token), state)
        return self.head(state), state


@torch.no_grad()
def generate(model: nn.Module, tokens: int) -> list[int]:
    token, state = torch.zeros(1, dtype=torch.long), torch.zeros(1, 16)
    chosen = []
    for _ in range(tokens):
        logits, state = model(token, state)
        token = logits.argmax(-1)
        chosen.append(int(token))
    return chosen


def main() -> None:
    dump_path = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="msprobe-")
    torch.manual_seed(0)
    model = Decoder().eval()
    without = generate(model, 6)
    debugger = PrecisionDebugger(level="mix", dump_path=dump_path)
    debugger.start(model, token_range=[3, 4])
    tokens = generate(model, 6)
    debugger.stop()
    debugger.step()
    print(f"tokens {tokens}, the same as without msprobe: {tokens == without}")
    (path,) = Path(dump_path).glob("step0/*/dump.json")
    data = json.loads(path.read_text(encoding="utf-8"))["data"]
    calls = [name for name in data if name.startswith("Module.head")]
    print(f"recorded calls of the head: {calls}")
    best = data["Module.head.Linear.forward.0"]["output"][0]["Max"]
    print(f"largest logit of token 3: {best:.4f}")


if __name__ == "__main__":
    main()
