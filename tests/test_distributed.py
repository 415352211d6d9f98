"""Real process groups (gloo): folders, collectives, parallel training, a killed rank.

What the ranks do is in ``ranks.py``.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ranks
from helpers import Dump, debugger, read_json, same
from ranks import COLLECTIVES, HANGS_AFTER_S, run_ranks
from runner import _environment

pytestmark = pytest.mark.distributed


def rank_dump(folder: Path, rank: int, step: int = 0) -> Dump:
    """The files of one rank."""
    found = folder / "dump" / f"step{step}" / f"rank{rank}"
    header = read_json(found / "dump.json")
    stack, construct = read_json(found / "stack.json"), read_json(found / "construct.json")
    return Dump(found, header, header["data"], stack, construct)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(program, argument) → what its ranks returned, and the folder; each runs once."""

    @functools.cache
    def run(program: str, argument: str = "") -> tuple[list[Any], Path]:
        folder = tmp_path_factory.mktemp(program)
        return run_ranks(program, folder, argument=argument), folder

    return run


def names_in(folder: Path, step: int = 0) -> list[str]:
    return sorted(path.name for path in (folder / "dump" / f"step{step}").iterdir())


# ---- folders ---------------------------------------------------------------------------------


def test_folder_of_a_process_gets_its_rank_when_the_group_comes_late(ran: Any) -> None:
    seen, folder = ran("late_group")
    assert [early for early, _ in seen] == [[f"proc{pid}"] for _, pid in seen]
    assert names_in(folder) == ["rank0", "rank1"]
    for rank in range(2):
        assert rank_dump(folder, rank).names("relu") == [f"Tensor.relu.{i}.forward" for i in (0, 1)]


def test_folder_gets_its_rank_at_step_when_no_window_follows(ran: Any) -> None:
    _, folder = ran("group_at_step")
    assert names_in(folder) == ["rank0", "rank1"]


def test_rank_id_tells_workers_of_equal_rank_apart(ran: Any) -> None:
    _, folder = ran("worker_groups")
    assert names_in(folder) == ["rank10", "rank11"]
    for worker in range(2):
        (output,) = rank_dump(folder, 10 + worker).data["Tensor.relu.0.forward"]["output"]
        assert output["Max"] == worker


def test_processes_without_a_group_share_a_path_and_no_file(ran: Any) -> None:
    pids, folder = ran("no_group")
    expected = sorted(f"proc{pid}" for pid in pids)
    assert [names_in(folder, step) for step in range(3)] == [expected] * 3
    for step in range(3):
        for name in expected:
            data = read_json(folder / f"dump/step{step}/{name}/dump.json")["data"]
            assert data["Tensor.relu.0.forward"]["output"][0]["Max"] == step


def test_rank_filter_makes_folders_of_wanted_ranks_only(ran: Any) -> None:
    _, folder = ran("rank_filter")
    assert names_in(folder) == ["rank1"]


def test_rank_filter_without_a_rank_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watcher = debugger(tmp_path, level="L1", top={"rank": [0]})
    with caplog.at_level(logging.WARNING, "msprobe"):
        for _ in range(2):
            watcher.start()
            watcher.stop()
            watcher.step()
    said = [record.message for record in caplog.records if "has no rank" in record.message]
    assert len(said) == 1
    assert list(tmp_path.iterdir()) == []


# ---- collectives -----------------------------------------------------------------------------


def tensors(entries: Any) -> list[Tensor]:
    if isinstance(entries, Tensor):
        return [entries]
    values = entries.values() if isinstance(entries, dict) else entries
    if not isinstance(entries, (dict, list)):
        return []
    return [t for value in values for t in tensors(value)]


@pytest.mark.parametrize("rank", [0, 1], ids=["rank0", "rank1"])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_output_of_a_collective_is_what_it_has_written(name: str, rank: int, ran: Any) -> None:
    seen, folder = ran("collectives")
    dump = rank_dump(folder, rank)
    for call, expected in enumerate(seen[rank][name]):
        record = dump.tensors(dump.data[f"Distributed.{name}.{call}.forward"])
        assert same(tensors(record["output"]), expected)
    assert record["output"][-1] == {"type": "bool", "value": True}
    assert record["input_kwargs"] == {"async_op": {"type": "bool", "value": True}}


