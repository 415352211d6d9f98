"""Public frameworks in which people use the debugger; what runs in them is in ``frameworks.py``.

They belong to the extra ``test``: where one is missing these tests fail.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers import Dump, read_dump, same
from runner import run_script

PROGRAMS = Path(__file__).with_name("frameworks.py")
# program → folders of steps that it leaves
STEPS = {
    "hf_trainer": 2,
    "hf_generate": 1,
    "hf_vit": 1,
    "accelerate_loop": 4,
    "lightning_fit": 3,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all programs have run, in one process that has imported the frameworks."""
    folder = tmp_path_factory.mktemp("frameworks")
    code, output = run_script(PROGRAMS, [str(folder)])
    assert code == 0, output
    assert sorted(path.stem for path in folder.glob("*.pt")) == sorted(STEPS), output
    return folder


@pytest.mark.parametrize("program", STEPS)
def test_framework_gives_the_same_results_with_the_tool(program: str, folder: Path) -> None:
    without, with_tool = torch.load(folder / f"{program}.pt")
    assert same(with_tool, without)


@pytest.mark.parametrize("program", STEPS)
def test_each_step_in_a_framework_has_its_files(program: str, folder: Path) -> None:
    steps = sorted(path.name for path in (folder / program).iterdir())
    assert steps == [f"step{i}" for i in range(STEPS[program])]
    for step in range(STEPS[program]):
        assert read_dump(folder / program, step).errors() == []


LAYER = {
    "input_layernorm.LlamaRMSNorm",
    "self_attn.q_proj.Linear",
    "self_attn.k_proj.Linear",
    "self_attn.v_proj.Linear",
    "self_attn.o_proj.Linear",
    "self_attn.LlamaAttention",
    "post_attention_layernorm.LlamaRMSNorm",
    "mlp.gate_proj.Linear",
    "mlp.up_proj.Linear",
    "mlp.act_fn.SiLUActivation",
    "mlp.down_proj.Linear",
    "mlp.LlamaMLP",
    "LlamaDecoderLayer",
}


def parts(dump: Dump, prefix: str, suffix: str) -> set[str]:
    """What stands between the two in the names of records."""
    found = dump.names(prefix)
    return {n.removeprefix(prefix).removesuffix(suffix) for n in found if n.endswith(suffix)}


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("micro_batch", [0, 1])
@pytest.mark.parametrize("step", [0, 1])
def test_trainer_records_each_layer_in_each_micro_batch(
    step: int, micro_batch: int, direction: str, folder: Path
) -> None:
    dump = read_dump(folder / "hf_trainer", step)
    suffix = f".{direction}.{micro_batch}"
    for layer in range(2):
        assert parts(dump, f"Module.model.layers.{layer}.", suffix) == LAYER
    assert f"Module.lm_head.Linear{suffix}" in dump.data


@pytest.mark.parametrize("step", [0, 1])
def test_trainer_records_the_gradient_of_each_parameter(step: int, folder: Path) -> None:
    dump = read_dump(folder / "hf_trainer", step)
    with_weights = {p for p in LAYER if p.endswith(("Linear", "RMSNorm"))}
    for layer in range(2):
        found = parts(dump, f"Module.model.layers.{layer}.", ".parameters_grad.1")
        assert found == with_weights


def test_generate_records_the_tokens_of_the_range(folder: Path) -> None:
    dump = read_dump(folder / "hf_generate")
    names = dump.names("Module.model.embed_tokens.")
    assert names == [f"Module.model.embed_tokens.Embedding.forward.{i}" for i in (0, 1)]
    # the prompt of three tokens has gone before: these are single tokens, out of the cache
    assert [dump.data[name]["output"][0]["shape"] for name in names] == [[1, 1, 16]] * 2
    assert f"Module.lm_head.Linear.forward.{1}" in dump.data
    assert dump.names("backward") == []


def test_vision_transformer_has_structured_output_and_gradients(folder: Path) -> None:
    dump = read_dump(folder / "hf_vit")
    (output,) = dump.data["Module.vit.ViTModel.forward.0"]["output"]
    assert output["last_hidden_state"]["shape"] == [2, 5, 16]
    record = dump.data["Module.vit.ViTModel.backward.0"]
    assert record["input"][0]["last_hidden_state"]["shape"] == [2, 5, 16]
    assert "Functional.conv2d.0.backward" in dump.data


@pytest.mark.parametrize(
    ("program", "modules"),
    [("accelerate_loop", ["0.Linear", "1.GELU", "2.Linear"]),
     ("lightning_fit", ["net.0.Linear", "net.1.GELU", "net.2.Linear", "net.Sequential"])],
    ids=["accelerate", "lightning"],
)  # fmt: skip
def test_training_loop_records_both_directions_of_each_module(
    program: str, modules: list[str], folder: Path
) -> None:
    for step in range(STEPS[program]):
        dump = read_dump(folder / program, step)
        for direction in ("forward", "backward"):
            assert parts(dump, "Module.", f".{direction}.0") == set(modules)
        layers = {name for name in modules if name.endswith("Linear")}
        assert parts(dump, "Module.", ".parameters_grad.0") == layers


def test_optimizer_in_lightning_is_the_parent_of_what_it_computes(folder: Path) -> None:
    construct = read_dump(folder / "lightning_fit").construct
    assert construct["optimizer"] is None
    assert "optimizer" in construct.values()
