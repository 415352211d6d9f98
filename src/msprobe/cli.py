"""The command line: ``msprobe show``, ``check``, ``selfcheck``, ``coverage``.

Imports no torch, so it answers at once.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import __version__, check, folders, pager, reader, scripts, selfcheck, show, text
from .errors import UsageError
from .reader import RankFolder

FINDINGS = 1
NO_ANSWER = 2
_SHOW = """examples:
  msprobe show ./dump_path                       every step and rank in short
  msprobe show ./dump_path --step 0 --rank 0     one of them
  msprobe show ./dump_path/step0 linear          the records with "linear" in their name
  msprobe show ./dump_path Functional.relu.0.forward

On a terminal, long output goes through $MSPROBE_PAGER, $PAGER or less. NO_COLOR turns colour off.

exit codes: 0 shown, 2 the path holds no dump, the arguments are wrong, or the output can not be
written
"""
_CHECK = """Checked are: strict JSON; the structure of every record (docs/dump.schema.json,
docs/stack.schema.json, docs/construct.schema.json); names that stand twice; a complete file for
every data_name; parents that exist and form a tree; a stack for every forward record; counts that
run from 0 without a gap, unless a filter (list, scope, risk_level, ...) was set; a dump in every
folder of a step and rank.

exit codes: 0 nothing wrong, 1 findings, 2 the path holds no dump, the arguments are wrong, or the
output can not be written
"""
_SELFCHECK = """The script runs three times as it is: twice with MSPROBE_OFF=1, where the debugger
does nothing, and once with collection, into a folder of its own. Each run ends after N calls of
PrecisionDebugger.step(). Compared bit by bit: what backward() was called on, all gradients, all
parameters, the states of the random number generators.

  msprobe selfcheck train.py --config my.yaml
  msprobe selfcheck --steps 5 -m torch.distributed.run --nproc-per-node 2 train.py

exit codes: 0 equal, 1 collecting changed something, 2 it could not run, nothing was collected, or
the script differs by itself from run to run
"""
_COVERAGE = """The script runs until its first PrecisionDebugger.step() with MSPROBE_COVERAGE=1: all
calls of torch functions on tensors are counted that no recorded call covers. The result stands in
coverage.json too, as "torch_calls_not_recorded".

exit codes: 0 shown, 2 it could not run
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a dump may hold text that no encoding can write
            stream.reconfigure(errors="backslashreplace")
    arguments = _parse(argv)
    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        return run(arguments)
    except UsageError as err:
        return _failed(arguments, str(err))
    except OSError as err:
        pager.drop()
        return _failed(arguments, str(err) if err.filename else f"the output is not written: {err}")
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as err:
        if arguments.command != "show":
            raise
        # Files that are cut, or JSON of another shape: `check` tells what is wrong with them.
        return _failed(
            arguments,
            f"{arguments.dir} holds a file that can not be read as a dump:"
            f" {type(err).__name__}: {err}. Run: msprobe check {arguments.dir}",
        )