def test_only_the_calls_of_the_program_are_recorded(ran: Any) -> None:
    _, folder = ran("collectives")
    names = rank_dump(folder, 0).names("Distributed.")
    assert names == [f"Distributed.{name}.{i}.forward" for name in COLLECTIVES for i in (0, 1)]


def test_receive_buffer_is_read_when_it_has_been_waited_for(ran: Any) -> None:
    seen, folder = ran("point_to_point")
    for rank in range(2):
        dump, sent = rank_dump(folder, rank), ranks.ours(1 - rank)
        assert torch.equal(seen[rank]["received"], sent)
        record = dump.tensors(dump.data["Distributed.irecv.0.forward"])
        assert record["input_args"] == [None]  # ignored: an empty buffer has no value
        buffer, group, tag, source = record["output"]
        assert torch.equal(buffer, sent)
        assert group["group_ranks"] == [0, 1]
        assert (tag["value"], source["value"]) == (3, 1 - rank)


def test_blocking_messages_are_recorded(ran: Any) -> None:
    seen, folder = ran("blocking_messages")
    for rank in range(2):
        dump = rank_dump(folder, rank)
        sent = dump.tensors(dump.data["Distributed.send.0.forward"])
        received = dump.tensors(dump.data["Distributed.recv.0.forward"])
        assert received["input_args"][0] is None  # ignored: the buffer is still empty
        assert same(sent["input_args"][0], ranks.ours(rank))
        assert same(received["output"][0], ranks.ours(1 - rank))
        assert same(seen[rank], ranks.ours(1 - rank))


def test_batch_of_messages_is_read_when_each_has_been_waited_for(ran: Any) -> None:
    _, folder = ran("point_to_point")
    for rank in range(2):
        dump = rank_dump(folder, rank)
        record = dump.tensors(dump.data["Distributed.batch_isend_irecv.0.forward"])
        ((sent, received),) = record["output"]
        assert torch.equal(sent["tensor"], ranks.ours(rank))
        assert torch.equal(received["tensor"], ranks.ours(1 - rank))


def test_wait_returns_what_torch_returns(ran: Any) -> None:
    seen, _ = ran("point_to_point")
    for rank in range(2):
        assert seen[rank]["waits"] == 2 * seen[rank]["without"]


def test_work_nobody_waits_for_gives_a_record(ran: Any) -> None:
    seen, folder = ran("nobody_waits")
    for rank in range(2):
        dump = rank_dump(folder, rank)
        ended = dump.tensors(dump.data["Distributed.all_reduce.0.forward"])["output"][0]
        assert torch.equal(ended, torch.full((2,), 3.0))
        assert list(dump.data["Distributed.irecv.0.forward"]) == ["input_args", "input_kwargs"]
        reason = "Distributed.irecv.0.forward: no output: nobody has waited for the collective"
        assert dump.errors() == [reason]
        assert torch.equal(seen[rank]["late"], torch.full((2,), 5.0))


def test_work_is_not_kept_alive_after_stop(ran: Any) -> None:
    seen, _ = ran("nobody_waits")
    assert [rank["references"] for rank in seen] == [(2, 2), (2, 2)]


def test_output_is_taken_when_polling_says_that_it_is_there(ran: Any) -> None:
    _, folder = ran("used_after_polling")
    dump = rank_dump(folder, 0)
    output = dump.tensors(dump.data["Distributed.all_reduce.0.forward"])["output"][0]
    assert torch.equal(output, torch.full((2,), 2.0))


def test_output_is_taken_before_a_callback_of_the_future_runs(ran: Any) -> None:
    seen, folder = ran("changed_by_a_callback")
    for rank in range(2):
        dump = rank_dump(folder, rank)
        output = dump.tensors(dump.data["Distributed.all_reduce.0.forward"])["output"][0]
        assert torch.equal(output, torch.full((2,), 2.0))
        assert torch.equal(seen[rank], torch.full((2,), 102.0))
        assert dump.errors() == []


def test_coalesced_collectives_are_read_when_the_manager_has_finished(ran: Any) -> None:
    seen, folder = ran("coalesced")
    for rank in range(2):
        dump = rank_dump(folder, rank)
        records = [dump.data[name] for name in dump.names("Distributed.")]
        outputs = [dump.tensors(record)["output"][0] for record in records]
        assert same(outputs, seen[rank])
        assert same(outputs[0], ranks.ours(0) + ranks.ours(1))


