"""After each test the session is ended, and torch must be what it was before the test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from msprobe.pytorch import PrecisionDebugger
from torch_state import changes, torch_state

# Tests look at what is said: without the lines about each step, here and in child processes.
os.environ["MSPROBE_LOG"] = "warning"


@pytest.fixture(autouse=True)
def torch_is_left_as_it_was() -> Iterator[None]:
    before = torch_state()
    yield
    PrecisionDebugger._instance = None
    assert changes(before, torch_state()) == []
