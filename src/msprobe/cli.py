"""The command line: ``msprobe show DIR [NAME]``. Imports no torch, so it answers at once."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence

from . import __version__, reader, show, text
from .errors import UsageError
from .reader import RankFolder

NO_DUMP = 2
_EXAMPLES = """examples:
  msprobe show ./dump_path                       every step and rank in short
  msprobe show ./dump_path --step 0 --rank 0     one of them
  msprobe show ./dump_path/step0 linear          the records with "linear" in their name
  msprobe show ./dump_path Functional.relu.0.forward

exit codes: 0 shown, 2 the path holds no dump or the arguments are wrong
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        return _show(arguments)
    except UsageError as err:
        print(f"msprobe show: {err}", file=sys.stderr)
        return NO_DUMP
    except BrokenPipeError:  # the reader of a pipe, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="msprobe", description="Look at what msprobe has collected."
    )
    parser.add_argument("--version", action="version", version=f"msprobe {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "show",
        help="show a dump, or the records of one name",
        description="Show a dump of msprobe or mindstudio-probe in readable form.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("dir", help="dump_path, or a step or rank folder in it")
    command.add_argument("name", nargs="?", help="name of a record, or a part of it")
    command.add_argument("--step", type=int, help="only this step")
    command.add_argument("--rank", help="only this rank: 0, rank0 or proc1234")
    command.add_argument("--json", action="store_true", help="print JSON instead of text")
    command.add_argument(
        "--limit", type=int, default=20, metavar="N", help="records listed per folder (0: all)"
    )
    return parser


def _show(arguments: argparse.Namespace) -> int:
    folders = _select(reader.find_ranks(arguments.dir), arguments.step, arguments.rank)
    if arguments.json:
        print(show.as_json(folders, arguments.name))
        return 0
    paint = text.painter(_has_colour())
    if arguments.name is None:
        _print(show.overview(folders, arguments.limit, paint))
    else:
        _print(show.records(folders, arguments.name, arguments.limit, paint))
    return 0


def _select(folders: list[RankFolder], step: int | None, rank: str | None) -> list[RankFolder]:
    chosen = [
        folder
        for folder in folders
        if step in (None, folder.step)
        and (rank is None or folder.name in (rank, f"rank{rank}", f"proc{rank}"))
    ]
    if not chosen:
        there = ", ".join(folder.title for folder in folders)
        raise UsageError(f"no folder matches --step and --rank; there are {there}.")
    return chosen


def _has_colour() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)
    sys.stdout.flush()