def test_differentiable_collective_is_recorded_once_in_each_direction(ran: Any) -> None:
    seen, folder = ran("functional")
    dump = rank_dump(folder, 1)
    first, second = (dump.tensors(dump.data[name]) for name in dump.names("Distributed.all"))
    assert torch.equal(first["output"][0], seen[1]["y"])
    assert torch.equal(second["output"][0], seen[1]["x.grad"])


FUNCTIONAL = "Distributed._functional_collectives."


def test_functional_collective_is_recorded_once_under_a_name_of_its_own(ran: Any) -> None:
    """With its own counter: those of ``torch.distributed`` keep their numbers."""
    seen, folder = ran("functional_each")
    for rank in range(2):
        names = rank_dump(folder, rank).names("Distributed.")
        expected = [f"{FUNCTIONAL}{name}.0.forward" for name in seen[rank]]
        assert names == ["Distributed.all_reduce.0.forward", *expected]


def test_output_of_a_functional_collective_is_what_it_gave(ran: Any) -> None:
    seen, folder = ran("functional_each")
    for rank in range(2):
        dump = rank_dump(folder, rank)
        for name, expected in seen[rank].items():
            record = dump.tensors(dump.data[f"{FUNCTIONAL}{name}.0.forward"])
            assert same(tensors(record["output"]), expected)
        assert dump.errors() == []


def test_functional_collective_shows_its_arguments(ran: Any) -> None:
    """Buffers that are only written to are null, as those of other collectives."""
    _, folder = ran("functional_each")
    dump = rank_dump(folder, 1)
    record = dump.tensors(dump.data[f"{FUNCTIONAL}reduce_scatter_tensor.0.forward"])
    tensor, operation, dimension, group = record["input_args"]
    assert torch.equal(tensor, ranks.ours(1))
    assert (operation["value"], dimension["value"]) == ("sum", 0)
    assert [entry["value"] for entry in group] == [0, 1]
    (buffer, *_) = dump.data[f"{FUNCTIONAL}all_gather_tensor_inplace.0.forward"]["input_args"]
    assert buffer is None


def test_gradients_of_a_functional_collective_are_recorded(ran: Any) -> None:
    seen, folder = ran("functional_backward")
    for rank in range(2):
        dump = rank_dump(folder, rank)
        without, with_tool = seen[rank]
        assert same(with_tool, without)
        for name, gradient in with_tool.items():
            record = dump.tensors(dump.data[f"{FUNCTIONAL}{name}.0.backward"])
            assert torch.equal(record["output"][0], gradient)
            assert torch.equal(record["input"][0], torch.arange(float(len(record["input"][0]))))


def test_functions_that_a_functional_collective_calls_keep_their_records(ran: Any) -> None:
    """They had them before it was recorded, so their numbers stay; stride() reads nothing."""
    seen, folder = ran("gathered_columns")
    dump = rank_dump(folder, 0)
    gather = f"{FUNCTIONAL}all_gather_tensor.0.forward"
    assert dump.names("Torch.") + dump.names("Distributed.") == [*dump.data]
    assert dump.names("Distributed.") == [gather]
    (joined,) = dump.tensors(dump.data["Torch.cat.0.forward"])["output"]
    (result,) = dump.tensors(dump.data[gather])["output"]
    assert torch.equal(joined, seen[0])
    assert torch.equal(result, seen[0])


def test_redistribution_is_recorded_where_no_recorded_call_is_around_it(ran: Any) -> None:
    """``redistribute`` is no function of the table, ``F.linear`` is."""
    seen, folder = ran("redistributed")
    dump = rank_dump(folder, 0)
    (gather,) = dump.names("Distributed.")
    assert gather.startswith(f"{FUNCTIONAL}all_gather_")
    assert "Functional.linear.0.forward" in dump.data
    assert torch.equal(seen[0]["whole"], torch.arange(8.0).view(4, 2))


def test_result_of_a_functional_collective_is_read_once_somebody_has_waited(ran: Any) -> None:
    _, folder = ran("functional")
    dump = rank_dump(folder, 0)
    (name,) = dump.names(FUNCTIONAL)
    (output,) = dump.tensors(dump.data[name])["output"]
    (before,) = dump.tensors(dump.data["Torch.exp.0.forward"])["input_args"]
    (after,) = dump.tensors(dump.data["Torch.tanh.0.forward"])["input_args"]
    assert same([output, before, after], [ranks.ours(0) + ranks.ours(1)] * 3)
    assert dump.errors() == []


