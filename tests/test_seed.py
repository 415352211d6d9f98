from __future__ import annotations

import inspect
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from msprobe.pytorch import seed as seed_module
from msprobe.pytorch.random_calls import OWNERS, load_random_calls
from msprobe.pytorch.seed import seed_all, undo_seed_all
from runner import run_script


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    """Every test ends with the process as it was; RNG states of the suite are kept as well."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    undo_seed_all()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def snapshot() -> dict[str, Any]:
    values = {
        f"{library}.{name}": value
        for library, owner in OWNERS.items()
        for name, value in vars(owner).items()
    }
    return values | {"jit.script": torch.jit.script, "default_rng": np.random.default_rng}


def shuffled(count: int) -> list[int]:
    values = list(range(count))
    random.shuffle(values)
    return values


# Values of the original's golden seed_all_enhanced (seed 1234); dropout is ours: it repeats too.
GOLDEN: dict[str, tuple[Callable[[], Any], Any]] = {
    "rand": (lambda: torch.rand(2).tolist(), [0.028979241847991943, 0.4018985629081726]),
    "randn": (lambda: torch.randn(2).tolist(), [0.0461304634809494, 0.4024028182029724]),
    "randint": (lambda: torch.randint(0, 100, (3,)).tolist(), [75, 71, 6]),
    "randperm": (lambda: torch.randperm(5).tolist(), [0, 4, 2, 1, 3]),
    "normal_": (
        lambda: torch.empty(2).normal_().tolist(),
        [0.0461304634809494, 0.4024028182029724],
    ),
    "uniform_": (
        lambda: torch.empty(2).uniform_().tolist(),
        [0.028979241847991943, 0.4018985629081726],
    ),
    "bernoulli": (lambda: torch.bernoulli(torch.full((4,), 0.5)).tolist(), [1.0] * 4),
    "multinomial": (lambda: torch.multinomial(torch.ones(5), 2).tolist(), [1, 0]),
    "np_rand": (lambda: np.random.rand(2).tolist(), [0.1915194503788923, 0.6221087710398319]),
    "np_randn": (lambda: np.random.randn(2).tolist(), [0.47143516373249306, -1.1909756947064645]),
    "np_choice": (lambda: np.random.choice(10, 3).tolist(), [3, 6, 5]),
    "py_random": (lambda: random.random(), 0.9664535356921388),
    "py_randint": (lambda: random.randint(0, 99), 99),
    "py_shuffle": (lambda: shuffled(5), [1, 2, 4, 0, 3]),
    "linear_init": (
        lambda: nn.Linear(2, 2).weight.tolist(),
        [[-0.6661239266395569, -0.13873638212680817], [-0.3396316170692444, -0.18859761953353882]],
    ),
}

DROPOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "F.dropout": lambda: F.dropout(torch.ones(16), 0.5),
    "nn.Dropout": lambda: nn.Dropout(0.5)(torch.ones(16)),
    "F.dropout1d": lambda: F.dropout1d(torch.ones(1, 16, 1), 0.5),
    "F.dropout2d": lambda: F.dropout2d(torch.ones(1, 16, 1, 1), 0.5),
    "F.dropout3d": lambda: F.dropout3d(torch.ones(1, 16, 1, 1, 1), 0.5),
    "F.alpha_dropout": lambda: F.alpha_dropout(torch.ones(16), 0.5, training=True),
    "F.feature_alpha_dropout": lambda: F.feature_alpha_dropout(torch.ones(1, 16, 1), 0.5, True),
    "F.rrelu": lambda: F.rrelu(-torch.ones(16), training=True),
    "nn.RReLU": lambda: nn.RReLU()(-torch.ones(16)),
    "torch.dropout": lambda: torch.dropout(torch.ones(16), 0.5, True),
    "attention": lambda: F.scaled_dot_product_attention(
        *[torch.ones(1, 4, 4)] * 3, dropout_p=0.5
    ),
    "nn.LSTM": lambda: nn.LSTM(4, 4, 2, dropout=0.5)(torch.ones(3, 1, 4))[0],
}


def test_plain_seed_gives_the_values_of_the_original() -> None:
    """Golden seed_all_enhanced, key "plain"."""
    seed_all(seed=1234)
    assert [torch.rand(1).item(), torch.rand(1).item(), np.random.rand(), random.random()] == [
        0.028979241847991943, 0.4018985629081726, 0.1915194503788923, 0.9664535356921388,
    ]


def test_positional_seed_is_the_seed() -> None:
    seed_all(777)
    drawn = torch.rand(3), np.random.rand(), random.random()
    torch.manual_seed(777)
    assert torch.equal(drawn[0], torch.rand(3))
    assert drawn[1:] == (np.random.RandomState(777).rand(), random.Random(777).random())
    assert os.environ["PYTHONHASHSEED"] == "777"


def test_seed_reaches_a_python_started_from_here() -> None:
    seed_all(5)
    outputs = {
        subprocess.run(
            [sys.executable, "-c", "print(hash('msprobe'))"], capture_output=True, check=True
        ).stdout
        for _ in range(2)
    }
    assert len(outputs) == 1


def test_plain_seed_patches_nothing_and_keeps_flags() -> None:
    before, flags = snapshot(), torch.are_deterministic_algorithms_enabled()
    seed_all()
    assert all(value is before[name] for name, value in snapshot().items())
    assert torch.are_deterministic_algorithms_enabled() is flags is False


@pytest.mark.skipif(
    bool(torch.version.cuda or torch.version.hip), reason="the golden was made by a CPU build"
)
def test_mode_sets_deterministic_algorithms_only_on_a_cpu() -> None:
    """Golden seed_all_enhanced, keys "det" and "env"."""
    seed_all(seed=1234, mode=True)
    cudnn = torch.backends.cudnn
    assert [
        torch.are_deterministic_algorithms_enabled(),
        cudnn.enabled, cudnn.benchmark, cudnn.deterministic,
    ] == [True, True, False, False]
    assert [
        os.environ.get(name)
        for name in ("PYTHONHASHSEED", "HCCL_DETERMINISTIC", "CUBLAS_WORKSPACE_CONFIG")
    ] == ["1234", None, None]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_enhanced_call_on_cuda_repeats() -> None:
    seed_all(mode=True)
    first = torch.rand(4, device="cuda")
    seed_all(mode=True, is_enhanced=True)
    assert torch.equal(first, torch.rand(4, device="cuda"))
    assert torch.equal(first, torch.rand(4, device="cuda"))


def test_flags_of_cuda_are_set_and_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flags exist in every build, so what a machine with CUDA gets can be seen here."""
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    cudnn = torch.backends.cudnn
    before = cudnn.enabled, cudnn.benchmark, cudnn.deterministic
    seed_all(mode=True)
    assert (cudnn.enabled, cudnn.benchmark, cudnn.deterministic) == (False, False, True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    undo_seed_all()
    assert (cudnn.enabled, cudnn.benchmark, cudnn.deterministic) == before
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_workspace_of_the_user_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    seed_all(mode=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_no_device_of_cuda_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking starts the driver, which no process forked afterwards could use."""

    def asked(*_: object) -> None:
        raise AssertionError("the driver has been started")

    monkeypatch.setattr(torch.version, "cuda", "12.6")
    for name in ("is_available", "device_count", "init", "_lazy_init", "current_device"):
        monkeypatch.setattr(torch.cuda, name, asked)
    seed_all(mode=True, rm_dropout=True, is_enhanced=True)
    torch.rand(2)
    undo_seed_all()


class FakeNpu:
    """What torch_npu puts at ``torch.npu``, as far as seeding goes."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def manual_seed(self, seed: int) -> None:
        self.calls.append(("manual_seed", seed))

    def manual_seed_all(self, seed: int) -> None:
        self.calls.append(("manual_seed_all", seed))


def test_npu_is_seeded_and_hccl_made_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    npu = FakeNpu()
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    monkeypatch.delenv("HCCL_DETERMINISTIC", raising=False)
    seed_all(7)
    assert npu.calls == [("manual_seed", 7), ("manual_seed_all", 7)]
    assert os.environ["HCCL_DETERMINISTIC"] == "True"
    undo_seed_all()
    assert "HCCL_DETERMINISTIC" not in os.environ


def test_rm_dropout_makes_the_named_dropouts_identities() -> None:
    early = nn.Dropout(0.5)
    seed_all(rm_dropout=True)
    x = torch.rand(2, 3, 4, 4, 4)
    for dropped in (
        early(x), nn.Dropout(0.9)(x), F.dropout(x), F.dropout(x, p=0.7), F.dropout(input=x),
        nn.Dropout2d()(x[0]), F.dropout2d(x[0], 0.5, True), nn.Dropout3d()(x), F.dropout3d(x),
        F.dropout(x.clone(), 0.5, inplace=True),
    ):
        assert torch.equal(dropped, x if dropped.dim() == 5 else x[0])
    assert nn.Dropout(0.5).p == 0.5


def test_rm_dropout_leaves_other_dropouts_alone() -> None:
    seed_all(rm_dropout=True)
    ones = torch.ones(1, 64, 1)
    assert not torch.equal(F.dropout1d(ones), ones)
    assert not torch.equal(F.alpha_dropout(ones, training=True), ones)


@pytest.mark.parametrize("name", GOLDEN, ids=list(GOLDEN))
def test_enhanced_call_repeats_the_value_of_the_original(name: str) -> None:
    draw, expected = GOLDEN[name]
    seed_all(seed=1234, mode=True, is_enhanced=True)
    assert draw() == expected
    torch.rand(3), np.random.rand(), random.random()
    assert draw() == expected


@pytest.mark.parametrize("name", DROPOUTS, ids=list(DROPOUTS))
def test_enhanced_dropout_repeats(name: str) -> None:
    """Quirk B27 of the original: two dropouts differ although is_enhanced is on."""
    draw = DROPOUTS[name]
    torch.manual_seed(99)
    plain = draw()
    if name != "nn.LSTM":  # there the weights are drawn first
        assert not torch.equal(plain, draw())
    seed_all(99, is_enhanced=True)
    first, _, second = draw(), torch.rand(7), draw()
    assert torch.equal(first, second)
    if name != "nn.LSTM":
        assert torch.equal(first, plain)


@pytest.mark.parametrize("made", [None, 3], ids=["unseeded", "seeded"])
def test_enhanced_numpy_generator_repeats_and_stays_a_generator(made: int | None) -> None:
    seed_all(42, is_enhanced=True)
    generator = np.random.default_rng(made)
    assert isinstance(generator, np.random.Generator)
    expected = np.random.Generator(np.random.PCG64(42)).random(3).tolist()
    assert generator.random(3).tolist() == expected
    assert generator.random(3).tolist() == expected
    assert generator.integers(10, size=4).tolist() == generator.integers(10, size=4).tolist()
    assert np.random.default_rng(generator) is generator
    assert isinstance(pickle.loads(pickle.dumps(generator)), np.random.Generator)


def test_enhanced_call_with_a_torch_generator_reseeds_that_one() -> None:
    seed_all(1234, is_enhanced=True)
    generator = torch.Generator()
    draws = [torch.rand(2, generator=generator).tolist() for _ in range(2)]
    assert draws == [[0.028979241847991943, 0.4018985629081726]] * 2


def test_enhanced_follows_a_later_seed() -> None:
    seed_all(1, is_enhanced=True)
    first = torch.rand(2)
    seed_all(2)
    second = torch.rand(2)
    assert not torch.equal(first, second)
    assert torch.equal(second, torch.rand(2))


def test_a_second_call_never_switches_off() -> None:
    seed_all(mode=True, rm_dropout=True)
    seed_all()
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.equal(F.dropout(torch.ones(9)), torch.ones(9))


@pytest.mark.parametrize("repeat", [1, 3], ids=["once", "thrice"])
def test_undo_brings_everything_back(repeat: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    before, environment = snapshot(), dict(os.environ)
    for number in range(repeat):
        seed_all(number, mode=True, rm_dropout=True, is_enhanced=True)
    assert snapshot()["functional_random.dropout"] is not before["functional_random.dropout"]
    undo_seed_all()
    undo_seed_all()
    after = snapshot()
    assert list(after) == list(before)
    assert all(value is before[name] for name, value in after.items())
    assert dict(os.environ) == environment
    assert not torch.are_deterministic_algorithms_enabled()


def test_device_context_works_while_enhanced_and_afterwards() -> None:
    """torch keeps a table of its constructors; a table filled with wrappers would break this."""
    seed_all(is_enhanced=True)
    with torch.device("meta"):
        assert torch.rand(2).device.type == "meta"
    undo_seed_all()
    with torch.device("meta"):
        assert torch.rand(2).device.type == "meta"


class Net(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5, self.training) + torch.rand(1)


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_torchscript_compiles_random_functions_while_patched() -> None:
    seed_all(rm_dropout=True, is_enhanced=True)
    scripted = torch.jit.script(Net())
    assert scripted(torch.ones(3)).shape == (3,)
    assert F.dropout is not torch.nn.Dropout
    assert torch.equal(F.dropout(torch.ones(9)), torch.ones(9))


class Told(torch.Tensor):
    functions: list[Any] = []  # noqa: RUF012  (a log shared on purpose)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        cls.functions.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("switch", ["rm_dropout", "is_enhanced"])
def test_tensor_subclass_is_told_the_original_function(switch: str) -> None:
    original = F.dropout
    seed_all(**{switch: True})
    Told.functions.clear()
    F.dropout(torch.ones(3).as_subclass(Told))
    assert Told.functions[0] is original


def test_wrapped_function_keeps_name_text_and_signature() -> None:
    original = F.dropout
    seed_all(rm_dropout=True, is_enhanced=True)
    assert F.dropout is not original
    assert F.dropout.__name__ == "dropout"
    assert F.dropout.__doc__ == original.__doc__
    assert inspect.signature(F.dropout) == inspect.signature(original)


def test_exception_of_a_random_call_passes_and_leaves_the_next_call_working() -> None:
    seed_all(1234, is_enhanced=True)
    with pytest.raises(ValueError, match="empty range"):
        random.randint(5, 1)
    assert random.random() == random.random() == 0.9664535356921388


def test_old_keyword_warns_and_the_rest_works() -> None:
    """Documentation of MindSpeed-MM still calls seed_all(is_gpu=False, mode=True)."""
    with pytest.warns(UserWarning, match="is_gpu.*leave it out") as caught:
        seed_all(is_gpu=False, mode=True)
    assert caught[0].filename == __file__
    assert torch.are_deterministic_algorithms_enabled()


def test_unknown_keyword_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'sed'; it takes seed, mode"):
        seed_all(sed=1)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"seed": "1"}, TypeError, "seed is '1'; expected an integer"),
        ({"seed": 1.5}, TypeError, "seed is 1.5; expected an integer"),
        ({"seed": True}, TypeError, "seed is True; expected an integer"),
        ({"seed": None}, TypeError, "seed is None; expected an integer"),
        ({"seed": -1}, ValueError, "seed is -1; expected 0 to 4294967295"),
        ({"seed": 2**32}, ValueError, "seed is 4294967296; expected 0 to 4294967295"),
        ({"mode": "yes"}, TypeError, "mode is 'yes'; expected True or False"),
        ({"rm_dropout": 1}, TypeError, "rm_dropout is 1; expected True or False"),
        ({"is_enhanced": None}, TypeError, "is_enhanced is None; expected True or False"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_wrong_argument_is_refused_and_changes_nothing(
    arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    state = torch.get_rng_state()
    with pytest.raises(error, match=text):
        seed_all(**arguments)
    assert torch.equal(state, torch.get_rng_state())


def test_numpy_integer_is_a_seed() -> None:
    seed_all(np.int64(9))
    assert os.environ["PYTHONHASHSEED"] == "9"


def test_every_listed_name_is_callable_and_listed_once() -> None:
    calls = load_random_calls()
    names = [(call.library, call.name) for call in calls]
    assert len(names) == len(set(names)) > 150
    assert all(callable(call.original) for call in calls)


def test_compiled_function_runs_while_enhanced(tmp_path: Path) -> None:
    """In a process of its own: the first compilation replaces attributes of torch for good."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, torch.nn.functional as F\n"
        "from msprobe.pytorch import seed_all\n"
        "seed_all(is_enhanced=True)\n"
        "f = torch.compile(lambda x: F.dropout(x, 0.5) + torch.rand(1), backend='eager')\n"
        "assert f(torch.ones(4)).shape == (4,)\n"
    )
    code, output = run_script(script)
    assert code == 0, output


def test_module_has_no_effect_on_import() -> None:
    assert seed_module._effects.done == set()
