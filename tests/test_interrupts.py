"""Ctrl-C waits until a window is in or out and the files are written; then it is obeyed."""

from __future__ import annotations

import ast
import itertools
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import msprobe
from helpers import debugger, read_dump
from msprobe import check, reader
from msprobe.pytorch import PrecisionDebugger
from msprobe.pytorch.dump import journal
from msprobe.pytorch.dump.interrupts import interrupts_wait
from msprobe.pytorch.dump.journal import Journal
from msprobe.pytorch.dump.jsonfile import JsonFile
from msprobe.pytorch.dump.writer import Writer
from recorded import batch, make_net
from torch_state import changes, torch_state


@pytest.fixture(autouse=True)
def plain_handler() -> Iterator[None]:
    """Python's own handler of Ctrl-C, whatever pytest and its plugins have set."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_at(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int
) -> Callable[[], int]:
    """Have Ctrl-C come in the ``number``-th call of a function from now on; count the calls."""
    original = getattr(owner, name)
    calls = 0

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            signal.raise_signal(signal.SIGINT)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, interrupted)
    return lambda: calls


def run(watcher: Any, net: nn.Module) -> None:
    watcher.start(net)
    net(batch(0)).sum().backward()
    watcher.stop()
    watcher.step()


FILES = ["open", "pwrite", "link", "replace", "unlink"]


@pytest.mark.parametrize("task", ["statistics", "tensor"])
@pytest.mark.parametrize("function", FILES)
def test_ctrl_c_while_files_are_written_loses_no_record(
    function: str, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each call of the function within stop() and step() in turn, until there are no more."""
    net = make_net()
    watcher = debugger(tmp_path, level="mix", task=task)
    run(watcher, net)
    whole = read_dump(tmp_path, 0)
    step, interrupted = 1, True
    while interrupted:
        watcher.start(net)
        net(batch(0)).sum().backward()
        with monkeypatch.context() as patch:
            interrupt_at(patch, os, function, step)
            interrupted = False
            for end in (watcher.stop, watcher.step):
                try:
                    end()
                except KeyboardInterrupt:
                    interrupted = True
        net.zero_grad()
        dump = read_dump(tmp_path, step)
        assert list(dump.data) == list(whole.data)
        assert dump.construct == whole.construct
        (folder,) = reader.find_ranks(tmp_path / f"step{step}")
        assert check.check_folder(folder) == []
        assert not [name for name in os.listdir(dump.folder) if name.startswith(".")]
        step += 1
    assert step > 2, "it was never called: the test shows nothing"


