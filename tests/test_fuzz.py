"""Whatever is computed, passed and called: the same training, no error of ours, valid files."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import enum
import fractions
import functools
import os
import types
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from helpers import Dump, debugger, read_dump, read_json
from models import Function
from msprobe.errors import UsageError
from msprobe.pytorch import PrecisionDebugger, module_dump, module_dump_end
from recorded import LEVELS, make_net
from torch_state import changes, torch_state

# A failing example is shown as it was drawn: to make it smaller would take minutes. Add
# Phase.shrink for that. FUZZ=20 in the environment tries 20 times as many examples.
BUDGET = settings(deadline=None, database=None, derandomize=True, phases=[Phase.generate])


def examples(count: int) -> settings:
    return settings(BUDGET, max_examples=count * int(os.environ.get("FUZZ", "1")))


# ---- values of every type ----------------------------------------------------------------------


class Refuses:
    """Answers no question."""

    def _refuse(self, *_: Any) -> Any:
        raise ZeroDivisionError("a method of the user's")

    __repr__ = __str__ = __len__ = __iter__ = __bool__ = __hash__ = __eq__ = _refuse  # type: ignore
    __getattr__ = __int__ = __float__ = __index__ = __getitem__ = __contains__ = _refuse
    items = keys = values = shape = dtype = property(_refuse)


class RefusingList(list[Any]):
    def __iter__(self) -> Any:
        yield from list.__iter__(self)
        raise ZeroDivisionError


class RefusingMap(Mapping[str, Any]):
    def __getitem__(self, key: str) -> Any:
        raise ZeroDivisionError

    def __iter__(self) -> Iterator[str]:
        return iter("ab")

    def __len__(self) -> int:
        return 2


class RefusingText(str):
    __slots__ = ()

    def __str__(self) -> str:
        raise ZeroDivisionError


class RefusingInt(int):
    __int__ = __index__ = __str__ = __repr__ = Refuses._refuse  # type: ignore[assignment]


class RefusingArray(np.ndarray[Any, Any]):
    max = min = mean = Refuses._refuse  # type: ignore[assignment]


@dataclasses.dataclass
class HalfBuilt:
    here: int
    missing: Any = dataclasses.field(init=False)


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Box:
    content: Any
    label: str = "box"


class Level(enum.IntEnum):
    HIGH = 3


def cyclic() -> list[Any]:
    value: list[Any] = [1]
    value.append({"again": value, "pair": (value,)})
    return value


def deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(500):
        value = [value]
    return value


SINGLES: list[Callable[[], Any]] = [
    Refuses, lambda: RefusingList([1, torch.ones(2)]), RefusingMap, lambda: RefusingText("x"),
    lambda: RefusingInt(3), lambda: HalfBuilt(1), cyclic, deep, lambda: Level.HIGH, object,
    lambda: Refuses, lambda: (i for i in range(2)), lambda: range(3), lambda: {1, 2},
    lambda: frozenset(), lambda: b"\xff", lambda: bytearray(2), lambda: memoryview(b"ab"),
    lambda: collections.deque([1]), lambda: collections.Counter("ab"), lambda: len,
    lambda: functools.partial(int), lambda: nn.Linear(1, 1), lambda: torch.Generator(),
    lambda: torch.float8_e5m2, lambda: torch.device("meta"), lambda: torch.channels_last,
    lambda: torch.strided, lambda: torch.Size([2, 3]), lambda: torch.finfo(torch.half),
    lambda: torch.per_tensor_affine, lambda: torch.ones(3).untyped_storage(), lambda: ...,
    lambda: slice(None, 10**5000, Refuses()), lambda: NotImplemented, lambda: 10**5000,
    lambda: -(2**70), lambda: fractions.Fraction(1, 3), lambda: datetime.date(2020, 1, 1),
    lambda: types.SimpleNamespace(a=1), lambda: ValueError("x"), lambda: np.array("text"),
    lambda: np.array([None, 1]), lambda: np.zeros(0), lambda: np.datetime64("2020-01-01"),
    lambda: np.zeros(2, "i4,f8"), lambda: np.longdouble(1), lambda: np.complex64(1j),
    lambda: np.float16("nan"), lambda: np.bool_(True), lambda: np.str_("\ud800"),
    lambda: np.arange(6.0)[::-2], lambda: np.array([1 + 1j]), lambda: np.ma.masked_array([1, 2]),
    lambda: np.void(b"ab"), lambda: np.ones(2).view(RefusingArray),
    lambda: torch.topk(torch.ones(3), 1), lambda: torch.iinfo(torch.int8),
]  # fmt: skip
ODD_KEYS = [
    "\udcff", Level.HIGH, torch.float32, int, object(), frozenset([1]), 10**5000, RefusingText("k"),
    torch.device("cpu"), b"bytes", "1", "None", "a.b/c",
]  # fmt: skip


class OddKey(NamedTuple):
    number: int


plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(), max_size=5),
)
keys = st.one_of(
    st.text(max_size=3),
    st.integers(-3, 3),
    st.none(),
    st.booleans(),
    st.floats(allow_nan=True),
    st.tuples(st.integers(0, 2)),
    st.builds(OddKey, st.integers(0, len(ODD_KEYS) - 1)),
)

# ---- tensors -----------------------------------------------------------------------------------

DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
GRADIENT_DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
WEIRD = [0.0, -0.0, 1.0, -2.5, float("nan"), float("inf"), float("-inf"), 1e-45, 6e4]
FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda t: t,
    "transposed": lambda t: t.transpose(0, -1) if t.ndim else t,
    "every other": lambda t: t[..., ::2] if t.ndim else t,
    "expanded": lambda t: t.expand(3, *t.shape),
    "offset": lambda t: t[1:] if t.ndim else t,
    "conjugated": lambda t: t.conj(),
    "coo": lambda t: t.to_sparse(),
    "csr": lambda t: t.to_sparse_csr(),
    "meta": lambda t: t.to("meta"),
    "parameter": lambda t: nn.Parameter(t, requires_grad=t.dtype.is_floating_point),
    "nested": lambda t: torch.nested.nested_tensor([t, t]),
    "quantized": lambda t: torch.quantize_per_tensor(t.float(), 0.5, 1, torch.qint8),
    "inference": lambda t: _in_inference(t),
}


def _in_inference(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor.clone()


def make_tensor(
    dtype: torch.dtype, shape: tuple[int, ...], form: str, values: list[float]
) -> Tensor:
    """As asked for, or as near to it as torch can make."""
    count = int(np.prod(shape, dtype=int))
    data = (values * (count // len(values) + 1))[:count]
    tensor = torch.tensor(data, dtype=torch.float64).reshape(shape)
    for change in (lambda t: t.to(dtype), FORMS[form]):
        try:
            tensor = change(tensor)
        except (RuntimeError, TypeError, NotImplementedError, IndexError, ValueError, KeyError):
            tensor = torch.zeros(shape)
    return tensor


shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
tensors = st.tuples(
    st.sampled_from(DTYPES),
    shapes,
    st.sampled_from(list(FORMS)),
    st.lists(st.sampled_from(WEIRD), min_size=1, max_size=5),
)


class Plan(NamedTuple):
    """How to make a value: hypothesis looks into what it draws, and some values refuse that."""

    kind: str
    content: Any


MAKERS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda content: content,
    "single": lambda number: SINGLES[number](),
    "tensor": lambda content: make_tensor(*content),
    "learned": lambda c: torch.ones(c[1], dtype=c[0], requires_grad=True),
    "list": lambda plans: [make(plan) for plan in plans],
    "tuple": lambda plans: tuple(make(plan) for plan in plans),
    "pair": lambda plans: Pair(*(make(plan) for plan in plans)),
    "box": lambda plan: Box(make(plan)),
    "dict": lambda plans: {make_key(key): make(plan) for key, plan in plans.items()},
    "ordered": lambda p: collections.OrderedDict((key, make(plan)) for key, plan in p.items()),
    "proxy": lambda plans: types.MappingProxyType({key: make(plan) for key, plan in plans.items()}),
    "refusing list": lambda plans: RefusingList(make(plan) for plan in plans),
}


def make_key(key: Any) -> Any:
    return ODD_KEYS[key.number] if isinstance(key, OddKey) else key


def make(plan: Plan) -> Any:
    return MAKERS[plan.kind](plan.content)


def plans_of(kind: str, content: st.SearchStrategy[Any]) -> st.SearchStrategy[Plan]:
    return st.builds(Plan, st.just(kind), content)


def containers(inner: st.SearchStrategy[Plan]) -> st.SearchStrategy[Plan]:
    named = st.dictionaries(st.text(max_size=2), inner, max_size=3)
    return st.one_of(
        plans_of("list", st.lists(inner, max_size=3)),
        plans_of("tuple", st.lists(inner, max_size=3)),
        plans_of("pair", st.tuples(inner, inner)),
        plans_of("box", inner),
        plans_of("dict", st.dictionaries(keys, inner, max_size=3)),
        plans_of("ordered", named),
        plans_of("proxy", named),
        plans_of("refusing list", st.lists(inner, max_size=2)),
    )


leaves = st.one_of(
    plans_of("plain", plain),
    plans_of("single", st.integers(0, len(SINGLES) - 1)),
    plans_of("tensor", tensors),
    plans_of("learned", st.tuples(st.sampled_from(GRADIENT_DTYPES), shapes)),
)
values = st.recursive(leaves, containers, max_leaves=8)

# ---- what must stand in the record of a call ---------------------------------------------------


class Api:
    """A function of the user's that is differentiable in everything it gets."""

    @staticmethod
    def call(*args: Any, **kwargs: Any) -> Tensor:
        total = torch.zeros(())
        for number, tensor in enumerate(learned_in([*args, *kwargs.values()])):
            total = total + tensor.float().sum() * (number + 1)
        return total


