"""What the configuration touches on disk: reading config.json, testing the dump directory."""

from __future__ import annotations

import errno
import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

from msprobe.errors import ConfigError
from msprobe.pytorch.dump.config_values import path as parse_path
from msprobe.pytorch.dump.config_values import show

PACKAGED_CONFIG = Path(__file__).parents[2] / "config.json"

_EXPECTED = {  # the messages of json.JSONDecodeError, in terms of what to write
    "Expecting value": "a value (string, number, true, false, null, [list] or {object})",
    "Expecting property name enclosed in double quotes": "a key in double quotes",
    "Expecting ':' delimiter": "':' between key and value",
    "Expecting ',' delimiter": "',' or a closing bracket",
    "Illegal trailing comma before end of object": "a key in double quotes after ','",
    "Illegal trailing comma before end of array": "a value after ','",
    "Extra data": "the end of the file",
}
_HINTS = {  # what the text begins with where JSON breaks off
    r"//|#|/\*": " JSON has no comments: use a key that begins with '_', such as \"_comment\".",
    r"'": " Strings and keys stand in double quotes.",
    r"[}\]]|,\s*[}\]]": " There is no comma after the last element.",
    r"True|False|None": " JSON writes true, false and null.",
    r"NaN|-?Infinity": " JSON has no NaN and no infinity.",
}
_STRING_OR_CONSTANT = re.compile(r'"(?:[^"\\]|\\.)*"|(?P<constant>NaN|-?Infinity)', re.DOTALL)
_ADVICE = {
    errno.EACCES: "choose a directory that this user may write",
    errno.EPERM: "choose a directory that this user may write",
    errno.EROFS: "choose a directory on a writable file system",
    errno.EEXIST: "a part of the path is a file: choose another path or remove that file",
    errno.ENOTDIR: "a part of the path is a file: choose another path or remove that file",
    errno.ENOSPC: "free some space or choose another disk",
    errno.EDQUOT: "free some space or choose another disk",
    errno.ENAMETOOLONG: "choose shorter names",
}


def read_config(config_path: object) -> tuple[Mapping[object, object], str]:
    """The content of a configuration (dict, path, or None and "" for the packaged file), its name.

    Raises `ConfigError` when there is no readable JSON object.
    """
    if isinstance(config_path, Mapping):
        return config_path, "<dict>"
    if config_path is None or (isinstance(config_path, str) and not config_path):
        config_path = PACKAGED_CONFIG
    try:
        path = os.path.abspath(parse_path(config_path))
    except (ValueError, OSError) as err:  # OSError: the current directory is gone
        raise ConfigError(
            f"<arguments>: 'config_path' is {show(config_path)} ({err}). Expected the path of a"
            " JSON file (string or os.PathLike), a dict of the same shape, or None."
            ' Example: config_path="./config.json".'
        ) from err
    content = _parse_json(_read_text(path), path)
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path}: the file holds {show(content)}. Expected one JSON object."
            ' Example: {"task": "statistics", "level": "L1"}.'
        )
    return content, path


def _read_text(path: str) -> str:
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except OSError as err:
        raise ConfigError(
            f"{path}: 'config_path' cannot be read: {err.strerror}. Expected the path of a JSON"
            ' file. Example: config_path="./config.json".'
        ) from err
    except ValueError as err:
        raise ConfigError(f"{path}: not UTF-8 text ({err}). Save the file as UTF-8.") from err


def _parse_json(text: str, path: str) -> object:
    def refuse(name: str) -> None:
        found = next(m for m in _STRING_OR_CONSTANT.finditer(text) if m["constant"])
        raise json.JSONDecodeError("Expecting value", text, found.start())

    if not text.strip():
        raise ConfigError(
            f"{path}: line 1, column 1: the file is empty. Expected one JSON object;"
            " {} stands for every default."
        )
    try:
        return json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as err:
        raise ConfigError(f"{path}: {_describe(err)}") from err
    except (ValueError, RecursionError) as err:  # an int of more than 4300 digits, deep nesting
        raise ConfigError(f"{path}: not usable as a configuration: {err}.") from err


def _describe(err: json.JSONDecodeError) -> str:
    rest = err.doc[err.pos :]
    word = re.match(r"-?\w+|.", rest, re.DOTALL)
    found = show(word[0]) if word else "the end of the file"
    hint = next((hint for start, hint in _HINTS.items() if re.match(start, rest)), "")
    expected = _EXPECTED.get(err.msg, f"valid JSON ({err.msg})")
    return f"line {err.lineno}, column {err.colno}: expected {expected}, found {found}.{hint}"


def check_dump_path(path: str) -> None:
    """Create the directory `path` and write, then remove, a small file in it.

    Raises `ConfigError` with the path, the reason of the operating system and what to do.
    """
    try:
        os.makedirs(path, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path, prefix=".msprobe-probe-") as probe:
            probe.write(b"msprobe")
            probe.flush()
    except (OSError, ValueError, RecursionError) as err:  # the name cannot be encoded; too deep
        number = err.errno if isinstance(err, OSError) else None
        advice = _ADVICE.get(number or 0, "choose a directory that can be created and written")
        raise ConfigError(
            f"'dump_path' is {path!r}: nothing can be written there ({err}). To fix it: {advice}."
            ' Example: dump_path="./dump_path".'
        ) from err
