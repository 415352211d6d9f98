from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from runner import run_script

EXAMPLES = Path(__file__).parents[1] / "examples"
# Packages of examples that the tests do not need.
NEEDS = {"hf_trainer": ("transformers", "accelerate")}

# Example -> lines of its output, as regular expressions.
OUTPUT = {
    "train_loop": [
        r"(\[msprobe\] )?dump\.json is at .*/step2 \(11 records.*\)",
        r"step 3: loss \d+\.\d+",
        r"2 steps, 1 process",
        r"step2/proc\d+   11 records   task statistics, level L0",
        r"  weight\.0  float32  \[1, 16\] .*",
    ],
    "ddp_torchrun": [
        r"records: 20 on rank0, 20 on rank1",
        r"differs: Module\.module\.0\.Linear\.forward\.0",
        r"differs: Module\.module\.2\.Linear\.backward\.0",
        r"equal: Module\.module\.2\.Linear\.parameters_grad\.0",
    ],
    "generate_token_range": [
        r"tokens \[.*\], the same as without msprobe: True",
        r"recorded calls of the head: \['Module\.head\.Linear\.forward\.0',"
        r" 'Module\.head\.Linear\.forward\.1'\]",
    ],
    "find_first_nan": [
        r"nan_check: 9 of 16 records bring NaN or infinity; first: Torch\.div\.0\.forward",
        r"overflow_check: Torch\.div\.0\.forward, called in forward",
        r"its divisor: \[0\.0, 0\.0, 0\.0\]",
        r"run again: 12 of 12 results are NaN",
    ],
    "determinism_md5": [
        r"the same records in the same order: True",
        r"\d of 11 records differ; the first is Tensor\.normal_\.0\.forward:",
        r"  input_args\.0: ([0-9a-f]{8}) and \1",
        r"  output\.0: [0-9a-f]{8} and [0-9a-f]{8}",
    ],
    "custom_op": [
        r"records: \['MyOps\.fused_swish\.0\.forward', .*'MyOps\.fused_swish\.0\.backward'\]",
        r"norm of the gradient: (\d\.\d{6}) recorded, \1 in x\.grad",
    ],
    "hf_trainer": [
        r"step 1: \d+ records",
        r"of the head, with two batches .*: \['Module\.lm_head\.Linear\.forward\.0',.*",
        r"norm of its gradient as it accumulates: \d\.\d{4}, \d\.\d{4}",
    ],
    "save_single_values": [
        r"scores\.0\.debug: shape \(2, 5, 5\), -?\d.* to \d.*",
        r"attention_grad\.0\.debug: shape \(2, 5, 5\), -?\d.* to \d.*",
    ],
}


def example_scripts() -> list[str]:
    """Names of the examples whose packages are there."""
    names = sorted(path.stem for path in EXAMPLES.glob("*.py"))
    return [name for name in names if all(map(importlib.util.find_spec, NEEDS.get(name, ())))]


def test_every_example_is_tested() -> None:
    assert set(example_scripts()) - {*OUTPUT, "train_llama"} == set()


@pytest.mark.parametrize("name", [name for name in example_scripts() if name in OUTPUT])
def test_example_prints_what_it_found(name: str, tmp_path: Path) -> None:
    code, output = run_script(
        EXAMPLES / f"{name}.py", [str(tmp_path / "dump")], tmp_path, {"MSPROBE_LOG": "info"}
    )
    assert code == 0, output
    missing = [line for line in OUTPUT[name] if not re.search(f"^{line}$", output, flags=re.M)]
    assert missing == [], output


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
