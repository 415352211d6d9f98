"""Record chosen optimizer steps of a Hugging Face Trainer, by a callback.

    python examples/hf_trainer.py [DUMP_PATH]

Needs transformers and accelerate. A tiny Llama with random weights; nothing is downloaded.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import msprobe
from msprobe.pytorch import PrecisionDebugger


class RecordSteps(TrainerCallback):
    """One step of the dump is one optimizer step, gradient accumulation included."""

    def __init__(self, debugger: PrecisionDebugger) -> None:
        self.debugger = debugger

    def on_step_begin(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
        self.debugger.start(model)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.debugger.stop()
        self.debugger.step()


def main() -> None:
    dump_path = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="msprobe-hf-")
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16,
        )
    )
    tokens = (torch.arange(8) + torch.arange(8)[:, None]) % 32
    arguments = TrainingArguments(
        output_dir=os.path.join(dump_path, "trainer"), max_steps=3, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, report_to=[], save_strategy="no", disable_tqdm=True,
        use_cpu=True,
    )
    debugger = PrecisionDebugger(level="mix", dump_path=dump_path, step=[1])
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[RecordSteps(debugger)],
    )
    trainer.train()
    (rank,) = msprobe.read(dump_path).ranks
    head = list(rank.find("Module.lm_head"))
    print(f"step {rank.step}: {len(rank)} records")
    print(f"of the head, with two batches for one optimizer step: {[r.name for r in head]}")
    norms = [record["weight"][0].norm for record in head if record.part == "parameters_grad"]
    print(f"norm of its gradient as it accumulates: {norms[0]:.4f}, {norms[1]:.4f}")


if __name__ == "__main__":
    main()
