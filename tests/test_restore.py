"""Outside of a window all is as without the tool; inside, the wrappers pass for the originals.

That torch itself is restored is checked after each test of the suite, by ``conftest.py``.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import io
import pickle
import pickletools
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers import collect, debugger, read_dump
from models import ZOO
from msprobe.pytorch import PrecisionDebugger
from torch_state import changes, torch_state

LEVELS = pytest.mark.parametrize("level", ["L0", "L1", "mix"])


def module_state(model: nn.Module) -> list[tuple[Any, ...]]:
    """Each attribute of each module, and each entry of its hook dictionaries, in order."""
    return [
        (name, key, value, list(value.items()) if isinstance(value, OrderedDict) else None)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
    ]


def words(pickled: bytes) -> str:
    """What a pickle says and names."""
    return " ".join(str(argument) for _, argument, _ in pickletools.genops(pickled))


def is_same(before: list[tuple[Any, ...]], after: list[tuple[Any, ...]]) -> bool:
    return [(n, k, id(v), entries) for n, k, v, entries in before] == [
        (n, k, id(v), entries) for n, k, v, entries in after
    ]


def with_hooks_of_the_user(model: nn.Module, seen: list[str]) -> nn.Module:
    for part in model.modules():
        part.register_forward_pre_hook(lambda m, a: seen.append("pre"))
        part.register_forward_pre_hook(lambda m, a, k: seen.append("pre kw"), with_kwargs=True)
        part.register_forward_hook(lambda m, a, out: seen.append("post"))
        part.register_forward_hook(lambda m, a, out: seen.append("always"), always_call=True)
        part.register_full_backward_hook(lambda m, gi, go: seen.append("backward"))
        part.register_state_dict_pre_hook(lambda *_: seen.append("state"))
    return model


class Exploding(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("the user's own")


# ---- after the window ------------------------------------------------------------------------


@LEVELS
def test_stop_leaves_torch_and_the_model_as_they_were(level: str, tmp_path: Path) -> None:
    model, batch, loss, *_ = ZOO["gru"]()
    batch.requires_grad_()  # else torch warns of the user's backward hooks
    seen: list[str] = []
    with_hooks_of_the_user(model, seen)
    loss(model, batch).backward()
    alone, seen[:] = list(seen), []
    before, torch_before = module_state(model), torch_state()

    watcher = debugger(tmp_path, level=level)
    watcher.start(model)
    loss(model, batch).backward()
    assert changes(torch_before, torch_state()) or level == "L0"
    watcher.stop()

    assert is_same(before, module_state(model))
    assert changes(torch_before, torch_state()) == []
    assert seen == alone


@LEVELS
@pytest.mark.parametrize("ending", ["stop", "step", "end of the session"])
def test_exception_in_the_window_leaves_all_as_it_was(
    ending: str, level: str, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), Exploding()))
    before, torch_before = module_state(model), torch_state()
    watcher = debugger(tmp_path, level=level)
    watcher.start(model)
    with pytest.raises(KeyError, match="the user's own"):
        model(torch.randn(3, 4))
    with pytest.raises(RuntimeError):
        torch.matmul(torch.ones(2, 3), torch.ones(2, 3))

    if ending == "end of the session":
        PrecisionDebugger._instance = None
    else:
        getattr(watcher, ending)()

    assert is_same(before, module_state(model))
    assert changes(torch_before, torch_state()) == []


def test_call_after_a_failed_one_is_recorded_at_the_right_place(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), Exploding()), nn.ReLU())

    def steps() -> None:
        with pytest.raises(KeyError):
            model(torch.randn(3, 4))
        with pytest.raises(RuntimeError):
            torch.matmul(torch.ones(2, 3), torch.ones(2, 3))
        model[1](torch.ones(2))

    dump = collect(tmp_path, steps, model)
    assert dump.construct["Functional.relu.0.forward"] == "Module.1.ReLU.forward.0"
    assert dump.construct["Module.1.ReLU.forward.0"] is None
    assert "output" not in dump.data["Module.0.1.Exploding.forward.0"]
    assert "output" not in dump.data["Torch.matmul.0.forward"]


def test_construction_changes_nothing(tmp_path: Path) -> None:
    before = torch_state()
    debugger(tmp_path)
    assert changes(before, torch_state()) == []


@LEVELS
def test_start_of_an_unwanted_step_changes_nothing(level: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    before, torch_before = module_state(model), torch_state()
    watcher = debugger(tmp_path, level=level, top={"step": [5]})
    watcher.start(model)
    assert is_same(before, module_state(model))
    assert changes(torch_before, torch_state()) == []


def test_function_taken_in_a_window_records_nothing_after_it(tmp_path: Path) -> None:
    """And a function that is saved between windows is torch's own."""
    original = F.gelu
    watcher = debugger(tmp_path, level="L1")
    watcher.start()
    taken = F.gelu
    watcher.stop()
    x = torch.randn(3)
    assert F.gelu is original
    assert torch.equal(taken(x), original(x))
    watcher.start()
    watcher.stop()
    assert F.gelu is original
    assert read_dump(tmp_path).data == {}


