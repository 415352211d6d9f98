"""The yaml tables beside this file as values: which functions to wrap, ignore, and rank by risk."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
import yaml

from msprobe.errors import ConfigError

FOLDER = Path(__file__).parent
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml: 7 times faster

IgnoreRule: TypeAlias = frozenset[int | str] | Literal["all"]
NOTHING: frozenset[int | str] = frozenset()

# Category of support_wrap_ops.yaml -> (prefix of the records, what holds the functions).
# A function of torch.distributed has two homes, and torch's own code calls it through the second.
CATEGORIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "functional": ("Functional", ("torch.nn.functional",)),
    "tensor": ("Tensor", ("torch.Tensor",)),
    "torch": ("Torch", ("torch",)),
    "_VF": ("VF", ("torch._VF",)),
    "distributed": ("Distributed", ("torch.distributed", "torch.distributed.distributed_c10d")),
    "npu_distributed": ("Distributed", ("torch_npu.distributed",)),
    "torch_npu": ("NPU", ("torch_npu",)),
    "mindspeed": ("MindSpeed", ("mindspeed.ops",)),
}
# torch loads it with DTensor, torch.compile or an optimizer: perhaps after the debugger is made.
FUNCTIONAL_COLLECTIVES = "torch.distributed._functional_collectives"
DTENSOR = ("torch.distributed.tensor", "torch.distributed._tensor")  # the latter: torch < 2.5
CORE_PREFIXES = frozenset({"Distributed", "NPU", "MindSpeed"})
RISK_CLASSES = ("CORE", "LOW")  # listed in risk_levels.yaml; every other name is FOCUS

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)


@dataclass(frozen=True, slots=True)
class ApiSpec:
    """One attribute to wrap: ``getattr(<owner>, attr)``, recorded as ``<prefix>.<name>``.

    ``owner`` is a dotted path for ``find_owner``, e.g. ``torch.linalg`` or ``torch.Tensor``.
    Two specs with the same prefix and name share one counter. The ignore rules hold positional
    indices (of the output: places in its list) and keyword names; see ``ignores``.
    """

    prefix: str
    name: str
    owner: str
    attr: str
    ignore_input: IgnoreRule = NOTHING
    ignore_output: IgnoreRule = NOTHING


def ignores(rule: IgnoreRule, key: int | str) -> bool:
    """Whether ``rule`` asks for null at this position or keyword."""
    return rule == "all" or key in rule


def find_owner(path: str) -> Any:
    """The module or class at a dotted path, or None. Imports nothing: looks in ``sys.modules``."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        found: Any = sys.modules.get(".".join(parts[:end]))
        if found is not None:
            for part in parts[end:]:
                found = getattr(found, part, None)
            return found
    return None


def load_specs(folder: Path = FOLDER) -> tuple[list[ApiSpec], list[str]]:
    """Every function of ``support_wrap_ops.yaml`` that exists here, and the spellings that do not.

    A package that is not imported (torch_npu, mindspeed) or not built in (torch.distributed) gives
    neither. No (owner, attr) occurs twice. ConfigError: a broken or misspelt yaml file.
    """
    rules = _load_ignore_rules(folder / "builtin_ignore_ops.yaml")
    specs: dict[tuple[str, str], ApiSpec] = {}
    missing: list[str] = []
    for category, spelling, record_name in _spellings(folder / "support_wrap_ops.yaml"):
        prefix, homes = CATEGORIES[category]
        places = [_place(home, spelling) for home in homes if _present(home)]
        found = [(owner, attr) for owner, attr in places if _has(owner, attr)]
        if places and not found and not _loads_late(places[0][0]):
            missing.append(f"{category}.{spelling}")
        by_spelling = rules.get((prefix, spelling), (NOTHING, NOTHING))
        ignored = rules.get((prefix, record_name), by_spelling)
        for owner, attr in _same_object(found):
            specs.setdefault((owner, attr), ApiSpec(prefix, record_name, owner, attr, *ignored))
    return list(specs.values()), missing


def load_custom(folder: Path = FOLDER) -> dict[str, list[str]]:
    """``custom_wrap_ops.yaml`` as module path -> function names. ConfigError: a broken file."""
    path = folder / "custom_wrap_ops.yaml"
    table = _load_mapping(path)
    for module, names in table.items():
        if not isinstance(module, str) or not _DOTTED.fullmatch(module):
            raise _error(path, f"module path {module!r}", "a dotted module path", "my_pkg.kernels")
        _check_names(path, module, names, _IDENTIFIER)
    return {module: list(names or ()) for module, names in table.items()}


@cache
def load_risk(folder: Path = FOLDER) -> dict[str, str]:
    """API name -> "CORE" or "LOW", from ``risk_levels.yaml``; a name that is absent is FOCUS."""
    path = folder / "risk_levels.yaml"
    table = _load_mapping(path)
    for risk, names in table.items():
        _check_key(path, risk, RISK_CLASSES)
        _check_names(path, risk, names, _DOTTED)
    return {name: risk for risk in RISK_CLASSES for name in table.get(risk) or ()}


def risk_of(prefix: str, name: str) -> Literal["CORE", "FOCUS", "LOW"]:
    """Risk class of the API that is recorded as ``<prefix>.<name>``."""
    risk = "CORE" if prefix in CORE_PREFIXES else load_risk().get(name, "FOCUS")
    return risk  # type: ignore[return-value]  # load_risk has checked the values


