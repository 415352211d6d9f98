"""The helper that runs scripts must give what ``python script.py`` gives."""

from __future__ import annotations

from pathlib import Path

import pytest

import runner

BOTH = pytest.mark.parametrize("fresh", [False, True], ids=["forked", "fresh"])


def write(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(text, encoding="utf-8")
    return path


@BOTH
def test_script_sees_its_arguments_folder_environment_and_name(tmp_path: Path, fresh: bool) -> None:
    script = write(
        tmp_path,
        "import os, sys\n"
        "print(__name__, __file__ == sys.argv[0], sys.argv[1:], os.getcwd(), os.environ['WORD'])\n"
        "print(sys.path[0] == os.path.dirname(__file__), sys.stdin.read() == '')\n",
    )
    code, output = runner.run_script(script, ["a", "b"], tmp_path, {"WORD": "hello"}, fresh=fresh)
    assert code == 0, output
    assert output == f"__main__ True ['a', 'b'] {tmp_path} hello\nTrue True\n"


@BOTH
@pytest.mark.parametrize(
    ("statement", "expected"),
    [("raise ValueError('boom')", 1), ("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", -9)],
    ids=["exception", "exit", "signal"],
)
def test_exit_code_is_that_of_the_script(
    tmp_path: Path, statement: str, expected: int, fresh: bool
) -> None:
    script = write(tmp_path, f"import os, sys\n{statement}\n")
    code, output = runner.run_script(script, cwd=tmp_path, fresh=fresh)
    assert code == expected
    assert ("ValueError: boom" in output) == (expected == 1)


@BOTH
def test_atexit_functions_run(tmp_path: Path, fresh: bool) -> None:
    text = "import atexit\nword = 'bye'\natexit.register(lambda: print(word))\nexit(3)\n"
    assert runner.run_script(write(tmp_path, text), cwd=tmp_path, fresh=fresh) == (3, "bye\n")


@BOTH
def test_script_that_hangs_is_killed_after_the_time_limit(tmp_path: Path, fresh: bool) -> None:
    script = write(tmp_path, "import time\ntime.sleep(60)\n")
    assert runner.run_script(script, cwd=tmp_path, fresh=fresh, timeout_s=0.3) == (-9, "")


def test_forked_scripts_do_not_see_each_other(tmp_path: Path) -> None:
    script = write(tmp_path, "import torch\nprint(getattr(torch, 'mark', None))\ntorch.mark = 1\n")
    outputs = [runner.run_script(script, cwd=tmp_path) for _ in range(2)]
    assert outputs == [(0, "None\n"), (0, "None\n")]
