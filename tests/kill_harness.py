"""Kills training runs at random moments and looks at the files that they leave.

``python tests/kill_harness.py --kills 200`` prints one line per failure and a summary; exit code 1
if anything failed. Each victim is a fork of this process, which has torch imported and has
computed nothing. It notes in a file beside the dump when it has completed which iteration.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from msprobe.pytorch import PrecisionDebugger

Log = Callable[[int, int], None]  # (step, iteration of that step): completed just now

PROMISED_S = 1.0  # what is older than this when the process dies is on disk
LONGEST_LIFE_S = 2.4
DEEPEST = 4  # calls inside each other: two containers, a module, a function
LEVELS = ("L0", "L1", "mix")
TASKS = ("statistics", "tensor")
_JSON = ("dump.json", "stack.json", "construct.json")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.forward$|\.backward$|$)")


# ---- the victim ------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.act(self.fc(x))) + x


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), Block(), nn.Linear(6, 2))


def iterate(net: nn.Module) -> None:
    F.mse_loss(net(torch.ones(3, 4)), torch.zeros(3, 2)).backward()


def one_window(net: nn.Module, log: Log, pause_s: float) -> None:
    """Only the clock makes the collector write."""
    PrecisionDebugger.start(net)
    for i in itertools.count():
        iterate(net)
        log(0, i)
        time.sleep(pause_s)


def windows_of_one_step(net: nn.Module, log: Log, pause_s: float) -> None:
    for i in itertools.count():
        PrecisionDebugger.start(net)
        iterate(net)
        log(0, i)
        PrecisionDebugger.stop()
        time.sleep(pause_s)


def short_steps(net: nn.Module, log: Log, pause_s: float) -> None:
    for step in itertools.count():
        PrecisionDebugger.start(net)
        for i in range(3):
            iterate(net)
            log(step, i)
            time.sleep(pause_s)
        PrecisionDebugger.stop()
        PrecisionDebugger.step()


class Texts:
    @staticmethod
    def read(text: str) -> int:
        return len(text)


def large_records(net: nn.Module, log: Log, pause_s: float) -> None:
    """Megabytes in each write: many kills hit the process while it is writing."""
    PrecisionDebugger.register_custom_api(Texts, "read")
    text = "x" * (2 << 20)
    for step in itertools.count():
        for i in range(8):
            PrecisionDebugger.start(net)
            Texts.read(text)
            PrecisionDebugger.stop()
            log(step, i)
        PrecisionDebugger.step()


PROGRAMS: dict[str, Callable[[nn.Module, Log, float], None]] = {
    function.__name__: function
    for function in (one_window, windows_of_one_step, short_steps, large_records)
}


@dataclass(frozen=True)
class Case:
    program: str
    level: str
    task: str
    async_dump: bool = False

    @property
    def pause_s(self) -> float:
        return 0.02 if self.task == "tensor" else 0.002  # fewer files to look at


CASES = [
    *(Case(p, level, task) for p in list(PROGRAMS)[:3] for level in LEVELS for task in TASKS),
    *(Case(p, "mix", "tensor", async_dump=True) for p in ("one_window", "short_steps")),
    *[Case("large_records", "L1", "statistics")] * 2,
]


def become_victim(case: Case, folder: Path) -> None:
    """Never returns: trains until it is killed."""
    code = 1
    try:
        torch.set_num_threads(1)
        output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        progress = os.open(folder / "progress.txt", os.O_WRONLY | os.O_CREAT)

        def log(step: int, iteration: int) -> None:
            os.write(progress, f"{time.monotonic()} {step} {iteration}\n".encode())

        config = {"task": case.task, "level": case.level, "async_dump": case.async_dump}
        PrecisionDebugger(config, dump_path=folder / "dump")
        PROGRAMS[case.program](build(), log, case.pause_s)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


# ---- what must be there ----------------------------------------------------------------------


def _fork(function: Callable[[], Any]) -> int:
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        function()
        os._exit(0)
    return child


def numbered(name: str) -> tuple[str, int]:
    """``Functional.relu.3.forward`` → ``Functional.relu.{}.forward``, 3."""
    match = _NUMBER.search(name)
    assert match is not None, name
    return f"{name[: match.start()]}{{}}{name[match.end() :]}", int(match.group())


@functools.cache
def pattern(case: Case) -> dict[str, int]:
    """How many records of each kind one iteration of the program makes: from two, not killed."""
    if case.program == "large_records":
        return {"Texts.read.{}.forward": 1}

    def run() -> None:
        PrecisionDebugger(dump_path=scratch, level=case.level)
        net = build()
        PrecisionDebugger.start(net)
        for _ in range(2):
            iterate(net)
        PrecisionDebugger._instance = None

    with tempfile.TemporaryDirectory() as scratch:
        assert os.waitpid(_fork(run), 0)[1] == 0
        (path,) = Path(scratch).glob("step0/*/dump.json")
        kinds = [numbered(name)[0] for name in json.loads(path.read_text())["data"]]
    return {kind: kinds.count(kind) // 2 for kind in kinds}


def names_of(case: Case, iteration: int) -> Iterator[str]:
    for kind, count in pattern(case).items():
        for n in range(count * iteration, count * (iteration + 1)):
            yield kind.format(n)


def read_strict(path: Path) -> Any:
    def unique(members: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({name for name, _ in members}) == len(members), f"{path}: a name stands twice"
        return dict(members)

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not strict JSON")

    return json.loads(path.read_bytes(), parse_constant=refuse, object_pairs_hook=unique)


@dataclass
class Findings:
    problems: list[str] = field(default_factory=list)
    records: int = 0
    promised: int = 0  # records that had to be there
    tensors: int = 0

    def add(self, other: Findings) -> None:
        self.problems += other.problems
        self.records += other.records
        self.promised += other.promised
        self.tensors += other.tensors


def inspect(case: Case, folder: Path, killed_at: float) -> Findings:
    """What is wrong in the folder of a victim that was killed at this moment."""
    found = Findings()
    dumps: dict[int, dict[str, Any]] = {}
    for place in sorted((folder / "dump").glob("step*/*")):
        contents = {}
        for path in place.glob("*.json"):
            try:
                contents[path.name] = read_strict(path)
            except (ValueError, AssertionError) as error:
                found.problems.append(f"{path}: {error}")
        data = contents.get("dump.json", {}).get("data", {})
        dumps[int(place.parent.name.removeprefix("step"))] = data
        found.records += len(data)
        _look_at_unfinished(found, place, data)
        if set(_JSON) <= set(contents):
            _look_beside(found, case, place, data, contents)
        _look_at_tensors(found, place, data)
    _look_for_promised(found, case, folder, dumps, killed_at)
    return found


def _look_at_unfinished(found: Findings, place: Path, data: dict[str, Any]) -> None:
    settled = list(data)[:-DEEPEST]
    if any(".forward" in name and "output" not in data[name] for name in settled):
        found.problems.append(f"{place}: a call that was running does not stand at the end")


def _look_beside(
    found: Findings, case: Case, place: Path, data: dict[str, Any], contents: dict[str, Any]
) -> None:
    # The last ones were running when the file was written: their stacks come when they end.
    done = list(data)[:-DEEPEST]
    stacked = {name for names, _ in contents["stack.json"].values() for name in names}
    for name in done:
        if ".forward" in name and name not in stacked:
            found.problems.append(f"{place}: {name} has no stack")
        if case.level != "L1" and _belongs(name) and name not in contents["construct.json"]:
            found.problems.append(f"{place}: {name} is not in construct.json")


def _belongs(name: str) -> bool:
    return "parameters_grad" not in name


def _look_at_tensors(found: Findings, place: Path, data: dict[str, Any]) -> None:
    for entry in _entries(list(data.values())):
        path = place / "dump_tensor_data" / entry["data_name"]
        found.tensors += 1
        try:
            tensor = torch.load(path, weights_only=True)
        except Exception as error:
            found.problems.append(f"{path}: {error}")
            continue
        if (str(tensor.dtype), list(tensor.shape)) != (entry["dtype"], entry["shape"]):
            found.problems.append(f"{path}: holds another tensor than its entry says")


def _entries(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict) and "data_name" in value:
        yield value
    elif isinstance(value, (dict, list)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _entries(part)


def _look_for_promised(
    found: Findings, case: Case, folder: Path, dumps: dict[int, Any], killed_at: float
) -> None:
    progress = folder / "progress.txt"
    whole = progress.read_text().rpartition("\n")[0] if progress.exists() else ""
    lines = [line.split() for line in whole.splitlines()]
    completed = [(float(at), int(step), int(i)) for at, step, i in lines]
    deadline = killed_at - PROMISED_S - _longest_wait(completed, killed_at)
    for at, step, iteration in completed:
        for name in names_of(case, iteration) if at < deadline else ():
            found.promised += 1
            if name not in dumps.get(step, {}):
                age = killed_at - at
                found.problems.append(f"{folder}: step {step}: {name} is lost ({age:.2f} s old)")


def _longest_wait(completed: Sequence[tuple[float, int, int]], killed_at: float) -> float:
    """How long the machine has let the victim wait lately: it lets its other thread wait too."""
    times = [at for at, *_ in completed if at > killed_at - 2 * PROMISED_S]
    return max((b - a for a, b in itertools.pairwise(times)), default=0.0)


# ---- the killer ------------------------------------------------------------------------------


@dataclass
class Victim:
    case: Case
    folder: Path
    pid: int
    dies_at: float


def run(cases: Sequence[Case], at_once: int, luck: random.Random, keep: Path) -> Findings:
    """Kill one victim per case, some of them living at the same time."""
    for case in set(cases):
        pattern(case)
    todo, living, total = list(cases), [], Findings()
    while todo or living:
        while todo and len(living) < at_once:
            living.append(_give_birth(todo.pop(0), luck, keep))
        victim = min(living, key=lambda v: v.dies_at)
        living.remove(victim)
        found = _kill(victim)
        for problem in found.problems[:5]:
            print(f"{victim.case}: {problem}")
        if not found.problems:
            shutil.rmtree(victim.folder)
        total.add(found)
    return total


def _give_birth(case: Case, luck: random.Random, keep: Path) -> Victim:
    folder = Path(tempfile.mkdtemp(dir=keep))
    pid = _fork(lambda: become_victim(case, folder))
    return Victim(case, folder, pid, time.monotonic() + luck.uniform(0, LONGEST_LIFE_S))


def _kill(victim: Victim) -> Findings:
    time.sleep(max(0.0, victim.dies_at - time.monotonic()))
    at = time.monotonic()
    os.kill(victim.pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(victim.pid, 0)[1])
    found = inspect(victim.case, victim.folder, at)
    if status != -signal.SIGKILL:
        output = (victim.folder / "output.txt").read_text()
        found.problems.append(f"{victim.folder}: ended by itself with {status}: {output}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--program", choices=PROGRAMS, help="only this kind of run")
    options = parser.parse_args(arguments)
    os.environ["MSPROBE_LOG"] = "warning"
    luck = random.Random(options.seed)
    fitting = [c for c in CASES if options.program in (None, c.program)]
    cases = [fitting[i % len(fitting)] for i in range(options.kills)]
    luck.shuffle(cases)
    keep = Path(tempfile.mkdtemp(prefix="kills"))
    found = run(cases, options.at_once, luck, keep)
    print(
        f"{len(cases)} kills, {len(found.problems)} problems: {found.records} records, "
        f"{found.promised} of which had to be there, {found.tensors} files of tensors"
    )
    if found.problems:
        print(f"the folders of the victims with problems are in {keep}")
        return 1
    shutil.rmtree(keep)
    return 0


if __name__ == "__main__":
    sys.exit(main())