def parts(value: Any) -> list[tuple[str, Any]] | None:
    """Name and content of each part of a container whose record is known; None for others."""
    if type(value) in (list, tuple):
        return [(str(i), part) for i, part in enumerate(value)]
    if isinstance(value, Pair):
        return list(value._asdict().items())
    if isinstance(value, Box):
        return [("content", value.content), ("label", value.label)]
    if type(value) in (dict, collections.OrderedDict) and all(type(k) is str for k in value):
        return list(value.items())
    return None


def learned_in(value: Any, around: tuple[int, ...] = ()) -> list[Tensor]:
    if isinstance(value, Tensor):
        ours = (
            value.requires_grad and value.dtype in GRADIENT_DTYPES and value.layout is torch.strided
        )
        return [value] if ours and type(value) is Tensor and not value.is_nested else []
    inner = (parts(value) or []) if id(value) not in around and len(around) < 50 else []
    around = (*around, id(value))
    return [tensor for _, part in inner for tensor in learned_in(part, around)]


def check_entry(value: Any, entry: Any, gradient: Any, numbers: dict[int, int]) -> None:
    """``numbers``: id of a tensor that gets a gradient → what it is."""
    inner = parts(value)
    if inner is not None:
        if type(entry) is dict and set(entry) == {"type", "value"} and entry["value"] is None:
            return  # cut: it repeats itself, or is deep
        entries, grads = (list(e.values()) if isinstance(e, dict) else e for e in (entry, gradient))
        assert len(entries) == len(inner)
        for i, (_, part) in enumerate(inner):
            check_entry(part, entries[i], grads and grads[i], numbers)
    elif isinstance(value, Tensor):
        check_tensor(value, entry, gradient, numbers.get(id(value)))
    elif type(value) in (bool, str) or (type(value) is int and abs(value) < 10**4000):
        assert entry == {"type": type(value).__name__, "value": value}
    elif value is None:
        assert entry is None


