"""Who may import whom: only downwards, as docs/architecture.md draws it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import msprobe

SOURCE = Path(msprobe.__file__).parent
DUMP = "msprobe.pytorch.dump"
REQUIRED = {"torch", "numpy", "yaml"}
OPTIONAL = {"isal", "numkong", "orjson"}  # imported in a try, with an answer to their absence

# Group -> (groups it may import, its modules). Within a group a module may import those before it;
# leaves do not import each other. Names begin at msprobe, "~" stands for msprobe.pytorch.dump.
GROUPS: dict[str, tuple[str, str]] = {
    "base": ("", "msprobe msprobe.errors"),
    "leaves": (
        "",
        "~ ~.callstack ~.coverage ~.device ~.entries ~.filters ~.flusher ~.forks ~.gate"
        " ~.interrupts ~.names ~.patches ~.quiet ~.subclasses ~.unseen ~.api_dump ~.module_dump",
    ),
    "graph": ("", "~.edges ~.passes ~.gradients"),
    "configuration": (
        "base",
        "~.config_values ~.config_file ~.config_keys ~.config ~.arguments ~.reload",
    ),
    "descriptions": ("leaves", "~.leaf_entries ~.describe"),
    "values": (
        "leaves",
        "~.deferred ~.pieces ~.small ~.checksums ~.fused ~.usual ~.stats_cpu ~.stats_device ~.stats"
        " ~.copies ~.fills ~.arrays ~.tasks ~.verdicts",
    ),
    "files": (
        "leaves values",
        "~.jsonfile ~.lines ~.ptfile ~.writer ~.background ~.tensor_files ~.journal",
    ),
    "records": ("base leaves graph descriptions", "~.call ~.saved"),
    "run": (
        "leaves graph configuration descriptions values files records",
        "~.guard ~.run ~.runs",
    ),
    "recording": ("leaves graph descriptions records run", "~.recording"),
    "interception": (
        "base leaves graph configuration records recording",  # the run is reached through the gate
        "~.api_dump.ops ~.api_dump.areas ~.api_dump.functional ~.api_dump.collectives"
        " ~.api_dump.wrap ~.api_dump.builtin ~.api_dump.custom"
        " ~.module_dump.parts ~.module_dump.parameters ~.module_dump.hooks"
        " ~.module_dump.focus ~.tokens ~.compilers ~.window ~.interception",
    ),
    "session": (
        "base leaves graph configuration values files records run recording interception",
        "~.session",
    ),
    "randomness": (
        "base leaves interception",
        "msprobe.pytorch.random_calls msprobe.pytorch.seed msprobe.pytorch.random_save",
    ),
    "selfcheck": (
        "leaves graph values session", "msprobe.pytorch.fingerprint msprobe.pytorch.marks"
    ),
    "facade": (
        "base configuration records session randomness selfcheck",
        "msprobe.pytorch.logs msprobe.pytorch.debugger.service"
        " msprobe.pytorch.debugger.precision_debugger"
        " msprobe.pytorch.debugger msprobe.pytorch.common.utils msprobe.pytorch.common"
        " msprobe.pytorch",
    ),
    "command line": (
        "base",
        "msprobe.text msprobe.reader msprobe.folders msprobe.values msprobe.records"
        " msprobe.summary msprobe.show msprobe.pager msprobe.strict msprobe.schema msprobe.check"
        " msprobe.missed msprobe.scripts"
        " msprobe.equality msprobe.selfcheck msprobe.cli msprobe.__main__",
    ),
}


def members(group: str) -> list[str]:
    return [name.replace("~", DUMP) for name in GROUPS[group][1].split()]


def modules() -> dict[str, Path]:
    """Every module of the package, by its name."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = list(path.relative_to(SOURCE.parent).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()
PARSED = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}
EACH_MODULE = pytest.mark.parametrize("name", MODULES)


def only_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def import_nodes(
    node: ast.AST, inside: tuple[ast.AST, ...] = ()
) -> Iterator[tuple[ast.Import | ast.ImportFrom, tuple[ast.AST, ...]]]:
    """Imports that run, each with what stands around it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, inside
        elif not only_for_types(child):
            yield from import_nodes(child, (*inside, child))


def targets(node: ast.Import | ast.ImportFrom, name: str) -> list[str]:
    """Full names of the modules that a statement in module ``name`` imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    package = name.split(".")
    if node.level:
        is_package = MODULES[name].name == "__init__.py"
        package = package[: len(package) - node.level + is_package]
    base = ".".join([*(package if node.level else []), *filter(None, [node.module])])
    return [full if (full := f"{base}.{alias.name}") in MODULES else base for alias in node.names]


def imports(name: str) -> set[str]:
    return {full for node, _ in import_nodes(PARSED[name]) for full in targets(node, name)}


def root(full: str) -> str:
    return full.partition(".")[0]


def may_import(name: str) -> set[str]:
    (group,) = (group for group in GROUPS if name in members(group))
    own = [] if group == "leaves" else members(group)[: members(group).index(name)]
    return {*own, *(other for below in GROUPS[group][0].split() for other in members(below))}


def test_every_module_has_its_place_in_the_table() -> None:
    placed = [name for group in GROUPS for name in members(group)]
    assert sorted(placed) == sorted(MODULES)


@EACH_MODULE
def test_module_imports_only_what_stands_below_it(name: str) -> None:
    ours = {full for full in imports(name) if root(full) == "msprobe"}
    assert ours - may_import(name) == set()


@EACH_MODULE
def test_module_imports_only_the_packages_that_are_required(name: str) -> None:
    others = {root(full) for full in imports(name)} - sys.stdlib_module_names - {"msprobe"}
    allowed = set() if name in members("command line") else REQUIRED | OPTIONAL
    assert others - allowed == set()


@EACH_MODULE
def test_import_inside_a_function_is_of_an_optional_package(name: str) -> None:
    function = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    inner = {
        full
        for node, inside in import_nodes(PARSED[name])
        if any(isinstance(around, function) for around in inside)
        for full in targets(node, name)
    }
    assert {full for full in inner if root(full) not in OPTIONAL} == set()


@EACH_MODULE
def test_optional_package_is_imported_in_a_try(name: str) -> None:
    bare = {
        full
        for node, inside in import_nodes(PARSED[name])
        if not any(isinstance(around, ast.Try) for around in inside)
        for full in targets(node, name)
    }
    assert {full for full in bare if root(full) in OPTIONAL} == set()
