from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from runner import run_script

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize("options", [[], ["--tied"]], ids=["untied", "tied"])
def test_llama_example_trains_records_and_shows(options: list[str], tmp_path: Path) -> None:
    code, output = run_script(EXAMPLES / "train_llama.py", [str(tmp_path / "dump"), *options])
    assert code == 0, output
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", output, flags=re.M)]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    assert re.search(r"^step0/proc\d+ +\d+ records +task statistics, level mix$", output, re.M)
    assert "no NaN or infinity in any statistic" in output
    assert "parent: Module.layers.0.attention.Attention.forward.0" in output
    for step in (0, 1):
        (path,) = (tmp_path / "dump" / f"step{step}").glob("proc*/dump.json")
        data = json.loads(path.read_text())["data"]
        for name in (
            "Module.layers.1.mlp.SwiGLU.backward.0",
            "Module.head.Linear.forward.0",
            "Functional.scaled_dot_product_attention.1.backward",
            "Functional.cross_entropy.0.forward",
        ):
            assert name in data
