"""Runs a training script as it is, for ``msprobe selfcheck`` and ``msprobe coverage``."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OUTPUT = "output.txt"


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run: the command, its steps, seconds for each run, where to keep the results."""

    command: Sequence[str]
    steps: int
    timeout_s: float
    keep: str | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """One run that has ended. ``code`` is None where the time was up.

    ``events``: process ("rank0", "process") → the lines of its fingerprints, see marks.py.
    """

    folder: Path
    code: int | None
    events: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @property
    def output(self) -> str:
        """What the script printed, stderr included."""
        return (self.folder / OUTPUT).read_text(encoding="utf-8", errors="replace")

    @property
    def steps(self) -> int:
        """How many steps the process with the most of them has ended."""
        return max((len(self.of_kind(name, "step")) for name in self.events), default=0)

    def of_kind(self, process: str, event: str) -> list[dict[str, Any]]:
        """The lines of one process and kind."""
        return [line for line in self.events[process] if line["event"] == event]

    def folders(self) -> list[Path]:
        """The rank folders that were written, in order."""
        lines = (line for lines in self.events.values() for line in lines)
        named = dict.fromkeys(line.get("folder") for line in lines)
        return [Path(name) for name in named if name and Path(name).is_dir()]


def run(plan: Plan, folder: Path, environment: Mapping[str, str]) -> Run:
    """Run the script once, with everything that it starts; return what it left in ``folder``."""
    folder.mkdir(parents=True)
    added = {
        "MSPROBE_SELFCHECK": str(folder.resolve()),
        "MSPROBE_SELFCHECK_STEPS": str(plan.steps),
        # The order of sets of strings must not differ from run to run.
        "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),
        **environment,
    }
    with (folder / OUTPUT).open("wb") as output:
        process = subprocess.Popen(
            list(plan.command),
            env={**os.environ, **added},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        try:
            code = process.wait(timeout=plan.timeout_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and the workers that it has left
            process.wait()
    return Run(folder, code, _events(folder))


def _events(folder: Path) -> dict[str, list[dict[str, Any]]]:
    found = {}
    for path in sorted(folder.glob("*.jsonl")):
        text = path.read_text(encoding="utf-8")
        # A process that was killed may have left half a line.
        found[path.stem] = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    return found
