"""Long output of a command goes through a pager, where a person looks at a terminal."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from itertools import chain, islice

_DEFAULT = "less"


def show(lines: Iterable[str], *, paged: bool = True) -> None:
    """Print the lines; through a pager if they do not fit on the terminal.

    The pager is $MSPROBE_PAGER, $PAGER or less; one of them empty, or ``paged`` False: none.
    Nothing is paged where stdout is no terminal.
    """
    lines = iter(lines)
    command = _pager() if paged and _on_terminal() else []
    if command:
        height = shutil.get_terminal_size().lines - 1
        head = list(islice(lines, height))
        lines = chain(head, lines)
        if len(head) == height:
            _page(lines, command)
            return
    write(lines)


def write(lines: Iterable[str]) -> None:
    """Print the lines. OSError where they can not be written: a full disk."""
    try:
        for line in lines:
            print(line)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of a pipe, such as head, has seen enough
        drop()


def drop() -> None:
    """Let what has been printed and not written yet go nowhere: Python writes it at its end."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _pager() -> list[str]:
    text = os.environ.get("MSPROBE_PAGER", os.environ.get("PAGER", _DEFAULT))
    try:
        command = shlex.split(text)
    except ValueError:
        return []
    return command if command and shutil.which(command[0]) else []


def _on_terminal() -> bool:
    try:
        return os.isatty(sys.stdout.fileno())
    except (OSError, ValueError):
        return False


def _page(lines: Iterable[str], command: list[str]) -> None:
    sys.stdout.flush()
    # -R keeps our colours, -F ends at once where all fits, -X leaves the text on the screen.
    environment = {"LESS": "FRX", **os.environ}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, text=True, encoding="utf-8", errors="replace",
        env=environment,
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the reader has seen enough
        for line in lines:
            process.stdin.write(line + "\n")
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    while True:
        try:
            process.wait()
            return
        except KeyboardInterrupt:
            continue  # it is for the pager: Ctrl-C ends a search there
