"""What is published, and the tools that check it, agree with each other."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import msprobe

ROOT = Path(__file__).parents[1]
PYPROJECT = (ROOT / "pyproject.toml").read_text()
CI = (ROOT / ".ci" / "run").read_text()


def pins() -> dict[str, str]:
    """Package → version in requirements-dev.txt."""
    lines = (ROOT / "requirements-dev.txt").read_text().splitlines()
    wanted = [line for line in lines if line and not line.startswith("#")]
    return dict(line.split("==") for line in wanted)


def named(array: str) -> set[str]:
    """Packages in an array of pyproject.toml."""
    (found,) = re.findall(rf"^{array} = \[(.*?)\]", PYPROJECT, re.M | re.S)
    return {re.split(r"[<>=]", name)[0] for name in re.findall(r'"([^"]+)"', found)}


def test_every_package_that_tests_and_developers_use_is_pinned() -> None:
    wanted = named("dependencies") | named("fast") | named("test") | named("dev")
    assert {name.lower() for name in wanted} == {name.lower() for name in pins()}


def test_pre_commit_runs_what_ci_runs_in_the_pinned_versions() -> None:
    """From .venv, which has the versions of requirements-dev.txt: none is typed a second time."""
    text = (ROOT / ".pre-commit-config.yaml").read_text()
    commands = re.findall(r"^ +entry: (.+)$", text, re.M)
    tools = [re.fullmatch(r"\.venv/bin/(\w+).*", command) for command in commands]
    assert [tool and tool[1] for tool in tools] == ["ruff", "mypy"]
    assert {"ruff", "mypy"} <= set(pins())
    assert re.findall(r"rev:|additional_dependencies|==", text) == []
    assert [c for c in commands if not re.search(rf"^{re.escape(c)}( \.)?$", CI, re.M)] == []
    assert set(re.findall(r"^ +language: (\w+)$", text, re.M)) == {"system"}


def test_torch_of_the_demo_is_the_pinned_one() -> None:
    for name in ("README.md", "README.zh.md"):
        versions = re.findall(r"torch==(\S+)", (ROOT / name).read_text(encoding="utf-8"))
        assert versions == [pins()["torch"]]


def test_version_is_a_semantic_one_and_stands_in_the_changelog() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", msprobe.__version__)
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## \[?{re.escape(msprobe.__version__)}\b", changes, re.M)
    assert 'version = { attr = "msprobe.__version__" }' in PYPROJECT


def test_every_file_of_the_package_that_is_no_source_is_published() -> None:
    patterns = re.findall(r'^"\*" = \[(.*)\]$', PYPROJECT, re.M)[0]
    source = ROOT / "src" / "msprobe"
    caches = {p for p in source.rglob("*") if "cache" in str(p.relative_to(source))}
    files = {p for p in set(source.rglob("*")) - caches if p.is_file() and p.suffix != ".py"}
    published = {p for pattern in re.findall(r'"(.+?)"', patterns) for p in source.rglob(pattern)}
    assert files - published == set()


def test_ci_script_is_sound_bash() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", script], check=True)
