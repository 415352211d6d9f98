"""``msprobe check``: what is wrong with a dump, and where; and the published schemas."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from torch import nn

import msprobe
from helpers import debugger
from msprobe import check, reader, schema
from msprobe.cli import main
from msprobe.pytorch import PrecisionDebugger

ROOT = Path(__file__).parents[1]
GOLDENS = Path(__file__).parent / "goldens"
SOURCE = str(Path(msprobe.__file__).parents[1])
SCHEMAS = {
    name: jsonschema.Draft202012Validator(
        json.loads((ROOT / "docs" / f"{name}.schema.json").read_text())
    )
    for name in ("dump", "stack", "construct")
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 5)
        self.fc2 = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.fc1(x))
        values, _ = torch.sort(self.fc2(hidden), dim=-1, descending=True)
        return torch.log(values).reshape(values.size())


def record(path: Path, **options: Any) -> Path:
    """One step of the net below ``path``; the rank folder."""
    torch.manual_seed(0)
    net = Net()
    watcher = debugger(path, **options)
    watcher.start(net)
    net(torch.randn(2, 4)).sum().backward()
    watcher.stop()
    watcher.step()
    (folder,) = (path / "step0").iterdir()
    return folder


def findings(path: Path, **options: Any) -> list[tuple[str, str, str]]:
    return [
        (found.file, found.where, found.problem)
        for folder in reader.find_ranks(path)
        for found in check.check_folder(folder, **options)
    ]


CONFIGURATIONS: list[dict[str, Any]] = [
    {"level": "L0"},
    {"level": "L1"},
    {"level": "mix"},
    {"level": "mix", "task": "tensor", "summary_mode": "md5"},
    {"level": "L1", "task": "tensor", "summary_mode": "xor"},
    {"level": "mix", "task": "structure"},
    {"level": "L1", "task": "nan_check"},
    {"level": "L1", "task": "acc_check"},
    {"level": "mix", "task": "overflow_check", "overflow_nums": -1},
    {"level": "L1", "list": ["relu", "log"]},
    {"level": "mix", "list": ["fc2"]},
    {"level": "mix", "data_mode": ["forward", "input"]},
    {"level": "mix", "data_mode": ["backward"]},
    {"level": "mix", "top": {"risk_level": "CORE"}},
    {"level": "mix", "top": {"extra_info": False}},
]


@pytest.mark.parametrize("options", CONFIGURATIONS, ids=lambda o: "-".join(map(str, o.values())))
def test_dump_of_ours_has_no_finding_and_fits_the_schemas(
    options: dict[str, Any], tmp_path: Path
) -> None:
    folder = record(tmp_path, **options)
    assert findings(tmp_path) == []
    for name, validator in SCHEMAS.items():
        path = folder / f"{name}.json"
        if path.exists():
            validator.validate(json.loads(path.read_text()))


def test_debug_dump_of_ours_has_no_finding_and_fits_the_schema(tmp_path: Path) -> None:
    watcher = debugger(tmp_path, level="debug")
    x = torch.ones(2, requires_grad=True)
    watcher.save({"x": x, "n": [1, float("nan"), "text"]}, "values")
    (x * 2).sum().backward()
    watcher.step()
    assert findings(tmp_path) == []
    (path,) = tmp_path.rglob("debug.json")
    SCHEMAS["dump"].validate(json.loads(path.read_text()))


GOLDEN_DUMPS = sorted(p.parents[1].name for p in GOLDENS.glob("*/expected/dump"))


@pytest.mark.parametrize("golden", GOLDEN_DUMPS)
def test_dump_of_the_original_is_checked_and_fits_the_schemas(golden: str) -> None:
    """What is left of the findings is what these dumps lack: files of tensors, strict JSON."""
    path = GOLDENS / golden / "expected" / "dump"
    rest = [
        found for found in findings(path, filtered=True)
        if not found[2].endswith("is not there") and "not strict JSON" not in found[2]
    ]
    assert rest == []
    for file in path.glob("step*/*/*.json"):
        validator = SCHEMAS.get("dump" if file.stem == "debug" else file.stem)
        if validator is not None:  # the list of its tensors was made with the golden
            validator.validate(json.loads(file.read_text()))


def test_nan_literal_is_a_finding_that_says_where() -> None:
    found = findings(GOLDENS / "save_debug_statistics" / "expected" / "dump" / "step0")
    problem = "not strict JSON: NaN without quotes (once in the file)"
    assert found == [("debug.json", "f.0.debug.value", problem)]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mix dump with tensors; tests change copies of it."""
    path = tmp_path_factory.mktemp("sound")
    record(path, task="tensor")
    PrecisionDebugger._instance = None
    return path


