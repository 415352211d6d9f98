"""Spellings that public projects use beside the documented ones; each test names the project."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import msprobe.pytorch
from msprobe.errors import UsageError
from msprobe.pytorch import PrecisionDebugger, seed_all
from msprobe.pytorch.seed import undo_seed_all
from recorded import Net, batch, make_net, rank_folder, read_data, step_names
from runner import run_script

APIS_OF_NET = 5


def run_once(debugger: Any, model: nn.Module, **arguments: Any) -> None:
    debugger.start(model, **arguments)
    model(batch(0))
    debugger.stop()


# ---- where things are imported from


def test_the_package_is_found_without_being_imported() -> None:
    """verl asks ``importlib.util.find_spec("msprobe")`` whether the tool is there."""
    code = """
        import importlib.util, sys
        assert importlib.util.find_spec("msprobe") is not None
        assert "msprobe" not in sys.modules and "torch" not in sys.modules
    """
    lines = "\n".join(line.strip() for line in code.splitlines())
    subprocess.run([sys.executable, "-c", lines], check=True)


def test_the_debugger_has_its_old_import_path() -> None:
    """verl-omni tries ``msprobe.pytorch.debugger.precision_debugger`` first."""
    from msprobe.pytorch.debugger import PrecisionDebugger as from_package
    from msprobe.pytorch.debugger.precision_debugger import PrecisionDebugger as from_module

    assert from_module is from_package is PrecisionDebugger


def test_seed_all_has_its_old_import_paths() -> None:
    """verl-omni imports it from ``common.utils``, an unnamed training script from ``common``."""
    from msprobe.pytorch.common import seed_all as from_package
    from msprobe.pytorch.common.utils import seed_all as from_module

    assert from_module is from_package is seed_all


def test_acl_graph_dumper_is_cleanly_absent(tmp_path: Path) -> None:
    """vllm-ascend imports it in graph mode only, and asks ``hasattr(debugger, "stop")``."""
    with pytest.raises(ImportError, match="AclGraphDumper"):
        from msprobe.pytorch import AclGraphDumper  # type: ignore[attr-defined]  # noqa: F401
    assert not hasattr(msprobe.pytorch, "AclGraphDumper")
    assert hasattr(PrecisionDebugger(dump_path=tmp_path), "stop")


# ---- construction


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    content = {"task": "statistics", "dump_path": str(tmp_path / "dump"), "level": "L0"}
    path.write_text(json.dumps(content))
    return path


def test_a_configuration_path_is_taken_by_position(config_file: Path, tmp_path: Path) -> None:
    """vllm-ascend: ``PrecisionDebugger(dump_cfg)``, a str."""
    run_once(PrecisionDebugger(str(config_file)), make_net())
    assert next(iter(read_data(tmp_path / "dump"))) == "Module.fc1.Linear.forward.0"


@pytest.mark.parametrize("kind", [str, Path, json.loads], ids=["str", "Path", "dict"])
def test_a_configuration_is_a_path_or_a_dict(kind: Any, config_file: Path, tmp_path: Path) -> None:
    """SGLang gives ``config_path=`` as str; vllm-ascend holds a dict."""
    argument = kind(config_file.read_text()) if kind is json.loads else kind(config_file)
    run_once(PrecisionDebugger(config_path=argument), make_net())
    assert len(read_data(tmp_path / "dump")) == 3


def test_a_file_without_dump_path_takes_it_from_the_constructor(tmp_path: Path) -> None:
    """verl's config.json never holds ``dump_path``."""
    path = tmp_path / "config.json"
    path.write_text('{"task": "statistics", "level": "L1", "statistics": {"scope": []}}')
    debugger = PrecisionDebugger(config_path=str(path), dump_path=str(tmp_path / "stage"))
    run_once(debugger, make_net())
    assert len(read_data(tmp_path / "stage")) == APIS_OF_NET


