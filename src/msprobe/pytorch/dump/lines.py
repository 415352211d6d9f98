"""One record → its line in dump.json.

The encoder of the json module spends most of its time on the keys, which are the same in every
entry, and on floats. orjson (the optional extra "fast") takes a sixth of it. Without it the text
of the most frequent entry, a plain tensor with finite statistics, is put together here; everything
else goes through the encoder of the json module. The values are the same in each case.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from . import jsonfile
from .entries import Entry, TensorEntry

_quoted: Any = json.encoder.encode_basestring
try:
    from orjson import dumps
except ImportError:
    _dumps: Any = None
else:
    _dumps = dumps


def line(name: str, record: Any) -> bytes:
    """``"name": record`` as UTF-8."""
    encoded: bytes | None = None if _dumps is None else _encoded(record)
    if encoded is not None:
        return b"%b: %b" % (_quoted(name).encode("utf-8", "backslashreplace"), encoded)
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


def _encoded(record: Any) -> bytes | None:
    """The text by orjson; None where it has none or another one than `jsonfile.encode`."""
    try:
        text: bytes = _dumps(record)
    except TypeError:  # lone surrogates, integers beyond 64 bits, lengths that are no numbers
        return None
    if b"null" in text and text.count(b"null") != _count_of_none(record):
        return None  # it writes NaN and infinities as null
    return text


def _count_of_none(record: Any) -> int:
    """How often None stands in a record, not counted where it seldom does: deeper inside."""
    count = 0
    for section in record.values() if type(record) is dict else ():
        kind = type(section)
        for part in section if kind is list else section.values() if kind is dict else ():
            if part is None:
                count += 1
            elif isinstance(part, Entry):
                count += [*part.values()].count(None)
    return count


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