def test_windows_may_nest_in_any_order_with_hooks_added_by_the_user(tmp_path: Path) -> None:
    """Hooks that the user adds or removes inside the window are the user's business."""
    model = nn.Sequential(nn.Linear(2, 2))
    early = model[0].register_forward_hook(lambda *_: None)
    watcher = debugger(tmp_path, level="L0")
    watcher.start(model)
    model[0].register_forward_hook(mine := lambda *_: None)
    early.remove()
    watcher.stop()
    assert list(model[0]._forward_hooks.values()) == [mine]
    assert not model[0]._forward_pre_hooks
    assert not model[0]._forward_hooks_always_called


# ---- references that were taken before -------------------------------------------------------


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """A module of the user's that has bound torch functions by name."""
    (tmp_path / "code_of_a_user.py").write_text(
        "from torch import matmul as mm\n"
        "from torch.nn.functional import relu\n"
        "def forward(x):\n"
        "    return mm(relu(x), x)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "code_of_a_user", raising=False)
    yield importlib.import_module("code_of_a_user")
    sys.modules.pop("code_of_a_user", None)


def test_global_bound_before_the_window_is_recorded_and_put_back(
    user_module: types.ModuleType, tmp_path: Path
) -> None:
    before = dict(vars(user_module))
    dump = collect(
        tmp_path / "dump", lambda: user_module.forward(torch.ones(2, 2)), level="L1"
    )
    assert list(dump.data) == ["Functional.relu.0.forward", "Torch.matmul.0.forward"]
    after = dict(vars(user_module))
    assert list(after) == list(before)
    assert [key for key in before if after[key] is not before[key]] == []
    assert user_module.relu is F.relu


class Activated(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x)


@pytest.mark.parametrize(
    ("act", "record"),
    [
        (F.gelu, "Functional.gelu.0.forward"),
        (torch.tanh, "Torch.tanh.0.forward"),
        (F.softplus, "Functional.softplus.0.forward"),
    ],
    ids=["gelu", "tanh", "softplus"],
)
@pytest.mark.parametrize("level", ["L1", "mix"])
def test_function_held_by_a_module_is_recorded_and_put_back(
    level: str, act: Any, record: str, tmp_path: Path
) -> None:
    model = nn.Sequential(Activated(act))
    before = module_state(model)
    dump = collect(tmp_path, lambda: model(torch.ones(2)), model, level=level)
    assert record in dump.data
    assert is_same(before, module_state(model))


def test_attribute_set_by_the_user_in_the_window_stays(
    user_module: types.ModuleType, tmp_path: Path
) -> None:
    model = nn.Sequential(Activated(F.gelu))
    watcher = debugger(tmp_path / "dump")
    watcher.start(model)
    model[0].act = mine = lambda x: x
    user_module.relu = mine
    watcher.stop()
    assert model[0].act is mine
    assert user_module.relu is mine


# ---- wrappers pass for the originals -----------------------------------------------------------

FUNCTIONS: dict[str, tuple[Callable[[], Any], Any]] = {
    "F.relu": (lambda: F.relu, F.relu),
    "F.gelu": (lambda: F.gelu, F.gelu),
    "torch.matmul": (lambda: torch.matmul, torch.matmul),
    "torch.einsum": (lambda: torch.einsum, torch.einsum),
    "Tensor.add": (lambda: torch.Tensor.add, torch.Tensor.add),
    "Tensor.__add__": (lambda: torch.Tensor.__add__, torch.Tensor.__add__),
    "linalg.inv": (lambda: torch.linalg.inv, torch.linalg.inv),
}
EACH_FUNCTION = pytest.mark.parametrize("name", FUNCTIONS)


@pytest.fixture
def in_window(tmp_path: Path) -> PrecisionDebugger:
    watcher = debugger(tmp_path, level="L1")
    watcher.start()
    return watcher


@EACH_FUNCTION
@pytest.mark.usefixtures("in_window")
def test_wrapper_equals_the_original_and_is_found_under_it(name: str) -> None:
    get, original = FUNCTIONS[name]
    wrapper = get()
    assert wrapper is not original
    assert wrapper == original
    assert original == wrapper
    assert (wrapper != original) is False
    assert hash(wrapper) == hash(original)
    assert {original: "found"}[wrapper] == "found"
    assert {wrapper: "found"}[original] == "found"
    assert wrapper in [original]
    assert wrapper != torch.sigmoid


@EACH_FUNCTION
@pytest.mark.usefixtures("in_window")
def test_wrapper_has_the_names_and_the_type_of_the_original(name: str) -> None:
    get, original = FUNCTIONS[name]
    wrapper = get()
    for attribute in ("__name__", "__qualname__", "__doc__", "__module__"):
        assert getattr(wrapper, attribute, None) == getattr(original, attribute, None)
    assert isinstance(wrapper, type(original))
    assert callable(wrapper)
    assert repr(wrapper) == repr(original)
    for kind in (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType):
        assert isinstance(wrapper, kind) == isinstance(original, kind)
    for question in (inspect.isfunction, inspect.isbuiltin, inspect.isroutine, inspect.isclass):
        assert question(wrapper) == question(original)


@pytest.mark.usefixtures("in_window")
def test_wrapper_has_the_signature_of_the_original() -> None:
    original = FUNCTIONS["F.relu"][1]
    assert F.relu is not original
    assert inspect.signature(F.relu) == inspect.signature(original)
    assert F.relu.__code__ is original.__code__


@EACH_FUNCTION
@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_pickle_of_a_wrapper_is_the_original_later(
    name: str, protocol: int, in_window: PrecisionDebugger
) -> None:
    get, original = FUNCTIONS[name]
    pickled = pickle.dumps(get(), protocol)
    assert "msprobe" not in words(pickled)
    assert pickle.loads(pickled) == original
    in_window.stop()
    assert type(pickle.loads(pickled)) is type(original)
    assert pickle.loads(pickled) == original


@EACH_FUNCTION
@pytest.mark.usefixtures("in_window")
def test_copy_of_a_wrapper_is_the_original(name: str) -> None:
    get, original = FUNCTIONS[name]
    assert copy.deepcopy(get()) is original
    assert copy.copy(get()) is original
    assert copy.deepcopy([get()])[0] is original


@pytest.mark.usefixtures("in_window")
def test_override_handler_is_told_the_original() -> None:
    class Listed(Tensor):
        heard: list[Any] = []  # noqa: RUF012

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            cls.heard.append(func)
            return super().__torch_function__(func, types, args, kwargs)

    x = torch.ones(2).as_subclass(Listed)
    Listed.heard.clear()
    F.relu(x)
    torch.exp(x)
    originals = [FUNCTIONS["F.relu"][1], torch.exp]
    assert [f for f in Listed.heard if f in originals][:1] == originals[:1]
    assert originals[1] in Listed.heard


# ---- copies of a hooked model -----------------------------------------------------------------


@pytest.fixture
def hooked(tmp_path: Path) -> nn.Module:
    """A model in an open window; after each test the file shows which calls were recorded."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), Activated(F.gelu)))
    debugger(tmp_path, level="mix").start(model)
    return model


def copied(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def pickled(model: nn.Module) -> nn.Module:
    text = pickle.dumps(model)
    assert "msprobe" not in words(text)
    loaded: nn.Module = pickle.loads(text)
    return loaded


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    assert b"msprobe" not in file.getvalue()
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("make", [copied, pickled, saved])
def test_copy_of_a_hooked_model_works_and_is_not_recorded(
    make: Callable[[nn.Module], nn.Module], hooked: nn.Module, tmp_path: Path
) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    expected = hooked(x)
    other = make(hooked)
    assert torch.equal(other(x), expected)
    other(x).sum().backward()
    PrecisionDebugger.step()
    other(x).sum().backward()

    assert other[1][1].act == F.gelu
    modules = [n for n in read_dump(tmp_path).data if n.startswith("Module.") and "forward" in n]
    assert all(name.endswith(".forward.0") for name in modules)
    assert len(modules) == 4


def test_state_dict_of_a_hooked_model_is_that_of_the_model(hooked: nn.Module) -> None:
    inside = hooked.state_dict()
    PrecisionDebugger.stop()
    outside = hooked.state_dict()
    assert list(inside) == list(outside)
    assert inside._metadata == outside._metadata