def test_the_fewest_keys_of_a_published_file_are_enough(tmp_path: Path) -> None:
    """vllm-ascend's graph example: task, level, dump_path and an empty list."""
    content = {"task": "statistics", "level": "L1", "dump_path": str(tmp_path / "dump"),
               "statistics": {"list": []}}  # fmt: skip
    run_once(PrecisionDebugger(content), make_net())
    assert len(read_data(tmp_path / "dump")) == APIS_OF_NET


def test_blocks_of_other_tools_in_the_file_are_tolerated_in_silence(tmp_path: Path) -> None:
    """MindSpeed's and SGLang's config.json, keys of ModelArts' guide included."""
    content = {
        "task": "statistics", "dump_path": str(tmp_path), "rank": [], "step": [], "level": "L1",
        "seed": 1234, "is_deterministic": False, "enable_dataloader": False, "async_dump": False,
        "tensor": {"scope": [], "list": [], "data_mode": ["all"], "file_format": "npy"},
        "statistics": {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"},
        "overflow_check": {"overflow_nums": 1, "check_mode": "all"},
        "acc_check": {"white_list": [], "black_list": [], "error_data_path": "./"},
        "run_ut": {"white_list": [], "black_list": [], "error_data_path": "./"},
        "grad_probe": {"grad_level": "L1", "param_list": [], "bounds": [-1, 0, 1]},
        "free_benchmark": {"scope": [], "list": [], "fuzz_device": "npu", "pert_mode": "add"},
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PrecisionDebugger(content)


def test_arguments_alone_configure_it_with_step_ranges(tmp_path: Path) -> None:
    """MindSpeed-RL: no file, and ``step=["0-2"]``."""
    debugger = PrecisionDebugger(
        task="statistics", level="L0", step=["0-1"], dump_path=str(tmp_path)
    )
    net = make_net()
    for _ in range(4):
        run_once(debugger, net)
        debugger.step()
    assert step_names(tmp_path) == ["step0", "step1"]


def test_the_constructors_model_serves_a_start_without_one(tmp_path: Path) -> None:
    """ms-swift and wenet: ``PrecisionDebugger(..., model=model)``, then ``start()``."""
    net = make_net()
    debugger = PrecisionDebugger(dump_path=str(tmp_path), level="L0", model=net)
    debugger.start()
    net(batch(0))
    debugger.stop()
    assert len(read_data(tmp_path)) == 3


def test_a_second_construction_takes_a_new_model_over(tmp_path: Path) -> None:
    """ms-swift constructs in each train step; the model may have been wrapped meanwhile."""
    PrecisionDebugger(dump_path=str(tmp_path), level="L0", model=make_net())
    wrapped = nn.Sequential(make_net())
    PrecisionDebugger(dump_path=str(tmp_path), level="L0", model=wrapped).start()
    wrapped(batch(0))
    PrecisionDebugger.stop()
    assert "Module.0.fc1.Linear.forward.0" in read_data(tmp_path)


def test_construction_again_with_the_same_arguments_is_silent(tmp_path: Path) -> None:
    """An anomaly monitor constructs anew for each region from the same file."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = PrecisionDebugger(dump_path=str(tmp_path), level="L1")
        assert PrecisionDebugger(dump_path=str(tmp_path), level="L1") is first
        assert PrecisionDebugger() is first


def test_construction_again_with_other_arguments_warns_and_changes_nothing(
    tmp_path: Path,
) -> None:
    """An earlier verl: two workers of one process, each with its own path."""
    first = PrecisionDebugger(dump_path=str(tmp_path / "a"), level="L1")
    with pytest.warns(UserWarning, match="exists already.*_instance = None"):
        again = PrecisionDebugger(dump_path=str(tmp_path / "b"), level="L0")
    assert again is first
    assert (again.config.level, again.config.dump_path) == ("L1", str(tmp_path / "a"))
    assert not (tmp_path / "b").exists()


BEFORE_THE_GROUP = """
import sys
import torch
from msprobe.pytorch import PrecisionDebugger

debugger = PrecisionDebugger({"rank": [0]}, dump_path=sys.argv[1], level="L1")
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
debugger.start()
torch.ones(2).relu()
debugger.stop()
debugger.step()
torch.distributed.destroy_process_group()
"""


@pytest.mark.distributed
def test_construction_before_the_process_group_finds_the_rank_later(tmp_path: Path) -> None:
    """MindSpeed constructs when its module is imported; verl and vllm-ascend before the model."""
    script = tmp_path / "script.py"
    script.write_text(BEFORE_THE_GROUP)
    code, output = run_script(script, [str(tmp_path / "dump")], cwd=tmp_path)
    assert code == 0, output
    assert rank_folder(tmp_path / "dump").name == "rank0"


# ---- debugger.config and debugger.service


@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_config_level_is_a_text_that_frameworks_branch_on(level: str, tmp_path: Path) -> None:
    """vllm-ascend 0.12 starts with the model where the upper-case level is L0 or MIX."""
    debugger = PrecisionDebugger(dump_path=tmp_path, level=level)
    found = getattr(getattr(debugger, "config", None), "level", "L1")
    assert type(found) is str
    assert str(found).upper() == level.upper()


@pytest.mark.parametrize("view", ["config", "service.config"])
def test_level_set_between_windows_is_in_force_from_the_next_start(
    view: str, tmp_path: Path
) -> None:
    """As dump_path is; no public caller is known yet, vllm-ascend only reads it."""
    debugger = PrecisionDebugger(dump_path=tmp_path, level="L1")
    net = make_net()
    run_once(debugger, net)
    debugger.step()
    view_of(debugger, view).level = "L0"
    run_once(debugger, net)
    debugger.step()
    assert debugger.config.level == debugger.service.config.level == "L0"
    assert not any(name.startswith("Module.") for name in read_data(tmp_path, 0))
    assert all(name.startswith("Module.") for name in read_data(tmp_path, 1))
    header = json.loads((rank_folder(tmp_path, 1) / "dump.json").read_text())
    assert header["level"] == "L0"


def view_of(debugger: Any, path: str) -> Any:
    for name in path.split("."):
        debugger = getattr(debugger, name)
    return debugger


@pytest.mark.parametrize("view", ["config", "service.config"])
def test_dump_path_set_between_windows_is_in_force_from_the_next_start(
    view: str, tmp_path: Path
) -> None:
    """verl and MindSpeed-RL set ``service.config``, verl-omni and a monitor ``config``."""
    debugger = PrecisionDebugger(dump_path=str(tmp_path / "a"), level="L1")
    net = make_net()
    run_once(debugger, net)
    prefix = debugger.config.dump_path
    assert prefix == str(tmp_path / "a")
    view_of(debugger, view).dump_path = os.path.join(prefix, "tag")
    assert debugger.config.dump_path == debugger.service.config.dump_path == f"{prefix}/tag"
    run_once(debugger, net)
    assert len(read_data(tmp_path / "a" / "tag")) == APIS_OF_NET
    assert next(iter(read_data(tmp_path / "a" / "tag"))) == "Functional.linear.0.forward"


def test_dump_path_set_in_an_open_window_waits_for_the_next_start(tmp_path: Path) -> None:
    """verl-omni redirects by process id whenever it likes."""
    debugger = PrecisionDebugger(dump_path=str(tmp_path / "a"), level="L1")
    net = make_net()
    debugger.start(net)
    net(batch(0))
    debugger.config.dump_path = tmp_path / "b"
    net(batch(0))
    debugger.stop()
    run_once(debugger, net)
    assert len(read_data(tmp_path / "a")) == 2 * APIS_OF_NET
    assert len(read_data(tmp_path / "b")) == APIS_OF_NET


def test_a_key_that_can_not_be_changed_says_so(tmp_path: Path) -> None:
    """Nobody is known to set others; silence would hide that it had no effect."""
    debugger = PrecisionDebugger(dump_path=tmp_path)
    with pytest.raises(AttributeError, match=r"'task' can not be changed.*_instance = None"):
        debugger.config.task = "tensor"
    with pytest.raises(AttributeError, match="no 'dumppath'"):
        debugger.service.config.dumppath = "x"
    with pytest.raises(AttributeError):
        debugger.config.dumppath  # noqa: B018


def test_first_start_tells_whether_a_start_has_been(tmp_path: Path) -> None:
    """MindSpeed-RL sets it to have hooks installed for a new model, and reads it back."""
    debugger = PrecisionDebugger(dump_path=tmp_path, level="L0")
    assert debugger.service.first_start is True
    debugger.start(make_net())
    assert debugger.service.first_start is False
    debugger.stop()
    debugger.service.first_start = True
    net = make_net(1)
    run_once(debugger, net)
    assert debugger.service.first_start is False
    assert len(read_data(tmp_path)) == 3


def test_should_stop_service_is_true_after_the_last_wanted_step(tmp_path: Path) -> None:
    """verl's asynchronous recipe reads it before each stop()."""
    debugger = PrecisionDebugger(dump_path=tmp_path, step=[0, 1])
    seen = []
    for _ in range(3):
        debugger.start()
        seen.append(debugger.service.should_stop_service)
        debugger.stop()
        debugger.step()
    assert seen == [False, False, True]


def test_current_iter_is_the_number_of_the_step(tmp_path: Path) -> None:
    """verl's asynchronous recipe logs it; a trainer's manager begins at ``set_init_step(n)``."""
    debugger = PrecisionDebugger(dump_path=tmp_path, level="L1")
    debugger.set_init_step(7)
    seen = []
    for _ in range(2):
        seen.append(debugger.service.current_iter)
        run_once(debugger, make_net())
        debugger.step()
    assert seen == [7, 8]
    assert step_names(tmp_path) == ["step7", "step8"]


@pytest.mark.parametrize("spelling", ["reset_status", "_reset_status"])
def test_reset_status_begins_anew_at_step_0(spelling: str, tmp_path: Path) -> None:
    """verl tries both names; recipes call the private one and never step()."""
    debugger = PrecisionDebugger(dump_path=tmp_path / "a", level="L1", step=[0])
    net = make_net()
    run_once(debugger, net)
    debugger.step()
    assert debugger.service.should_stop_service
    reset = getattr(debugger.service, spelling, None)
    assert callable(reset)
    reset()
    assert (debugger.service.current_iter, debugger.service.should_stop_service) == (0, False)
    debugger.config.dump_path = tmp_path / "b"
    run_once(debugger, net)
    assert read_data(tmp_path / "b") == read_data(tmp_path / "a")


# ---- _instance, _maybe_reload_config


def test_instance_is_readable_and_none_before_construction(tmp_path: Path) -> None:
    """An earlier verl tests ``PrecisionDebugger._instance is None`` in each worker."""
    assert PrecisionDebugger._instance is None
    debugger = PrecisionDebugger(dump_path=tmp_path)
    assert PrecisionDebugger._instance is debugger


def test_instance_set_to_none_in_an_open_window_gives_torch_back(tmp_path: Path) -> None:
    """An earlier verl; nothing of the old session may stay in torch."""
    relu, net = F.relu, make_net()
    PrecisionDebugger(dump_path=tmp_path, level="mix").start(net)
    assert vars(F)["relu"] is not relu
    PrecisionDebugger._instance = None
    assert vars(F)["relu"] is relu
    assert not any(module._forward_hooks for module in net.modules())
    with pytest.raises(UsageError, match=r"start\(\) before PrecisionDebugger exists"):
        PrecisionDebugger.start(net)


def test_instance_set_to_something_else_is_refused(tmp_path: Path) -> None:
    """An earlier verl sets None only; another object could not be a debugger."""
    debugger = PrecisionDebugger(dump_path=tmp_path)
    PrecisionDebugger._instance = debugger
    with pytest.raises(UsageError, match="can only be set to None"):
        PrecisionDebugger._instance = object()
    assert PrecisionDebugger._instance is debugger


def test_an_old_reference_after_the_reset_goes_on_in_the_new_session(tmp_path: Path) -> None:
    """An earlier verl keeps ``self.debugger`` while another worker resets the singleton."""
    old = PrecisionDebugger(dump_path=tmp_path / "a", level="L1")
    PrecisionDebugger._instance = None
    PrecisionDebugger(dump_path=tmp_path / "b", level="L1")
    run_once(old, make_net())
    old.step()
    assert len(read_data(tmp_path / "b")) == APIS_OF_NET


def test_maybe_reload_config_takes_the_file_over_at_once(tmp_path: Path) -> None:
    """A dumper for vllm-ascend rewrites ``dump_enable`` and calls this, both on one anomaly."""
    path = tmp_path / "config.json"
    content = {"dump_path": str(tmp_path / "dump"), "level": "L1", "dump_enable": False}
    path.write_text(json.dumps(content))
    debugger = PrecisionDebugger(str(path))
    run_once(debugger, make_net())
    debugger.step()
    path.write_text(json.dumps(content | {"dump_enable": True}))
    debugger._maybe_reload_config(force=True)
    run_once(debugger, make_net())
    debugger.step()
    assert step_names(tmp_path / "dump") == ["step1"]


# ---- start, stop, step and the others


def test_start_takes_what_inference_servers_pass(tmp_path: Path) -> None:
    """vllm-ascend: scheduled_tokens without a request_id; SGLang: ``rank_id=None``."""
    debugger = PrecisionDebugger(dump_path=tmp_path, level="mix")
    net = make_net()
    run_once(debugger, net, rank_id=None)
    run_once(debugger, net, scheduled_tokens={"req-1": 1, "req-2": 1})
    debugger.step()
    assert len(read_data(tmp_path)) == 2 * (APIS_OF_NET + 3)


def test_rank_id_names_the_folder(tmp_path: Path) -> None:
    """SGLang with several data-parallel workers, each of which is rank 0 of its own group."""
    debugger = PrecisionDebugger({"rank": [3]}, dump_path=tmp_path, level="L1")
    run_once(debugger, make_net(), rank_id=3)
    assert rank_folder(tmp_path).name == "rank3"


def test_a_list_of_model_parts_is_numbered(tmp_path: Path) -> None:
    """MindSpeed (model chunks), TorchTitan (pipeline parts), slime."""
    debugger = PrecisionDebugger(dump_path=tmp_path, level="L0")
    parts = [make_net(0), make_net(1)]
    debugger.start(model=parts)
    for part in parts:
        part(batch(0))
    debugger.stop()
    names = list(read_data(tmp_path))
    assert names[0] == "Module.0.fc1.Linear.forward.0"
    assert names[3] == "Module.1.fc1.Linear.forward.0"


def test_step_without_dump_discards_and_takes_other_keywords(tmp_path: Path) -> None:
    """vllm-ascend: ``step(**kwargs)`` with ``dump=False`` for dummy runs, also when not started."""
    debugger = PrecisionDebugger(dump_path=tmp_path, level="L1")
    debugger.step(dump=False)
    net = make_net()
    run_once(debugger, net)
    debugger.step(dump=False)
    run_once(debugger, net)
    debugger.step(dump=True)
    assert step_names(tmp_path) == ["step2"]
    assert next(iter(read_data(tmp_path, 2))) == "Functional.linear.0.forward"


def test_gradients_of_a_discarded_step_are_dropped(tmp_path: Path) -> None:
    """vllm-ascend's dummy runs have none; a trainer's warm-up has, after step(dump=False)."""
    debugger = PrecisionDebugger(dump_path=tmp_path, level="mix")
    net = make_net()
    debugger.start(net)
    loss = net(batch(0)).sum()
    debugger.stop()
    debugger.step(dump=False)
    loss.backward()
    PrecisionDebugger._instance = None
    assert step_names(tmp_path) == []


def test_methods_work_on_the_class(tmp_path: Path) -> None:
    """The XLA trainer and an earlier verl hold no reference."""
    PrecisionDebugger(dump_path=tmp_path, level="L1")
    net = make_net()
    PrecisionDebugger.start()
    loss = net(batch(0)).sum()
    PrecisionDebugger.forward_backward_dump_end()
    loss.backward()
    PrecisionDebugger.stop()
    PrecisionDebugger.step()
    kinds = [name.rpartition(".")[2] for name in read_data(tmp_path)]
    assert kinds.count("forward") == kinds.count("backward") == APIS_OF_NET + 1


def test_save_works_on_the_class_without_gradients(tmp_path: Path) -> None:
    """A TorchTitan harness: ``PrecisionDebugger.save(t, name, save_backward=False)``."""
    PrecisionDebugger(dump_path=tmp_path, level="debug")
    PrecisionDebugger.save(torch.ones(2), "hidden", save_backward=False)
    PrecisionDebugger.step()
    assert list(read_data(tmp_path, file="debug.json")) == ["hidden.0.debug"]


def test_a_forward_that_the_user_replaces_on_the_class_is_the_one_that_runs(
    tmp_path: Path,
) -> None:
    """ms-swift swaps ``VocabParallelEmbedding.forward`` on the class inside the window."""
    net = make_net()
    debugger = PrecisionDebugger(dump_path=tmp_path, level="mix")
    original = nn.ReLU.forward
    debugger.start(net)
    nn.ReLU.forward = lambda self, x: F.softplus(x)  # type: ignore[method-assign]
    try:
        net(batch(0))
    finally:
        nn.ReLU.forward = original  # type: ignore[method-assign]
    debugger.stop()
    data = read_data(tmp_path)
    assert "Functional.softplus.0.forward" in data
    assert "Functional.relu.0.forward" not in data
    assert (
        data["Module.act.ReLU.forward.0"]["output"]
        == (data["Functional.softplus.0.forward"]["output"])
    )


def test_net_is_called_by_its_class_too(tmp_path: Path) -> None:
    """Llama-style user code calls ``Class.forward(self, x)``: hooks do not run, APIs do."""
    net = make_net()
    debugger = PrecisionDebugger(dump_path=tmp_path, level="mix")
    debugger.start(net)
    Net.forward(net, batch(0))
    debugger.stop()
    assert len(read_data(tmp_path)) == APIS_OF_NET + 3


# ---- seed_all


@pytest.fixture
def _generators_kept() -> Iterator[None]:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    undo_seed_all()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


@pytest.mark.usefixtures("_generators_kept")
def test_seed_all_takes_the_seed_by_position() -> None:
    """wenet: ``seed_all(777)``."""
    seed_all(777)
    drawn = torch.rand(2)
    torch.manual_seed(777)
    assert torch.equal(drawn, torch.rand(2))


@pytest.mark.usefixtures("_generators_kept")
def test_seed_all_takes_the_keywords_of_a_trainer() -> None:
    """TorchTitan: seed, mode and rm_dropout by name; vllm-ascend and SGLang: ``mode=True``."""
    seed_all(seed=3, mode=True, rm_dropout=False)
    assert torch.are_deterministic_algorithms_enabled()


@pytest.mark.usefixtures("_generators_kept")
def test_seed_all_ignores_is_gpu_with_a_warning() -> None:
    """MindSpeed-MM's guide still says ``seed_all(is_gpu=False, mode=True)``."""
    with pytest.warns(UserWarning, match="is_gpu"):
        seed_all(is_gpu=False, mode=True)
    assert torch.are_deterministic_algorithms_enabled()
