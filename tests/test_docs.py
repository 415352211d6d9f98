"""The documents: code runs, links lead somewhere, tables agree with the source."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

import msprobe
from runner import run_script
from test_imports import GROUPS

ROOT = Path(__file__).parents[1]
SOURCE = Path(msprobe.__file__).parent
# Needs other packages; its blocks are checked by tests of its own.
NOT_EXECUTED = {"integrations.md"}
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "README.zh.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
EACH_DOCUMENT = pytest.mark.parametrize(
    "path", DOCUMENTS, ids=[str(path.relative_to(ROOT)) for path in DOCUMENTS]
)
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^(#+) +(.+)$", re.MULTILINE)


def blocks(text: str, language: str) -> list[str]:
    """Contents of the fenced blocks of a language."""
    return [content for found, content in _FENCE.findall(text) if found == language]


def prose(text: str) -> str:
    """The text without its fenced blocks."""
    return _FENCE.sub("", text)


def headings(text: str) -> list[tuple[int, str]]:
    return [(len(marks), title) for marks, title in _HEADING.findall(prose(text))]


def anchor(title: str) -> str:
    """What GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def only_python(text: str) -> str:
    """The Python blocks at the lines where they stand, so that a traceback names the line."""
    lines: list[str] = []
    language = None
    for line in text.splitlines():
        if line.startswith("```"):
            language = None if language is not None else line[3:]
            lines.append("")
        else:
            lines.append(line if language == "python" else "")
    return "\n".join(lines) + "\n"


def with_python() -> list[Path]:
    found = [path for path in DOCUMENTS if blocks(path.read_text(encoding="utf-8"), "python")]
    return [path for path in found if path.name not in NOT_EXECUTED]


@pytest.mark.parametrize("path", with_python(), ids=lambda path: path.name)
def test_python_blocks_of_a_document_run(path: Path, tmp_path: Path) -> None:
    script = tmp_path / f"{path.stem}.py"
    script.write_text(only_python(path.read_text(encoding="utf-8")), encoding="utf-8")
    code, output = run_script(script, cwd=tmp_path)
    assert code == 0, output


@EACH_DOCUMENT
def test_json_blocks_are_json(path: Path) -> None:
    for block in blocks(path.read_text(encoding="utf-8"), "json"):
        json.loads(block)


@EACH_DOCUMENT
def test_relative_links_lead_to_files_and_headings(path: Path) -> None:
    dead = []
    for link in _LINK.findall(prose(path.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, fragment = link.partition("#")
        target = path.parent / name if name else path
        if not target.exists():
            dead.append(link)
        elif fragment and target.suffix == ".md":
            titles = [title for _, title in headings(target.read_text(encoding="utf-8"))]
            if fragment not in map(anchor, titles):
                dead.append(link)
    assert dead == []


def test_chinese_readme_has_the_commands_and_headings_of_the_english_one() -> None:
    english, chinese = (
        (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh.md")
    )
    for language in ("bash", "python"):
        assert blocks(chinese, language) == blocks(english, language)
    levels = [[level for level, _ in headings(text)] for text in (english, chinese)]
    assert levels[0] == levels[1]
    markers = [re.findall(r"^<!-- .* -->$", text, re.MULTILINE) for text in (english, chinese)]
    assert markers[0] == markers[1]


def test_readme_shows_what_the_demo_prints(tmp_path: Path) -> None:
    """Apart from what differs by run and machine: process number, sizes of files, numbers."""
    _, output = run_script(ROOT / "examples" / "train_llama.py", [str(tmp_path / "dump")])
    (shown,) = [
        block
        for block in blocks((ROOT / "README.md").read_text(encoding="utf-8"), "text")
        if "$ msprobe show" in block
    ]
    steady = [line for line in shown.splitlines() if re.match(r"  (kind|[A-Z]\w+ ) *\S", line)]
    assert len(steady) >= 4
    assert [line for line in steady if line not in output.splitlines()] == []


def test_every_module_has_its_line_in_the_architecture() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (layout,) = [block for block in blocks(text, "text") if "__main__.py" in block]
    files = [p.relative_to(SOURCE).as_posix() for p in SOURCE.rglob("*") if p.is_file()]
    wanted = [f for f in files if f.endswith((".py", ".yaml", ".json"))]
    named = [n for n in wanted if not n.endswith("/__init__.py")]
    shown = set(re.findall(r"^(?:[│├└─ ]*)(\S+\.(?:py|yaml|json))", layout, re.MULTILINE))
    assert {Path(name).name for name in named} - shown == set()
    assert shown - {Path(name).name for name in wanted} == set()


def test_import_table_of_the_architecture_is_the_tested_one() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| (`.+`) \| (.*?) ?\|$", text, re.MULTILINE)
    shown = {group: set(filter(None, below.split(", "))) for group, _, below in rows}
    assert {group: shown.get(group) for group in GROUPS} == {
        group: set(below.split()) for group, (below, _) in GROUPS.items()
    }


def literal_texts() -> str:
    """All string literals of the package, adjacent ones joined, with format fields as ``*``."""
    joined = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                joined.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "*" for p in node.values)
                joined.append("".join(map(str, parts)))
    return "\n".join(re.sub(r"%[ds]", "*", text) for text in joined)


def test_messages_in_troubleshooting_stand_in_the_source() -> None:
    """A cell of the tables that begins with a message: words in <> stand for what varies."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
    assert len(messages) >= 15
    known = literal_texts()
    pieces = [
        piece.strip()
        for message in messages
        for piece in re.split(r"<[^>]*>", message)
        if piece.strip(" ,.:()")
    ]
    assert [piece for piece in pieces if piece not in known] == []


@pytest.mark.parametrize("name", ["README.md", "README.zh.md"])
def test_figures_of_the_readme_stand_in_the_results_of_the_benchmarks(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| (?:measured|测量项) \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.M)
    cells = [[cell.strip() for cell in row.split("|")[2:4]] for row in table.splitlines()]
    figures = {figure for row in cells for figure in row}
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    assert figures - set(re.findall(r"\d+(?:\.\d+)?", results)) == set()
