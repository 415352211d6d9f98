"""Tasks that look at a call's results before they decide what to keep of it.

overflow_check records only calls that bring NaN or infinity; a live comparison (bench_path)
keeps the tensors of calls whose checksums differ from an earlier dump. Both end collecting after
a number of such calls. The verdict needs the results on the host, so these two wait for the
device once per call; no other task does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from .entries import TensorEntry
from .subclasses import plain_tensor

# Functions that write into their first argument with inplace=True.
_IN_PLACE_BY_KEYWORD = frozenset(
    {"relu", "relu6", "elu", "celu", "selu", "silu", "mish", "hardtanh", "hardswish", "hardsigmoid"}
    | {"leaky_relu", "rrelu", "threshold", "dropout", "dropout1d", "dropout2d", "dropout3d"}
    | {"alpha_dropout", "feature_alpha_dropout"}
)
Held = list[tuple[TensorEntry, str, Any, int, Any]]  # entry, path, tensor, version, copy or None


class Verdicts:
    """Judges records; keeps the tensors of the bad ones and counts them."""

    def __init__(
        self,
        is_bad: Callable[[str, Any], bool],
        limit: int,
        *,
        only_bad: bool,
        keep: Callable[[str, Any], str],
        problem: Callable[[str, str], None],
        end: Callable[[str], None],
    ) -> None:
        self._is_bad = is_bad
        self._limit = limit
        self._only_bad = only_bad
        self._keep = keep
        self._problem = problem
        self._end = end
        self._bad = 0

    def hold(self, held: Held, entry: TensorEntry, path: str, tensor: Any, *, copy: bool) -> None:
        """Remember a tensor until the verdict; ``copy`` if the call is about to write into it."""
        plain = plain_tensor(tensor)
        if plain is not None and plain.numel() and plain.device.type != "meta":
            kept = plain.clone() if copy else None
            version = 0 if plain.is_inference() else plain._version
            held.append((entry, path, plain, version, kept))

    @staticmethod
    def may_write(call: Any) -> bool:
        """Whether the call may change its arguments, so that they must be copied before it."""
        name = call.base.rpartition(".")[2]
        if call.spec is None:
            return True  # what a module does to its input can not be told from its name
        in_place = name.startswith("__i") or name == "__setitem__" or name.endswith("_")
        return in_place or name in _IN_PLACE_BY_KEYWORD

    def judge(self, name: str, results: Any, held: Held) -> bool:
        """Whether the record is written; saves the tensors of a bad one."""
        if 0 < self._limit <= self._bad or not self._is_bad(name, results):
            return not self._only_bad
        for entry, path, tensor, version, kept in held:
            if kept is None and not tensor.is_inference() and tensor._version != version:
                self._problem(path, "not saved: it was changed in place before the verdict")
            else:
                md5 = entry.pop("md5", None)
                entry["data_name"] = self._keep(path, tensor if kept is None else kept)
                if md5 is not None:
                    entry["md5"] = md5
        self._bad += 1
        if self._bad == self._limit:
            self._end(f"{name} is bad call number {self._bad}: collecting ends here")
        return True


def has_overflow(_name: str, results: Any) -> bool:
    """Whether a described value holds NaN or infinity."""
    return any(not _is_finite(entry) for entry in tensor_entries(results))


def tensor_entries(value: Any) -> Iterator[TensorEntry]:
    """The tensor entries of a described value."""
    if type(value) is TensorEntry:
        yield value
    elif type(value) is dict:
        for part in value.values():
            yield from tensor_entries(part)
    elif type(value) is list:
        for part in value:
            yield from tensor_entries(part)


def _is_finite(entry: TensorEntry) -> bool:
    # Max and Min carry every NaN and infinity of the tensor; x - x is 0 for finite x only.
    values = (entry.get("Max"), entry.get("Min"))
    return all(not isinstance(v, float) or v - v == 0 for v in values)


class Bench:
    """The checksums of an earlier dump of the same step and rank."""

    def __init__(self, records: dict[str, Any]) -> None:
        self._sums = {name: _checksums(record) for name, record in records.items()}

    def differs(self, name: str, results: Any) -> bool:
        """Whether the checksums of these results are others than in the earlier dump.

        A record that the earlier dump does not have, or without checksums, does not differ.
        """
        earlier = self._sums.get(name)
        now = [entry.get("md5") for entry in tensor_entries(results)]
        return bool(earlier) and bool(now) and earlier != now


def read_bench(bench_path: str, step: int, rank_folder: str) -> dict[str, Any]:
    """Records of the earlier dump. OSError, ValueError or KeyError if there is none to read."""
    folder = os.path.join(bench_path, f"step{step}", rank_folder)
    if rank_folder.startswith("proc"):
        # Without ranks the earlier process had another number.
        parent = os.path.dirname(folder)
        names = sorted(os.listdir(parent)) if os.path.isdir(parent) else []
        found = [name for name in names if name.startswith("proc")]
        folder = os.path.join(parent, found[0]) if len(found) == 1 else folder
    path = os.path.join(folder, "dump.json")
    with open(path, encoding="utf-8") as file:
        data = json.load(file)["data"]
    return dict(data)


def _checksums(record: Any) -> list[Any]:
    """Checksums of a record's results: section ``output``."""
    found: list[Any] = []

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            if value.get("type", "").startswith("torch.") and "shape" in value:
                found.append(value.get("md5"))
            else:
                for part in value.values():
                    walk(part)
        elif isinstance(value, list):
            for part in value:
                walk(part)

    walk(record.get("output") if isinstance(record, dict) else None)
    return found
