from __future__ import annotations

import errno
import functools
import itertools
import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from helpers import collect
from msprobe.pytorch.dump import background, run
from msprobe.pytorch.dump.writer import Writer


def test_long_flush_tells_how_far_it_is(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "PROGRESS_S", 0.01)
    caplog.set_level(logging.INFO, logger="msprobe")
    told = threading.Event()
    jobs = background.Background()

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.set()

    handler = Told()
    logging.getLogger("msprobe").addHandler(handler)
    try:
        jobs.submit(3_000_000, lambda: told.wait(20) and None)
        jobs.wait()
    finally:
        logging.getLogger("msprobe").removeHandler(handler)
    assert "tensors to be written: 1 (3.0 MB)" in caplog.messages


def test_more_bytes_than_the_limit_never_wait() -> None:
    jobs = background.Background(limit_bytes=10)
    room, held, most = threading.Semaphore(0), 0, 0
    lock = threading.Lock()

    def done() -> None:
        nonlocal held
        room.acquire(timeout=20)
        with lock:
            held -= 4

    def submit_all() -> None:
        nonlocal held, most
        for _ in range(8):
            with lock:
                held += 4
                most = max(most, held)
            jobs.submit(4, done)

    submitting = threading.Thread(target=submit_all)
    submitting.start()
    for _ in range(8):
        room.release()
    submitting.join(20)
    jobs.wait()
    assert held == 0
    assert most <= 10 + 4 + 4  # the one that waits for room, and one between its end and its count


def _saves(tmp_path: Path) -> list[dict]:
    def step() -> None:
        x = torch.arange(6.0)
        F.relu(x.view(2, 3))
        x.mul_(2)  # after it was handed over: the file holds what was there before

    dump = collect(tmp_path, step, None, level="L1", task="tensor")
    entries = [
        entry
        for record in dump.data.values()
        for entry in (*record["input_args"], *record["output"])
        if "shape" in entry
    ]
    folder = dump.folder / "dump_tensor_data"
    for entry in entries:
        if entry["data_name"] is not None:
            saved = torch.load(folder / entry["data_name"], weights_only=True)
            assert (saved.max().item(), saved.sum().item() / 6) == (entry["Max"], entry["Mean"])
    return entries


@pytest.mark.parametrize("limit", [0, 24, 1 << 20], ids=["at once", "one at a time", "all wait"])
def test_tensor_is_saved_as_it_was_whatever_may_wait(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "LIMIT_BYTES", limit)
    entries = _saves(tmp_path)
    assert len(entries) > 4
    assert all(entry["data_name"] for entry in entries)


@pytest.mark.parametrize("limit", [0, 1 << 20], ids=["at once", "in the background"])
def test_tensor_that_cannot_be_written_has_no_file_name_and_a_reason(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "LIMIT_BYTES", limit)
    save = Writer.save_tensor

    def failing(self: Writer, name: str, tensor: object) -> None:
        if "relu" in name and "output" in name:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(self, name, tensor)

    monkeypatch.setattr(Writer, "save_tensor", failing)
    entries = _saves(tmp_path)
    named = [entry.get("data_name") for entry in entries]
    assert named.count(None) == 1
    assert len(set(named)) > 3
    log = next(tmp_path.rglob("dump_error_info.log")).read_text()
    assert "relu.0.forward.output.0" in log
    assert "No space left on device" in log


def _interrupted_at(line: int, function: Any, call: Callable[[], None]) -> bool:
    """Whether ``call`` came to this line of ``function``, where Ctrl-C then came."""
    code = function.__code__

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code is not code:
            return None
        if event == "line" and frame.f_lineno == line:
            sys.settrace(None)
            raise KeyboardInterrupt
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


SUBMITTING = [background.Background.submit, background.Background._start]


@pytest.mark.parametrize("function", SUBMITTING, ids=lambda f: f.__name__)
def test_ctrl_c_at_any_line_of_a_submission_leaves_nothing_to_wait_for(function: Any) -> None:
    lines = {line for _, _, line in function.__code__.co_lines() if line}
    interrupted = 0
    for line, before in itertools.product(sorted(lines), (0, 1, 3)):
        jobs = background.Background()
        done: list[int] = []
        for number in range(before):
            jobs.submit(10, functools.partial(done.append, number))
        submit = functools.partial(jobs.submit, 10, lambda: None)
        interrupted += _interrupted_at(line, function, submit)
        jobs.submit(10, functools.partial(done.append, before))
        over = threading.Thread(target=_end, args=[jobs], daemon=True)
        over.start()
        over.join(20)
        assert not over.is_alive(), line
        assert len(done) == before + 1
    assert interrupted >= 4


def _end(jobs: background.Background) -> None:
    jobs.wait()
    jobs.close()