def _spellings(path: Path) -> Iterator[tuple[str, str, str]]:
    """(category, spelling in the file, record name), the base table first, then ``added``."""
    table = _load_mapping(path)
    added = table.pop("added", None) or {}
    if not isinstance(added, dict):
        raise _error(path, f"'added' is {added!r}", "categories as at the top level")
    # A dotted base name is recorded under its last part, an added one in full: see the file's head.
    for part, name_of in ((table, _last_part), (added, str)):
        yield from _category_names(path, part, name_of)


def _category_names(
    path: Path, table: dict[Any, Any], name_of: Callable[[str], str]
) -> Iterator[tuple[str, str, str]]:
    for category, names in table.items():
        # "aten" is a documented category that eager collection has never installed.
        _check_key(path, category, (*CATEGORIES, "aten"))
        _check_names(path, category, names, _DOTTED)
        if category != "aten":
            yield from ((category, name, name_of(name)) for name in names or ())


def _last_part(spelling: str) -> str:
    return spelling.rpartition(".")[2]


def _place(home: str, spelling: str) -> tuple[str, str]:
    """Owner and attribute: ("torch", "linalg.norm") -> ("torch.linalg", "norm")."""
    owner, _, attr = f"{home}.{spelling}".rpartition(".")
    return owner, attr


def late_modules() -> list[str]:
    """Modules of torch that come late and that we wrap something of: those loaded by now."""
    return [name for name in (FUNCTIONAL_COLLECTIVES, *DTENSOR) if name in sys.modules]


def _present(home: str) -> bool:
    if home.startswith("torch.distributed") and not torch.distributed.is_available():
        return False
    return home.partition(".")[0] in sys.modules


def _loads_late(owner: str) -> bool:
    """Whether an absence there proves nothing: so packages beside torch load their submodules."""
    if owner == FUNCTIONAL_COLLECTIVES:
        return owner not in sys.modules
    return owner.partition(".")[0] != "torch"


def _has(owner: str, attr: str) -> bool:
    found = find_owner(owner)
    return found is not None and hasattr(found, attr)


def _same_object(places: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The places that hold the same function as the first one."""
    functions = [getattr(find_owner(owner), attr) for owner, attr in places]
    return [place for place, f in zip(places, functions, strict=True) if f is functions[0]]


def _load_ignore_rules(path: Path) -> dict[tuple[str, str], tuple[IgnoreRule, IgnoreRule]]:
    """(prefix, API name) -> (input rule, output rule)."""
    prefixes = sorted({prefix for prefix, _ in CATEGORIES.values()} | {"Aten"})
    rules: dict[tuple[str, str], tuple[IgnoreRule, IgnoreRule]] = {}
    for prefix, apis in _load_mapping(path).items():
        _check_key(path, prefix, prefixes)
        if not isinstance(apis, dict):
            raise _error(path, f"{prefix!r} is {apis!r}", "API names with input and output")
        for api, sides in apis.items():
            where = f"{prefix}.{api}"
            if not isinstance(sides, dict) or not set(sides) <= {"input", "output"}:
                raise _error(path, f"{where!r} is {sides!r}", "input and output", "input: [0]")
            rules[prefix, str(api)] = (
                _ignore_rule(path, where, "input", sides.get("input")),
                _ignore_rule(path, where, "output", sides.get("output")),
            )
    return rules


def _ignore_rule(path: Path, where: str, side: str, value: object) -> IgnoreRule:
    if value is None:
        return NOTHING
    if value == "all":
        return "all"
    if isinstance(value, list) and all(_is_position(v) or _is_keyword(v, side) for v in value):
        return frozenset(value)
    expected = "'all' or a list of positions" + (" and keywords" if side == "input" else "")
    raise _error(path, f"{side!r} of {where!r} is {value!r}", expected, f"{side}: [0]")


def _is_position(value: object) -> bool:
    return type(value) is int and value >= 0  # not isinstance: yaml's true is an int too


def _is_keyword(value: object, side: str) -> bool:
    return side == "input" and isinstance(value, str) and value.isidentifier()


def _parse_yaml(text: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError:
        return yaml.safe_load(text)  # whose messages tell the line


def _load_mapping(path: Path) -> dict[Any, Any]:
    try:
        content = _parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as err:
        raise ConfigError(f"{path}: cannot be read as yaml: {err}") from err
    if content is not None and not isinstance(content, dict):
        raise _error(path, f"the file holds a {type(content).__name__}", "a mapping")
    return content or {}


def _check_key(path: Path, key: object, allowed: tuple[str, ...] | list[str]) -> None:
    if key not in allowed:
        raise _error(path, f"unknown key {key!r}", f"one of {', '.join(allowed)}")


def _check_names(path: Path, key: object, names: object, pattern: re.Pattern[str]) -> None:
    if names is not None and not isinstance(names, list):
        raise _error(path, f"{key!r} is {names!r}", "a list of names")
    for name in names or ():
        if not isinstance(name, str) or not pattern.fullmatch(name):
            raise _error(path, f"{key!r} lists {name!r}", "a function name", "- relu")


def _error(path: Path, found: str, expected: str, example: str = "") -> ConfigError:
    tail = f" Example: {example}" if example else ""
    return ConfigError(f"{path}: {found}; expected {expected}.{tail}")