def check_tensor(value: Tensor, entry: Any, gradient: Any, number: int | None) -> None:
    assert entry["dtype"] == str(value.dtype)
    if not value.is_nested:
        assert entry["shape"] == list(value.shape)
    if number is not None and value.numel():
        assert gradient["shape"] == list(value.shape)
        assert gradient["Max"] == gradient["Min"] == number


def end_step(watcher: PrecisionDebugger, path: Path) -> Dump:
    """Close the window and the step; its files are JSON, and what was patched is as before."""
    watcher.stop()
    watcher.step()
    number = watcher.service.current_iter - 1
    for file in (path / f"step{number}").glob("*/*.json"):
        read_json(file)
    return read_dump(path, number)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("task", ["statistics", "tensor"])
def test_any_arguments_pass_and_are_recorded_in_their_places(task: str, tmp_path: Path) -> None:
    """Gradients too: that of the n-th tensor is n + 1, and stands where the tensor does."""
    before = torch_state()
    watcher = debugger(tmp_path, level="L1", task=task)
    watcher.register_custom_api(Api, "call")

    @examples(100)
    @given(
        st.lists(values, max_size=3),
        st.dictionaries(st.text("abcdef", min_size=1), values, max_size=2),
    )
    def check(planned: list[Plan], named: dict[str, Plan]) -> None:
        args = [make(plan) for plan in planned]
        kwargs = {key: make(plan) for key, plan in named.items()}
        expected = Api.call(*args, **kwargs)
        watcher.start()
        torch.tanh(torch.ones(1))
        result = Api.call(*args, **kwargs)
        if result.requires_grad:
            result.backward()
        torch.tanh(torch.ones(1))
        data = end_step(watcher, tmp_path).data
        assert torch.equal(result, expected)
        assert changes(before, torch_state()) == []
        for tensor in learned_in([*args, *kwargs.values()]):
            tensor.grad = None

        assert [n for n in data if ".forward" in n and "tanh" in n] == [
            "Torch.tanh.0.forward", "Torch.tanh.1.forward",
        ]  # fmt: skip
        record = data["Api.call.0.forward"]
        assert list(record["input_kwargs"]) == list(kwargs)
        given_ = [*args, *kwargs.values()]
        entries = [*record["input_args"], *record["input_kwargs"].values()]
        numbers = {id(t): n + 1 for n, t in enumerate(learned_in(given_))}
        grads = data.get("Api.call.0.backward", {"output": [None] * len(given_)})["output"]
        assert len(given_) == len(entries) == len(grads)
        for value, entry, gradient in zip(given_, entries, grads, strict=True):
            check_entry(value, entry, gradient, numbers)

    check()


