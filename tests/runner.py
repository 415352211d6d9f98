"""Runs scripts as ``python script.py ARGS`` would, without paying for ``import torch`` each time.

One server process has torch imported and has computed nothing, so it has one thread and can fork.
Each script runs in a fork of it, as ``__main__``, with its own arguments, folder, environment and
output, and ends as an interpreter ends: threads are waited for, atexit functions run, an uncaught
exception gives exit code 1. Only the clean-up of modules after that is left out: it takes longer
than most scripts.
"""

from __future__ import annotations

import atexit
import builtins
import functools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import msprobe

SOURCE = Path(msprobe.__file__).parents[1]


def run_script(
    path: Path | str,
    args: Sequence[str] = (),
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    *,
    fresh: bool = False,
    timeout_s: float = 120.0,
) -> tuple[int, str]:
    """Exit code and stdout + stderr of a script; ``-signal`` when a signal ended it.

    ``env`` is added to the environment of the tests. ``fresh`` starts a new interpreter: for
    scripts that need variables read by ``import torch``, or that must not find torch imported.
    After ``timeout_s`` the script and its children are killed: exit code -9.
    """
    folder = str(cwd or Path.cwd())
    request = {"path": str(Path(path).resolve()), "args": list(args), "cwd": folder}
    added = _environment() | dict(env or {})
    if fresh:
        return _run_fresh(request, added, timeout_s)
    with tempfile.TemporaryDirectory() as scratch:
        output = os.path.join(scratch, "output.txt")
        request |= {"env": added, "output": output, "timeout_s": timeout_s}
        return _ask(request), Path(output).read_text(errors="replace")


def _environment() -> dict[str, str]:
    paths = [str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


def _run_fresh(
    request: Mapping[str, Any], env: Mapping[str, str], timeout_s: float
) -> tuple[int, str]:
    process = subprocess.Popen(
        [sys.executable, request["path"], *request["args"]],
        cwd=request["cwd"],
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
    return process.returncode, output


def _ask(request: Mapping[str, Any]) -> int:
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    if not answer:
        raise RuntimeError(f"the server of tests/runner.py ended with {server.wait()}")
    return int(answer)


@functools.cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, __file__],
        env={**os.environ, **_environment()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(_close, server)
    return server


def _close(server: subprocess.Popen[str]) -> None:
    if server.stdin is not None:
        server.stdin.close()
    server.wait()


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answers each request (a line of JSON) with the exit code of its script."""
    import numpy  # noqa: F401  # imported here: the tests' own process may do without
    import torch._dynamo  # noqa: F401  # any optimizer imports it, which takes a second

    if os.path.isdir("/proc/self/task") and len(os.listdir("/proc/self/task")) != 1:
        raise RuntimeError("import torch has started a thread: a fork would not be clean")
    for line in requests:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            os._exit(_exit_code(functools.partial(_become_script, request)))
        answers.write(f"{_wait(child, request['timeout_s'])}\n")
        answers.flush()


def _wait(child: int, timeout_s: float) -> int:
    deadline = time.monotonic() + timeout_s
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.killpg(child, 9)
            deadline = float("inf")
        time.sleep(0.005)


def _exit_code(script: Callable[[], None]) -> int:
    code = 0
    try:
        script()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    # What Py_FinalizeEx does first, by the functions it calls; they have no public names.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code


def _become_script(request: Mapping[str, Any]) -> None:
    os.setsid()
    path = request["path"]
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.chdir(request["cwd"])
    os.environ.update(request["env"])
    sys.argv = [path, *request["args"]]
    sys.path[0] = os.path.dirname(path)
    # The module stays in sys.modules until the process ends: atexit functions and pickle need it.
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=builtins, __spec__=None)
    sys.modules["__main__"] = main
    exec(compile(Path(path).read_bytes(), path, "exec"), main.__dict__)


if __name__ == "__main__":
    serve(sys.stdin, sys.stdout)
