"""Each golden's script, run with our package, makes the tree that mindstudio-probe 26.2.0 made.

Which differences are allowed, and why, is in ``golden_compare`` and ``golden_values``.
"""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from golden_compare import tree_differences
from runner import run_script

GOLDENS = Path(__file__).parent / "goldens"

# What the collector itself must do: levels, tasks, life cycle, values.
COLLECTOR = [
    "arg_types",
    "autograd_function",
    "checkpoint_reentrant",
    "cnn_inplace_l0_tensor",
    "cnn_inplace_l1",
    "crash_in_step",
    "dtypes_statistics",
    "dtypes_tensor",
    "mlp_extra_info_false",
    "mlp_l0_statistics",
    "mlp_l0_tensor",
    "mlp_l1_statistics",
    "mlp_l1_tensor",
    "mlp_mix_statistics",
    "mlp_risk_all",
    "mlp_structure_mix",
    "model_list_l0",
    "repeat_start_stop",
    "set_init_step_rank_id",
    "shared_module_mix",
    "transformer_l0",
]
# What the options of config.json and the other calls add to it.
OPTIONS = [
    "custom_api",
    "dtypes_md5",
    "dtypes_xor",
    "mlp_async_statistics",
    "mlp_data_mode_backward",
    "mlp_data_mode_forward",
    "mlp_data_mode_input",
    "mlp_data_mode_output",
    "mlp_dump_enable_false",
    "mlp_l1_md5",
    "mlp_l1_xor",
    "mlp_list_exact_l1",
    "mlp_list_l0",
    "mlp_list_module_mix",
    "mlp_list_substring_l1",
    "mlp_mix_tensor_md5",
    "mlp_precision_high",
    "mlp_rank_filter_nonmatching",
    "mlp_risk_core",
    "mlp_risk_focus",
    "mlp_scope_l0",
    "mlp_scope_l1",
    "mlp_slice",
    "mlp_step_filter",
    "mlp_tensor_list",
    "module_dump_l0",
    "module_dump_l1",
    "save_debug_md5",
    "save_debug_statistics",
    "save_debug_tensor",
]
PROCESS_GROUPS = ["gloo_collectives", "gloo_ddp_mix"]
WITH_OWN_TEST = ["bench_path_diff", "random_save", "seed_all_enhanced"]


def test_every_golden_is_run() -> None:
    lists = [*COLLECTOR, *OPTIONS, *PROCESS_GROUPS, *WITH_OWN_TEST]
    assert sorted(lists) == sorted(path.parent.name for path in GOLDENS.glob("*/script.py"))


def run_golden(name: str, folder: Path, **how: Any) -> Path:
    """Runs a golden's script with the argument ``out`` in ``folder``; checks its exit code."""
    script = how.pop("script", GOLDENS / name / "script.py")
    code, output = run_script(script, ["out"], folder, **how)
    expected = (GOLDENS / name / "expected_rc.txt").read_text(encoding="utf-8").strip()
    assert code == int(expected), output
    return folder / "out"


@pytest.mark.parametrize("name", COLLECTOR)
def test_golden_of_the_collector(name: str, tmp_path: Path) -> None:
    ours = run_golden(name, tmp_path)
    assert tree_differences(name, GOLDENS / name / "expected", ours) == []


@pytest.mark.parametrize("name", OPTIONS)
def test_golden_of_an_option(name: str, tmp_path: Path) -> None:
    ours = run_golden(name, tmp_path)
    assert tree_differences(name, GOLDENS / name / "expected", ours) == []


def run_process_group(name: str, folder: Path) -> Path:
    script = folder / "script.py"
    text = (GOLDENS / name / "script.py").read_text(encoding="utf-8")
    script.write_text(_for_this_machine(text, folder), encoding="utf-8")
    return run_golden(name, folder, script=script)


def _for_this_machine(text: str, folder: Path) -> str:
    """The same lines without a port, and with forked ranks: spawned ones would import torch."""
    group = 'init_process_group("gloo", '
    assert text.count(group) == 1
    text = text.replace(group, f'{group}init_method="file://{folder}/store", ')
    forked = re.sub(r"mp\.spawn\((.*)\)", r'mp.start_processes(\1, start_method="fork")', text)
    assert forked != text
    return forked


