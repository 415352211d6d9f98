"""The programs in docs/integrations.md run and leave what their text says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from helpers import read_json
from runner import run_script

PAGE = Path(__file__).parents[1] / "docs" / "integrations.md"


def programs() -> dict[str, str]:
    """Title of a section → its code blocks, one after the other."""
    sections = re.split(r"^## (.+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    titles, bodies = sections[1::2], sections[2::2]
    blocks = [re.findall(r"^```python\n(.*?)^```$", body, re.S | re.M) for body in bodies]
    return {title: "\n".join(found) for title, found in zip(titles, blocks, strict=True)}


PROGRAMS = programs()
# section → the folders of a step in ./dump, and a record that each of them holds
LEFT = {
    "Plain loop": (["step0/proc*", "step1/proc*"], "Module.2.Linear.parameters_grad.0"),
    "Several processes": (["step0/rank0"], "Module.module.0.Linear.parameters_grad.0"),
    "Hugging Face Trainer": (
        [f"step{i}/proc*" for i in range(3)],
        "Module.lm_head.Linear.forward.0",
    ),
    "Lightning": (["step0/proc*", "step1/proc*"], "Module.net.2.Linear.backward.0"),
    "Accelerate": (["step0/proc*", "step1/proc*"], "Module.0.Linear.backward.1"),
    "Megatron-style train_step": (
        ["step0/proc*", "step1/proc*"],
        "Module.1.fc.Linear.backward.2",
    ),
    "Windows with changing dump_path, as in verl": (
        [f"step_{i}/{s}_update/step0/proc*" for i in range(2) for s in ("actor", "critic")],
        "Module.0.Linear.backward.0",
    ),
    "Model runner of an inference server, as in vLLM and SGLang": (
        ["step1/rank3", "step2/rank3"],
        "Module.1.Linear.forward.0",
    ),
}


def test_each_section_is_tested() -> None:
    assert list(PROGRAMS) == list(LEFT)


def run(title: str, folder: Path) -> list[Path]:
    script = folder / "program.py"
    script.write_text(PROGRAMS[title], encoding="utf-8")
    code, output = run_script(script, [], folder, {"HF_HUB_OFFLINE": "1"})
    assert code == 0, output
    return sorted((folder / "dump").rglob("dump.json"))


@pytest.mark.parametrize("title", LEFT)
def test_recipe_runs_and_leaves_its_records(title: str, tmp_path: Path) -> None:
    dumps = run(title, tmp_path)
    folders, record = LEFT[title]
    patterns = [f"*/dump/{folder}/dump.json" for folder in folders]
    assert len(dumps) == len(patterns)
    assert all(path.match(pattern) for path, pattern in zip(dumps, patterns, strict=True))
    for path in dumps:
        assert record in read_json(path)["data"]


def test_recipe_of_a_model_runner_records_the_rows_of_its_request(tmp_path: Path) -> None:
    dumps = run("Model runner of an inference server, as in vLLM and SGLang", tmp_path)
    shapes = []
    for path in dumps:
        record = read_json(path)["data"]["Module.0.Embedding.forward.0"]
        shapes.append(record["input_args"][0]["shape"])
    assert shapes == [[2], [1]]
