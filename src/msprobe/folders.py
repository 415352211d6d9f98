"""The folders of a dump tree by their names, those that hold no dump too."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import reader
from .errors import UsageError
from .reader import RankFolder

_STEP = re.compile(r"step([0-9]+)")
_RANK = re.compile(r"(?:rank|proc)[0-9]*")


def find_folders(path: str) -> list[RankFolder]:
    """The rank folders at or below a path, with those that lack the dump they should hold.

    A step folder without any rank folder is one of these. UsageError where there is no folder.
    """
    empty = list(_without_dump(Path(path).expanduser().resolve()))
    try:
        found = reader.find_ranks(path)
    except UsageError:
        if not empty:
            raise
        found = []
    return sorted([*found, *empty], key=lambda folder: _natural(str(folder.path)))


def has_data(folder: Path) -> bool:
    """Whether there is dump.json or debug.json."""
    return any((folder / name).is_file() for name in reader.DATA_FILES)


def _without_dump(root: Path) -> Iterator[RankFolder]:
    parent = _STEP.fullmatch(root.parent.name)
    if parent and root.is_dir() and not has_data(root):
        yield RankFolder(root, int(parent[1]), root.name)
    for step in [root] if _STEP.fullmatch(root.name) else root.glob("step*"):
        match = _STEP.fullmatch(step.name)
        if match is None or not step.is_dir() or has_data(step):
            continue
        below = [folder for folder in step.iterdir() if folder.is_dir()]
        ranks = [folder for folder in below if _RANK.fullmatch(folder.name) or has_data(folder)]
        for rank in ranks:
            if not has_data(rank):
                yield RankFolder(rank, int(match[1]), rank.name)
        if not ranks:
            yield RankFolder(step, int(match[1]), "(empty)")


def _natural(text: str) -> list[Any]:
    return [int(part) if part.isdecimal() else part for part in re.split(r"([0-9]+)", text)]
