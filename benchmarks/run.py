"""Compare the cost of this tool with another of the same interface, and with no tool at all.

    python benchmarks/run.py [--peer-python PATH] [--quick] [--only NAME] [--out FILE]

Each configuration runs in processes of its own (`worker.py`), ours and the peer's in turn, several
rounds; the table shows medians over the rounds. See README.md for what the columns mean.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

from cases import CASES, Case, others

_HERE = os.path.dirname(os.path.abspath(__file__))
Figures = dict[str, Any]
Rounds = list[Figures]
Run = Callable[..., dict[str, Rounds]]  # arguments of the worker → rounds of "ours" and "peer"


def run_worker(python: str, arguments: Iterable[str], *, ours: bool) -> Figures:
    """The figures of one process. Raises RuntimeError with its output when it fails."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # or each import of ours compiles it anew
    if not ours:
        env.pop("PYTHONPATH", None)  # the way to our sources is none to the peer's
    done = subprocess.run(
        [python, os.path.join(_HERE, "worker.py"), *arguments],
        capture_output=True,
        text=True,
        env=env,
        timeout=3600,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"')]
    if done.returncode or not lines:
        raise RuntimeError(f"{python} {arguments}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    figures: Figures = json.loads(lines[-1])
    return figures


def runner(peer: str | None, rounds: int) -> Run:
    """A function that runs a worker for ours and the peer in turn."""
    pythons = {"ours": sys.executable} | ({"peer": peer} if peer else {})

    def run(*arguments: str, only_ours: bool = False) -> dict[str, Rounds]:
        found: dict[str, Rounds] = {who: [] for who in pythons}
        for number in range(rounds):
            for who, python in pythons.items():
                if only_ours and who != "ours":
                    continue
                print(f"round {number}: {who}: {' '.join(arguments)}", file=sys.stderr, flush=True)
                found[who].append(run_worker(python, arguments, ours=who == "ours"))
        return found

    return run


def middle(rounds: Rounds, key: str) -> float:
    return statistics.median(figures[key] for figures in rounds)


def added(rounds: Rounds, kind: str) -> list[float]:
    """Time added per step in each round; ``kind``: "ms" of the clock or "cpu_ms"."""
    return [figures[f"tool_{kind}"] - figures[f"plain_{kind}"] for figures in rounds]


def ratio(ours: Rounds, peer: Rounds, kind: str) -> tuple[float, float, float]:
    """Median of ours over that of the peer, and the least and greatest ratio of one round."""
    mine, other = added(ours, kind), added(peer, kind)
    each = [a / b for a, b in zip(mine, other, strict=True)]
    return statistics.median(mine) / statistics.median(other), min(each), max(each)


def case_row(case: Case, found: dict[str, Rounds]) -> list[str]:
    ours, peer = found["ours"], found.get("peer")
    sides = [ours, peer] if peer else [ours]
    plain = middle(ours, "plain_cpu_ms")
    row = [case.name, f"{middle(ours, 'plain_ms'):.1f}", f"{middle(ours, 'tool_ms'):.1f}"]
    for kind in ("ms", "cpu_ms"):
        row.append(" / ".join(f"{statistics.median(added(side, kind)):.1f}" for side in sides))
    if peer:
        wall, low, high = ratio(ours, peer, "ms")
        cpu, cpu_low, cpu_high = ratio(ours, peer, "cpu_ms")
        row += [
            f"{wall:.2f} ({low:.2f}-{high:.2f})",
            f"**{cpu:.2f}** ({cpu_low:.2f}-{cpu_high:.2f})",
            f"{case.limit:.2f}",
            "yes" if max(wall, cpu) <= case.limit else "no",
        ]
    else:
        row.append(f"{middle(ours, 'tool_cpu_ms') / plain:.2f}")
    row += [
        " / ".join(f"{middle(side, 'records'):.0f}" for side in sides),
        " / ".join(
            f"{statistics.median(added(side, 'cpu_ms')) * 1e3 / middle(side, 'records'):.0f}"
            for side in sides
        ),
        " / ".join(f"{middle(side, 'json_bytes_per_record'):.0f}" for side in sides),
        " / ".join(f"{middle(side, 'tensor_mb'):.0f}" for side in sides),
        " / ".join(f"{middle(side, 'tool_peak_mb'):.1f}" for side in sides),
    ]
    return row


def case_head(peer: bool) -> list[str]:
    compared = ["ratio, clock", "ratio, CPU", "at most", "met"] if peer else ["CPU with / plain"]
    return [
        "case", "plain ms", "with the tool ms", "added ms", "added CPU ms", *compared,
        "records", "CPU µs per record", "JSON bytes per record", "tensors MB", "peak MB added",
    ]  # fmt: skip


def other_row(found: dict[str, Rounds], title: str, key: str, per: str, limit: str) -> list[str]:
    """Median and range of a figure (divided by another), for ours and the peer."""
    values = []
    for who in ("ours", "peer"):
        each = [f[key] / f[per] if per else f[key] for f in found.get(who, [])]
        shown = f"{statistics.median(each):.4g} ({min(each):.4g}-{max(each):.4g})" if each else ""
        values.append(shown)
    return [title, *values, limit]


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def machine(found: dict[str, Rounds]) -> str:
    processor = platform.processor()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
        processor = names[0] if names else processor
    except OSError:
        pass
    tools = ", ".join(f"{who}: {r[0]['tool']}, torch {r[0]['torch']}" for who, r in found.items())
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        f"{datetime.date.today()}, {platform.platform()}, {processor}, {os.cpu_count()} cores, "
        f"load {load}, Python {platform.python_version()}. {tools}.\n"
        f"`python {' '.join(sys.argv)}`"
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer-python", help="interpreter that has the other tool")
    parser.add_argument("--quick", action="store_true", help="few steps, two rounds")
    parser.add_argument("--only", default="", help="only cases with this in their name")
    parser.add_argument("--rounds", type=int, default=0, help="rounds instead of 5 (quick: 2)")
    parser.add_argument("--out", help="write the Markdown to this file too")
    return parser.parse_args()


def main() -> None:
    # What the workers write is deleted at the end: see `timing.Dumps.remove`.
    with tempfile.TemporaryDirectory(prefix="bench_", ignore_cleanup_errors=True) as folder:
        os.environ["BENCH_FOLDER"] = folder
        measure_all(arguments())


def measure_all(args: argparse.Namespace) -> None:
    """Run what is asked for and print the tables."""
    steps = ["--steps", "3", "--seconds", "0.3"] if args.quick else ["--steps", "7"]
    run = runner(args.peer_python, args.rounds or (2 if args.quick else 5))
    runner(args.peer_python, 1)("imported")  # compiles what is not compiled yet
    rows, lines, tools = [], [], {}
    for case in CASES:
        if args.only in case.name:
            tools = run(
                *("train", "--model", case.model, "--level", case.level),
                *("--task", case.task, "--summary", case.summary, *steps),
            )
            rows.append(case_row(case, tools))
    for other in others([1_000, 10_000] if args.quick else [1_000, 10_000, 200_000]):
        if args.only in other.name:
            found = run(*other.arguments, only_ours=other.only_ours)
            lines += [other_row(found, *figure) for figure in other.figures]
            tools = tools or found
    text = [machine(tools)]
    text += [table(case_head(bool(args.peer_python)), rows)] if rows else []
    text += [table(["figure", "ours", "peer", "limit"], lines)] if lines else []
    print("\n\n".join(text))
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            file.write("\n\n".join(text) + "\n")


if __name__ == "__main__":
    main()
