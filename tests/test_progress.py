from __future__ import annotations

import logging
import threading

import pytest

from msprobe.pytorch.dump import background


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
