"""Programs of several processes: ``python ranks.py PROGRAM FOLDER RANKS [ARGUMENT]``.

Each rank is a fork in which the function of that name runs; what it returns is saved in
``FOLDER/seen<rank>.pt``, what it collects goes to ``FOLDER/dump``.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

from msprobe.pytorch import PrecisionDebugger
from runner import run_script

RANKS = 2
HANGS_AFTER_S = 300  # far beyond what a busy machine needs: programs take a few seconds


def run_ranks(program: str, folder: Path, ranks: int = RANKS, argument: str = "") -> list[Any]:
    """Runs a program of this file; what each rank returned."""
    arguments = [program, str(folder), str(ranks), argument]
    code, output = run_script(Path(__file__), arguments, timeout_s=HANGS_AFTER_S)
    assert code == 0, output
    return [torch.load(folder / f"seen{rank}.pt") for rank in range(ranks)]


def join(rank: int, ranks: int, folder: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )


def _rank(rank: int, ranks: int, program: str, folder: Path, argument: str) -> None:
    torch.set_num_threads(1)
    function = PROGRAMS[program]
    if program not in WITHOUT_GROUP:
        join(rank, ranks, folder)
    seen = function(rank, folder, *([argument] if argument else []))
    torch.save(seen, folder / f"seen{rank}.pt")
    PrecisionDebugger._instance = None
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def watcher(folder: Path, **config: Any) -> PrecisionDebugger:
    return PrecisionDebugger({"dump_path": str(folder / "dump"), **config})


# ---- folders ---------------------------------------------------------------------------------


def late_group(rank: int, folder: Path) -> Any:
    """A window before there is a group, one after it, and a step."""
    debugger = watcher(folder)
    debugger.start()
    torch.ones(2).relu()
    debugger.stop()
    early = [
        path.name for path in (folder / "dump/step0").iterdir() if str(os.getpid()) in path.name
    ]
    join(rank, RANKS, folder)
    debugger.start()
    torch.ones(2).relu()
    debugger.stop()
    debugger.step()
    return early, os.getpid()


def group_at_step(rank: int, folder: Path) -> Any:
    """The group comes after the only window: ``step()`` finds the rank."""
    debugger = watcher(folder)
    debugger.start()
    torch.ones(2).relu()
    debugger.stop()
    join(rank, RANKS, folder)
    debugger.step()


def worker_groups(rank: int, folder: Path) -> Any:
    """Two groups of one process each, as data-parallel servers make: both have rank 0."""
    own = folder / f"group{rank}"
    own.mkdir()
    join(0, 1, own)
    debugger = watcher(folder)
    debugger.start(rank_id=10 + rank)
    torch.full((2,), float(rank)).relu()
    debugger.stop()
    debugger.step()


def no_group(rank: int, folder: Path) -> Any:
    """Processes that know nothing of each other on one dump_path."""
    debugger = watcher(folder)
    for step in range(3):
        debugger.start()
        torch.full((2,), float(step)).relu()
        debugger.stop()
        debugger.step()
    return os.getpid()


def rank_filter(rank: int, folder: Path) -> Any:
    debugger = watcher(folder, rank=[1])
    debugger.start()
    torch.ones(2).relu()
    debugger.stop()
    debugger.step()


# ---- collectives -----------------------------------------------------------------------------


def ours(rank: int, size: int = 4) -> Tensor:
    return torch.arange(float(size)) + 10 * rank


def blanks(count: int = RANKS, size: int = 4) -> list[Tensor]:
    return [torch.zeros(size) for _ in range(count)]


# function → its arguments on a rank; the group has two ranks
COLLECTIVES: dict[str, Callable[[int], list[Any]]] = {
    "all_reduce": lambda r: [ours(r)],
    "broadcast": lambda r: [ours(r), 1],
    "reduce": lambda r: [ours(r), 0],
    "all_gather": lambda r: [blanks(), ours(r)],
    "all_gather_into_tensor": lambda r: [torch.zeros(8), ours(r)],
    "_all_gather_base": lambda r: [torch.zeros(8), ours(r)],
    "gather": lambda r: [ours(r), blanks() if r == 0 else None, 0],
    "scatter": lambda r: [torch.zeros(4), [ours(0), ours(1)] if r == 0 else None, 0],
    "reduce_scatter": lambda r: [torch.zeros(2), [ours(r, 2), ours(r + 1, 2)]],
    "reduce_scatter_tensor": lambda r: [torch.zeros(2), ours(r)],
    "_reduce_scatter_base": lambda r: [torch.zeros(2), ours(r)],
    "all_to_all": lambda r: [blanks(size=2), [ours(r, 2), ours(r + 1, 2)]],
    "all_to_all_single": lambda r: [torch.zeros(4), ours(r)],
    "all_reduce_coalesced": lambda r: [[ours(r), ours(r, 2)]],
    "all_gather_coalesced": lambda r: [
        [[torch.zeros(4), torch.zeros(2)] for _ in range(RANKS)],
        [ours(r), ours(r, 2)],
    ],
}


def collectives(rank: int, folder: Path) -> Any:
    """Each function, at once and asynchronously; the other rank comes late to the latter."""
    debugger = watcher(folder, task="tensor", level="L1")
    seen: dict[str, Any] = {}
    debugger.start()
    for name, arguments in COLLECTIVES.items():
        function = getattr(dist, name)
        at_once = arguments(rank)
        function(*at_once)
        later = arguments(rank)
        if rank == 1:
            time.sleep(0.02)
        function(*later, async_op=True).wait()
        seen[name] = [_tensors(at_once), _tensors(later)]
    debugger.stop()
    return seen


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value.clone()]
    return [t for part in value for t in _tensors(part)] if isinstance(value, list) else []


def point_to_point(rank: int, folder: Path) -> Any:
    """Messages in both directions, first alone and then as a batch; receivers wait."""
    debugger = watcher(folder, task="tensor", level="L1")
    other = 1 - rank
    debugger.start()
    received = torch.zeros(4)
    works = [dist.irecv(received, src=other, tag=3)]
    time.sleep(0.05 * rank)
    works += [dist.isend(ours(rank), dst=other, tag=3)]
    results = [work.wait() for work in works]
    batch = torch.zeros(4)
    operations = [
        dist.P2POp(dist.isend, ours(rank), other),
        dist.P2POp(dist.irecv, batch, other),
    ]
    time.sleep(0.05 * rank)
    results += [work.wait() for work in dist.batch_isend_irecv(operations)]
    debugger.stop()
    plain = [dist.isend(ours(rank), dst=other), dist.irecv(torch.zeros(4), src=other)]
    without = [work.wait() for work in plain]
    return {"received": received, "batch": batch, "waits": results, "without": without}


def blocking_messages(rank: int, folder: Path) -> Any:
    """send and recv, there and back."""
    debugger = watcher(folder, task="tensor", level="L1")
    received = torch.zeros(4)
    debugger.start()
    if rank == 0:
        dist.send(ours(0), 1)
        dist.recv(received, src=1)
    else:
        dist.recv(received, 0)
        dist.send(ours(1), dst=0)
    debugger.stop()
    return received


def nobody_waits(rank: int, folder: Path) -> Any:
    """One Work that ends by itself, and one that can not end before ``stop()``."""
    debugger = watcher(folder, task="tensor", level="L1")
    debugger.start()
    ends = torch.ones(2) * (rank + 1)
    work = dist.all_reduce(ends, async_op=True)
    while not work.is_completed():
        time.sleep(0.001)
    late = torch.zeros(2)
    unfinished = dist.irecv(late, src=1 - rank)
    debugger.stop()
    counts = sys.getrefcount(work), sys.getrefcount(unfinished)
    dist.barrier()  # else the message could come before the other rank has stopped
    sent = dist.isend(torch.full((2,), 5.0), dst=1 - rank)
    unfinished.wait()
    sent.wait()
    return {"late": late, "references": counts}


def used_after_polling(rank: int, folder: Path) -> Any:
    """The result is changed after the program has seen by polling that it is there."""
    debugger = watcher(folder, task="tensor", level="L1")
    debugger.start()
    t = torch.ones(2)
    work = dist.all_reduce(t, async_op=True)
    while not work.is_completed():
        time.sleep(0.001)
    t.add_(100)
    debugger.stop()


def changed_by_a_callback(rank: int, folder: Path) -> Any:
    """The result goes on to a callback, as in the communication hooks of DDP."""
    debugger = watcher(folder, task="tensor", level="L1")
    debugger.start()
    t = torch.ones(2)
    future = dist.all_reduce(t, async_op=True).get_future()
    future.then(lambda done: done.value()[0].add_(100)).wait()
    debugger.stop()
    return t


def coalesced(rank: int, folder: Path) -> Any:
    """Two reductions in one, at once and asynchronously."""
    debugger = watcher(folder, task="tensor", level="L1")
    debugger.start()
    at_once = [ours(rank), ours(rank, 2)]
    with dist._coalescing_manager():
        for t in at_once:
            dist.all_reduce(t)
    later = [ours(rank, 3), ours(rank, 1)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for t in later:
            dist.all_reduce(t)
    time.sleep(0.02 * rank)
    manager.wait()
    seen = [t.clone() for t in (*at_once, *later)]
    for t in (*at_once, *later):
        t.zero_()
    debugger.stop()
    return seen


def functional(rank: int, folder: Path) -> Any:
    """The collectives that autograd knows, and those of compilers and DTensor."""
    debugger = watcher(folder, task="tensor", level="L1")
    debugger.start()
    x = ours(rank).requires_grad_()
    y = torch.distributed.nn.functional.all_reduce(x)
    y.sum().backward()
    z = funcol.all_reduce(ours(rank), "sum", dist.group.WORLD)
    torch.exp(z)  # the operator waits: what comes after it finds the values
    torch.tanh(z)
    debugger.stop()
    return {"y": y.detach(), "x.grad": x.grad, "z": z.trigger_wait()}


WORLD = [0, 1]
Results = Tensor | list[Tensor]
# functional collective → a call of it; names that this torch lacks are passed over
FUNCTIONAL: dict[str, Callable[[Tensor], Results]] = {
    "all_reduce": lambda x: funcol.all_reduce(x, "sum", WORLD),
    "broadcast": lambda x: funcol.broadcast(x, 1, WORLD),
    "all_gather_tensor": lambda x: funcol.all_gather_tensor(x, 0, WORLD),
    "all_gather_tensor_autograd": lambda x: funcol.all_gather_tensor_autograd(x, 0, WORLD),
    "all_gather_single": lambda x: funcol.all_gather_single(x, 0, WORLD),
    "reduce_scatter_tensor": lambda x: funcol.reduce_scatter_tensor(x, "sum", 0, WORLD),
    "reduce_scatter_single": lambda x: funcol.reduce_scatter_single(x, "sum", 0, WORLD),
    "reduce_scatter_tensor_autograd": lambda x: funcol.reduce_scatter_tensor_autograd(
        x, "sum", 0, WORLD
    ),
    "all_to_all_single": lambda x: funcol.all_to_all_single(x, [2, 2], [2, 2], WORLD),
    "all_to_all_single_autograd": lambda x: funcol.all_to_all_single_autograd(
        x, [2, 2], [2, 2], WORLD
    ),
    "permute_tensor": lambda x: funcol.permute_tensor(x, [1, 0], WORLD),
    "all_reduce_coalesced": lambda x: funcol.all_reduce_coalesced([x, x + 1], "sum", WORLD),
    "all_gather_into_tensor_coalesced": lambda x: funcol.all_gather_into_tensor_coalesced(
        [x], WORLD
    ),
    "reduce_scatter_tensor_coalesced": lambda x: funcol.reduce_scatter_tensor_coalesced(
        [x], "sum", [0], WORLD
    ),
    "all_reduce_inplace": lambda x: funcol.all_reduce_inplace(x.clone(), "sum", dist.group.WORLD),
    "all_gather_tensor_inplace": lambda x: funcol.all_gather_tensor_inplace(
        torch.zeros(8), x, dist.group.WORLD
    ),
}


def functional_each(rank: int, folder: Path) -> Any:
    """Each functional collective by itself, and one that is none."""
    warnings.simplefilter("ignore", FutureWarning)  # newer torch calls some by another name
    debugger = watcher(folder, task="tensor", level="L1")
    debugger.start()
    dist.all_reduce(ours(rank))
    seen = {}
    for name, call in FUNCTIONAL.items():
        if hasattr(funcol, name):
            seen[name] = _waited(call(ours(rank)))
    debugger.stop()
    return seen


def waited_late(rank: int, folder: Path) -> Any:
    """Results that are used, or not, long after a flush has written what there was."""
    debugger = watcher(folder, task="tensor", level="L1")
    path = folder / f"dump/step0/rank{rank}/dump.json"
    debugger.start()
    used, viewed, waited, never = (
        funcol.all_reduce(ours(rank) + i, "sum", WORLD) for i in range(4)
    )
    rows = viewed.view(2, 2)
    torch.flatten(waited)
    deadline = time.monotonic() + HANGS_AFTER_S
    while not path.exists() or '"Torch.flatten.0.forward"' not in path.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    early = json.loads(path.read_text())["data"]
    used.add_(100)
    torch.tanh(rows)
    funcol.wait_tensor(waited)
    debugger.stop()
    assert "all_reduce.3" in str(list(early))
    return {
        "early": [f"{FUNCOL}.{i}.forward" in early for i in range(4)],
        "used": ours(0) + ours(1),
        "never": never.wait(),
    }


def funcol_wait(tensor: Tensor) -> Any:
    return torch.ops._c10d_functional.wait_tensor(tensor)


# how to wait for a result → that, without the function that torch itself waits with
WAITS: dict[str, Callable[[Any], Any]] = {
    "wait_tensor": funcol_wait,
    "its overload": lambda z: torch.ops._c10d_functional.wait_tensor.default(z),
    "its old name": lambda z: torch.ops.c10d_functional.wait_tensor(z),
    "of the tensor within": lambda z: funcol_wait(z.elem),
    "of the tensor within, changed": lambda z: funcol_wait(z.elem).add_(1),
}


def waited_directly(rank: int, folder: Path) -> Any:
    """Results that are waited for by the operator; in the second step one is not."""
    debugger = watcher(folder, level="L1")
    for step in range(2):
        debugger.start()
        results = [funcol.all_reduce(ours(rank), "sum", dist.group.WORLD) for _ in WAITS]
        left = [funcol.all_reduce(ours(rank), "sum", dist.group.WORLD) for _ in range(step)]
        for wait, result in zip(WAITS.values(), results, strict=True):
            wait(result)
        debugger.stop()
        debugger.step()
        _waited(left)


FUNCOL = "Distributed._functional_collectives.all_reduce"


def _waited(value: Results) -> list[Tensor]:
    values = value if isinstance(value, list) else [value]
    waits = [t.wait() if hasattr(t, "wait") else t for t in values]
    return [t.clone() for t in waits]


def functional_backward(rank: int, folder: Path) -> Any:
    """The gradient of the input of each that autograd knows, without the tool and with it."""
    warnings.simplefilter("ignore", FutureWarning)
    names = ("reduce_scatter_tensor_autograd", "all_gather_tensor_autograd")
    seen = []
    debugger = None
    for _ in ("without", "with"):
        gradients = {}
        if debugger is not None:
            debugger.start()
        for name in names:
            x = ours(rank).requires_grad_()
            y = FUNCTIONAL[name](x)
            assert isinstance(y, Tensor)
            (y * torch.arange(float(len(y)))).sum().backward()
            gradients[name] = x.grad
        if debugger is not None:
            debugger.stop()
        seen.append(gradients)
        debugger = watcher(folder, task="tensor", level="L1")
    return seen


def gathered_columns(rank: int, folder: Path) -> Any:
    """A functional collective that computes with functions of the table."""
    warnings.simplefilter("ignore", FutureWarning)
    debugger = watcher(folder, task="tensor", level="L1")
    x = ours(rank).view(2, 2)
    debugger.start()
    y = funcol.all_gather_tensor(x, 1, WORLD)
    debugger.stop()
    return y


def redistributed(rank: int, folder: Path) -> Any:
    """DTensor changes a placement by itself, and within a recorded function."""
    mesh = init_device_mesh("cpu", (RANKS,))
    sharded = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)])
    weight = distribute_tensor(torch.ones(3, 2), mesh, [Shard(1)])
    debugger = watcher(folder, task="tensor", level="L1")
    debugger.start()
    whole = sharded.redistribute(mesh, [Replicate()]).to_local()
    product = F.linear(sharded, weight)
    debugger.stop()
    return {"whole": _waited(whole)[0], "product": _waited(product.full_tensor())[0]}


# computations on DTensors; each works out the layout of its results when it runs first
SHARDED: list[Callable[[Any, Any], Any]] = [
    lambda x, w: F.layer_norm(x, (4,)),
    lambda x, w: F.gelu(x).softmax(-1),
    lambda x, w: torch.cat([x, x * 2], 1),
    lambda x, w: torch.stack([x.transpose(0, 1), x.transpose(0, 1)]),
    lambda x, w: x @ w.t(),
    lambda x, w: torch.einsum("abc,abc->ab", x, x),
    lambda x, w: x.std(),
    lambda x, w: x.topk(2)[0],
    lambda x, w: torch.where(x > 3, x, x * 2),
    lambda x, w: x[:2].pow(2),
    lambda x, w: x.masked_fill(x > 1, 0.0),
    lambda x, w: x.clone().fill_(3.0) + x,
    lambda x, w: x.expand(4, 3, 4).unsqueeze(0).squeeze(0).contiguous(),
    lambda x, w: x.to(torch.bfloat16).float(),
    lambda x, w: torch.zeros_like(x) + x.new_zeros(3, 4).sum() + x,
    lambda x, w: x.redistribute(placements=[Replicate()]),
    lambda x, w: F.linear(x, w),
]


def sharding_propagation(rank: int, folder: Path, level: str) -> Any:
    """The same in three steps: only the first has to work out how results are laid out.
    """
    debugger = watcher(folder, level=level)
    mesh = init_device_mesh("cpu", (RANKS,))
    model = nn.Sequential(nn.Linear(4, 4))
    x, w = (
        distribute_tensor(torch.arange(float(math.prod(shape))).view(shape), mesh, [Shard(0)])
        for shape in ((4, 3, 4), (6, 4))
    )
    optimizers = [
        torch.optim.AdamW([x.requires_grad_(), w.requires_grad_()], foreach=foreach)
        for foreach in (False, True)
    ]
    for _ in range(3):
        debugger.start(model)
        for compute in SHARDED:
            x.grad = w.grad = None
            compute(x, w).sum().full_tensor().backward()
        with torch.no_grad():
            F.linear(x, w)
        torch.nn.utils.clip_grad_norm_([x, w], 1.0)
        for optimizer in optimizers:
            optimizer.step()
        debugger.stop()
        debugger.step()


def encodings(rank: int, folder: Path) -> Any:
    """Arguments that only collectives take."""
    debugger = watcher(folder, level="L1")
    both = dist.new_group([0, 1])
    debugger.start()
    dist.all_reduce(ours(rank), dist.ReduceOp.MAX, group=both)
    operations = [
        dist.P2POp(dist.isend, ours(rank), 1 - rank, both, 7),
        dist.P2POp(dist.irecv, torch.zeros(4), 1 - rank, both, 7),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    debugger.stop()


# ---- training --------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.act = nn.GELU()
        self.down = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x))) + x


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(4, 2))


def _ddp(model: nn.Sequential, mesh: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def _fsdp2(model: nn.Sequential, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for part in model:
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _tensor_parallel(model: nn.Sequential, mesh: Any) -> nn.Module:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    for block in list(model)[:2]:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def _ddp_static(model: nn.Sequential, mesh: Any) -> nn.Module:
    options = {"static_graph": True, "gradient_as_bucket_view": True}
    return nn.parallel.DistributedDataParallel(model, **options)


def _ddp_find_unused(model: nn.Sequential, mesh: Any) -> nn.Module:
    model[0].spare = nn.Linear(4, 4)
    return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)


def _ddp_hook(model: nn.Sequential, mesh: Any) -> nn.Module:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    wrapped = nn.parallel.DistributedDataParallel(model)
    wrapped.register_comm_hook(None, fp16_compress_hook)
    return wrapped


def _fsdp1(model: nn.Sequential, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({Block})
    cpu = torch.device("cpu")
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_id=cpu, use_orig_params=True
    )


def _fsdp2_low_precision(model: nn.Sequential, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*model, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    return model


def _fsdp2_offloaded(model: nn.Sequential, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    for part in (*model, model):
        fully_shard(part, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    return model


def _fsdp2_checkpointed(model: nn.Sequential, mesh: Any) -> nn.Module:
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapper

    wrapper.apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=wrapper.checkpoint_wrapper,
        check_fn=lambda part: isinstance(part, Block),
    )
    return _fsdp2(model, mesh)


WRAPPERS = {"ddp": _ddp, "fsdp2": _fsdp2, "tensor_parallel": _tensor_parallel}
VARIANTS = {
    "ddp_static": _ddp_static,
    "ddp_find_unused": _ddp_find_unused,
    "ddp_hook": _ddp_hook,
    "fsdp1": _fsdp1,
    "fsdp2_low_precision": _fsdp2_low_precision,
    "fsdp2_offloaded": _fsdp2_offloaded,
    "fsdp2_checkpointed": _fsdp2_checkpointed,
}


def local(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def sent() -> int:
    """How many collectives the default group has begun, from Python or from C++."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD._get_sequence_number_for_group()


