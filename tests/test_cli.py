from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import msprobe
from msprobe import reader
from msprobe.cli import main
from msprobe.errors import UsageError

GOLDENS = Path(__file__).parent / "goldens"
SOURCE = str(Path(msprobe.__file__).parents[1])


def tensor(low: Any = -1.0, high: Any = 2.0, **more: Any) -> dict[str, Any]:
    return {
        "type": "torch.Tensor", "dtype": "torch.float32", "shape": [2, 3],
        "Max": high, "Min": low, "Mean": 0.25, "Norm": 1.5, "requires_grad": False, **more,
    }


def forward(*inputs: Any, output: Any = None) -> dict[str, Any]:
    return {"input_args": list(inputs), "input_kwargs": {}, "output": [output or tensor()]}


OURS: dict[str, Any] = {
    "Functional.linear.0.forward": forward(tensor(), tensor()),
    "Module.net.fc1.Linear.forward.0": {**forward(tensor()), "parameters": {"weight": tensor()}},
    "Torch.log.0.forward": forward(tensor(), output=tensor(low="-Infinity", Mean="-Infinity")),
    "Tensor.__mul__.0.forward": forward(tensor(low="-Infinity"), output=tensor(high="NaN")),
    "Functional.cross_entropy.0.forward": {
        "input_args": [tensor()],
        "input_kwargs": {"reduction": {"type": "str", "value": "mean"}, "weight": None},
        "output": [tensor()],
    },
    "Torch.log.0.backward": {"input": [tensor()], "output": [tensor(high="Infinity"), None]},
    "Module.net.fc1.Linear.backward.0": {"input": [tensor()], "output": []},
    "Module.net.fc1.Linear.parameters_grad.0": {"weight": [tensor()], "bias": [tensor()]},
    "Functional.relu.0.forward": {"input_args": [tensor()], "input_kwargs": {}},
}
STACKS = {
    "0": [["Functional.linear.0.forward"], ["File /a/net.py, line 3, in forward, \n return x"]],
    "1": [["Torch.log.0.forward"], ["File /a/b.py, line 9, in f, \n torch.log(x)", "File /a/c.py, "
                                    "line 1, in <module>, \n "]],
}


def write_ours(folder: Path, records: dict[str, Any] | None = None, **header: Any) -> Path:
    """The layout of product.md §3: one record per line."""
    folder.mkdir(parents=True)
    records = OURS if records is None else records
    head = {"task": "statistics", "level": "mix", "framework": "pytorch", "dump_data_dir": None}
    lines = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in records.items())
    text = json.dumps({**head, **header})[:-1] + ', "data": {\n' + lines + "\n}}\n   "
    (folder / "dump.json").write_text(text if records else text.replace("\n\n", "\n"))
    (folder / "stack.json").write_text(json.dumps(STACKS))
    parents = {"Functional.linear.0.forward": "Module.net.fc1.Linear.forward.0"}
    (folder / "construct.json").write_text(json.dumps(parents))
    return folder


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    write_ours(tmp_path / "dump" / "step0" / "rank0")
    return tmp_path / "dump"


def golden(name: str) -> Path:
    return GOLDENS / name / "expected" / "dump"


