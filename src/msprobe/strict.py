"""Reading JSON so that nothing wrong with it passes unseen."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong: in which file, at which record and place (empty: the file)."""

    file: str
    where: str
    problem: str


def load(path: Path, findings: list[Finding]) -> Any:
    """The content of a JSON file, None if there is none; what is wrong with it as findings."""
    if not path.is_file():
        return None
    twice: list[str] = []
    bare: list[str] = []

    def unique(members: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(members)
        if len(made) != len(members):
            names = [name for name, _ in members]
            twice.extend(name for name in made if names.count(name) > 1)
        return made

    def constant(word: str) -> float:
        bare.append(word)
        return float(word)

    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except (ValueError, OSError, RecursionError) as err:
        findings.append(Finding(path.name, "", f"cannot be read: {err}"))
        return None
    findings += [Finding(path.name, name, "the name stands twice") for name in twice]
    if bare:
        where = _first_non_finite(content)
        many = f"{len(bare)} times" if len(bare) > 1 else "once"
        problem = f"not strict JSON: {bare[0]} without quotes ({many} in the file)"
        findings.append(Finding(path.name, where, problem))
    return content


def _first_non_finite(value: Any) -> str:
    """Where the first NaN or infinite float stands, with dots; empty if there is none."""
    if isinstance(value, (dict, list)):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(part, float) and not math.isfinite(part):
                return str(key)
            if below := _first_non_finite(part):
                return f"{key}.{below}".removeprefix("data.")
    return ""
