"""The values in a record as dataclasses: tensors, plain arguments."""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import reader
from .errors import UsageError

if TYPE_CHECKING:
    import torch

_FLOATS = frozenset({"float", "float16", "float32", "float64", "longdouble"})


@dataclass(frozen=True, slots=True)
class TensorValue:
    """One tensor (or numpy array) of a record, as the file describes it.

    ``place`` tells where it stood: ``input_args.0``, ``output.1.hidden``, ``parameters.weight``.
    ``dtype`` is as in the file (``torch.float32``; numpy: ``float64``). ``shape`` is None for a
    nested tensor, which has none. The statistics are None where none were taken; of a bool tensor
    ``max`` and ``min`` are any() and all(). ``md5`` holds the checksum of summary_mode md5 or xor.
    ``data_name`` and ``path`` name the saved file.
    """

    place: str
    type: str
    dtype: str
    shape: tuple[int, ...] | None
    max: float | int | bool | None = None
    min: float | int | bool | None = None
    mean: float | None = None
    norm: float | None = None
    requires_grad: bool | None = None
    md5: str | float | None = None  # a number: xor of a 0-dim tensor, by the original
    data_name: str | None = None
    path: Path | None = None

    def load(self) -> torch.Tensor:
        """The saved tensor, on the CPU; a saved numpy array comes as a tensor as well.

        UsageError if it was not saved, or is an array that no tensor can hold (text);
        FileNotFoundError if its file is gone. Runs no code from the file.
        """
        if self.path is None:
            raise UsageError(
                f'{self.place} was not saved: use "task": "tensor", or name its record in'
                " 'tensor_list'."
            )
        library: Any = importlib.import_module("torch")  # only now: reading needs none
        loaded: torch.Tensor
        if self.path.suffix == ".npy":
            array = importlib.import_module("numpy").load(self.path, allow_pickle=False)
            native = array.astype(array.dtype.newbyteorder("="), copy=False)
            try:
                loaded = library.from_numpy(native)
            except TypeError as err:
                raise UsageError(
                    f"{self.place} is a numpy array of {self.dtype}, which no tensor can hold: read"
                    f" it with numpy.load({str(self.path)!r})."
                ) from err
        else:
            loaded = library.load(self.path, map_location="cpu", weights_only=True)
        return loaded

    @property
    def is_finite(self) -> bool:
        """Whether no element is NaN or infinite (True where no statistic was taken).

        Told by ``max`` and ``min``: ``mean`` and ``norm`` of large finite elements may be infinite.
        """
        return all(number is None or math.isfinite(number) for number in (self.max, self.min))


@dataclass(frozen=True, slots=True)
class PlainValue:
    """One argument that is no tensor: ``type`` is its class, ``value`` what the file holds of it.

    Floats are floats, NaN and infinities included; a complex number is a ``complex``, an integer
    of any length an ``int``. Anything else is as in the file.
    """

    place: str
    type: str
    value: Any


def values_of(raw: Any, place: str, folder: Path) -> Any:
    """``raw``, as in dump.json, with `TensorValue` and `PlainValue` in the places of values.

    ``place`` is where it stands in its record, ``folder`` where tensors are saved.
    """
    if reader.is_tensor(raw):
        return _tensor(raw, place, folder)
    if isinstance(raw, list):
        return [values_of(part, _join(place, i), folder) for i, part in enumerate(raw)]
    if not isinstance(raw, dict):
        return raw
    if isinstance(raw.get("type"), str):
        return _plain(raw, place)
    return {key: values_of(part, _join(place, key), folder) for key, part in raw.items()}


def _join(place: str, key: Any) -> str:
    return f"{place}.{key}" if place else str(key)


def _tensor(raw: dict[str, Any], place: str, folder: Path) -> TensorValue:
    statistics: list[Any] = [_statistic(raw.get(name)) for name in reader.STATISTICS]
    high, low, mean, norm = statistics
    name = raw.get("data_name")
    # A name from a file that somebody sent must not lead out of the folder.
    path = folder / Path(name).name if isinstance(name, str) else None
    shape = None if raw["shape"] is None else tuple(raw["shape"])
    return TensorValue(
        place, str(raw.get("type")), raw["dtype"], shape, high, low, mean, norm,
        requires_grad=raw.get("requires_grad"), md5=raw.get("md5"), data_name=name, path=path,
    )


def _statistic(value: Any) -> Any:
    """A number as in the file; of text (NaN, the infinities) the float."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return None
    return value


def _plain(raw: dict[str, Any], place: str) -> PlainValue:
    kind = raw["type"]
    rest = {key: value for key, value in raw.items() if key != "type"}
    value = next(iter(rest.values()), None) if len(rest) <= 1 else rest
    if isinstance(value, str):
        with contextlib.suppress(ValueError):  # a class of the user's may have any name
            value = _from_text(kind, value)
    return PlainValue(place, kind, value)


def _from_text(kind: str, text: str) -> Any:
    """What JSON can not hold as a number. ValueError if it is none."""
    if kind in _FLOATS:
        return float(text)
    if kind == "complex":
        return complex(text)
    return int(text, 16) if kind == "int" else text


def tensors_in(content: Any) -> Iterator[TensorValue]:
    """Every tensor in what `values_of` returned."""
    if isinstance(content, TensorValue):
        yield content
    elif isinstance(content, (dict, list)):
        for part in content.values() if isinstance(content, dict) else content:
            yield from tensors_in(part)
