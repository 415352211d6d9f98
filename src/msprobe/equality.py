"""Whether runs of a script are bit-equal, from the fingerprints that they have left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .scripts import Run

KINDS = {
    "course": "course of events",
    "loss": "losses",
    "gradients": "gradients",
    "parameters": "parameters",
    "rng": "random numbers",
}
_FINGERPRINTS = ("loss", "gradients", "parameters", "rng")
_OFTEN_UNSEEDED = ("numpy", "python")
_Prints = dict[tuple[str, str, str], Any]  # (process, event, name) → fingerprint


@dataclass(slots=True)
class Verdict:
    """One kind of fingerprint: how many agree in the runs without collection, where others differ.

    ``by_itself``: where those two runs differ first; ``difference``: where the run with collection
    differs from both. ``unclear``: a difference of the first sort that is not only a generator of
    numpy or Python that the script does not seed.
    """

    compared: int = 0
    by_itself: str = ""
    difference: str = ""
    unclear: bool = False

    @property
    def text(self) -> str:
        """What to tell of it."""
        if self.unclear:
            return f"no answer: without collection it differs by itself, first at {self.by_itself}"
        if self.difference:
            return f"DIFFERENT, first at {self.difference}"
        note = "; numpy or Python unseeded, drawn from equally often" if self.by_itself else ""
        return f"equal ({self.compared} compared{note})" if self.compared else "none seen"


def judge(off: Run, again: Run, on: Run) -> dict[str, Verdict]:
    """Compare what two runs without collection have in common with the run with it."""
    several = max(len(run.events) for run in (off, again, on)) > 1
    flat = [_flat(run, several) for run in (off, again, on)]
    return {kind: _verdict(*(kinds[kind] for kinds in flat)) for kind in KINDS}


def _verdict(off: _Prints, again: _Prints, on: _Prints) -> Verdict:
    verdict = Verdict()
    for key in {**off, **again, **on}:
        where = ", ".join(filter(None, key))
        if off.get(key) != again.get(key):
            verdict.by_itself = verdict.by_itself or where
            verdict.unclear |= key[-1] not in _OFTEN_UNSEEDED
            continue
        verdict.compared += off.get(key) is not None
        if off.get(key) != on.get(key):
            verdict.difference = verdict.difference or where
    return verdict


def _flat(run: Run, several: bool) -> dict[str, _Prints]:
    """The fingerprints of a run by kind; ``several``: processes are told apart."""
    kinds: dict[str, _Prints] = {kind: {} for kind in KINDS}
    for process, lines in run.events.items():
        shown = process if several else ""
        numbers: Counter[tuple[int, str]] = Counter()
        for line in lines:
            step = line["step"] - (line["event"] == "step")  # counted when it had ended
            numbers[step, line["event"]] += 1
            number = numbers[step, line["event"]]
            event = f"step {step}, {line['event']}" + (f" {number}" if number > 1 else "")
            kinds["course"][shown, event, ""] = True
            for kind in _FINGERPRINTS:
                named = {(shown, event, n): v for n, v in _named(line.get(kind))}
                kinds[kind].update(named)
    return kinds


def _named(values: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(values, dict):
        yield from values.items()
    elif isinstance(values, list):
        yield from ((str(i) if len(values) > 1 else "", value) for i, value in enumerate(values))
