"""``msprobe selfcheck``: the user's script with and without collection, compared bit by bit."""

from __future__ import annotations

import json
import time
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from msprobe.cli import main
from msprobe.equality import Verdict, judge
from msprobe.pytorch.fingerprint import fingerprint, leaves_of, rng_states
from msprobe.scripts import Run
from runner import run_script

TRAIN = """
import os, random, sys
import numpy as np
import torch
from torch import nn
from msprobe.pytorch import PrecisionDebugger

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 3))
debugger = PrecisionDebugger({"task": "statistics", "level": "mix", "dump_path": "user_dump"})
OFF = bool(os.environ.get("MSPROBE_OFF"))
for step in range(100):
    debugger.start(model)
    x = torch.randn(2, 4)
    loss = model(x).square().sum()
    loss.backward()
    print("loss", loss.detach().numpy().tobytes().hex())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
    CHANGE
    debugger.stop()
    debugger.step()
"""


def script(folder: Path, text: str = TRAIN, change: str = "pass") -> Path:
    path = folder / "train.py"
    path.write_text(text.replace("CHANGE", change))
    return path


def marks(
    path: Path, name: str, *, off: bool, steps: int = 2, rc: int = 0, **more: str
) -> tuple[Run, str]:
    """One run as selfcheck makes it, and its output."""
    folder = path.parent / name
    folder.mkdir()
    env = {
        "MSPROBE_SELFCHECK": str(folder), "MSPROBE_SELFCHECK_STEPS": str(steps),
        "MSPROBE_OFF": "1" if off else "", **more,
    }
    code, output = run_script(path, cwd=path.parent, env=env)
    assert (code, output if code else "") == (rc, output if rc else "")
    events = {
        file.stem: [json.loads(line) for line in file.read_text().splitlines()]
        for file in folder.glob("*.jsonl")
    }
    return Run(folder, code, events), output


def judged(path: Path) -> dict[str, Verdict]:
    runs = [
        marks(path, name, off=off)[0]
        for name, off in (("off", True), ("again", True), ("on", False))
    ]
    return judge(*runs)


# ---- with a real script ------------------------------------------------------------------------


def test_script_that_collecting_does_not_change_is_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(tmp_path)
    kept = tmp_path / "kept"
    code = main(["selfcheck", "--steps", "2", "--keep", str(kept), "--json", str(path)])
    facts = json.loads(capsys.readouterr().out)
    assert code == 0, facts
    assert (facts["code"], facts["steps"]) == (0, 2)
    assert all(text.startswith("equal (") for text in facts["verdicts"].values())
    assert facts["seconds_per_step_with"] > facts["seconds_per_step_without"] > 0
    assert facts["records"] > 20
    assert facts["modules_never_called"] == []
    assert not (Path.cwd() / "user_dump").exists()
    assert len(list(kept.glob("on/dump/step*/*/dump.json"))) == 2
    assert not list(kept.glob("off*/dump"))


@pytest.mark.parametrize(
    ("change", "kind", "where"),
    [
        ("if not OFF: torch.rand(1)", "rng", "step 0, stop, torch"),
        ("if not OFF: random.random()", "rng", "step 0, stop, python's place"),
        ("if not OFF: np.random.rand()", "rng", "step 0, stop, numpy"),
        ("if not OFF: model[3].bias.data[0] += 1e-6", "parameters", "step 0, step, 3.bias"),
        ("if not OFF: model[0].weight.grad = x.new_ones(5, 4)", "gradients",
         "step 0, step, 0.weight"),
    ],
    ids=["torch", "python", "numpy", "parameter", "gradient"],
)
def test_what_changes_under_collection_is_named(
    change: str, kind: str, where: str, tmp_path: Path
) -> None:
    verdict = judged(script(tmp_path, change=change))[kind]
    assert verdict.difference == where
    assert not verdict.unclear


def test_unseeded_generators_of_numpy_and_python_are_no_difference(tmp_path: Path) -> None:
    path = script(tmp_path, change="np.random.rand(); random.random()")
    runs = [
        marks(path, name, off=off, PYTHONHASHSEED="0")[0]
        for name, off in (("off", True), ("again", True), ("on", False))
    ]
    for number, run in enumerate(runs):  # a fork server seeds alike: make them differ
        for line in run.events["process"]:
            if "rng" in line:
                line["rng"]["python"] += number
                line["rng"]["numpy"] += number
    verdict = judge(*runs)["rng"]
    assert not verdict.unclear
    assert "drawn from equally often" in verdict.text


def test_script_that_differs_by_itself_is_not_blamed_on_the_tool(tmp_path: Path) -> None:
    unseeded = TRAIN.replace("torch.manual_seed(0)", "torch.seed()")
    verdicts = judged(script(tmp_path, unseeded))
    assert verdicts["loss"].text.startswith("no answer: without collection it differs by itself")
    assert verdicts["parameters"].unclear


