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
    >>> dump = msprobe.read("./dump")
    >>> for step in dump:
    ...     for rank in step:
    ...         for record in rank:
    ...             for tensor in record.tensors:
    ...                 if not tensor.is_finite:
    ...                     print(step.number, rank.name, record.name, tensor.place)
    0 rank0 Torch.log.0.forward output.0
    >>> relu = dump.step(0).rank(0)["Torch.relu.0.forward"]
    >>> relu["output"][0].max
    2.0
    >>> relu["output"][0].load()
    tensor([0., 2.])
    """
    records: Any = importlib.import_module(".records", __name__)
    dump: Dump = records.Dump(path)
    return dump
