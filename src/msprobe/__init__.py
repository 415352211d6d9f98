"""Precision data collection for PyTorch training and inference; see ``msprobe.pytorch``.

Importing this package imports nothing else and changes nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import os

    from .records import Dump

__version__ = "0.1.0"


def read(path: str | os.PathLike[str]) -> Dump:
    """Open a dump for reading: a dump_path, or a step or rank folder in it.

    Steps, ranks and records are read when they are asked for; numbers are numbers, NaN and
    infinities included. Reads dumps of mindstudio-probe as well, and needs no torch but for
    ``load()``. UsageError where there is no dump.

    >>> import msprobe
    >>> for step in msprobe.read("./dump"):                            # doctest: +SKIP
    ...     for rank in step:
    ...         for record in rank:
    ...             for tensor in record.tensors:
    ...                 if not tensor.is_finite:
    ...                     print(step.number, rank.name, record.name, tensor.place)
    >>> rank = msprobe.read("./dump").step(0).rank(0)                  # doctest: +SKIP
    >>> relu = rank["Functional.relu.0.forward"]                       # doctest: +SKIP
    >>> relu["output"][0].max, relu.parent, relu.stack[0]              # doctest: +SKIP
    >>> relu["output"][0].load()                                       # doctest: +SKIP
    """
    records: Any = importlib.import_module(".records", __name__)
    dump: Dump = records.Dump(path)
    return dump