def test_result_is_described_when_somebody_waits_however_late(ran: Any) -> None:
    """Before it is changed in place; through a view; a record stands once in the file."""
    seen, folder = ran("waited_late")
    for rank in range(2):
        dump = rank_dump(folder, rank)
        assert seen[rank]["early"] == [True] * 4
        outputs = [dump.tensors(dump.data[name])["output"][0] for name in dump.names(FUNCTIONAL)]
        total = seen[rank]["used"]
        assert same(outputs[:3], [total + 2 * i for i in range(3)])
        (flat,) = dump.tensors(dump.data["Torch.flatten.0.forward"])["output"]
        assert torch.equal(flat, total + 4)
        assert torch.equal(seen[rank]["never"], total + 6)
        assert (outputs[3]["Max"], outputs[3]["shape"]) == (None, [4])
        name = f"{FUNCTIONAL}all_reduce.3.forward"
        (line,) = dump.errors()
        assert line.startswith(f"{name}.output.0: no numbers: nobody has waited for the collective")
        text = (dump.folder / "dump.json").read_text(encoding="utf-8")
        assert [text.count(f'"{name}": ') for name in dump.data] == [1] * len(dump.data)


# what tells that a result is there: at once, or at stop() if no other is under way
HEARD = {
    "wait_tensor": (True, True),
    "its overload": (True, True),
    "its old name": (True, True),
    "of the tensor within": (True, False),
    "of the tensor within, changed": (False, False),
}


@pytest.mark.parametrize("step", [0, 1], ids=["all are waited for", "one is not"])
@pytest.mark.parametrize("way", ranks.WAITS)
def test_result_that_an_operator_has_waited_for_has_its_values_or_a_reason(
    way: str, step: int, ran: Any
) -> None:
    _, folder = ran("waited_directly")
    number = list(ranks.WAITS).index(way)
    dump = rank_dump(folder, 0, step)
    name = f"{FUNCTIONAL}all_reduce.{number}.forward"
    (entry,) = dump.data[name]["output"]
    reasons = [line for line in dump.errors() if line.startswith(f"{name}.output.0: no numbers: ")]
    if HEARD[way][step]:
        assert [entry["Min"], entry["Max"], reasons] == [10.0, 16.0, []]
    else:
        assert (entry["Min"], entry["Max"], len(reasons)) == (None, None, 1)
        assert ("changed in place" in reasons[0]) == (step == 0)


def test_output_of_a_row_parallel_layer_has_its_values(ran: Any) -> None:
    """The all-reduce is under way when the layer returns, and is waited for by what uses it."""
    _, folder = ran("train", "tensor_parallel")
    model = ranks.build()
    kept: list[Tensor] = []
    model[0].down.register_forward_hook(lambda *call: kept.append(call[2].detach()))
    model(torch.randn(3, 4, generator=torch.Generator().manual_seed(0)))
    for rank in range(2):
        dump = rank_dump(folder, rank)
        record = dump.tensors(dump.data["Module.0.down.Linear.forward.0"])
        # The sum of two partial products is rounded otherwise than that of all terms.
        torch.testing.assert_close(record["output"][0], kept[0], rtol=1e-5, atol=1e-6)
        assert dump.errors() == []


@pytest.mark.parametrize("level", ["L1", "mix"])
def test_steps_of_dtensors_have_the_same_records_whatever_torch_keeps_in_caches(
    level: str, ran: Any
) -> None:
    """Only the first step works out, with fake tensors, how results are laid out."""
    _, folder = ran("sharding_propagation", level)
    for rank in range(2):
        first, second, third = (rank_dump(folder, rank, step).data for step in range(3))
        assert list(first) == list(second) == list(third)
        assert "FakeTensor" not in str(first)
        for name in ("Functional.linear", "Torch.einsum", "Tensor.fill_", "Tensor.__matmul__"):
            assert f"{name}.0.forward" in first


def test_arguments_of_collectives_are_encoded(ran: Any) -> None:
    _, folder = ran("encodings")
    dump = rank_dump(folder, 0)
    record = dump.data["Distributed.all_reduce.0.forward"]
    group = {"type": "torch.ProcessGroup", "group_ranks": [0, 1], "group_id": "77849d8c"}
    operation = {"type": "torch.distributed.ReduceOp", "value": "RedOpType.MAX"}
    assert record["input_args"][1] == operation
    assert record["input_kwargs"] == {"group": group}
    assert record["output"][1:] == [operation, group]
    ((send, receive),) = dump.data["Distributed.batch_isend_irecv.0.forward"]["input_args"]
    for entry, name in ((send, "isend"), (receive, "irecv")):
        assert entry.pop("tensor")["shape"] == [4]
        assert entry == {
            "class_type": "torch.distributed.P2POp",
            "op": name,
            "peer": 1,
            "tag": 7,
            "group_id": group["group_id"],
        }


