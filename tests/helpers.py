"""Runs a function inside one window of the collector and reads back what was written."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from msprobe.pytorch import PrecisionDebugger


@dataclass(frozen=True)
class Dump:
    """The files of one step and rank."""

    folder: Path
    header: dict[str, Any]
    data: dict[str, Any]
    stack: dict[str, Any]
    construct: dict[str, Any]

    def names(self, part: str) -> list[str]:
        """Names of the records that hold ``part``, in the order of the file."""
        return [name for name in self.data if part in name]

    def tensors(self, value: Any) -> Any:
        """``value`` with the saved tensor in place of every entry that names a file."""
        if isinstance(value, list):
            return [self.tensors(entry) for entry in value]
        if not isinstance(value, dict):
            return value
        if value.get("data_name"):
            path = self.folder / "dump_tensor_data" / value["data_name"]
            return torch.load(path, weights_only=True)
        return {key: self.tensors(entry) for key, entry in value.items()}

    def gradients(self, record: str) -> dict[str, Any]:
        """A backward record with its saved tensors."""
        found: dict[str, Any] = self.tensors(self.data[record])
        return found

    def errors(self) -> list[str]:
        """Lines of dump_error_info.log, save those that only say what did not happen."""
        log = self.folder / "dump_error_info.log"
        lines = log.read_text().splitlines() if log.exists() else []
        return [line for line in lines if not line.startswith("not recorded: ")]


def debugger(
    dump_path: Path,
    *,
    level: str = "mix",
    task: str = "statistics",
    top: dict[str, Any] | None = None,
    **options: Any,
) -> PrecisionDebugger:
    """A debugger with this configuration; ``options`` are those of the task's section."""
    config = {"task": task, "level": level, "dump_path": str(dump_path), task: options}
    config |= top or {}
    return PrecisionDebugger(config)


def collect(
    dump_path: Path,
    function: Callable[[], Any],
    model: Any = None,
    **config: Any,
) -> Dump:
    """What ``function()`` leaves when it runs as one step; ``config`` as for `debugger`."""
    watcher = debugger(dump_path, **config)
    watcher.start(model)
    function()
    watcher.stop()
    watcher.step()
    return read_dump(dump_path)


def read_dump(dump_path: Path, step: int = 0) -> Dump:
    """The files of the only rank or process in a step's folder."""
    (folder,) = (dump_path / f"step{step}").iterdir()
    header = read_json(folder / "dump.json")
    others = [
        read_json(folder / name) if (folder / name).exists() else {}
        for name in ("stack.json", "construct.json")
    ]
    return Dump(folder, header, header["data"], *others)


def read_json(path: Path) -> Any:
    """The value in a file that must be strict JSON."""
    return json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not strict JSON")


def same(ours: Any, expected: Any) -> bool:
    """Equal in structure, and bit by bit in the tensors."""
    if isinstance(expected, Tensor):
        return (
            isinstance(ours, Tensor)
            and ours.dtype == expected.dtype
            and ours.shape == expected.shape
            and torch.equal(ours, expected)
        )
    if isinstance(expected, dict):
        return (
            isinstance(ours, dict)
            and list(ours) == list(expected)
            and all(same(ours[key], expected[key]) for key in expected)
        )
    if isinstance(expected, list):
        return (
            isinstance(ours, list)
            and len(ours) == len(expected)
            and all(same(a, b) for a, b in zip(ours, expected, strict=True))
        )
    return ours is None and expected is None