def _failed(arguments: argparse.Namespace, why: str) -> int:
    print(f"msprobe {arguments.command}: {why}", file=sys.stderr)
    return NO_ANSWER


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    arguments, left = parser.parse_known_args(argv)
    # argparse gives up on a name that may be missing as soon as it has DIR and sees an option.
    if len(left) == 1 and not left[0].startswith("-") and vars(arguments).get("name", "") is None:
        arguments.name = left.pop()
    if left:
        parser.error(f"unrecognized arguments: {' '.join(left)}")
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="msprobe", description="Look at what msprobe has collected, and at what it does."
    )
    parser.add_argument("--version", action="version", version=f"msprobe {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, run: Any, help_: str, epilog: str) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name, help=help_, description=help_[0].upper() + help_[1:] + ".", epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=run)
        return command

    command = add("show", _show, "show a dump, or the records of one name", _SHOW)
    _add_folder(command, "records listed per folder (0: all)")
    command.add_argument("name", nargs="?", help="name of a record, or a part of it")
    command.add_argument("--no-pager", action="store_true", help="print, however long it is")
    command = add("check", _check, "tell what is wrong with a dump, and where", _CHECK)
    _add_folder(command, "findings listed per folder (0: all)")
    command.add_argument(
        "--filtered", action="store_true",
        help="calls were left out on purpose, so gaps are no findings (our own dumps say so)",
    )
    help_ = "run a training script with and without collection and compare bit by bit"
    _add_script(add("selfcheck", _selfcheck, help_, _SELFCHECK), steps=3)
    help_ = "run one step of a script and tell what was not recorded"
    _add_script(add("coverage", _coverage, help_, _COVERAGE), steps=1)
    return parser


def _add_folder(command: argparse.ArgumentParser, limit: str) -> None:
    command.add_argument("dir", help="dump_path, or a step or rank folder in it")
    command.add_argument("--step", type=int, help="only this step")
    command.add_argument("--rank", help="only this rank: 0, rank0 or proc1234")
    command.add_argument("--json", action="store_true", help="print JSON instead of text")
    command.add_argument("--limit", type=int, default=20, metavar="N", help=limit)


def _add_script(command: argparse.ArgumentParser, steps: int) -> None:
    command.add_argument(
        "--steps", type=int, default=steps, metavar="N", help=f"steps per run (default {steps})"
    )
    command.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="seconds per run (default 600)"
    )
    command.add_argument(
        "--keep", metavar="DIR", help="keep dumps and output here (default: a temporary folder)"
    )
    command.add_argument("--json", action="store_true", help="print JSON instead of text")
    command.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module name")
    command.add_argument("script", help="the training script")
    command.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")


def _show(arguments: argparse.Namespace) -> int:
    chosen = _select(reader.find_ranks(arguments.dir), arguments.step, arguments.rank)
    if arguments.json:
        pager.write([show.as_json(chosen, arguments.name)])
        return 0
    paint = text.painter(_has_colour())
    if arguments.name is None:
        lines = show.overview(chosen, arguments.limit, paint)
    else:
        lines = show.records(chosen, arguments.name, arguments.limit, paint)
    pager.show(lines, paged=not arguments.no_pager)
    return 0


def _check(arguments: argparse.Namespace) -> int:
    chosen = _select(folders.find_folders(arguments.dir), arguments.step, arguments.rank)
    found = {f.title: check.check_folder(f, filtered=arguments.filtered) for f in chosen}
    if arguments.json:
        plain = {title: list(map(asdict, some)) for title, some in found.items()}
        pager.write([json.dumps(plain, indent=1)])
    else:
        pager.show(check.describe(found, arguments.limit, text.painter(_has_colour())))
    return FINDINGS if any(found.values()) else 0


def _selfcheck(arguments: argparse.Namespace) -> int:
    return _run_script(selfcheck.compare, arguments)


def _coverage(arguments: argparse.Namespace) -> int:
    return _run_script(selfcheck.coverage, arguments)


def _run_script(run: Callable[[scripts.Plan], selfcheck.Report], arguments: Any) -> int:
    if not arguments.module and not Path(arguments.script).is_file():
        raise UsageError(f"{arguments.script} is not there.")
    if arguments.steps < 1 or arguments.timeout <= 0:
        raise UsageError("--steps and --timeout must be greater than 0.")
    start = ["-m"] if arguments.module else []
    command = [sys.executable, *start, arguments.script, *arguments.args]
    plan = scripts.Plan(command, arguments.steps, arguments.timeout, arguments.keep)
    report: selfcheck.Report = run(plan)
    if arguments.json:
        pager.write([json.dumps(show.strict(report.facts), indent=1)])
    else:
        pager.show(report.lines)
    return report.code


def _select(found: list[RankFolder], step: int | None, rank: str | None) -> list[RankFolder]:
    chosen = [
        folder
        for folder in found
        if step in (None, folder.step)
        and (rank is None or folder.name in (rank, f"rank{rank}", f"proc{rank}"))
    ]
    if not chosen:
        there = ", ".join(folder.title for folder in found)
        raise UsageError(f"no folder matches --step and --rank; there are {there}.")
    return chosen


def _has_colour() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ
