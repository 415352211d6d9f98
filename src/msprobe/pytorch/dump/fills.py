"""How the numbers of one tensor get into its entry, for each summary mode."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from . import small, stats
from .entries import Entry, TensorEntry


class Sink(Protocol):
    """Where a description goes: values to be read back later, tensors to keep, problems.

    ``small``: entries whose statistics are filled in together, with what `small.fill_in` needs.
    """

    small: deque[small.Waiting]

    def defer(self, deferred: Any, use: Callable[[Any], None]) -> None:
        """Call ``use`` with the values of ``deferred`` once they are read back."""

    def postpone(self, result: Any, path: str, fill: Callable[[], None]) -> bool:
        """``fill`` in a description once somebody waits for ``result``; False if none will tell."""

    def keep(self, path: str, tensor: Any) -> str:
        """Save a tensor and return its file name."""

    def problem(self, path: str, reason: str | Exception) -> None:
        """Log why the value at ``path`` could not be computed."""


Fill = Callable[[TensorEntry, Any, str], None]  # (entry, plain tensor or None, path)
_NUMBERS = ("Max", "Min", "Mean", "Norm")
NO_VALUES = (None, None, None, None)
# mode → fields that hold what is computed
FIELDS: dict[str, Sequence[str]] = {
    "statistics": _NUMBERS,
    "md5": _NUMBERS,
    "xor": ("md5",),
    "nan": (),
}


def _statistics(high: bool, sink: Sink) -> tuple[Fill, None]:
    measure, together = stats.statistics, small.REDUCTIONS[high]

    def fill(entry: TensorEntry, plain: Any, path: str) -> None:
        if plain.dtype in together:
            width, reduction = together[plain.dtype]
            copy = small.elements_of_any(plain, width)
            if copy is not None:
                set_statistics(entry, NO_VALUES)
                sink.small.append((entry, reduction, copy))
                return
        values = measure(plain, high)
        if type(values) is list:
            entry["Max"], entry["Min"], entry["Mean"], entry["Norm"] = values
        else:
            set_statistics(entry, NO_VALUES)
            sink.defer(values, lambda read: set_statistics(entry, read))

    return fill, None


def set_statistics(entry: Entry, values: Sequence[Any]) -> None:
    """The four numbers of an entry, in their order."""
    entry["Max"], entry["Min"], entry["Mean"], entry["Norm"] = values


def _checksum(compute: Callable[[Any], Any], sink: Sink) -> Fill:
    def fill(entry: TensorEntry, plain: Any, path: str) -> None:
        entry["md5"] = None
        value = compute(plain)
        if type(value) is str:
            entry["md5"] = value
        else:
            sink.defer(value, lambda read: entry.__setitem__("md5", read[0]))

    return fill


def _last(fill: Fill, sink: Sink) -> Fill:
    """``fill`` after the other fields: it says itself what it can not compute."""

    def attempt(entry: TensorEntry, plain: Any, path: str) -> None:
        if plain is None:
            entry["md5"] = None  # why, has been said for the statistics
            return
        try:
            fill(entry, plain, path)
        except Exception as reason:
            say(entry, path, reason, sink, ("md5",))

    return attempt


def _nan(high: bool, sink: Sink) -> tuple[Fill, None]:
    def fill(entry: TensorEntry, plain: Any, path: str) -> None:
        if not (plain.is_floating_point() or plain.is_complex()):
            return
        values = stats.statistics(plain)
        if type(values) is list:
            _judge(entry, values)
        else:
            sink.defer(values, lambda read: _judge(entry, read))

    return fill, None


def _judge(entry: TensorEntry, values: Sequence[Any]) -> None:
    # x - x is 0 for finite x only; Max and Min carry every NaN and infinity.
    entry.bad = any(value is not None and value - value != 0 for value in values[:2])


# mode → (fills before requires_grad, fills after data_name)
FILLS: dict[str, Callable[[bool, Sink], tuple[Fill, Fill | None]]] = {
    "statistics": _statistics,
    "md5": lambda high, sink: (
        _statistics(high, sink)[0],
        _last(_checksum(stats.crc32, sink), sink),
    ),
    "xor": lambda high, sink: (_checksum(stats.xor64, sink), None),
    "nan": _nan,
}


def say(
    entry: TensorEntry, path: str, reason: Exception, sink: Sink, fields: Sequence[str]
) -> None:
    """Null in these fields, with the reason in the log."""
    entry.setdefault("shape", None)  # a nested tensor has none
    for field in fields:
        entry[field] = None
    what = "checksum" if tuple(fields) == ("md5",) else "numbers"
    sink.problem(path, f"no {what} of {entry['type']} {entry['dtype']}: {reason}")