class Takes:
    @staticmethod
    def call(value: Any) -> Any:
        return value


@pytest.mark.filterwarnings("ignore")
def test_checksum_and_numbers_are_those_of_the_saved_tensor(tmp_path: Path) -> None:
    """Of any dtype, shape, stride and content."""
    watcher = debugger(tmp_path, level="L1", task="tensor", summary_mode="md5")
    watcher.register_custom_api(Takes, "call")

    @examples(60)
    @given(st.lists(tensors, min_size=1, max_size=6))
    def check(planned: list[Any]) -> None:
        given_ = [make_tensor(*content) for content in planned]
        watcher.start()
        assert Takes.call(given_) is given_
        dump = end_step(watcher, tmp_path)
        (entries,) = dump.data["Takes.call.0.forward"]["input_args"]
        assert [e["dtype"] for e in entries] == [str(t.dtype) for t in given_]
        for entry in entries:
            if "data_name" in entry and not entry["dtype"].startswith("torch.q"):
                check_saved(entry, dump.tensors(entry))

    check()


def check_saved(entry: dict[str, Any], saved: Tensor) -> None:
    if saved.layout is not torch.strided or saved.is_nested:
        return
    packed = saved.clone(memory_format=torch.contiguous_format)
    raw = packed.reshape(-1).view(torch.uint8).numpy().tobytes()
    if entry["md5"] is not None:
        assert entry["md5"] == f"{zlib.crc32(raw):08x}"
    if saved.dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        exact = saved.double().numpy()
        assert float(entry["Max"]) == exact.max() or np.isnan(exact).any()
        assert float(entry["Min"]) == exact.min() or np.isnan(exact).any()
        assert (entry["Max"] == "NaN") == bool(np.isnan(exact).any())