# ---- training --------------------------------------------------------------------------------

KINDS = list(ranks.WRAPPERS)
CLASSES = {
    "ddp": {"": "module.", "Block": "Block", "Linear": "Linear"},
    "fsdp2": {"": "", "Block": "FSDPBlock", "Linear": "FSDPLinear"},
    "tensor_parallel": {"": "", "Block": "Block", "Linear": "Linear"},
}
PARTS = {"up": "Linear", "act": "GELU", "down": "Linear"}


def module_bases(kind: str) -> list[str]:
    words = CLASSES[kind]
    blocks = [f"{words['']}{i}" for i in range(2)]
    inner = [f"{block}.{part}.{name}" for block in blocks for part, name in PARTS.items()]
    outer = [f"{block}.{words['Block']}" for block in blocks]
    head = [f"{words['']}2.{words['Linear']}"]
    return [*inner, *outer, *head, *(["module.Sequential"] if kind == "ddp" else [])]


@pytest.mark.parametrize("kind", [*KINDS, *ranks.VARIANTS])
def test_parallel_training_is_bit_equal_and_sends_nothing_more(kind: str, ran: Any) -> None:
    seen, _ = ran("train", kind)
    for without, with_tool in seen:
        assert without["collectives"] == with_tool["collectives"] > 0
        assert same(with_tool["losses"], without["losses"])
        assert same(with_tool["gradients"], without["gradients"])
        assert same(with_tool["weights"], without["weights"])


@pytest.mark.parametrize("kind", KINDS)
def test_each_module_of_a_parallel_model_has_its_records(kind: str, ran: Any) -> None:
    _, folder = ran("train", kind)
    bases = module_bases(kind)
    for rank in range(2):
        dump = rank_dump(folder, rank, step=1)
        for direction in ("forward", "backward"):
            names = dump.names(f".{direction}.0")
            expected = sorted(f"Module.{base}.{direction}.0" for base in bases)
            assert sorted(name for name in names if name.startswith("Module.")) == expected
        with_parameters = [base for base in bases if re.search("Linear$", base)]
        expected = sorted(f"Module.{base}.parameters_grad.0" for base in with_parameters)
        assert sorted(dump.names("parameters_grad")) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_grad_is_what_the_optimizer_gets(kind: str, ran: Any) -> None:
    """After the all-reduce of DDP, the local shard of the others."""
    seen, folder = ran("train", kind)
    for rank in range(2):
        for step, expected in enumerate(seen[rank][0]["gradients"]):
            dump = rank_dump(folder, rank, step)
            found = gradients_by_parameter(dump)
            assert same([found.get(name) for name in expected], list(expected.values()))


def gradients_by_parameter(dump: Dump) -> dict[str, Tensor]:
    found = {}
    for name in dump.names("parameters_grad"):
        module = name.removeprefix("Module.").rsplit(".", 3)[0]
        for parameter, (value,) in dump.tensors(dump.data[name]).items():
            found[f"{module}.{parameter}"] = value
    return found


WRAPPINGS = re.compile(r"_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.")


@pytest.mark.parametrize("kind", ranks.VARIANTS)
def test_variants_of_wrappers_have_each_backward_and_gradient(kind: str, ran: Any) -> None:
    """A parameter of which FSDP1 has put no part on a rank has no gradient there."""
    seen, folder = ran("train", kind)
    for rank in range(2):
        dump = rank_dump(folder, rank, step=1)
        forwards = {name for name in dump.names(".forward.0") if name.startswith("Module.")}
        for name in forwards:
            assert name.replace(".forward.", ".backward.") in dump.data
        found = {WRAPPINGS.sub("", n): grad for n, grad in gradients_by_parameter(dump).items()}
        gradients = seen[rank][0]["gradients"][1]
        used = {name: grad for name, grad in gradients.items() if ".spare." not in name}
        for name, expected in used.items():
            assert same(found[WRAPPINGS.sub("", name)], expected)
        assert len(found) == len(used)
        missing = [name for name, gradient in found.items() if gradient is None]
        said = [line for line in dump.errors() if "no gradient on this rank: FSDP" in line]
        assert len(said) == len(missing) == len(dump.errors())
        assert bool(missing) == (kind == "fsdp1")


