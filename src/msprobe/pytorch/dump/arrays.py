"""Entries of numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from .entries import Entry
from .fills import Sink, set_statistics


def array_entry(array: Any, path: str, sink: Sink, keeps: bool) -> Entry:
    """Entry of a numpy array; of an odd one only its type."""
    try:
        return _measured(array, path, sink, keeps)
    except Exception as reason:  # an odd subclass costs its own entry only
        sink.problem(path, reason)
        kind = type(array)
        return Entry(type=f"{kind.__module__}.{kind.__qualname__}", value=None)


def _measured(array: Any, path: str, sink: Sink, keeps: bool) -> Entry:
    """Entry of a numpy array. Statistics in numpy's own arithmetic; null for text and empty."""
    entry = Entry(type="numpy.ndarray", dtype=_dtype_name(array), shape=list(array.shape))
    values: list[Any] = [None] * 4
    if array.size and array.dtype.kind in "biufc":
        magnitude = np.abs(array) if array.dtype.kind == "c" else array
        values = [magnitude.max(), magnitude.min(), magnitude.mean(), np.linalg.norm(magnitude)]
        # float: the item of a longdouble is no Python number.
        values = [float(v) if isinstance(v, np.longdouble) else v.item() for v in values]
    set_statistics(entry, values)
    if keeps and array.size:
        if array.dtype.kind in "biufcSU":
            entry["data_name"] = sink.keep(path, array)
        else:
            sink.problem(path, f"not saved: an array of {array.dtype} would have to be pickled")
    return entry


def _dtype_name(array: Any) -> str:
    return array.dtype.str if array.dtype.kind in "SUV" else str(array.dtype)
