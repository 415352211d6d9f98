"""Text for the terminal: tables, numbers, sizes, colour."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

Paint = Callable[[str, str], str]
_CODES = {"title": "1;36", "name": "1", "bad": "1;31", "dim": "2"}
_NAMES = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}
_Item = TypeVar("_Item")


def painter(colour: bool) -> Paint:
    """Return a function that paints text for a terminal, or leaves it as it is."""

    def paint(text: str, kind: str) -> str:
        text = visible(text)
        return f"\x1b[{_CODES[kind]}m{text}\x1b[0m" if colour else text

    return paint


def visible(text: str) -> str:
    """Return text on one line, without what a terminal would obey: control characters escaped."""
    return text.translate(_CONTROL)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines with aligned columns."""
    rows = [list(map(visible, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def indent(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines two columns to the right."""
    return ("  " + line for line in lines)


def readable(value: Any) -> str:
    """Return one cell of a table; floats with 6 significant digits."""
    if isinstance(value, float):
        return _NAMES.get(str(value), f"{value:.6g}")
    if isinstance(value, str):
        return value.removeprefix("torch.")
    return "" if value is None else str(value)


def readable_size(size_bytes: int) -> str:
    """Return a size with a unit: ``4.2 kB``."""
    size, unit = float(size_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"


def first(items: Sequence[_Item], limit: int) -> Sequence[_Item]:
    """Return the first `limit` items, all of them if `limit` is not positive."""
    return items[:limit] if limit > 0 else items


def count(number: int, noun: str, plural: str = "s") -> str:
    """Return a number with its noun: ``1 step``, ``2 steps``."""
    return f"{number} {noun}{'' if number == 1 else plural}"
