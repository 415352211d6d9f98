"""``msprobe selfcheck`` and ``msprobe coverage``: what collecting does to a script, and misses.

The script runs as it is in processes of its own, see marks.py for what they tell.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import missed, scripts
from .equality import KINDS, Verdict, judge
from .errors import UsageError
from .scripts import Plan, Run
from .text import count, indent, table

EQUAL, DIFFERENT, NO_ANSWER = 0, 1, 2
_LAST_LINES = 15


@dataclass(frozen=True, slots=True)
class Report:
    """What a command has found: its exit code, the text, and the same as plain data."""

    code: int
    lines: list[str]
    facts: dict[str, Any]


def compare(plan: Plan) -> Report:
    """Run the script twice without and once with collection, and compare."""
    with _folder(plan.keep) as folder:
        runs: list[Run] = []
        for name, off in (("off", "1"), ("off-again", "1"), ("on", "")):
            run = scripts.run(plan, folder / name, {"MSPROBE_OFF": off})
            failure = _failure(run, plan)
            if failure:
                return _failed(name, failure, run, DIFFERENT if _only_on(name, run) else NO_ANSWER)
            runs.append(run)
        return _judged(plan, runs)


def coverage(plan: Plan) -> Report:
    """Run the script with collection and tell what was not recorded."""
    with _folder(plan.keep) as folder:
        run = scripts.run(plan, folder / "on", {"MSPROBE_COVERAGE": "1", "MSPROBE_OFF": ""})
        failure = _failure(run, plan)
        if not failure and not run.folders():
            failure = _NOTHING
        if failure:
            return _failed("on", failure, run, NO_ANSWER)
        found = missed.collect(run.folders())
        lines = [f"{count(run.steps, 'step')} of {' '.join(plan.command[1:])}", ""]
        return Report(0, [*lines, *missed.calls(found), "", *missed.lines(found)], found)


_NOTHING = (
    "nothing was collected in these steps: see 'step', 'rank' and 'dump_enable' in the"
    " configuration, or give more --steps"
)


@contextlib.contextmanager
def _folder(keep: str | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="msprobe-") as name:
            yield Path(name)
        return
    folder = Path(keep).expanduser()
    if folder.exists() and (not folder.is_dir() or os.listdir(folder)):
        raise UsageError(f"--keep {folder}: it must be a new or an empty folder.")
    yield folder


def _failure(run: Run, plan: Plan) -> str:
    if run.code is None:
        return f"did not end {plan.steps} steps within {plan.timeout_s:g} s (--timeout)"
    if run.code:
        return f"ended with exit code {run.code} after {count(run.steps, 'step')}"
    if not any(lines[:-1] for lines in run.events.values()):
        return "never closed a window: it must call PrecisionDebugger's start, stop and step"
    return ""


def _only_on(name: str, run: Run) -> bool:
    """Whether it is the tool that makes the script fail: without it, it went well twice."""
    return name == "on" and bool(run.code)


def _failed(name: str, failure: str, run: Run, code: int) -> Report:
    how = "with collection" if name == "on" else "without collection (MSPROBE_OFF=1)"
    last = run.output.splitlines()[-_LAST_LINES:]
    lines = [f"The script {failure}, {how}."]
    if last:
        lines += ["Its last lines:", *indent(last)]
    return Report(code, lines, {"failure": f"{failure}, {how}", "output": last})


def _judged(plan: Plan, runs: Sequence[Run]) -> Report:
    off, again, on = runs
    verdicts = judge(off, again, on)
    found = missed.collect(on.folders())
    records = found["records"]
    without, with_ = min(_step_time(off), _step_time(again)), _step_time(on)
    code = _code(verdicts.values(), bool(records))
    rows = [[KINDS[kind], verdict.text] for kind, verdict in verdicts.items()]
    lines = [
        f"{count(on.steps, 'step')} of {' '.join(plan.command[1:])},"
        f" {count(len(on.events), 'process', 'es')}: twice without collection, once with it",
        "",
        *table(rows),
        "",
        _time_line(without, with_),
        f"collected: {count(records, 'record')}" if records else f"No answer: {_NOTHING}",
        "",
        *missed.lines(found),
        "",
        _CONCLUSIONS[code],
    ]
    facts = {
        "code": code,
        "steps": on.steps,
        "verdicts": {kind: verdict.text for kind, verdict in verdicts.items()},
        "seconds_per_step_without": without,
        "seconds_per_step_with": with_,
        **found,
    }
    return Report(code, lines, facts)


_CONCLUSIONS = {
    EQUAL: "Collecting changed nothing.",
    DIFFERENT: (
        "The run with collection differs from two equal runs without it. If a second selfcheck"
        " says the same, please report it."
    ),
    NO_ANSWER: (
        "No full answer. A script that differs by itself needs its seeds set and deterministic"
        " algorithms: msprobe.pytorch.seed_all(1234, mode=True)."
    ),
}


def _code(verdicts: Iterable[Verdict], collected: bool) -> int:
    found = list(verdicts)
    if any(verdict.unclear for verdict in found) or not collected:
        return NO_ANSWER  # what differs by itself may differ with collection for no reason of ours
    return DIFFERENT if any(verdict.difference for verdict in found) else EQUAL


def _step_time(run: Run) -> float:
    """Median seconds of a step, the first (which warms up) left out; NaN if none was timed."""
    for process in run.events:
        times = [line["seconds"] for line in run.of_kind(process, "step")]
        times = [seconds for seconds in times if seconds is not None]
        if times:
            return float(statistics.median(times[1:] or times))
    return float("nan")


def _time_line(without: float, with_: float) -> str:
    if not with_ > 0 or not without > 0:
        return "time per step: not known, step() was never called"
    return (
        f"time per step: {without * 1000:.1f} ms without, {with_ * 1000:.1f} ms with collection"
        f" ({with_ / without:.1f} times; from start() to the end of step(), median)"
    )
