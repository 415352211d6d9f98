"""Under a fake tensor mode the user's own calls are recorded, what torch does for them is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers import debugger, read_dump

# what the user calls → the records it gives
CALLS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "recorded functions": (
        lambda: torch.relu(torch.empty(3, 4)).add(1),
        ["Torch.relu.0.forward", "Tensor.add.0.forward"],
    ),
    "operators that are not recorded": (
        lambda: torch.ops.aten.clamp(torch.ops.aten.relu(torch.empty(3, 4)), 0, 1),
        [],
    ),
    "both": (
        lambda: torch.ops.aten.softmax(torch.empty(2, 5), 1).exp().stride(),
        ["Tensor.exp.0.forward", "Tensor.stride.0.forward"],
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_each_step_has_the_calls_of_the_user_under_a_fake_tensor_mode(
    call: str, tmp_path: Path
) -> None:
    """torch keeps what it has worked out about shapes: the first step is no special one."""
    function, names = CALLS[call]
    mode = FakeTensorMode()
    watcher = debugger(tmp_path, level="L1")
    for _ in range(2):
        watcher.start()
        with mode:
            function()
        watcher.stop()
        watcher.step()
    assert [list(read_dump(tmp_path, step).data) for step in range(2)] == [names, names]