@pytest.mark.parametrize("function", [*FILES[:-1], "pread", "ftruncate"])
def test_ctrl_c_while_one_file_grows_and_shrinks(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is interrupted is done again, and the file is valid at every moment."""
    path = tmp_path / "dump.json"
    long, number = b'"running": "%b"' % (b"x" * 5000), 0
    parts: list[tuple[list[bytes], list[bytes]]] = [
        ([b'"a": 1'], [long]),
        ([], []),
        ([b'"b": 2', b'"c": 3'], [long, b'"d": 4']),
        ([b'"d": 4'], [b'"e": 5']),
        ([b'"e": 5'], []),
    ]
    interrupted = True
    while interrupted:
        number += 1
        with monkeypatch.context() as patch:
            interrupt_at(patch, os, function, number)
            interrupted = False
            try:
                file = JsonFile(str(path), '{"data": {', "}}")
            except KeyboardInterrupt:
                interrupted = True
                file = JsonFile(str(path), '{"data": {', "}}")
            final: dict[str, Any] = {}
            for members, draft in parts:
                try:
                    file.append(members, draft)
                except KeyboardInterrupt:
                    interrupted = True
                    assert json.loads(path.read_bytes())["data"].items() >= final.items()
                    file.append(members, draft)
                final |= json.loads(b"{%b}" % b",".join(members))
                expected = final | json.loads(b"{%b}" % b",".join(draft))
                assert json.loads(path.read_bytes()) == {"data": expected}
        file.close()
        assert os.listdir(tmp_path) == ["dump.json"]
    assert number > 1, "it was never called: the test shows nothing"


PLACES = [
    (os, "pwrite"),
    (torch.nn.Module, "register_forward_pre_hook"),
    (torch.nn.Module, "register_forward_hook"),
    (sys.modules["torch.optim.optimizer"], "register_optimizer_step_pre_hook"),
    (torch.overrides, "get_overridable_functions"),
]


@pytest.mark.parametrize(("owner", "name"), PLACES, ids=[name for _, name in PLACES])
def test_ctrl_c_within_start_leaves_no_window(
    owner: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = make_net()
    watcher = debugger(tmp_path, level="mix")
    before, parts = torch_state(), [dict(vars(part)) for part in net.modules()]
    with monkeypatch.context() as patch:
        calls = interrupt_at(patch, owner, name, 2 if owner is torch.nn.Module else 1)
        with pytest.raises(KeyboardInterrupt):
            watcher.start(net)
        assert calls()
    assert changes(before, torch_state()) == []
    assert [dict(vars(part)) for part in net.modules()] == parts
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in net.modules())
    net(batch(0)).sum().backward()  # nobody listens
    net.zero_grad()
    run(watcher, net)
    data = read_dump(tmp_path).data
    assert list(data) == sorted(data, key=list(data).index)
    assert "Module.fc1.Linear.forward.0" in data
    assert "Module.fc1.Linear.forward.1" not in data


def test_exception_of_another_signal_within_stop_is_made_good_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time limit by SIGALRM raises wherever it likes: here, when half of the hooks are out."""

    class TimeIsUp(Exception):
        pass

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeIsUp

    net = make_net()
    watcher = debugger(tmp_path, level="mix")
    before = torch_state()
    run(watcher, net)
    handler = signal.signal(signal.SIGALRM, late)
    try:
        watcher.start(net)
        with monkeypatch.context() as patch:
            table = net.act._forward_hooks
            patch.setattr(net.act, "_forward_hooks", _Rings(table))
            with pytest.raises(TimeIsUp):
                watcher.stop()
            table.clear()
        run(watcher, net)
    finally:
        signal.signal(signal.SIGALRM, handler)
    assert changes(before, torch_state()) == []
    assert list(read_dump(tmp_path, 1).data) == list(read_dump(tmp_path, 0).data)


class _Rings(dict[int, Any]):
    """A table of hooks from which nothing can be taken before the time is up."""

    def pop(self, *args: Any) -> Any:
        signal.raise_signal(signal.SIGALRM)
        return super().pop(*args)


def test_handler_of_the_user_is_called_once_and_put_back(tmp_path: Path) -> None:
    came: list[str] = []

    def handler(number: int, frame: FrameType | None) -> None:
        assert frame is not None
        came.append(frame.f_code.co_name)

    signal.signal(signal.SIGINT, handler)
    watcher = debugger(tmp_path, level="L1")
    run(watcher, make_net())
    assert signal.getsignal(signal.SIGINT) is handler
    with interrupts_wait() as waiting:
        signal.raise_signal(signal.SIGINT)
        assert (len(waiting), came) == (1, [])
    assert len(came) == 1
    assert signal.getsignal(signal.SIGINT) is handler


def test_second_ctrl_c_does_not_wait() -> None:
    with interrupts_wait():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    # Here the first is not raised once more.


@pytest.mark.parametrize("kind", [signal.SIG_IGN, signal.SIG_DFL])
def test_signal_that_python_does_not_handle_is_left_alone(kind: Any) -> None:
    signal.signal(signal.SIGINT, kind)
    with interrupts_wait():
        assert signal.getsignal(signal.SIGINT) is kind
    assert signal.getsignal(signal.SIGINT) is kind


def test_windows_in_another_thread_leave_the_handler_alone(tmp_path: Path) -> None:
    watcher = debugger(tmp_path, level="L1")
    errors: list[BaseException] = []

    def work() -> None:
        try:
            run(watcher, make_net())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert len(read_dump(tmp_path).data) > 5


def test_second_interrupt_comes_through_a_block_within_a_block() -> None:
    """step() calls stop(): both wait, and one further Ctrl-C is enough for both."""
    with interrupts_wait(), interrupts_wait():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_interrupt_in_a_block_within_a_block_waits_for_the_outer_one() -> None:
    done = []

    @interrupts_wait()
    def outer() -> None:
        with interrupts_wait():
            signal.raise_signal(signal.SIGINT)
        done.append("behind the inner block")

    with pytest.raises(KeyboardInterrupt):
        outer()
    assert done


WRITING = [
    Journal.flush, Journal._complete, Journal._write, Journal._forget, journal._hand_over,
    Writer.append, Writer.append_stacks, Writer.append_parents, Writer.compact,
    JsonFile.append, JsonFile._catch_up, JsonFile._write, JsonFile._show,
]  # fmt: skip


@pytest.mark.parametrize("function", WRITING, ids=lambda f: f.__qualname__)
def test_exception_at_any_line_of_a_flush_loses_no_record(function: Any, tmp_path: Path) -> None:
    """A second Ctrl-C, or what the handler of another signal raises, does not wait for us."""
    lines = {line for _, _, line in function.__code__.co_lines() if line}
    # construct.json, stack.json and dump.json go through the same lines, one after the other.
    name, interrupted = function.__qualname__, 0
    visits = 3 if name.startswith("JsonFile") else 2 if name == "_hand_over" else 1
    for line, visit in itertools.product(sorted(lines), range(visits)):
        folder = tmp_path / f"{line}.{visit}"
        net, watcher = make_net(), debugger(folder, level="mix")
        watcher.start(net)
        torch.relu(torch.ones(3))
        watcher.stop()
        watcher.start(net)
        torch.sin(torch.ones(3))
        net(batch(0))
        interrupted += raised_at(function, line, visit, watcher.stop)
        for _ in range(2):
            watcher.start(net)
            torch.cos(torch.ones(3))
            watcher.stop()
        watcher.step()
        PrecisionDebugger._instance = None
        dump = read_dump(folder)
        names = [name for name in dump.data if name.startswith("Torch")]
        calls = [("relu", 0), ("sin", 0), ("cos", 0), ("cos", 1)]
        assert names == [f"Torch.{name}.{number}.forward" for name, number in calls], line
        assert any(name.startswith("Module") for name in dump.data)
        stacked = {name for names, _ in dump.stack.values() for name in names}
        assert stacked >= {name for name in dump.data if ".forward" in name}
        assert dump.construct.keys() >= dump.data.keys()
        log = dump.folder / "dump_error_info.log"
        assert "cut the file off" not in (log.read_text() if log.exists() else "")
    assert interrupted


def raised_at(function: Any, line: int, visit: int, call: Callable[[], None]) -> bool:
    """Whether ``call`` came to this line once more than ``visit`` times: KeyboardInterrupt then."""
    code, left = function.__code__, visit

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code is not code:
            return None
        if event == "line" and frame.f_lineno == line:
            if left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
            left -= 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_no_lock_is_made_in_python() -> None:
    """Ctrl-C within their methods may come when the lock is taken and nobody will give it back."""
    kinds = ("Barrier", "BoundedSemaphore", "Condition", "Event", "Semaphore", "Timer")
    made_in_python = {*(f"threading.{kind}" for kind in kinds), "queue.Queue"}
    used = {
        ast.unparse(node)
        for path in Path(msprobe.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
    }
    assert "threading.Lock" in used
    assert used.isdisjoint(made_in_python)
