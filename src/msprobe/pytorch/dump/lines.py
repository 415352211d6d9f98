"""One record → its line in dump.json.

The encoder of the json module spends most of its time on the keys, which are the same in every
entry. So the text of the most frequent entry, a plain tensor with finite statistics, is put
together here; everything else goes through the encoder. The text is the same in both cases.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from . import jsonfile
from .entries import TensorEntry

_quoted: Any = json.encoder.encode_basestring


def line(name: str, record: Any) -> bytes:
    """``"name": record`` as UTF-8."""
    if type(record) is not dict:
        return jsonfile.member(name, record)
    sections = []
    for key, section in record.items():
        kind = type(section)
        if kind is list:
            text = f"[{', '.join(map(_entry, section))}]"
        elif kind is dict:
            text = _named(section) if section else "{}"
        else:
            text = jsonfile.encode(section)
        sections.append(f"{_quoted(key)}: {text}")
    return f"{_quoted(name)}: {{{', '.join(sections)}}}".encode("utf-8", "backslashreplace")


def pair(name: str, value: str | None) -> bytes:
    """``"name": "value"`` as UTF-8, null for None."""
    text = "null" if value is None else _quoted(value)
    return f"{_quoted(name)}: {text}".encode("utf-8", "backslashreplace")


def _named(section: dict[str, Any]) -> str:
    entries = [f"{_quoted(key)}: {_entry(entry)}" for key, entry in section.items()]
    return f"{{{', '.join(entries)}}}"


def _entry(entry: Any) -> str:
    # With Norm, only an entry of exactly these fields in this order has eight.
    if type(entry) is TensorEntry and len(entry) == 8 and "Norm" in entry:
        kind, dtype, shape, top, low, mean, norm, requires_grad = entry.values()
        # The difference is 0 only for finite numbers: NaN and infinities are no JSON.
        if type(norm) is float and (top - top) + (low - low) + (mean - mean) + (norm - norm) == 0:
            return (
                f'{_head(kind, dtype, shape)}{top!r}, "Min": {low!r}, "Mean": {mean!r},'
                f' "Norm": {norm!r}{_GRAD[requires_grad]}'
            )
    return jsonfile.encode(entry)


_GRAD = {True: ', "requires_grad": true}', False: ', "requires_grad": false}'}


@functools.lru_cache(maxsize=4096)
def _head(kind: str, dtype: str, shape: tuple[int, ...]) -> str:
    return f"{jsonfile.encode({'type': kind, 'dtype': dtype, 'shape': shape})[:-1]}, \"Max\": "