# ---- programs ----------------------------------------------------------------------------------


class Machine(nn.Module):
    """Modules of many kinds that work on numbered tensors of shape (4, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.again = self.linear[0]
        self.relu = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(4)
        self.block = nn.Sequential(
            nn.Linear(4, 4), nn.Identity(), nn.Sequential(self.again, nn.ELU())
        )
        self.view = Function(lambda m, x: x.t())
        self.split = Function(lambda m, x: (x.chunk(2), {"sum": x.sum(), "x": x}))
        self.keywords = Function(lambda m, *, left, right: left * right[0] + right[1]["x"])
        self.fails = Function(lambda m, x: torch.mm(m.again(x), torch.ones(3, 3)), again=self.again)
        self.in_place = Function(lambda m, x: x.mul_(0.5).add_(1))
        self.late = nn.LazyLinear(4)


Registers = list[Tensor]


def _grad_in_between(m: Machine, r: Registers, i: int, j: int) -> Any:
    if r[i].requires_grad and r[i].grad_fn is not None:
        loss = r[i].square().sum()
        return torch.autograd.grad(loss, m.linear[0].weight, create_graph=True, allow_unused=True)[
            0
        ]
    return None


def _caught(m: Machine, r: Registers, i: int, j: int) -> Any:
    try:
        return m.fails(r[i])
    except RuntimeError:
        return None


def _backward(m: Machine, r: Registers, i: int, j: int) -> None:
    if r[i].requires_grad:
        r[i].sum().backward(retain_graph=True)


def _no_grad(m: Machine, r: Registers, i: int, j: int) -> Any:
    with torch.no_grad():
        return m.block(r[i])


def _out(m: Machine, r: Registers, i: int, j: int) -> Any:
    with torch.no_grad():
        return torch.add(r[i], r[j], out=torch.empty(4, 4))


def _amp(m: Machine, r: Registers, i: int, j: int) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return m.linear[0](r[i]).float()


OPERATIONS: dict[str, Callable[[Machine, Registers, int, int], Any]] = {
    "linear": lambda m, r, i, j: m.linear[i % 2](r[j]),
    "shared": lambda m, r, i, j: m.again(r[i]),
    "block": lambda m, r, i, j: m.block(r[i]),
    "relu module": lambda m, r, i, j: m.relu(r[i]),
    "dropout": lambda m, r, i, j: m.drop(r[i]),
    "norm": lambda m, r, i, j: m.norm(r[i]),
    "view": lambda m, r, i, j: m.view(r[i]),
    "split": lambda m, r, i, j: torch.cat(m.split(r[i])[0]),
    "half of a split in place": lambda m, r, i, j: m.split(r[i])[0][1].mul_(2) is None,
    "keywords": lambda m, r, i, j: m.keywords(left=r[i], right=(r[j], {"x": r[i]})),
    "in place module": lambda m, r, i, j: m.in_place(r[i]),
    "in place": lambda m, r, i, j: r[i].add_(r[j].detach()) is None,
    "set item": lambda m, r, i, j: r[i].__setitem__(j % 4, 0.5),
    "functional": lambda m, r, i, j: F.softmax(r[i] @ r[j].t(), -1),
    "relu_": lambda m, r, i, j: F.relu_(r[i]),
    "clone": lambda m, r, i, j: r[i].clone(),
    "detach": lambda m, r, i, j: r[i].detach(),
    "row": lambda m, r, i, j: r[i][j % 4].expand(4, 4),
    "random": lambda m, r, i, j: r[i] + torch.randn(4, 4),
    "checkpoint": lambda m, r, i, j: checkpoint(m.block, r[i], use_reentrant=bool(j % 2)),
    "gradient": _grad_in_between,
    "backward": _backward,
    "caught": _caught,
    "uncaught": lambda m, r, i, j: m.fails(r[i]),
    "no_grad": _no_grad,
    "out": _out,
    "amp": _amp,
    "lazy": lambda m, r, i, j: m.late(r[i]),
    "view of a view": lambda m, r, i, j: r[i].view(2, 2, 4).flatten(0, 1),
    "twice": lambda m, r, i, j: torch.stack([r[i], r[i]]).sum(0),
}
programs = st.lists(
    st.tuples(st.sampled_from(list(OPERATIONS)), st.integers(0, 99), st.integers(0, 99)),
    min_size=1,
    max_size=12,
)
Program = list[tuple[str, int, int]]


def run(machine: Machine, program: Program) -> list[Any]:
    """What the program computes up to its end or its error, and the error."""
    registers: Registers = [torch.randn(4, 4), torch.randn(4, 4, requires_grad=True) * 1]
    error: BaseException | None = None
    try:
        for name, i, j in program:
            result = OPERATIONS[name](machine, registers, i % len(registers), j % len(registers))
            if isinstance(result, Tensor) and result.shape == (4, 4):
                registers.append(result)
        learned_ = [r for r in registers if r.requires_grad]
        torch.stack([r.square().mean() for r in learned_]).sum().backward()
    except RuntimeError as raised:
        error = raised
    found = [registers, [p.grad for p in machine.parameters()], list(machine.buffers())]
    return [as_bytes(found), str(error), torch.get_rng_state().numpy().tobytes()]


def as_bytes(value: Any) -> Any:
    if isinstance(value, Tensor):
        if isinstance(value, nn.parameter.UninitializedTensorMixin):
            return "lazy"
        return str(value.dtype), value.detach().contiguous().numpy().tobytes()
    return [as_bytes(part) for part in value] if isinstance(value, list) else value


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("level", LEVELS)
def test_any_program_trains_to_the_same_bits(level: str, tmp_path: Path) -> None:
    """Shared and in-place modules, views, exceptions, checkpoints, gradients in between."""
    before = torch_state()
    watcher = debugger(tmp_path, level=level)

    @examples(60)
    @given(programs)
    def check(program: Program) -> None:
        results = []
        for watched in (False, True):
            torch.manual_seed(3)
            machine = Machine()
            if watched:
                watcher.start(machine)
            results.append(run(machine, program))
        dump = end_step(watcher, tmp_path)
        assert results[1] == results[0]
        assert changes(before, torch_state()) == []
        assert count_hooks(machine) <= count_hooks(Machine())  # of its own: the lazy module's
        assert dump.errors() == []
        check_tree(dump)

    check()


def count_hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def check_tree(dump: Dump) -> None:
    """Parents lead to the top, and every forward record has its stack."""
    for name in dump.construct:
        seen = [name]
        while (parent := dump.construct[seen[-1]]) is not None:
            assert parent not in seen
            seen.append(parent)
    stacked = [name for names, _ in dump.stack.values() for name in names]
    assert sorted(stacked) == sorted(dump.names(".forward"))


# ---- calls of the public functions in any order ------------------------------------------------


class Session:
    """A user who calls everything at any moment; without the tool only the training remains."""

    def __init__(self, path: Path, level: str, *, watched: bool) -> None:
        self.watched = watched
        self.path = path
        self.level = level
        self.net = make_net()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.losses: list[Tensor] = []
        self.results: list[Any] = []

    def tool(self, call: Callable[[], Any]) -> None:
        if self.watched:
            with contextlib.suppress(UsageError):  # documented: it says what is missing
                call()

    def construct(self) -> None:
        self.tool(lambda: debugger(self.path, level=self.level))

    def forward(self) -> None:
        self.losses.append(self.net(torch.randn(2, 4)).square().mean())

    def backward(self) -> None:
        if self.losses:
            loss = self.losses.pop()
            loss.backward()
            grads = [p.grad.clone() for p in self.net.parameters() if p.grad is not None]
            self.results.append(as_bytes([loss, grads]))

    def update(self) -> None:
        # The graphs that exist were made with the old weights: torch would refuse them.
        self.losses.clear()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def fail(self) -> None:
        try:
            self.net(torch.ones(2, 5))
        except RuntimeError:
            self.results.append("failed")

    def registered(self) -> None:
        self.results.append(as_bytes(Takes.call(torch.tanh(torch.ones(2)))))


ACTIONS: dict[str, Callable[[Session], Any]] = {
    "construct": Session.construct,
    "forward": Session.forward,
    "backward": Session.backward,
    "update": Session.update,
    "fail": Session.fail,
    "registered": Session.registered,
    "start": lambda s: s.tool(lambda: PrecisionDebugger.start(s.net)),
    "start without model": lambda s: s.tool(PrecisionDebugger.start),
    "start a part": lambda s: s.tool(lambda: PrecisionDebugger.start([s.net.fc1, s.net])),
    "start a rank": lambda s: s.tool(lambda: PrecisionDebugger.start(s.net, rank_id=1)),
    "tokens": lambda s: s.tool(lambda: PrecisionDebugger.start(s.net, token_range=[1, 2])),
    "stop": lambda s: s.tool(PrecisionDebugger.stop),
    "step": lambda s: s.tool(PrecisionDebugger.step),
    "discard": lambda s: s.tool(lambda: PrecisionDebugger.step(dump=False)),
    "forward end": lambda s: s.tool(PrecisionDebugger.forward_backward_dump_end),
    "init step": lambda s: s.tool(lambda: PrecisionDebugger.set_init_step(3)),
    "save": lambda s: s.tool(lambda: PrecisionDebugger.save(s.net.fc1.weight, "w")),
    "focus": lambda s: s.tool(lambda: module_dump(s.net.fc2, "mine")),
    "unfocus": lambda s: s.tool(module_dump_end),
    "register": lambda s: s.tool(lambda: PrecisionDebugger.register_custom_api(Takes, "call")),
    "restore": lambda s: s.tool(lambda: PrecisionDebugger.restore_custom_api(Takes, "call")),
    "end": lambda s: s.tool(lambda: setattr(PrecisionDebugger, "_instance", None)),
    "reset": lambda s: s.tool(lambda: _instance().service.reset_status()),
    "path": lambda s: s.tool(lambda: setattr(_instance().config, "dump_path", s.path / "2")),
    "reload": lambda s: s.tool(lambda: _instance()._maybe_reload_config(force=True)),
}


def _instance() -> Any:
    if PrecisionDebugger._instance is None:
        raise UsageError("a user would look")
    return PrecisionDebugger._instance


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("level", [*LEVELS, "debug"])
def test_any_order_of_calls_trains_to_the_same_bits(
    level: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    before = torch_state()
    original = vars(Takes)["call"]

    @examples(40)
    @given(st.lists(st.sampled_from(list(ACTIONS)), min_size=3, max_size=25))
    def check(actions: list[str]) -> None:
        path = tmp_path_factory.mktemp("orders")
        results = []
        for watched in (False, True):
            torch.manual_seed(5)
            session = Session(path, level, watched=watched)
            for action in ["construct", "start", *actions]:
                ACTIONS[action](session)
            results.append(session.results)
        assert results[1] == results[0]
        PrecisionDebugger._instance = None
        assert changes(before, torch_state()) == []
        assert vars(Takes)["call"] is original
        assert count_hooks(session.net) == 0
        for file in path.glob("**/*.json"):
            read_json(file)
        for log in path.glob("**/dump_error_info.log"):
            assert "Traceback" not in log.read_text()

    check()
