"""Programs in public frameworks: ``python frameworks.py FOLDER``.

Each runs in a fork of this process, first without and then with the tool, and leaves what it saw
in ``FOLDER/<program>.pt`` and its records in ``FOLDER/<program>``. Models are drawn at random:
nothing is fetched.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import accelerate
import pytorch_lightning as lightning
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from msprobe.pytorch import PrecisionDebugger

Debugger = Any


def llama() -> Any:
    transformers.set_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    config = transformers.LlamaConfig(
        vocab_size=31, num_hidden_layers=2, num_key_value_heads=1, **sizes
    )
    return transformers.LlamaForCausalLM(config)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


class Watch(transformers.TrainerCallback):
    def __init__(self, debugger: PrecisionDebugger) -> None:
        self.debugger = debugger

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.debugger.start(kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.debugger.stop()
        self.debugger.step()


def hf_trainer(folder: Path, debugger: Debugger) -> Any:
    """Two steps of two micro-batches."""
    tokens = torch.randint(0, 31, (8, 6), generator=torch.Generator().manual_seed(0))
    model = llama()
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = transformers.Trainer(
        model,
        arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[] if debugger is None else [Watch(debugger)],
    )
    loss = trainer.train().training_loss
    return {"loss": torch.tensor(loss), **weights(model)}


def hf_generate(folder: Path, debugger: Debugger) -> Any:
    model = llama().eval()
    prompt = torch.tensor([[1, 5, 7]])
    if debugger is not None:
        debugger.start(model, token_range=[1, 2])
    tokens = model.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0)
    if debugger is not None:
        debugger.stop()
        debugger.step()
    return {"tokens": tokens}


def hf_vit(folder: Path, debugger: Debugger) -> Any:
    transformers.set_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    config = transformers.ViTConfig(
        image_size=8, patch_size=4, num_hidden_layers=1, num_labels=3, **sizes
    )
    model = transformers.ViTForImageClassification(config)
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    if debugger is not None:
        debugger.start(model)
    output = model(pixel_values=images, labels=torch.tensor([0, 2]))
    output.loss.backward()
    if debugger is not None:
        debugger.stop()
        debugger.step()
    assert type(output).__name__ == "ImageClassifierOutput"
    return {"loss": output.loss.detach(), **gradients(model)}


def accelerate_loop(folder: Path, debugger: Debugger) -> Any:
    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, 2))
    for batch in loader:
        if debugger is not None:
            debugger.start(model)
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if debugger is not None:
            debugger.stop()
            debugger.step()
    return weights(model)


class Lit(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))

    def training_step(self, batch: Tensor, number: int) -> Tensor:
        return F.softplus(self.net(batch)).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class WatchBatches(lightning.Callback):
    def __init__(self, debugger: PrecisionDebugger) -> None:
        self.debugger = debugger

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        self.debugger.start(module)

    def on_train_batch_end(self, *_: Any) -> None:
        self.debugger.stop()
        self.debugger.step()


def lightning_fit(folder: Path, debugger: Debugger) -> Any:
    torch.manual_seed(0)
    model = Lit()
    rows = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    trainer = lightning.Trainer(
        max_steps=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[] if debugger is None else [WatchBatches(debugger)],
    )
    trainer.fit(model, DataLoader(rows, 2))
    return weights(model)


PROGRAMS: dict[str, Callable[[Path, Debugger], Any]] = {
    function.__name__: function
    for function in (hf_trainer, hf_generate, hf_vit, accelerate_loop, lightning_fit)
}


def run(name: str, folder: Path) -> None:
    torch.set_num_threads(1)
    program = PROGRAMS[name]
    without = program(folder, None)
    debugger = PrecisionDebugger(dump_path=folder / name, level="mix")
    torch.save([without, program(folder, debugger)], folder / f"{name}.pt")
    PrecisionDebugger._instance = None


def main(folder: str) -> None:
    fork = multiprocessing.get_context("fork")
    for name in PROGRAMS:
        process = fork.Process(target=run, args=(name, Path(folder)))
        process.start()
        process.join()


if __name__ == "__main__":
    main(sys.argv[1])