def shown(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    assert main(["show", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_overview_counts_records_by_kind(
    ours: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(capsys, ours)
    assert "1 step, 1 process" in text
    assert "step0/rank0   9 records   task statistics, level mix" in text
    rows = [line.split() for line in text.splitlines()[3:8]]
    assert rows == [
        ["kind", "forward", "backward", "parameters_grad"],
        ["Module", "1", "1", "1"],
        ["Functional", "3"],
        ["Tensor", "1"],
        ["Torch", "1", "1"],
    ]
    size = (ours / "step0" / "rank0" / "dump.json").stat().st_size / 1000
    assert f"dump.json {size:.1f} kB" in text


def test_overview_lists_records_with_nan_in_order_and_marks_the_first(
    ours: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(capsys, ours)
    assert "NaN or infinity in 3 records; first: Torch.log.0.forward" in text
    rows = [re.split(r"  +", line.strip()) for line in text.splitlines() if "Infinity" in line]
    assert rows == [
        [">", "Torch.log.0.forward", "output.0", "Min -Infinity, Mean -Infinity", "made here"],
        ["Tensor.__mul__.0.forward", "input_args.0", "Min -Infinity"],
        ["Torch.log.0.backward", "output.0", "Max Infinity", "made here"],
    ]


def test_limit_shortens_the_list_and_says_so(
    ours: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(capsys, ours, "--limit", 1)
    assert "... and 2 more records (--limit 0 shows all)" in text
    assert "Torch.log.0.backward" not in text
    assert "Torch.log.0.backward" in shown(capsys, ours, "--limit", 0)


def test_overview_names_unfinished_calls_problems_and_modules_never_called(
    ours: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ours / "step0" / "rank0"
    why = "it raised an exception"
    notes = {
        "modules_never_called": ["net.unused", "head"],
        "selection_unmatched": ["list entry 'gelu' matched no record"],
        "records_incomplete": {"Functional.relu.0.forward": why},
    }
    (folder / "coverage.json").write_text(json.dumps(notes))
    (folder / "dump_error_info.log").write_text(
        'Functional.gelu.0.forward: ValueError: odd\nTraceback (most recent call last):\n'
        '  File "x.py", line 1, in f\nValueError: odd\nTorch.add.0.forward: other\n'
        "not recorded: 2 modules were never called (net.unused, head)\n"
    )
    text = shown(capsys, ours)
    assert f"1 call without a result; last: Functional.relu.0.forward ({why})" in text
    assert "list entry 'gelu' matched no record" in text
    assert "2 modules never called: net.unused, head" in text
    assert f"2 problems in {folder / 'dump_error_info.log'}" in text


def test_problems_are_counted_by_their_reason(
    ours: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Thousands of one kind do not hide one of another."""
    folder = ours / "step0" / "rank0"
    lines = [f"Torch.add.{n}.forward.output.0: no numbers: odd\n" for n in range(3000)]
    lines.insert(
        1500,
        "Torch.mul.0.forward: KeyError: 'a: b'\nTraceback (most recent call last):\n"
        '  File "x.py", line 1, in f\nKeyError: \'a: b\'\n',
    )
    (folder / "dump_error_info.log").write_text("".join(lines))
    assert (
        f"  3001 problems in {folder / 'dump_error_info.log'}\n"
        "    3000  no numbers: odd\n"
        "    1     KeyError: 'a: b'\n"
    ) in shown(capsys, ours)
    shortened = "    3000  no numbers: odd\n    ... and 1 more reasons (--limit 0 shows all)\n"
    assert shortened in shown(capsys, ours, "--limit", 1)
    (found,) = json.loads(shown(capsys, ours, "--json"))
    assert found["problems"] == 3001
    assert found["problems_by_reason"] == {"no numbers: odd": 3000, "KeyError: 'a: b'": 1}


def test_call_without_a_result_and_without_a_reason_had_begun(
    ours: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(capsys, ours)  # of a process that was killed
    assert "last: Functional.relu.0.forward (it had begun and not returned)" in text


INFINITE = {"Max": "Infinity", "Min": 0.0, "Mean": "Infinity", "Norm": "Infinity"}
MIXED = {"Max": "Infinity", "Min": "-Infinity", "Mean": "NaN", "Norm": "Infinity"}
MADE = {
    "nan of infinities": (INFINITE, dict.fromkeys(INFINITE, "NaN"), True),
    "nan of infinities of both signs": (MIXED, dict.fromkeys(INFINITE, "NaN"), True),
    "infinities passed on": (MIXED, MIXED, False),
    "nan passed on": (dict.fromkeys(INFINITE, "NaN"), dict.fromkeys(INFINITE, "NaN"), False),
    "nan taken away": (dict.fromkeys(INFINITE, "NaN"), INFINITE, False),
}


@pytest.mark.parametrize(("came", "went", "made"), MADE.values(), ids=MADE)
def test_call_that_makes_nan_is_marked(
    came: dict[str, Any], went: dict[str, Any], made: bool, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    record = {"input_args": [tensor(**came)], "input_kwargs": {}, "output": [tensor(**went)]}
    write_ours(tmp_path / "step0" / "rank0", {"Torch.add.0.forward": record})
    assert ("made here" in shown(capsys, tmp_path)) == made


@pytest.mark.parametrize("is_nan", [0, 1])
def test_nan_check_tells_which_records_and_not_where_it_was_made(
    is_nan: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = {"input_args": [], "input_kwargs": {}, "output": [], "is_nan": is_nan}
    write_ours(tmp_path / "step0" / "rank0", {"Torch.add.0.forward": record}, task="nan_check")
    text = shown(capsys, tmp_path)
    assert ("NaN or infinity in 1 record" in text) == bool(is_nan)
    assert ("no NaN or infinity in any record" in text) != bool(is_nan)
    assert "made here" not in text


def test_records_without_any_output_are_not_called_unfinished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With data_mode ["input"] no record has an output."""
    record = {"input_args": [tensor()], "input_kwargs": {}}
    write_ours(tmp_path / "step0" / "rank0", {"Torch.add.0.forward": record})
    assert "not returned" not in shown(capsys, tmp_path)


def test_overview_counts_tensor_files_and_their_size(
    ours: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = ours / "step0" / "rank0" / "dump_tensor_data"
    tensors.mkdir()
    for number in range(3):
        (tensors / f"{number}.pt").write_bytes(b"0" * 500)
    assert "dump_tensor_data 1.5 kB (3 files)" in shown(capsys, ours)


@pytest.mark.parametrize("below", ["", "step0", "step0/rank0"], ids=["dump", "step", "rank"])
def test_dump_path_step_and_rank_folder_are_accepted(
    below: str, ours: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "step0/rank0   9 records" in shown(capsys, ours / below)


def test_steps_and_ranks_stand_in_numeric_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["step2/rank10", "step2/rank9", "step10/rank0", "step2/proc7"]
    for name in names:
        write_ours(tmp_path / name)
    found = re.findall(r"^(step\S+)", shown(capsys, tmp_path), flags=re.M)
    assert found == ["step2/proc7", "step2/rank9", "step2/rank10", "step10/rank0"]
    assert "2 steps, 4 processes" in shown(capsys, tmp_path)


@pytest.mark.parametrize("rank", ["9", "rank9"])
def test_step_and_rank_choose_folders(
    rank: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("step0/rank9", "step1/rank9", "step1/rank0"):
        write_ours(tmp_path / name)
    text = shown(capsys, tmp_path, "--step", 1, "--rank", rank)
    assert re.findall(r"^(step\S+)", text, flags=re.M) == ["step1/rank9"]


def test_many_folders_get_a_line_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(9):
        write_ours(tmp_path / "step0" / f"rank{rank}")
    rows = [line.split()[:3] for line in shown(capsys, tmp_path).splitlines()]
    assert rows[2:11] == [[f"step0/rank{rank}", "9", "3"] for rank in range(9)]


def test_exact_name_shows_that_record_only(
    ours: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(capsys, ours, "Functional.cross_entropy.0.forward")
    lines = [re.split(r"  +", line.strip()) for line in text.splitlines()]
    assert lines[:6] == [
        ["step0/rank0", "Functional.cross_entropy.0.forward"],
        ["place", "dtype", "shape", "Max", "Min", "Mean", "Norm", "requires_grad"],
        ["input_args.0", "float32", "[2, 3]", "2", "-1", "0.25", "1.5", "False"],
        ["output.0", "float32", "[2, 3]", "2", "-1", "0.25", "1.5", "False"],
        ["input_kwargs.reduction", "str mean"],
        ["input_kwargs.weight", "None"],
    ]
    assert "1 record with" in text


def test_record_shows_parent_and_stack(
    ours: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(capsys, ours, "linear.0")
    assert "parent: Module.net.fc1.Linear.forward.0" in text
    assert "    File /a/net.py, line 3, in forward\n        return x\n" in text


def test_backward_record_shows_the_stack_of_its_forward(
    ours: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(capsys, ours, "Torch.log.0.backward")
    assert "stack of Torch.log.0.forward:\n    File /a/b.py, line 9, in f\n" in text


def test_part_of_a_name_shows_every_match_up_to_the_limit(
    ours: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(capsys, ours, "forward", "--limit", 2)
    assert text.count("step0/rank0   ") == 2
    assert "... and 4 more in step0/rank0 (--limit 0 shows all)" in text
    assert "6 records with 'forward' in the name" in text


ORDERS = [
    order
    for order in itertools.permutations(["DIR", "linear.0", "--json", "--step 0"])
    if order.index("DIR") < order.index("linear.0")
]


@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
def test_options_stand_before_between_and_after_folder_and_name(
    order: tuple[str, ...], ours: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = " ".join(order).replace("DIR", str(ours)).split()
    [found] = json.loads(shown(capsys, *arguments))
    assert found["record"] == OURS["Functional.linear.0.forward"]


@pytest.mark.parametrize(
    "arguments",
    ["show DIR --json linear.0 log", "show DIR linear.0 --json log", "show DIR --jsn linear.0",
     "show DIR linear.0 --jsn", "check DIR --json linear.0"],
)
def test_arguments_too_many_exit_with_2_and_are_named(
    arguments: str, ours: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments.replace("DIR", str(ours)).split())
    assert re.search(r"unrecognized arguments: .*(log|--jsn|linear\.0)", capsys.readouterr().err)


def test_name_without_match_says_so(ours: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "0 records with 'softmax' in the name" in shown(capsys, ours, "softmax")


def test_checksum_and_file_have_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = tensor(md5="0c245805", data_name="Torch.add.0.forward.input.0.pt")
    write_ours(tmp_path / "step0" / "rank0", {"Torch.add.0.forward": forward(entry)})
    text = shown(capsys, tmp_path, "add")
    assert "requires_grad  md5       file" in text
    assert "0c245805  Torch.add.0.forward.input.0.pt" in text


def test_json_overview_is_strict_and_has_the_same_findings(
    ours: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    (found,) = json.loads(shown(capsys, ours, "--json"), parse_constant=refuse)
    assert (found["step"], found["rank"], found["records"]) == (0, "rank0", 9)
    assert found["kinds"]["Torch"] == {"forward": 1, "backward": 1}
    assert found["non_finite"][0] == {
        "record": "Torch.log.0.forward",
        "places": {"output.0": {"Min": "-Infinity", "Mean": "-Infinity"}},
        "made_here": True,
    }


def test_json_of_a_record_has_parent_stack_and_content(
    ours: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (found,) = json.loads(shown(capsys, ours, "linear.0", "--json"))
    assert found["record"] == OURS["Functional.linear.0.forward"]
    assert found["parent"] == "Module.net.fc1.Linear.forward.0"
    assert found["stack"] == ["File /a/net.py, line 3, in forward, \n return x"]


def test_mix_dump_of_the_original_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Golden mlp_list_module_mix: JSON with indent=1."""
    text = shown(capsys, golden("mlp_list_module_mix"), "Module.fc2")
    assert "parameters.bias    float32  [2]" in text
    assert "parent: none" in text
    assert "File WORK/script.py, line 30, in forward" in text


def test_debug_dump_of_the_original_with_nan_literal_is_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Golden save_debug_statistics: a saved float NaN, written as the bare word."""
    text = shown(capsys, golden("save_debug_statistics"), "--step", 0)
    assert "9 records   task statistics, level debug" in text
    assert "NaN or infinity in 1 record; first: f.0.debug" in text
    assert '"value": "NaN"' in shown(capsys, golden("save_debug_statistics"), "f.0.debug", "--json")


def test_rank_folders_of_the_original_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Golden set_init_step_rank_id: steps 5 and 6 of rank 7."""
    text = shown(capsys, golden("set_init_step_rank_id"))
    assert re.findall(r"^(step\S+)", text, flags=re.M) == ["step5/rank7", "step6/rank7"]


def test_structure_dump_tells_the_named_calls(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_ours(tmp_path / "step0" / "rank0", {}, task="structure")
    text = shown(capsys, tmp_path)
    assert "0 records   task structure" in text
    assert "2 calls named in stack.json" in text
    assert "no NaN" not in text


@pytest.mark.parametrize("content", ["", "{", '{"data": 3}', '{"task": "x", "data": {\n"a": {'])
def test_broken_file_is_reported_and_the_rest_shown(
    content: str, ours: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ours / "step0" / "rank1"
    folder.mkdir()
    (folder / "dump.json").write_text(content)
    text = shown(capsys, ours)
    assert "step0/rank0   9 records" in text
    assert "cannot be read to its end: " in text


def test_file_cut_off_keeps_the_records_before_the_cut(
    ours: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = ours / "step0" / "rank0" / "dump.json"
    path.write_text("\n".join(path.read_text().splitlines()[:4]) + '\n"Torch.x.0.forward": {"in')
    text = shown(capsys, ours)
    assert "step0/rank0   3 records" in text
    assert "cannot be read to its end: line 5: " in text


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda path: None, "is not there"),
        (lambda path: path.write_text("x"), "is not a directory"),
        (lambda path: path.mkdir(), "holds no dump: expected step<N>/rank<R>/dump.json"),
    ],
    ids=["missing", "file", "empty"],
)
def test_path_without_a_dump_exits_with_2(
    make: Any, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "place")
    assert main(["show", str(tmp_path / "place")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert text in captured.err


def test_choice_that_matches_no_folder_exits_with_2_and_names_them(
    ours: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(ours), "--rank", "5"]) == 2
    assert "there are step0/rank0" in capsys.readouterr().err


def test_missing_command_exits_with_2_and_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "usage: msprobe" in capsys.readouterr().err


def run(*arguments: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, text=True, capture_output=True, **kwargs
    )


def test_module_entry_point_shows_without_importing_torch(ours: Path) -> None:
    result = run("-X", "importtime", "-m", "msprobe", "show", str(ours))
    assert result.returncode == 0
    assert "9 records" in result.stdout
    assert not re.search(r"\| +(torch|numpy|yaml)$", result.stderr, flags=re.M)


def test_output_to_a_pipe_has_no_colour_and_a_closed_pipe_is_no_error(ours: Path) -> None:
    assert "\x1b" not in run("-m", "msprobe", "show", str(ours)).stdout
    read_end, write_end = os.pipe()
    os.close(read_end)
    result = subprocess.run(
        [sys.executable, "-m", "msprobe", "show", str(ours)],
        env={**os.environ, "PYTHONPATH": SOURCE}, stdout=write_end, stderr=subprocess.PIPE,
    )
    os.close(write_end)
    assert (result.returncode, result.stderr) == (0, b"")


COMMANDS = {
    "show": ["show"],
    "show a record": ["show", "--no-pager", "--limit", "0"],
    "show --json": ["show", "--json"],
    "check": ["check"],
    "check --json": ["check", "--json"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_output_that_can_not_be_written_is_one_line_and_2(command: str, tmp_path: Path) -> None:
    """/dev/full takes nothing, as a full disk; more than one buffer full, and less."""
    records = {f"Torch.log.{i}.forward": OURS["Torch.log.0.forward"] for i in range(300)}
    for folder in (write_ours(tmp_path / "step0" / "rank0"),
                   write_ours(tmp_path / "step1" / "rank0", records)):  # fmt: skip
        arguments = [*COMMANDS[command], str(folder)]
        if command != "show" and command.startswith("show"):
            arguments.append("Torch")
        with open("/dev/full", "w") as full:
            result = subprocess.run(
                [sys.executable, "-m", "msprobe", *arguments], text=True,
                env={**os.environ, "PYTHONPATH": SOURCE}, stdout=full, stderr=subprocess.PIPE,
            )
        name = arguments[0]
        assert re.fullmatch(f"msprobe {name}: .*No space left on device\n", result.stderr)
        assert result.returncode == 2


@pytest.mark.parametrize(("command", "code"), [("show", 0), ("check", 1)])
@pytest.mark.parametrize("form", ["text", "json"])
def test_reader_that_has_seen_enough_changes_no_exit_code(
    form: str, command: str, code: int, tmp_path: Path
) -> None:
    records = {f"Torch.log.{i}.forward": OURS["Torch.log.0.forward"] for i in range(1, 3000)}
    folder = write_ours(tmp_path / "dump", records)
    options = ["Torch"] if command == "show" else []
    options += ["--json"] if form == "json" else ["--limit", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "msprobe", command, str(folder), *options],
        env={**os.environ, "PYTHONPATH": SOURCE}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == code


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("command", COMMANDS)
def test_text_that_a_terminal_can_not_take_is_escaped(
    command: str, encoding: str, tmp_path: Path
) -> None:
    """A lone surrogate, which JSON can hold; what clears the screen; letters of other scripts."""
    odd = "\ud800\x1b[2J\r\n\u6570"
    entry = {"type": "str", "value": odd}
    folder = write_ours(tmp_path / "dump", {
        "Torch.log.0.forward": forward(entry), f"Torch.{odd}.0.forward": forward(tensor("NaN")),
        f"{odd}.1.forward": {"input_args": [], "input_kwargs": {}, "bad": odd},
    })  # fmt: skip
    (folder / "construct.json").write_text(json.dumps({"Torch.log.0.forward": odd}))
    (folder / "stack.json").write_text(json.dumps({"0": [["Torch.log.0.forward"], [odd]]}))
    arguments = [*COMMANDS[command], str(folder)]
    if command != "show" and command.startswith("show"):
        arguments.append("")
    result = subprocess.run(
        [sys.executable, "-m", "msprobe", *arguments], capture_output=True,
        env={**os.environ, "PYTHONPATH": SOURCE, "PYTHONIOENCODING": encoding},
    )
    assert result.returncode == (command.startswith("check")), result.stderr
    assert result.stderr == b""
    assert b"\x1b" not in result.stdout
    assert b"ud800" in result.stdout


@pytest.mark.parametrize("no_color", [False, True], ids=["colour", "NO_COLOR"])
def test_terminal_gets_colour_unless_told_otherwise(
    no_color: bool, ours: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    assert ("\x1b[" in shown(capsys, ours, "Torch.log")) is not no_color


def test_records_are_read_one_at_a_time(tmp_path: Path) -> None:
    """Our layout is streamed: a broken end does not matter to who stops before it."""
    folder = write_ours(tmp_path / "step0" / "rank0")
    with (folder / "dump.json").open("a") as file:
        file.write("rubbish")
    header, records = reader.open_records(folder)
    assert header["level"] == "mix"
    assert next(records)[0] == "Functional.linear.0.forward"


def test_find_ranks_raises_a_usage_error_for_other_paths(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"Give the dump_path of config\.json"):
        reader.find_ranks(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", '{"data": []}', '{"data": {"a": 1', "\x00\x01"])
def test_show_of_a_broken_file_says_so_and_exits_2(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "step0" / "rank0"
    folder.mkdir(parents=True)
    (folder / "dump.json").write_text(content)
    assert main(["show", str(tmp_path), "linear"]) in (0, 2)
    assert "Traceback" not in capsys.readouterr().err