def train(rank: int, folder: Path, kind: str) -> Any:
    """The same two steps without and with the tool."""
    mesh = init_device_mesh("cpu", (RANKS,))
    replica = 0 if kind == "tensor_parallel" else rank
    debugger = None
    seen = []
    for _ in ("without", "with"):
        model = (WRAPPERS | VARIANTS)[kind](build(), mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        begun, losses, gradients = sent(), [], []
        for step in range(2):
            batch = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + replica))
            if debugger is not None:
                debugger.start(model)
            loss = model(batch).square().mean()
            loss.backward()
            if debugger is not None:
                debugger.stop()
                debugger.step()
            losses.append(loss.detach())
            gradients.append({name: local(p.grad) for name, p in model.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()
        weights = {name: local(p) for name, p in model.named_parameters()}
        results = {"losses": losses, "gradients": gradients, "weights": weights}
        seen.append({**results, "collectives": sent() - begun})
        debugger = watcher(folder, level="mix", task="tensor")
    return seen


def accumulate_ddp(rank: int, folder: Path) -> Any:
    """Two micro-batches, of which only the second is reduced."""
    model = nn.parallel.DistributedDataParallel(build())
    debugger = watcher(folder, level="L0", task="tensor")
    debugger.start(model)
    with model.no_sync():
        model(torch.full((1, 4), 1.0 + rank)).sum().backward()
    first = {name: local(p.grad) for name, p in model.named_parameters()}
    model(torch.full((1, 4), 2.0 + rank)).sum().backward()
    debugger.stop()
    return [first, {name: local(p.grad) for name, p in model.named_parameters()}]


def compiled(rank: int, folder: Path, backend: str) -> Any:
    """Collectives within compiled regions, which Dynamo replaces by functional ones."""
    from torch._dynamo.utils import counters

    def reduced(x: Tensor) -> Tensor:
        y = x * 2
        dist.all_reduce(y)
        return funcol.all_reduce(y, "sum", WORLD) + 1

    model = nn.parallel.DistributedDataParallel(build())
    batch = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
    for _ in range(2):  # DDP arranges its buckets anew after the first step
        model(batch).sum().backward()
    debugger = None
    seen = []
    for _ in ("without", "with"):
        torch._dynamo.reset()
        counters.clear()
        model.zero_grad()
        begun = sent()
        if debugger is not None:
            debugger.start(model)
        value = torch.compile(reduced, backend=backend, fullgraph=True)(batch)
        loss = torch.compile(model, backend=backend)(batch).square().mean()
        loss.backward()
        dist.all_reduce(value)
        if debugger is not None:
            debugger.stop()
        gradients = {name: local(p.grad) for name, p in model.named_parameters()}
        results = {"value": value, "loss": loss.detach(), **gradients}
        graphs = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
        seen.append({"results": results, "graphs": graphs, "collectives": sent() - begun})
        debugger = watcher(folder, level="mix", task="tensor")
    return seen


def pipeline(rank: int, folder: Path, schedule: str) -> Any:
    """Two stages, four micro-batches, without and with the tool."""
    from torch.distributed import pipelining

    batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    target = torch.randn(8, 2, generator=torch.Generator().manual_seed(2))
    debugger = None
    seen = []
    for _ in ("without", "with"):
        part = build()[:1] if rank == 0 else build()[1:]
        stage = pipelining.PipelineStage(
            part,
            rank,
            RANKS,
            torch.device("cpu"),
            input_args=torch.zeros(2, 4, requires_grad=rank == 1),
            output_args=torch.zeros(2, 4 if rank == 0 else 2, requires_grad=True),
        )
        run = getattr(pipelining, schedule)(stage, 4, loss_fn=F.mse_loss)
        begun = sent()
        if debugger is not None:
            debugger.start(part)
        losses: list[Tensor] = []
        out = run.step(batch) if rank == 0 else run.step(target=target, losses=losses)
        if debugger is not None:
            debugger.stop()
            debugger.step()
        values = {name: local(p.grad) for name, p in part.named_parameters()}
        values |= {f"loss{i}": loss.detach() for i, loss in enumerate(losses)}
        values |= {} if out is None else {"out": out.detach()}
        seen.append({"values": values, "collectives": sent() - begun})
        debugger = watcher(folder, level="mix", task="tensor")
    return seen


# ---- under torchrun --------------------------------------------------------------------------


def die_in_the_middle(folder: Path) -> None:
    """Four ranks train; rank 2 is killed in a forward, so the others wait for it for ever."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    debugger = watcher(folder, level="mix")
    model = nn.parallel.DistributedDataParallel(build())
    for step in range(3):
        debugger.start(model)
        for part in range(4):
            total = torch.full((1, 4), 1.0 + rank)
            dist.all_reduce(total)
            model(total).sum().backward()
            if (rank, step, part) == (2, 1, 2):
                wait_for_files(folder / "dump/step1")
                os.kill(os.getpid(), 9)
        debugger.stop()
        debugger.step()
    raise AssertionError("rank 2 was not killed")


def wait_for_files(step: Path) -> None:
    """Until the flusher of each rank has written what its rank has begun so far.

    What is older than a second is on disk, if the machine gives the flusher its turn.
    """
    deadline = time.monotonic() + HANGS_AFTER_S
    for rank in range(4):
        last = f"Distributed.all_reduce.{2 if rank == 2 else 3}.forward"
        wanted = (last, "Module.module.Sequential.backward.2")
        path = step / f"rank{rank}/dump.json"
        while not path.exists() or not all(name in path.read_text() for name in wanted):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path} lacks {wanted}")
            time.sleep(0.02)


PROGRAMS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        late_group,
        group_at_step,
        worker_groups,
        no_group,
        rank_filter,
        collectives,
        point_to_point,
        blocking_messages,
        nobody_waits,
        used_after_polling,
        changed_by_a_callback,
        coalesced,
        functional,
        functional_each,
        waited_late,
        waited_directly,
        functional_backward,
        gathered_columns,
        redistributed,
        sharding_propagation,
        encodings,
        train,
        accumulate_ddp,
        compiled,
        pipeline,
    )
}
WITHOUT_GROUP = {"late_group", "group_at_step", "worker_groups", "no_group"}


def main() -> None:
    program, folder, ranks, argument = [*sys.argv[1:], ""][:4]
    if program == "die_in_the_middle":
        die_in_the_middle(Path(folder))
        return
    arguments = int(ranks), program, Path(folder), argument
    torch.multiprocessing.start_processes(_rank, arguments, nprocs=int(ranks), start_method="fork")


if __name__ == "__main__":
    main()