@pytest.mark.parametrize(
    ("kind", "weight", "shape", "placement"),
    [
        ("fsdp2", "Module.0.up.Linear", [4, 4], {"Shard": {"dim": 0}}),
        ("tensor_parallel", "Module.0.up.Linear", [4, 4], {"Shard": {"dim": 0}}),
        ("tensor_parallel", "Module.0.down.Linear", [4, 4], {"Shard": {"dim": 1}}),
    ],
    ids=["fsdp2", "columns", "rows"],
)
def test_gradient_of_a_sharded_parameter_tells_its_placement(
    kind: str, weight: str, shape: list[int], placement: Any, ran: Any
) -> None:
    seen, folder = ran("train", kind)
    dump = rank_dump(folder, 0)
    (entry,) = dump.data[f"{weight}.parameters_grad.0"]["weight"]
    local = seen[0][0]["gradients"][0][
        f"{weight.removeprefix('Module.').rpartition('.')[0]}.weight"
    ]
    assert entry["type"] == "torch.distributed.tensor.DTensor"
    assert entry["device_mesh"] == [0, 1]
    assert entry["placements"] == [placement]
    assert entry["shape"] == shape == list(local.shape)
    assert entry["Max"] == local.max().item()


def test_micro_batch_that_ddp_does_not_reduce_shows_its_own_gradient(ran: Any) -> None:
    seen, folder = ran("accumulate_ddp")
    for rank in range(2):
        dump = rank_dump(folder, rank)
        for backward, expected in enumerate(seen[rank]):
            name = f"Module.module.0.up.Linear.parameters_grad.{backward}"
            (found,) = dump.tensors(dump.data[name])["weight"]
            assert torch.equal(found, expected["module.0.up.weight"])
    assert not same(seen[0][0], seen[1][0])
    assert same(seen[0][1], seen[1][1])


def test_compiled_collectives_and_models_are_as_without_the_tool(ran: Any) -> None:
    seen, folder = ran("compiled", "aot_eager")
    for rank, (without, with_tool) in enumerate(seen):
        assert same(with_tool["results"], without["results"])
        assert with_tool["collectives"] == without["collectives"]
        assert with_tool["graphs"] == without["graphs"]
        dump = rank_dump(folder, rank)
        assert dump.names("Distributed.") == ["Distributed.all_reduce.0.forward"]
        assert dump.errors() == []


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
def test_pipeline_schedule_gives_each_micro_batch_its_records(schedule: str, ran: Any) -> None:
    seen, folder = ran("pipeline", schedule)
    for rank, (without, with_tool) in enumerate(seen):
        assert same(with_tool["values"], without["values"])
        assert with_tool["collectives"] == without["collectives"]
        dump = rank_dump(folder, rank)
        name = f"Module.{rank}.Block"
        for direction in ("forward", "backward"):
            expected = [f"{name}.{direction}.{i}" for i in range(4)]
            assert sorted(dump.names(f"{name}.{direction}")) == expected
        last = dump.data[f"Module.{rank}.up.Linear.parameters_grad.3"]
        (found,) = dump.tensors(last)["weight"]
        # The schedule divides what the four passes have accumulated by their number at its end.
        assert torch.allclose(found / 4, without["values"][f"{rank}.up.weight"], rtol=1e-6)


# ---- a rank that dies ------------------------------------------------------------------------


def test_files_of_all_ranks_are_valid_when_one_of_four_is_killed(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    program = [ranks.__file__, "die_in_the_middle", str(tmp_path), "4"]
    command = [*torchrun, "--nproc-per-node", "4", *program]
    environment = {**os.environ, **_environment()}
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=HANGS_AFTER_S
    )
    assert ended.returncode != 0
    assert "Signal 9 (SIGKILL)" in ended.stderr, ended.stderr
    for rank in range(4):
        assert len(rank_dump(tmp_path, rank, 0).names("Distributed.all_reduce")) == 4
        dump = rank_dump(tmp_path, rank, 1)
        assert len(dump.names("Distributed.all_reduce")) == (3 if rank == 2 else 4)
        assert len(dump.names("Module.module.Sequential.backward")) == 3
    assert names_in(tmp_path, 1) == [f"rank{rank}" for rank in range(4)]