def test_run_ends_after_its_steps_with_all_output_and_a_complete_dump(tmp_path: Path) -> None:
    path = script(tmp_path)
    run, output = marks(path, "on", off=False, steps=3)
    assert output.count("loss") == 3
    assert [line["event"] for line in run.events["process"]] == [
        *["backward", "stop", "step"] * 3, "end",
    ]
    assert run.steps == len(run.folders()) == 3
    assert not (tmp_path / "user_dump").exists()
    for folder in run.folders():
        assert "coverage.json" in {file.name for file in folder.iterdir()}


def test_fingerprint_of_the_loss_is_the_crc_of_its_bytes(tmp_path: Path) -> None:
    run, output = marks(script(tmp_path), "off", off=True)
    losses = [line["loss"] for line in run.of_kind("process", "backward")]
    words = [line.split()[1] for line in output.splitlines() if line.startswith("loss")]
    assert losses == [[f"{zlib.crc32(bytes.fromhex(word)):08x}"] for word in words]


def test_script_without_a_model_is_known_by_the_leaves_of_its_graph(tmp_path: Path) -> None:
    text = TRAIN.replace("debugger.start(model)", "debugger.start()").replace('"mix"', '"L1"')
    run, _ = marks(script(tmp_path, text), "on", off=False)
    gradients = run.of_kind("process", "backward")[0]["gradients"]
    assert len(gradients) == 4
    assert any(name.endswith("(5, 4)") for name in gradients)
    assert all(gradients.values())


def test_script_that_never_calls_step_ends_after_ten_times_as_many_windows(
    tmp_path: Path,
) -> None:
    run, _ = marks(script(tmp_path, TRAIN.replace("debugger.step()", "")), "off", off=True)
    assert len(run.of_kind("process", "stop")) == 20
    assert run.events["process"][-1]["event"] == "end"


def test_process_with_a_rank_has_a_file_of_its_name(tmp_path: Path) -> None:
    run, _ = marks(script(tmp_path), "off", off=True, RANK="3")
    assert list(run.events) == ["rank3"]


def test_forked_child_writes_no_fingerprints(tmp_path: Path) -> None:
    """A data loader worker that computes a loss of its own."""
    child = "os.fork() or (torch.ones(1, requires_grad=True).sum().backward(), os._exit(0))"
    run, _ = marks(script(tmp_path, change=child), "off", off=True)
    assert list(run.events) == ["process"]
    assert len(run.of_kind("process", "backward")) == 2


def test_nothing_is_written_or_patched_without_the_variable(tmp_path: Path) -> None:
    text = TRAIN.replace("range(100)", "range(1)")
    check = "assert torch.autograd.backward.__module__ == 'torch.autograd'"
    check += " and not hasattr(torch.autograd.backward, '__wrapped__')"
    code, output = run_script(script(tmp_path, text, check), cwd=tmp_path)
    assert code == 0, output
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "user_dump"}


# ---- fingerprints ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool])
def test_fingerprint_is_the_crc_of_the_elements(dtype: torch.dtype) -> None:
    tensor = torch.arange(12).reshape(3, 4).to(dtype)
    expected = zlib.crc32(np.ascontiguousarray(tensor.numpy().T).tobytes())
    assert fingerprint(tensor.T) == f"{expected:08x}"


def test_fingerprint_of_a_sparse_gradient_has_indices_and_values() -> None:
    make = partial(torch.sparse_coo_tensor, size=(4,), check_invariants=True)
    sparse, same = make([[2, 0]], [1.0, 2.0]), make([[0, 2]], [2.0, 1.0])
    moved = make([[0, 3]], [2.0, 1.0])
    assert fingerprint(sparse) == fingerprint(same) != fingerprint(moved)
    assert fingerprint(None) is None
    assert fingerprint(torch.empty(3, device="meta")) not in (None, "00000000")


def test_leaves_of_a_graph_are_found_once_each() -> None:
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    found = list(leaves_of([(a * b + a).sum(), torch.ones(1)]))
    assert {id(leaf) for leaf in found} == {id(a), id(b)}
    assert len(found) == 2


def test_rng_states_tell_each_generator_apart() -> None:
    before = rng_states()
    state = np.random.get_state()
    np.random.rand()
    after = rng_states()
    np.random.set_state(state)
    assert {name for name in before if before[name] != after[name]} == {"numpy", "numpy's place"}
    assert rng_states() == before


# ---- verdicts and exit codes: scripts that leave fingerprints without training -----------------

FAKE = """
import json, os, sys, time
OFF = bool(os.environ.get("MSPROBE_OFF"))
folder = os.environ["MSPROBE_SELFCHECK"]
AGAIN = folder.endswith("off-again")
def write(process, *events):
    with open(os.path.join(folder, process + ".jsonl"), "w") as file:
        file.writelines(json.dumps(event) + "\\n" for event in events)
def collect():
    path = os.path.join(folder, "dump", "step0", "rank0")
    os.makedirs(path)
    head = {"task": "statistics", "level": "L1", "framework": "pytorch", "dump_data_dir": None}
    record = {"input_args": [], "input_kwargs": {}, "output": []}
    with open(os.path.join(path, "dump.json"), "w") as file:
        json.dump({**head, "data": {"Torch.add.0.forward": record}}, file)
    with open(os.path.join(path, "coverage.json"), "w") as file:
        json.dump({"modules_never_called": ["head"], "records_incomplete": {"a": "why"}}, file)
    with open(os.path.join(path, "dump_error_info.log"), "w") as file:
        file.write("Torch.mul.0.forward: odd\\n")
    return path
def run(loss="1", process="process", path=None):
    write(
        process,
        {"event": "backward", "step": 0, "loss": [loss], "gradients": {"w": "2"}},
        {"event": "stop", "step": 0, "rng": {"torch": "3"}, "folder": path},
        {"event": "step", "step": 1, "seconds": 0.1 if OFF else 0.3, "parameters": {"w": "4"}},
        {"event": "end", "step": 1},
    )
"""
GOOD = "run(path=None if OFF else collect())\n"