def change(path: Path, edit: Callable[[dict[str, Any]], Any], file: str) -> None:
    (target,) = path.rglob(file)
    content = json.loads(target.read_text())
    edit(content)
    target.write_text(json.dumps(content))


RELU, FC1 = "Torch.relu.0.forward", "Module.fc1.Linear.forward.0"


def set_in(*keys: Any) -> Callable[[Any], None]:
    """An edit that puts the last of ``keys`` at the place that the others name."""

    def edit(content: Any) -> None:
        *way, last, value = keys
        for key in way:
            content = content[key]
        content[last] = value

    return edit


def drop(*keys: Any) -> Callable[[Any], None]:
    def edit(content: Any) -> None:
        *way, last = keys
        for key in way:
            content = content[key]
        del content[last]

    return edit


def rename(old: str, new: str) -> Callable[[Any], None]:
    def edit(content: Any) -> None:
        content["data"][new] = content["data"].pop(old)

    return edit


IN_RELU = ("data", RELU, "input_args", 0)
WRONG: dict[str, tuple[str, Callable[[Any], None], tuple[str, str, str]]] = {
    "header": ("dump.json", drop("task"), ("dump.json", "", "has no task")),
    "header-type": (
        "dump.json", set_in("level", 3), ("dump.json", "level", "is 3; expected text")
    ),
    "section": (
        "dump.json", set_in("data", RELU, "outputs", []),
        ("dump.json", f"{RELU}: outputs",
         "unknown section; expected one of input_args, input_kwargs, output, parameters, is_nan"),
    ),
    "section-type": (
        "dump.json", set_in("data", RELU, "input_kwargs", []),
        ("dump.json", f"{RELU}: input_kwargs", "is a list; expected an object"),
    ),
    "tensor-field": (
        "dump.json", drop(*IN_RELU, "dtype"),
        ("dump.json", f"{RELU}: input_args.0", "has no dtype"),
    ),
    "statistic": (
        "dump.json", set_in(*IN_RELU, "Max", "big"),
        ("dump.json", f"{RELU}: input_args.0.Max",
         'is "big"; expected a number, null, "NaN", "Infinity" or "-Infinity"'),
    ),
    "bare-value": (
        "dump.json", set_in(*IN_RELU, 7),
        ("dump.json", f"{RELU}: input_args.0",
         "a number by itself; expected an object with a type"),
    ),
    "name": (
        "dump.json", set_in("data", "nonsense", {}),
        ("dump.json", "nonsense", "the name has none of the known forms"),
    ),
    "record-type": (
        "dump.json", set_in("data", RELU, []),
        ("dump.json", RELU, "the record is a list; expected an object"),
    ),
    "parameters_grad": (
        "dump.json", set_in("data", "Module.fc1.Linear.parameters_grad.0", "bias", []),
        ("dump.json", "Module.fc1.Linear.parameters_grad.0: bias",
         "is a list; expected a list of one"),
    ),
    "gap": (
        "dump.json", rename(RELU, "Torch.relu.2.forward"),
        ("dump.json", "Torch.relu", "calls 0, 1 of 3 are missing"),
    ),
    "lost-record": (
        "dump.json", drop("data", RELU),
        ("dump.json", RELU, "the call is in construct.json and not here"),
    ),
    "file": (
        "dump.json", set_in(*IN_RELU, "data_name", "no.pt"),
        ("dump.json", f"{RELU}: input_args.0", "dump_tensor_data/no.pt is not there"),
    ),
    "file-outside": (
        "dump.json", set_in(*IN_RELU, "data_name", "../dump.json"),
        ("dump.json", f"{RELU}: input_args.0",
         "dump_tensor_data/../dump.json is outside of the folder"),
    ),
    "parent": (
        "construct.json", set_in(RELU, "Module.gone.Linear.forward.0"),
        ("construct.json", RELU, "its parent Module.gone.Linear.forward.0 is not in the dump"),
    ),
    "parent-type": (
        "construct.json", set_in(RELU, 3),
        ("construct.json", RELU, "the parent is neither a name nor null"),
    ),
    "circle": (
        "construct.json", set_in(FC1, "Functional.linear.0.forward"),
        ("construct.json", "Functional.linear.0.forward", "the record is its own ancestor"),
    ),
    "not-in-tree": (
        "construct.json", drop(RELU),
        ("construct.json", RELU, "the record is in dump.json and not here"),
    ),
    "stack-form": (
        "stack.json", set_in("99", [["x"]]),
        ("stack.json", "99", "expected [[record names], [frames]]"),
    ),
    "stack-twice": (
        "stack.json", set_in("99", [[RELU], []]),
        ("stack.json", "99", f"{RELU} has a stack already"),
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_found_where_it_is(case: str, sound: Path, tmp_path: Path) -> None:
    file, edit, expected = WRONG[case]
    shutil.copytree(sound, tmp_path / "dump")
    change(tmp_path, edit, file)
    assert expected in findings(tmp_path / "dump")


SCHEMA_CASES = (
    "header", "header-type", "section", "section-type", "tensor-field", "statistic", "bare-value",
    "name", "record-type", "parameters_grad", "parent-type", "stack-form",
)


@pytest.mark.parametrize("case", SCHEMA_CASES)
def test_published_schema_refuses_what_the_check_refuses(
    case: str, sound: Path, tmp_path: Path
) -> None:
    file, edit, _ = WRONG[case]
    shutil.copytree(sound, tmp_path / "dump")
    change(tmp_path, edit, file)
    (path,) = tmp_path.rglob(file)
    assert not SCHEMAS[path.stem].is_valid(json.loads(path.read_text()))


def test_missing_stack_is_found(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path / "dump")
    (path,) = tmp_path.rglob("stack.json")
    path.write_text(path.read_text().replace(RELU, "Torch.other.0.forward"))
    assert ("stack.json", RELU, "the record has no stack") in findings(tmp_path / "dump")


@pytest.mark.parametrize("name", ["stack.json", "construct.json"])
def test_file_that_is_gone_is_found(name: str, sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path / "dump")
    (path,) = tmp_path.rglob(name)
    path.unlink()
    assert (name, "", "is not there") in findings(tmp_path / "dump")


def test_name_that_stands_twice_is_found(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path / "dump")
    (path,) = tmp_path.rglob("construct.json")
    path.write_text(path.read_text().replace("{", f'{{"{RELU}": null,', 1))
    assert ("construct.json", RELU, "the name stands twice") in findings(tmp_path / "dump")


def test_file_of_a_tensor_that_was_cut_off_is_found(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path / "dump")
    (path,) = tmp_path.rglob(f"{RELU}.output.0.pt")
    path.write_bytes(path.read_bytes()[:-30])
    (found,) = findings(tmp_path / "dump")
    assert found[:2] == ("dump.json", f"{RELU}: output.0")
    assert "is not complete" in found[2]


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_broken_file_is_a_finding_and_no_crash(
    content: bytes, sound: Path, tmp_path: Path
) -> None:
    shutil.copytree(sound, tmp_path / "dump")
    (path,) = tmp_path.rglob("dump.json")
    path.write_bytes(content)
    assert findings(tmp_path / "dump")[0][0] == "dump.json"


def test_gaps_are_no_finding_where_a_filter_was_set(tmp_path: Path) -> None:
    folder = record(tmp_path, level="L1", list=["linear.1"])
    assert findings(tmp_path) == []
    (folder / "coverage.json").unlink()  # as with a dump of the original
    assert ("dump.json", "Functional.linear", "calls 0 of 2 are missing") in findings(tmp_path)
    assert findings(tmp_path, filtered=True) == []


def test_call_that_was_running_when_the_process_was_killed_is_no_finding(
    tmp_path: Path,
) -> None:
    folder = record(tmp_path)
    (folder / "coverage.json").unlink()

    def running(content: dict[str, Any]) -> None:
        content["data"]["Torch.exp.0.forward"] = content["data"][RELU]  # about to return
        content["data"]["Torch.mm.0.forward"] = {"input_args": [], "input_kwargs": {}}

    change(tmp_path, running, "dump.json")
    # The tree is written before the records.
    ahead = {"Torch.sin.0.forward": None, "Torch.sin.0.backward": None}
    change(tmp_path, lambda content: content.update(ahead), "construct.json")
    assert findings(tmp_path) == []


def test_check_entry_accepts_what_the_schema_accepts() -> None:
    """A process-to-process operation of torch.distributed has bare members."""
    p2p = {
        "class_type": "torch.distributed.P2POp", "tensor": {"type": "x", "value": None},
        "op": "isend", "peer": 1, "tag": 0, "group_id": None,
    }
    assert list(schema.check_entry([p2p, {"a": [None]}, {}], "output")) == []


# ---- the command -------------------------------------------------------------------------------


def test_command_exits_with_0_where_nothing_is_wrong(
    sound: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(sound)]) == 0
    assert capsys.readouterr().out.endswith("nothing wrong\n1 folder checked, 0 findings\n")


def test_command_exits_with_1_and_lists_findings_up_to_the_limit(
    sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(sound, tmp_path / "dump")
    for path in tmp_path.rglob("*.pt"):
        path.unlink()
    assert main(["check", str(tmp_path / "dump"), "--limit", "2"]) == 1
    text = capsys.readouterr().out
    assert text.count("is not there") == 2
    assert "more (--limit 0 shows all)" in text
    assert main(["check", str(tmp_path / "dump"), "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out).values()
    assert found[0].keys() == {"file", "where", "problem"}
    assert len(found) > 2


def test_command_exits_with_2_where_there_is_no_dump(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(tmp_path)]) == 2
    assert "msprobe check: " in capsys.readouterr().err


def test_folder_without_a_dump_is_a_finding(
    sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was lost as a whole: nothing else would tell of it."""
    (folder,) = (sound / "step0").iterdir()
    shutil.copytree(folder, tmp_path / "dump" / "step0" / "rank0")
    (tmp_path / "dump" / "step1" / "rank0" / "dump_tensor_data").mkdir(parents=True)
    (tmp_path / "dump" / "step10").mkdir()
    (tmp_path / "dump" / "step2" / "notes").mkdir(parents=True)
    (tmp_path / "dump" / "of the user").mkdir()

    def found(path: Path) -> dict[str, Any]:
        code = main(["check", str(path), "--json"])
        content: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert code == int(any(content.values()))
        return content

    missing = [{"file": "dump.json", "where": "", "problem": "is not there"}]
    rank = {"step1/rank0": missing}
    assert list(found(tmp_path / "dump").items()) == [
        ("step0/rank0", []), *rank.items(), ("step2/(empty)", missing), ("step10/(empty)", missing),
    ]  # fmt: skip
    assert found(tmp_path / "dump" / "step1") == rank
    assert found(tmp_path / "dump" / "step1" / "rank0") == rank
    assert found(tmp_path / "dump" / "step0") == {"step0/rank0": []}
    assert found(tmp_path / "dump" / "step10") == {"step10/(empty)": missing}
    assert main(["check", str(tmp_path / "dump"), "--step", "0"]) == 0
    assert main(["check", str(tmp_path / "dump" / "of the user")]) == 2


@pytest.mark.parametrize("command", ["show", "check", "selfcheck", "coverage"])
def test_help_and_docs_tell_the_exit_codes(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert "exit codes: 0 " in capsys.readouterr().out
    assert f"## msprobe {command}" in (ROOT / "docs" / "command-line.md").read_text()


# ---- the pager ---------------------------------------------------------------------------------


def on_terminal(arguments: list[str], **environment: str) -> str:
    """What the command prints on a terminal of 24 lines."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "msprobe", *arguments],
        env={**os.environ, "PYTHONPATH": SOURCE, "LINES": "24", "COLUMNS": "80", **environment},
        stdout=follower, stdin=subprocess.DEVNULL,
    )
    os.close(follower)
    printed = b""
    while True:
        try:
            block = os.read(leader, 65536)
        except OSError:  # Linux: the other end is closed
            break
        if not block:
            break
        printed += block
    os.close(leader)
    assert process.wait() == 0
    return printed.decode().replace("\r\n", "\n")


MARK = "sed s/^/paged:/"


def test_long_output_on_a_terminal_goes_through_the_pager(sound: Path) -> None:
    text = on_terminal(["show", str(sound), "forward"], PAGER=MARK)
    lines = text.splitlines()
    assert len(lines) > 24
    assert all(line.startswith("paged:") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (["show", "DUMP"], {"PAGER": MARK}),
        (["show", "DUMP", "forward", "--no-pager"], {"PAGER": MARK}),
        (["show", "DUMP", "forward"], {"PAGER": MARK, "MSPROBE_PAGER": ""}),
        (["show", "DUMP", "forward"], {"PAGER": "no-such-program"}),
        (["show", "DUMP", "forward", "--json"], {"PAGER": MARK}),
    ],
    ids=["short", "no-pager", "empty", "missing", "json"],
)
def test_output_is_printed_without_the_pager(
    arguments: list[str], environment: dict[str, str], sound: Path
) -> None:
    filled = [str(sound) if word == "DUMP" else word for word in arguments]
    assert "paged:" not in on_terminal(filled, **environment)


def test_pager_that_is_left_early_is_no_error(sound: Path) -> None:
    text = on_terminal(["show", str(sound), "forward", "--limit", "0"], PAGER="head -n 1")
    assert len(text.splitlines()) == 1
