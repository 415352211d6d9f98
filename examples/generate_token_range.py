"""Record two tokens out of a generation loop: ``start(model, token_range=[3, 4])``.

    python examples/generate_token_range.py [DUMP_PATH]

Calls of the model are counted from 0 since ``start()``; both ends of the range are recorded.
"""

from __future__ import annotations

import sys
import tempfile

import torch
from torch import Tensor, nn

import msprobe
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
    (rank,) = msprobe.read(dump_path).ranks
    calls = list(rank.find("Module.head"))
    print(f"recorded calls of the head: {[record.name for record in calls]}")
    print(f"largest logits of tokens 3 and 4: {[call['output'][0].max for call in calls]}")


if __name__ == "__main__":
    main()