def fake(folder: Path, body: str, *options: str) -> list[str]:
    path = folder / "fake.py"
    path.write_text(FAKE + body)
    return ["selfcheck", *options, str(path)]


def test_report_has_verdicts_overhead_and_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(fake(tmp_path, GOOD)) == 0
    text = capsys.readouterr().out
    assert "losses            equal (1 compared)" in text
    assert "time per step: 100.0 ms without, 300.0 ms with collection (3.0 times" in text
    assert "collected: 1 record" in text
    assert "1 module never called: head" in text
    assert "a is incomplete: why" in text
    assert "dump_error_info.log: Torch.mul.0.forward: odd" in text
    assert text.endswith("Collecting changed nothing.\n")


@pytest.mark.parametrize(
    ("body", "code", "text"),
    [
        ("run(loss='1' if OFF else '9', path=None if OFF else collect())", 1,
         "DIFFERENT, first at step 0, backward"),
        ("run(loss='9' if AGAIN else '1', path=None if OFF else collect())", 2,
         "no answer: without collection it differs by itself, first at step 0, backward"),
        ("run()", 2, "No answer: nothing was collected in these steps"),
        ("print('no data'); sys.exit(4)", 2, "ended with exit code 4 after 0 steps, without"),
        (GOOD + "OFF or sys.exit('broken by it')", 1, "ended with exit code 1 after 1 step, with "),
        ("pass", 2, "never closed a window"),
        ("write('process', {'event': 'end', 'step': 0})", 2, "never closed a window"),
        ("OFF or write('process-2'); " + GOOD, 0, "Collecting changed nothing."),
        ("run(process='rank0', path=None if OFF else collect()); run(process='rank1',"
         " loss='1' if OFF else '2')", 1, "DIFFERENT, first at rank1, step 0, backward"),
    ],
    ids=["different", "by-itself", "nothing", "fails", "fails-on", "no-debugger", "no-window",
         "other-process", "ranks"],
)
def test_exit_code_and_text_tell_what_happened(
    body: str, code: int, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = main(fake(tmp_path, body))
    out = capsys.readouterr().out
    assert text in out
    assert found == code


def test_last_lines_of_a_script_that_fails_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(fake(tmp_path, "print('the reason'); sys.exit(4)"))
    assert "  the reason\n" in capsys.readouterr().out


def test_script_that_takes_too_long_is_ended_with_its_children(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = """
child = os.fork()
if child:
    with open(sys.argv[1] + ".part", "w") as file:
        file.write(str(child))
    os.rename(file.name, sys.argv[1])
time.sleep(60)
"""
    # Long enough for Python to start on a machine that has much else to do.
    arguments = [*fake(tmp_path, body, "--timeout", "3"), str(tmp_path / "child")]
    assert main(arguments) == 2
    assert "did not end 3 steps within 3 s (--timeout)" in capsys.readouterr().out
    state = Path(f"/proc/{(tmp_path / 'child').read_text()}/stat")
    for _ in range(600):
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] in "ZX":
            return
        time.sleep(0.05)  # killed, and not dead yet
    raise AssertionError(f"{state} is still running")


def test_arguments_and_module_names_are_passed_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(tmp_path, GOOD + "assert sys.argv[1:] == ['--steps', '9', 'x'], sys.argv")
    monkeypatch.chdir(tmp_path)
    assert main(["selfcheck", "-m", "fake", "--steps", "9", "x"]) == 0
    assert "-m fake --steps 9 x" in capsys.readouterr().out


@pytest.mark.parametrize("case", ["script", "keep", "steps"])
def test_wrong_arguments_exit_with_2(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = {
        "script": ["selfcheck", str(tmp_path / "none.py")],
        "keep": fake(tmp_path, GOOD, "--keep", str(tmp_path)),
        "steps": fake(tmp_path, GOOD, "--steps", "0"),
    }[case]
    assert main(arguments) == 2
    text = {
        "script": "none.py is not there",
        "keep": "it must be a new or an empty folder",
        "steps": "must be greater than 0",
    }
    assert text[case] in capsys.readouterr().err


def test_json_has_the_same_content(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(fake(tmp_path, GOOD, "--json")) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert facts["verdicts"]["loss"] == "equal (1 compared)"
    assert facts["problems"] == ["Torch.mul.0.forward: odd"]
