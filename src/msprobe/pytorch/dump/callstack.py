"""The stack of user frames, for stack.json and random_save.

Capturing is on the path of every collected call, rendering happens once per distinct stack.
So a capture only notes where each frame stands, as integers; no text is made and no frame kept.
"""

from __future__ import annotations

import linecache
import os
import sys
from functools import lru_cache
from types import CodeType, FrameType

Key = tuple[int, ...]
"""A stack: ``(id of code, offset of instruction)`` of each frame, flat, innermost first."""

_Seen = tuple[str | int, ...]

PACKAGE_DIR = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep

# Every code object that a key names stays referenced here, so that its id is never given away.
_codes: dict[int, CodeType] = {}
# What a walk saw (all frames) -> the key without the skipped ones. Only a cache.
_keys: dict[_Seen, Key] = {}
_MAX_CACHED_KEYS = 100_000


def capture(skip_prefix: str = PACKAGE_DIR) -> Key:
    """Return the stack of the caller without the frames whose file starts with `skip_prefix`.

    Equal keys mean the same instructions of the same functions. About 3 µs for 20 frames.
    """
    frame: FrameType | None = sys._getframe(1)
    innermost = frame
    # Hashing a code object costs more than the whole walk; its id is as good while it lives.
    seen: list[str | int] = [skip_prefix]
    while frame is not None:
        seen += (id(frame.f_code), frame.f_lasti)
        frame = frame.f_back
    walk = tuple(seen)
    key = _keys.get(walk)
    if key is None:
        key = _remember(walk, innermost, skip_prefix)
    return key


def _remember(seen: _Seen, frame: FrameType | None, skip_prefix: str) -> Key:
    key: list[int] = []
    for place in range(1, len(seen), 2):
        assert frame is not None
        code = frame.f_code
        _codes[id(code)] = code
        if not code.co_filename.startswith(skip_prefix):
            key += (id(code), int(seen[place + 1]))
        frame = frame.f_back
    if len(_keys) >= _MAX_CACHED_KEYS:
        _keys.clear()
    return _keys.setdefault(seen, tuple(key))


def render(key: Key) -> list[str]:
    r"""Return one text per frame, innermost first, as dump-format.md §5 describes it.

    ``File /home/me/train.py, line 7, in forward, \n return F.relu(x)``, where ``\n`` is a line
    break and the last part the stripped source line, empty when the source is not at hand.
    """
    return [_frame_text(at, offset) for at, offset in zip(key[::2], key[1::2], strict=True)]


@lru_cache(maxsize=65_536)
def _frame_text(code_id: int, offset: int) -> str:
    code = _codes[code_id]
    line = _line_number(code, offset)
    path = code.co_filename
    source = linecache.getline(path, line).strip()
    if not path.startswith("<"):
        path = os.path.abspath(path)
    return f"File {path}, line {line}, in {code.co_name}, \n {source}"


def _line_number(code: CodeType, offset: int) -> int:
    for start, end, line in code.co_lines():
        if start <= offset < end and line is not None:
            return line
    return code.co_firstlineno
