"""Statistics of many small tensors at once: against numpy in float64, and against one at a time."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from helpers import debugger, read_dump
from msprobe.pytorch.dump import small
from msprobe.pytorch.dump.stats import statistics

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# One rounding to the dtype, of sums in float64.
ROUNDING = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}
NAN, INF = math.nan, math.inf


def together(tensors: list[torch.Tensor], high: bool = False) -> list[list[float]]:
    entries: list[dict[str, float]] = [{} for _ in tensors]
    waiting = []
    for entry, tensor in zip(entries, tensors, strict=True):
        width, reduction = small.REDUCTIONS[high][tensor.dtype]
        copy = small.elements(tensor, width)
        assert copy is not None
        waiting.append((entry, reduction, copy))
    small.fill_in(waiting)
    return [[entry[key] for key in ("Max", "Min", "Mean", "Norm")] for entry in entries]


@pytest.mark.parametrize("high", [False, True], ids=["low", "high"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_statistics_of_many_agree_with_numpy(dtype: torch.dtype, high: bool) -> None:
    made = torch.Generator().manual_seed(0)
    sizes = [1, 2, 3, 31, 1024, 7, 500]
    tensors = [(torch.randn(n, generator=made) * 3 + 1).to(dtype) for n in sizes]
    tolerance = ROUNDING[torch.float32 if high else dtype]
    for tensor, found in zip(tensors, together(tensors, high), strict=True):
        values = tensor.double().numpy()
        assert found[:2] == [values.max(), values.min()]
        expected = [values.mean(), math.sqrt((values**2).sum())]
        assert found[2:] == pytest.approx(expected, rel=tolerance)


finite = st.floats(width=32, allow_nan=True, allow_infinity=True)


@given(st.lists(st.lists(finite, min_size=1, max_size=20), min_size=1, max_size=6))
def test_any_float32_gives_what_numpy_gives_in_float64(parts: list[list[float]]) -> None:
    with np.errstate(all="ignore"):
        for values, found in zip(parts, together([torch.tensor(p) for p in parts]), strict=True):
            wide = np.array(values)
            total = wide.sum()
            mean = total * np.inf if abs(total) > np.finfo(np.float32).max else wide.mean()
            expected = [wide.max(), wide.min(), mean, np.sqrt(np.square(wide).sum())]
            single = [float(np.float32(v)) for v in expected]
            # Twice the rounding of float32, and its smallest step near zero: of the Mean, terms
            # that cancel leave the rounding of the sum in float64.
            absolute = 2e-45 + 1e-14 * float(np.abs(wide[np.isfinite(wide)]).max(initial=0))
            assert found == pytest.approx(single, rel=2**-23, abs=absolute, nan_ok=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "values", [[NAN, 1.0], [INF, 1.0], [-INF, INF], [0.0], [-0.0, -1.0]], ids=str
)
def test_odd_values_give_what_one_tensor_alone_gives(
    dtype: torch.dtype, values: list[float]
) -> None:
    tensor = torch.tensor(values, dtype=dtype)
    alone = statistics(tensor)
    assert together([torch.ones(3, dtype=dtype), tensor])[1] == pytest.approx(alone, nan_ok=True)


def test_user_who_lets_numpy_raise_is_not_disturbed() -> None:
    with np.errstate(all="raise"):
        assert together([torch.tensor([NAN, INF, 3e38, 3e38, 1e-45])])
        assert statistics(torch.full((3000,), NAN))
        assert statistics(torch.full((3000,), 1e-45))


NOT_SMALL = {
    "empty": lambda: torch.empty(0),
    "large": lambda: torch.ones(small.LARGEST + 1),
    "gaps": lambda: torch.ones(8)[::2],
    "transposed": lambda: torch.ones(2, 3).t(),
    "negated lazily": lambda: torch.ones(3, dtype=torch.complex64).conj().imag,
    "meta": lambda: torch.ones(3, device="meta"),
    "sparse": lambda: torch.ones(3).to_sparse(),
    "zeros of autograd": lambda: torch._efficientzerotensor((3,)),
}


@pytest.mark.parametrize("make", NOT_SMALL.values(), ids=NOT_SMALL)
def test_tensor_without_plain_memory_is_left_to_the_general_way(make) -> None:
    assert small.elements(make(), 4) is None


@pytest.mark.parametrize("begin", [0, 5])
def test_freed_memory_is_not_read(begin: int) -> None:
    whole = torch.ones(64)
    part = whole[begin : begin + 8]
    whole.untyped_storage().resize_(0)
    assert small.elements(part, 4) is None


PACKED = {
    "gaps": lambda t: t[::2],
    "transposed": lambda t: t.view(4, 6).t(),
    "expanded": lambda t: t[:1].expand(24),
}


@pytest.mark.parametrize("layout", PACKED.values(), ids=PACKED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_elements_of_any_layout_are_those_in_c_order(dtype: torch.dtype, layout) -> None:
    tensor = layout(torch.randn(24).to(dtype))
    width = tensor.element_size()
    found = small.elements_of_any(tensor, width)
    assert found == tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("name", sorted({*NOT_SMALL} - {"gaps", "transposed", "negated lazily"}))
def test_tensor_without_plain_memory_has_no_elements_to_pack(name: str) -> None:
    assert small.elements_of_any(NOT_SMALL[name](), 4) is None


def test_lazily_negated_tensor_gives_its_own_values() -> None:
    tensor = torch.full((3,), 1 + 2j).conj().imag
    assert small.elements_of_any(tensor, 4) == np.full(3, -2, dtype=np.float32).tobytes()


@pytest.mark.parametrize("top", [{}, {"task": "tensor"}], ids=["statistics", "tensor"])
@pytest.mark.parametrize(
    "options", [{}, {"summary_mode": "md5"}, {"tensor_list": ["relu"]}], ids=str
)
def test_numbers_do_not_depend_on_what_else_is_recorded(
    top: dict, options: dict, tmp_path: Path
) -> None:
    x = torch.randn(7, 30, generator=torch.Generator().manual_seed(3))
    task = top.get("task", "statistics")
    if task == "tensor":
        options = {k: v for k, v in options.items() if k == "summary_mode"}
    watcher = debugger(tmp_path, level="L1", task=task, **options)
    watcher.start()
    F.relu(x)
    watcher.stop()
    watcher.step()
    entry = read_dump(tmp_path).data["Functional.relu.0.forward"]["input_args"][0]
    assert [entry[k] for k in ("Max", "Min", "Mean", "Norm")] == together([x])[0]


def test_copy_is_of_the_moment_and_the_storage_stays_resizable() -> None:
    tensor = torch.arange(4.0)
    copy = small.elements(tensor, 4)
    tensor.zero_()
    assert copy == np.arange(4, dtype=np.float32).tobytes()
    tensor.resize_(1000)


def test_values_are_those_before_the_tensor_was_changed(tmp_path: Path) -> None:
    watcher = debugger(tmp_path, level="L1")
    x = torch.ones(4)
    watcher.start()
    for _ in range(600):  # more than are measured together
        F.relu(x)
        x.add_(1)
    watcher.stop()
    watcher.step()
    data = read_dump(tmp_path).data
    tops = [data[f"Functional.relu.{n}.forward"]["input_args"][0]["Max"] for n in range(600)]
    assert tops == [float(n + 1) for n in range(600)]


def test_records_of_several_threads_have_all_their_values(tmp_path: Path) -> None:
    watcher = debugger(tmp_path, level="L1")
    watcher.start()

    def work(value: float) -> None:
        x = torch.full((3,), value)
        for _ in range(400):
            F.relu(x)

    threads = [threading.Thread(target=work, args=(float(n + 1),)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    watcher.stop()
    watcher.step()
    dump = read_dump(tmp_path)
    names = dump.names("relu")
    assert len(names) == 1200
    for record in map(dump.data.get, names):
        (given_,), (made,) = record["input_args"], record["output"]
        assert given_["Max"] == given_["Min"] == given_["Mean"] == made["Max"] in (1.0, 2.0, 3.0)
        assert made["Norm"] == pytest.approx(made["Max"] * math.sqrt(3), rel=2**-23)
