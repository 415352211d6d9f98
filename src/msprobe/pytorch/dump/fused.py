"""Max, Min, sum and sum of squares of a stretch of memory, by numkong (the optional extra "fast").

A call of torch or numpy costs 5 to 15 µs besides its work where the code of the model has run in
between: its own has left the caches by then. numkong takes two reductions in one pass and few
instructions, so that a tensor is measured at the speed of the memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .pieces import even, memory_at

_largest = np.maximum.reduce
_least = np.minimum.reduce
_PIECE_BYTES = 1 << 18  # the second pass finds them in the cache
Reduced = tuple[float, float, float, float]  # Max, Min, sum, sum of squares: NaN with any NaN


def _is_right(numkong: Any) -> bool:
    """Whether its kernels for this processor give what numpy gives; all sums here are exact."""
    for dtype in (np.float32, np.float64):
        values = ((np.arange(5003) * 37 % 101 - 50) / 4).astype(dtype)
        for count in (1, 2, 31, 1000, 5003):
            part = values[:count].astype(np.float64)
            view = numkong.from_pointer(values.ctypes.data, count, values.dtype.name)
            low, _, top, _ = numkong.minmax(view)
            expected = part.max(), part.min(), part.sum(), np.square(part).sum()
            if (top, low, *numkong.moments(view)) != expected:
                return False
        values[77] = math.nan
        if not math.isnan(numkong.moments(view)[1]):
            return False
    return True


def _loaded() -> Any:
    """The library, if it is there and does what is expected of it."""
    try:
        import numkong

        return numkong if _is_right(numkong) else None
    except Exception:  # it is not there, or a version with other names
        return None


_numkong = _loaded()
if _numkong is not None:
    _view, _minmax, _moments = _numkong.from_pointer, _numkong.minmax, _numkong.moments


def _reduce(address: int, count: int, dtype: str) -> Reduced:
    """Of ``count`` >= 1 numbers of ``dtype`` (float32, float64) at ``address``, in float64."""
    width = 4 if dtype == "float32" else 8
    size = even(count, _PIECE_BYTES // width)
    top, low, total, squares = -math.inf, math.inf, 0.0, 0.0
    for begin in range(0, count, size):
        start, length = address + begin * width, min(size, count - begin)
        view = _view(start, length, dtype)
        sums, found = _moments(view)
        if found != found:
            return math.nan, math.nan, math.nan, math.nan  # Max and Min would be of the others
        total += sums
        squares += found
        if found == math.inf:
            # An infinity, or squares beyond float64. numkong begins with the largest finite
            # numbers: the Max of nothing but -inf would be one of them.
            array = np.frombuffer(memory_at(start, length * width), dtype)
            most, least = float(_largest(array)), float(_least(array))
        else:
            least, _, most, _ = _minmax(view)
        top, low = max(top, most), min(low, least)
    return top, low, total, squares


# None without the library.
reduce: Callable[[int, int, str], Reduced] | None = None if _numkong is None else _reduce