@pytest.mark.distributed
@pytest.mark.parametrize("name", PROCESS_GROUPS)
def test_golden_of_a_process_group(name: str, tmp_path: Path) -> None:
    ours = run_process_group(name, tmp_path)
    assert tree_differences(name, GOLDENS / name / "expected", ours) == []


@pytest.mark.distributed
def test_gradient_under_ddp_is_the_average_of_what_the_golden_ranks_had(tmp_path: Path) -> None:
    ours = run_process_group("gloo_ddp_mix", tmp_path)
    expected = _mean_gradients(GOLDENS / "gloo_ddp_mix" / "expected")
    found = _mean_gradients(ours)
    averages = {place: sum(means) / 2 for place, means in expected.items()}
    # The mean over elements is linear, so it can be compared although the elements are not there.
    assert found == {place: [pytest.approx(mean, rel=2e-5)] * 2 for place, mean in averages.items()}


def _mean_gradients(root: Path) -> dict[str, list[float]]:
    """<step>.<record>.<parameter> -> the mean gradient on rank 0 and on rank 1."""
    found: dict[str, list[float]] = {}
    for path in sorted(root.glob("dump/step*/rank*/dump.json")):
        for name, record in json.loads(path.read_text(encoding="utf-8"))["data"].items():
            if ".parameters_grad." in name:
                for parameter, (gradient,) in record.items():
                    place = f"{path.parent.parent.name}.{name}.{parameter}"
                    found.setdefault(place, []).append(gradient["Mean"])
    return found


def test_golden_of_bench_path_except_for_names_of_missing_files(tmp_path: Path) -> None:
    # Quirk B22: the golden names a file at every tensor, although only those of one call exist.
    ours = run_golden("bench_path_diff", tmp_path)
    expected = GOLDENS / "bench_path_diff" / "expected"
    assert tree_differences("bench_path_diff", expected, ours) == []
    files = {path.name for path in ours.glob("second/dump/step0/*/dump_tensor_data/*")}
    assert files == {f"Tensor.__add__.0.forward.{end}.0.pt" for end in ("input", "output")}


# quirk B27: with is_enhanced, dropout repeats too; the golden's second call differs.
OVERRULED_SEED = {("enh", "dropout")}


def test_golden_of_seed_all(tmp_path: Path) -> None:
    ours = json.loads((run_golden("seed_all_enhanced", tmp_path) / "result.json").read_text())
    path = GOLDENS / "seed_all_enhanced" / "expected" / "result.json"
    golden = json.loads(path.read_text(encoding="utf-8"))
    for part, name in OVERRULED_SEED:
        first, second = ours[part].pop(name)
        assert first == second == golden[part].pop(name)[0]
    if torch.version.cuda or torch.version.hip:  # the golden was made by a CPU build
        golden["det"] = [True, False, False, True]
        golden["env"]["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    # The generators are the same, the last bit of a normal deviate depends on the maths library.
    assert _rounded(ours) == _rounded(golden)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_rounded(part) for part in value]
    return round(value, 5) if isinstance(value, float) else value


# product.md and issue 3: what only ours records. (The golden watches neither.)
ADDED_RANDOM = re.compile(r".*(dropout|rrelu|Generator|default_rng).*")


def test_golden_of_random_save(tmp_path: Path) -> None:
    golden = _random_rows(GOLDENS / "random_save" / "expected")
    ours = _random_rows(run_golden("random_save", tmp_path))
    assert [row for row in ours if not ADDED_RANDOM.fullmatch(row[0])] == golden


def _random_rows(root: Path) -> list[tuple[str, list[str]]]:
    """(API name, frames in script.py) of each row of the one CSV file."""
    (path,) = root.glob("rs/random_proc*_*.csv")
    assert re.fullmatch(r"random_proc\d+_\d{14}\.csv", path.name)
    with path.open(encoding="utf-8-sig", newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["api_name", "stack"]
    frame = re.compile(r"^File .*script\.py, (line \d+, in .+), $", re.MULTILINE)
    return [(name, frame.findall(stack)) for name, stack in rows]
