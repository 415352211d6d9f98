"""Statistics against numpy in float64, and against torch's own reductions."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from msprobe.pytorch.dump import fused, pieces, small, stats_cpu
from msprobe.pytorch.dump import usual as usual_kind
from msprobe.pytorch.dump.stats import (
    CannotMeasure,
    Deferred,
    crc32,
    read_back,
    statistics,
    usual,
    xor64,
)
from msprobe.pytorch.dump.stats import device_statistics as on_device

NAN = math.nan
INF = math.inf
LARGE = 300_007  # several pieces of the walk, the last one not full

# Of the sums in float32 of at most 300,000 elements; 16-bit results are rounded to 8 bits.
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,
    torch.float16: 2e-2,
    torch.bfloat16: 2e-2,
}
FLOATS = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
FLOAT8 = [getattr(torch, name) for name in dir(torch) if name.startswith("float8_")]

LAYOUTS = {
    "contiguous": lambda t: t,
    "flat": lambda t: t.reshape(-1),
    "transposed": lambda t: t.transpose(0, 1),
    "permuted": lambda t: t.permute(3, 1, 0, 2),
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "every_second": lambda t: t[:, :, :, ::2],
    "inner_rows": lambda t: t[:, 1:3],
    "offset": lambda t: t[1:, :, 1:, 1:],
    "split_heads": lambda t: t[:, 1].transpose(1, 2),
    "expanded": lambda t: t[:, :1].expand(-1, 6, -1, -1),
    "expanded_transposed": lambda t: t[0, 0].unsqueeze(1).expand(-1, 5, -1).transpose(0, 2),
    "overlapping": lambda t: t.as_strided((40, 30), (3, 1)),
    "one_row": lambda t: t[1:2, 2:3],
}
LAYOUT = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
SIZE = pytest.mark.parametrize("shape", [(2, 4, 6, 5), (5, 4, 130, 100)], ids=["small", "large"])


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 0.25


def by_numpy(tensor: torch.Tensor) -> list[float]:
    """Max, Min, Mean and Norm in float64, which holds every value of the narrower dtypes."""
    values = tensor.double().numpy()
    return [values.max(), values.min(), values.mean(), math.sqrt((values**2).sum())]


def near(values, rel):
    """Equal to each value within ``rel``; NaN to NaN and None to None."""
    return [v if v is None else pytest.approx(v, rel=rel, nan_ok=True) for v in values]


def quiet(make):
    """What ``make`` makes, without the warnings that torch gives for rare kinds of tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


@pytest.fixture(scope="module", autouse=True, params=["torch and numpy", "numkong"])
def reductions(request):
    """Every test with the optional library and without it."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "numkong":
            pytest.importorskip("numkong")
            assert fused.reduce is not None
        else:
            squares = 1e-30, torch.finfo(torch.float32).max
            for module, name, value in [
                (stats_cpu, "_fused", None),
                (stats_cpu, "ALONE", usual_kind.GRAIN),
                (usual_kind, "_fused", None),
                (usual_kind, "ALONE", usual_kind.GRAIN),
                (usual_kind, "LEAST", usual_kind.SMALL),
                (usual_kind, "SQUARES", squares),
            ]:
                patch.setattr(module, name, value)
            patch.setitem(stats_cpu._SQUARES, torch.float32, squares)
        yield


@pytest.mark.parametrize("wrong", ["minmax", "moments", "from_pointer"])
def test_library_that_is_wrong_somewhere_is_not_used(wrong, monkeypatch):
    """Its kernels differ by processor: it is asked what is known before it is believed."""
    numkong = pytest.importorskip("numkong")
    assert fused._loaded() is numkong
    right = getattr(numkong, wrong)

    def beyond_a_thousand(*args, **kwargs):
        found = right(*args, **kwargs)
        if wrong == "from_pointer" and args[1] > 1000:
            raise TypeError("no such argument")
        if wrong != "from_pointer" and args[0].shape[0] > 1000:
            return tuple(np.nextafter(np.float32(value), np.float32(9)) for value in found)
        return found

    monkeypatch.setattr(numkong, wrong, beyond_a_thousand)
    assert fused._loaded() is None


# ---- float dtypes ----------------------------------------------------------------------------


@FLOATS
@LAYOUT
@SIZE
def test_statistics_of_any_layout_agree_with_numpy(dtype, layout, shape):
    tensor = layout(random(*shape).to(dtype))
    found = statistics(tensor)
    assert found[:2] == by_numpy(tensor)[:2]
    assert found == pytest.approx(by_numpy(tensor), rel=TOLERANCE[dtype])


@FLOATS
@LAYOUT
def test_high_precision_of_any_layout_agrees_with_numpy_to_float32(dtype, layout):
    tensor = layout(random(5, 4, 130, 100).to(dtype))
    assert statistics(tensor, high=True) == pytest.approx(by_numpy(tensor), rel=2e-5)


@FLOATS
@pytest.mark.parametrize("count", [1, 7, 1003, LARGE])
def test_statistics_agree_with_the_torch_functions_of_the_dtype(dtype, count):
    tensor = random(count).to(dtype)
    plain = [tensor.max(), tensor.min(), tensor.mean(), torch.linalg.vector_norm(tensor)]
    assert statistics(tensor) == pytest.approx(
        [value.item() for value in plain], rel=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [50, LARGE])
def test_mean_and_norm_of_16_bit_tensors_are_numbers_of_their_dtype(dtype, count):
    found = statistics(random(count).to(dtype))
    assert found == torch.tensor(found, dtype=dtype).tolist()


@pytest.mark.parametrize("count", [50, LARGE])
def test_mean_and_norm_of_float32_are_float32_numbers(count):
    found = statistics(random(count))
    assert found == torch.tensor(found).tolist()


def test_float16_norm_overflows_like_torch_and_not_in_high_precision():
    tensor = torch.full((10,), 60000.0, dtype=torch.float16)
    assert statistics(tensor) == [60000.0, 60000.0, 60000.0, INF]
    assert statistics(tensor, high=True)[3] == pytest.approx(60000 * math.sqrt(10), rel=1e-6)


@pytest.mark.parametrize("count", [40, LARGE])
@pytest.mark.parametrize("value", [1e18, 1e38, -3e38, 1e-21, 1e-30, 0.0, -0.0])
def test_huge_and_tiny_float32_values_give_what_torch_gives(value, count):
    tensor = torch.full((count,), value)
    plain = [value, value, tensor.mean().item(), torch.linalg.vector_norm(tensor).item()]
    # The sums are inexact in both; torch's own, in float32, by 1e-4 for this many equal values.
    # Where its squares overflow, ours may not: it depends on the number of threads.
    exact = torch.tensor(value).item()
    *found, norm = statistics(tensor)
    assert found == pytest.approx([exact, exact, plain[2]], rel=3e-4)
    norms = plain[3], by_numpy(tensor)[3]
    assert any(norm == pytest.approx(right, rel=3e-4) for right in norms)


@pytest.mark.parametrize("value", [1e160, -1e308, 1e-200])
@pytest.mark.parametrize("count", [40, LARGE])
def test_huge_and_tiny_float64_values_give_what_torch_gives(value, count):
    tensor = torch.full((count,), value, dtype=torch.float64)
    plain = [value, value, tensor.mean().item(), torch.linalg.vector_norm(tensor).item()]
    assert statistics(tensor) == pytest.approx(plain, rel=1e-9)


@FLOATS
@pytest.mark.parametrize("count", [3, 1000, LARGE])
@pytest.mark.parametrize("place", [0, 0.5, 1], ids=["first", "middle", "last"])
@pytest.mark.parametrize("rest", [1.0, INF, -0.0])
def test_one_nan_makes_all_four_nan(dtype, count, place, rest):
    tensor = torch.full((count,), rest, dtype=dtype)
    tensor[round(place * (count - 1))] = NAN
    assert all(math.isnan(value) for value in statistics(tensor))


@FLOATS
@pytest.mark.parametrize("count", [4, LARGE])
@pytest.mark.parametrize("high", [False, True], ids=["low", "high"])
def test_infinities_give_what_torch_gives(dtype, count, high):
    tensor = torch.ones(count, dtype=dtype)
    tensor[1] = INF
    assert statistics(tensor, high) == [INF, 1.0, INF, INF]
    tensor[count - 2] = -INF
    found = statistics(tensor, high)
    assert found == near([INF, -INF, NAN, INF], 0)


@FLOATS
@pytest.mark.parametrize("count", [1, 50, 1500, 40_000, LARGE])
@pytest.mark.parametrize("value", [INF, -INF])
@pytest.mark.parametrize("place", [None, 0, -1], ids=["alone", "a number first", "a number last"])
def test_nothing_but_infinities_of_one_sign_has_no_finite_max_or_min(dtype, count, value, place):
    tensor = torch.full((count + 1,), value, dtype=dtype)
    if place is not None:
        tensor[place] = 2.0
    assert statistics(tensor)[:2] == [tensor.max().item(), tensor.min().item()]


@pytest.mark.parametrize("value", [1e200, -1e200])
def test_float64_beyond_its_squares_has_its_max_and_min(value):
    assert statistics(torch.full((40_000,), value, dtype=torch.float64))[:2] == [value, value]


@FLOATS
@pytest.mark.parametrize("count", [1, 5, LARGE])
def test_negative_zero_is_kept(dtype, count):
    found = statistics(torch.full((count,), -0.0, dtype=dtype))
    assert found == [0, 0, 0, 0]
    assert [math.copysign(1, value) for value in found[:2]] == [-1, -1]


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
@pytest.mark.parametrize("count", [1, 64, LARGE])
def test_float8_is_measured_in_float32(dtype, count):
    tensor = random(count).abs().to(dtype)
    found = statistics(tensor.unsqueeze(0))
    assert found == pytest.approx(by_numpy(tensor.float()), rel=2e-5)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_shape_stride_and_offset_agrees_with_numpy(data):
    shape = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    strides = data.draw(st.lists(st.integers(0, 30), min_size=len(shape), max_size=len(shape)))
    offset = data.draw(st.integers(0, 20))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16, torch.int16, torch.bool]))
    base = (random(1000) * 3).to(dtype)
    tensor = torch.as_strided(base, shape, strides, offset)
    expected = by_numpy(tensor)
    found = statistics(tensor)
    if not dtype.is_floating_point:
        assert found == [*expected[:2], None, None]
        return
    # Terms of the sum that cancel leave its rounding, which is as large as the terms.
    absolute = TOLERANCE[dtype] * abs(tensor.double()).max().item()
    assert found == pytest.approx(expected, rel=TOLERANCE[dtype], abs=absolute)
    assert found[:2] == expected[:2]


def test_results_are_the_same_each_time():
    tensor = random(LARGE)
    assert statistics(tensor) == statistics(tensor.clone())


# ---- other dtypes ----------------------------------------------------------------------------

INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
UNSIGNED = [getattr(torch, n) for n in ("uint16", "uint32", "uint64") if hasattr(torch, n)]


@pytest.mark.parametrize("dtype", INTEGERS + UNSIGNED, ids=str)
@LAYOUT
def test_integers_give_exact_max_and_min_only(dtype, layout):
    info = torch.iinfo(dtype)
    values = torch.arange(5 * 4 * 30 * 70) % 100
    values[[70, 333, 4567]] = torch.tensor([info.max if info.max < 2**63 else -1, info.min, 101])
    tensor = layout(values.view(5, 4, 30, 70).to(dtype))
    expected = tensor.clone().numpy()
    assert statistics(tensor) == [int(expected.max()), int(expected.min()), None, None]


def test_large_integers_are_not_rounded():
    assert statistics(torch.tensor([2**62 + 1, -(2**62) - 1])) == [
        2**62 + 1,
        -(2**62) - 1,
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("values", "expected"),
    [([True, False], (True, False)), ([True], (True, True)), ([False] * 3, (False, False))],
    ids=["mixed", "all", "none"],
)
def test_bool_tensors_give_any_and_all(values, expected):
    found = statistics(torch.tensor(values).repeat(20_000).view(100, -1).t())
    assert found == [*expected, None, None]
    assert type(found[0]) is type(found[1]) is bool


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@LAYOUT
def test_complex_tensors_are_measured_by_absolute_value(dtype, layout):
    tensor = layout(torch.complex(random(5, 4, 130, 100), random(5, 4, 130, 100, seed=1)).to(dtype))
    magnitude = np.abs(tensor.numpy().astype(np.complex128))
    expected = [magnitude.max(), magnitude.min(), magnitude.mean()]
    found = statistics(tensor)
    assert found[:3] == pytest.approx(expected, rel=2e-5)
    assert found[3] is None


def test_complex_nan_makes_all_nan():
    tensor = torch.ones(LARGE, dtype=torch.complex64)
    tensor[LARGE - 1] = complex(0, NAN)
    assert statistics(tensor) == near([NAN, NAN, NAN, None], 0)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.tensor(-2.5), [-2.5, -2.5, -2.5, 2.5]),
        (torch.tensor(-2.5, dtype=torch.bfloat16), [-2.5, -2.5, -2.5, 2.5]),
        (torch.tensor(1e300, dtype=torch.float64), [1e300] * 4),
        (torch.tensor(-7), [-7, -7, -7, 7]),
        (torch.tensor(200, dtype=torch.uint8), [200] * 4),
        (torch.tensor(True), [True, True, None, None]),
        (torch.tensor(3 - 4j), [5.0, 5.0, 5.0, None]),
        (torch.tensor(0.5).to(torch.float8_e5m2), [0.5] * 4),
    ],
    ids=lambda value: str(value.dtype) if isinstance(value, torch.Tensor) else "",
)
def test_zero_dim_tensor_gives_its_value_and_absolute_value(tensor, expected):
    assert statistics(tensor) == expected
    assert read_back([on_device(tensor)]) == [expected]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(0),
        torch.empty(2, 0, 3, dtype=torch.int64),
        torch.empty(0, dtype=torch.complex64),
        torch.empty(2, 3, device="meta"),
        torch.tensor(1.0, device="meta"),
        torch.empty(2, 3, device="meta", dtype=torch.bool),
    ],
    ids=["float", "int", "complex", "meta", "meta_0dim", "meta_bool"],
)
def test_empty_and_meta_tensors_have_no_statistics(tensor):
    assert statistics(tensor) == [None] * 4


# ---- layouts and kinds that torch converts ---------------------------------------------------

DENSE = torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.0, -4.0]])
SPARSE = {
    "coo": lambda: DENSE.to_sparse(),
    "csr": lambda: DENSE.to_sparse_csr(),
    "csc": lambda: DENSE.to_sparse_csc(),
    "bsr": lambda: DENSE.to_sparse_bsr((1, 3)),
    "hybrid": lambda: DENSE.to_sparse(1),
    "uncoalesced": lambda: torch.sparse_coo_tensor(
        [[0, 1, 0], [1, 2, 1]], [1.5, -4.0, 0.5], (2, 3), check_invariants=True
    ),
    "mkldnn": lambda: DENSE.to_mkldnn(),
}


@pytest.mark.parametrize("make", SPARSE.values(), ids=SPARSE)
def test_sparse_tensors_are_measured_with_their_zeros(make):
    tensor = quiet(make)
    assert statistics(tensor) == pytest.approx([2.0, -4.0, -2 / 6, math.sqrt(20)], rel=1e-6)


def test_sparse_tensor_without_gaps_counts_no_zero():
    assert statistics(torch.tensor([3.0, 5.0]).to_sparse())[:3] == [5.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.tensor([0, -3]), [0, -3, None, None]),
        (torch.tensor([True, False]), [True, False, None, None]),
        (torch.tensor([0.0, 0.0]), [0.0] * 4),
        (torch.tensor([0.0, NAN]), [NAN] * 4),
    ],
    ids=["int", "bool", "all_zero", "nan"],
)
def test_sparse_tensor_of_other_values_is_measured_as_if_dense(tensor, expected):
    found = statistics(tensor.to_sparse())
    assert found == near(expected, 0)
    assert [type(value) for value in found] == [type(value) for value in expected]


def test_nested_tensor_is_measured_over_all_its_parts():
    nested = quiet(lambda: torch.nested.nested_tensor([DENSE, torch.full((1, 3), 5.0)]))
    assert statistics(nested) == pytest.approx([5.0, -4.0, 13 / 9, math.sqrt(95)], rel=1e-6)


def test_quantized_tensor_is_measured_dequantized():
    quantized = quiet(lambda: torch.quantize_per_tensor(DENSE, 0.5, 2, torch.qint8))
    assert statistics(quantized) == pytest.approx([2, -4, -2 / 6, math.sqrt(20)], rel=1e-6)


def test_conjugate_and_negative_views_are_measured_as_their_values():
    conjugate = torch.tensor([3 + 4j, 0 - 1j]).conj()
    assert statistics(conjugate) == [5.0, 1.0, 3.0, None]
    assert conjugate.imag.is_neg()
    assert statistics(conjugate.imag) == pytest.approx([1, -4, -1.5, math.sqrt(17)], rel=1e-6)


def test_complex32_is_measured_in_complex64():
    tensor = quiet(lambda: torch.tensor([3 + 4j, 0j]).to(torch.complex32))
    assert statistics(tensor) == [5.0, 0.0, 2.5, None]


@pytest.mark.parametrize("name", ["bits8", "float4_e2m1fn_x2"])
def test_dtype_without_arithmetic_cannot_be_measured(name):
    if hasattr(torch, name):
        with pytest.raises(CannotMeasure, match=r"cannot reduce torch\." + name):
            statistics(torch.zeros(8, dtype=torch.uint8).view(getattr(torch, name)))


@pytest.mark.parametrize("view", [lambda t: t, lambda t: t[2:]], ids=["whole", "offset"])
def test_tensor_whose_memory_is_freed_cannot_be_measured(view):
    base = torch.ones(8)
    tensor = view(base)
    base.untyped_storage().resize_(0)
    with pytest.raises(CannotMeasure, match="freed"):
        statistics(tensor)
    with pytest.raises(CannotMeasure, match="freed"):
        statistics(tensor.view(torch.uint16))


def test_tensor_inside_vmap_cannot_be_measured():
    reasons = []

    def double(tensor):
        with pytest.raises(CannotMeasure) as caught:
            statistics(tensor)
        reasons.append(str(caught.value))
        return tensor * 2

    torch.vmap(double)(torch.ones(3, 2))
    assert len(reasons) == 1
    assert "\n" not in reasons[0]


# ---- what the user's tensors and torch keep --------------------------------------------------

ALL_KINDS = {
    "float": lambda: random(40, 30),
    "large": lambda: random(LARGE),
    "large_float16": lambda: random(LARGE).half(),
    "sliced": lambda: random(400, 300)[:, ::2],
    "expanded": lambda: random(1, 5).expand(4, 5),
    "int": lambda: torch.arange(40_000).view(200, 200)[:, 1:],
    "bool": lambda: random(30) > 0,
    "complex": lambda: torch.complex(random(30), random(30)),
    "0dim": lambda: torch.tensor(2.0),
}
KIND = pytest.mark.parametrize("make", ALL_KINDS.values(), ids=ALL_KINDS)


@KIND
@pytest.mark.parametrize("measure", [statistics, on_device], ids=["cpu", "device"])
def test_measuring_leaves_tensor_storage_and_random_state_as_they_were(make, measure):
    tensor = make()
    before = tensor.clone()
    version, generator = tensor._version, torch.get_rng_state()
    measure(tensor)
    assert torch.equal(tensor, before)
    assert tensor._version == version
    assert torch.equal(torch.get_rng_state(), generator)
    tensor.untyped_storage().resize_(1 << 22)  # raises if something holds the memory


def patch_all_of_torch(monkeypatch):
    """Break every function that a window may replace."""

    def patched(*args, **kwargs):
        raise AssertionError("a torch function was looked up at call time")

    for owner in (torch, torch.Tensor, torch.linalg, torch._VF, torch.nn.functional):
        for name in dir(owner):
            value = getattr(owner, name)
            dunder = name.startswith("__") and name not in ("__getitem__", "__xor__", "__add__")
            if callable(value) and not isinstance(value, type) and not dunder:
                monkeypatch.setattr(owner, name, patched)


@KIND
def test_measuring_calls_no_torch_function_that_was_patched_later(make, monkeypatch):
    tensor = make()
    expected = statistics(tensor)
    deferred = on_device(tensor)
    with monkeypatch.context() as patches:
        patch_all_of_torch(patches)
        found = statistics(tensor)
        again = on_device(tensor)
        read = read_back([deferred, again])
    assert found == expected
    assert read[0] == read[1]


# ---- on a device -----------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """Notes the operations that reach the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


# Copies (to the host, or at all), and what makes the host wait for a value of the device.
WAITING = {"_local_scalar_dense", "item", "copy_", "_to_copy", "nonzero", "is_nonzero", "equal"}
ON_DEVICE = {
    **{str(dtype): random(6, 50).to(dtype) for dtype in TOLERANCE},
    "transposed": random(6, 50).t(),
    "int64": torch.tensor([2**62 + 1, -5]),
    "uint8": torch.tensor([3, 200], dtype=torch.uint8),
    "bool": torch.tensor([True, False]),
    "complex64": torch.complex(random(9), random(9)),
    "0dim": torch.tensor(-2.0),
    "0dim_int": torch.tensor(-2),
    "0dim_bool": torch.tensor(True),
    "0dim_complex": torch.tensor(3 + 4j),
}


@pytest.mark.parametrize("tensor", ON_DEVICE.values(), ids=ON_DEVICE)
@pytest.mark.parametrize("high", [False, True], ids=["low", "high"])
def test_device_statistics_wait_for_nothing_and_agree_with_those_of_the_cpu(tensor, high):
    with Recorder() as recorder:
        deferred = on_device(tensor, high)
    assert not WAITING.intersection(recorder.seen)
    assert isinstance(deferred, Deferred)
    assert deferred.values.ndim == 1
    expected = statistics(tensor, high)
    tolerance = 2e-5 if high else TOLERANCE.get(tensor.dtype, 2e-5)
    (found,) = read_back([deferred])
    assert found == near(expected, tolerance)
    assert [type(value) for value in found] == [type(value) for value in expected]


@pytest.mark.parametrize("dtype", [*FLOAT8, *UNSIGNED[2:]], ids=str)
def test_device_statistics_of_converted_dtypes_agree_with_those_of_the_cpu(dtype):
    tensor = (random(6, 50).abs() * 8).to(dtype)
    with Recorder() as recorder:
        deferred = on_device(tensor)
    assert not {"_local_scalar_dense", "item"}.intersection(recorder.seen)
    assert read_back([deferred])[0] == near(statistics(tensor), 2e-5)


def test_device_statistics_are_those_of_the_moment_of_the_call():
    tensors = [torch.tensor(2.0), torch.ones(3), torch.tensor([True])]
    deferred = [on_device(tensor) for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    assert read_back(deferred)[0] == [2.0] * 4
    assert [values[0] for values in read_back(deferred)[1:]] == [1.0, True]


def test_read_back_makes_one_copy_per_dtype_and_keeps_the_order():
    tensors = [torch.full((3,), float(i)) for i in range(40)]
    tensors[1::2] = [torch.full((3,), i) for i in range(20)]
    deferred = [on_device(tensor) for tensor in tensors]
    with Recorder() as recorder:
        found = read_back(deferred)
    assert recorder.seen.count("cat") == len(recorder.seen) == 2
    assert [values[:2] for values in found] == [[t[0].item()] * 2 for t in tensors]


def test_read_back_of_nothing_is_nothing():
    assert read_back([]) == []


def test_read_back_waits_for_the_stream_of_the_values_once():
    class Stream:
        waits = 0

        def synchronize(self):
            self.waits += 1

    stream = Stream()
    values = torch.tensor([1.0, 2.0])
    found = read_back([Deferred(values, list, stream), Deferred(values, sum_of, stream)])
    assert found == [[1.0, 2.0], [3.0]]
    assert stream.waits == 1


def sum_of(values):
    return [sum(values)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_tensors_are_measured_without_a_synchronisation():
    tensors = [t.cuda() for t in ON_DEVICE.values()]
    torch.cuda.set_sync_debug_mode("error")
    try:
        deferred = [statistics(tensor) for tensor in tensors]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = [statistics(tensor) for tensor in ON_DEVICE.values()]
    for found, wanted in zip(read_back(deferred), expected, strict=True):
        assert found == near(wanted, 2e-2)


# ---- the short way of the most frequent kind -------------------------------------------------


@pytest.mark.parametrize(
    "count",
    [usual_kind.SMALL + 1, 100_000, *(pieces.PIECE_BYTES // 4 + more for more in (0, 1)), 10**6],
)
@pytest.mark.parametrize("leaf", [False, True], ids=["plain", "requires_grad"])
@pytest.mark.usefixtures("one_thread")
def test_usual_tensor_has_the_statistics_of_numpy(count, leaf, monkeypatch):
    tensor = random(count, seed=1).requires_grad_(leaf)
    found = usual(tensor)
    monkeypatch.setattr(stats_cpu, "usual", lambda _: None)
    assert found == near(by_numpy(tensor.detach()), TOLERANCE[torch.float32])
    assert found == statistics(tensor.detach())  # the long way has the same numbers
    tensor.detach().resize_(1)  # still allowed


def shaped(*shape):
    return random(int(np.prod(shape)), seed=2).view(shape)


LAYOUTS = {
    "transposed": lambda: shaped(200, 150).t(),
    "heads and tokens": lambda: shaped(2, 128, 4, 32).transpose(1, 2),
    "channels last": lambda: shaped(2, 16, 32, 32).to(memory_format=torch.channels_last),
    "gaps": lambda: shaped(60_000)[::2],
    "half of each row": lambda: shaped(2, 128, 4, 64).transpose(1, 2).chunk(2, dim=-1)[1],
    "columns": lambda: shaped(400, 300)[10:390, 7:290].t(),
    "dimension of size 1": lambda: shaped(30_000, 4)[:, 1:2],
    "requires_grad": lambda: shaped(200, 150).requires_grad_().t(),
    "transposed, more than a piece": lambda: shaped(700, 800).t(),
}


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.usefixtures("one_thread")
def test_usual_tensor_of_any_layout_has_the_statistics_of_numpy(make, monkeypatch):
    tensor = make()
    found = usual(tensor)
    monkeypatch.setattr(stats_cpu, "usual", lambda _: None)
    assert found == near(by_numpy(tensor.detach()), TOLERANCE[torch.float32])
    assert found == near(statistics(tensor.detach()), 1e-6)


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # with more, torch's own reductions are faster
    yield
    torch.set_num_threads(before)


def test_large_tensor_is_left_to_the_threads_of_torch():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert usual(torch.ones(300_000)) is None
        assert statistics(torch.ones(300_000)) == [1.0, 1.0, 1.0, near([547.72256], 1e-5)[0]]
    finally:
        torch.set_num_threads(before)


def lazily_negated():
    return torch.ones(20_000, dtype=torch.complex64).conj().imag


def freed(view=lambda tensor: tensor):
    tensor = view(torch.ones(60_000)[5_000:])
    tensor.untyped_storage().resize_(0)
    return tensor


UNUSUAL = {
    "small": lambda: torch.ones(usual_kind.LEAST),
    "gaps in more than a piece": lambda: torch.ones(pieces.PIECE_BYTES)[::2],
    "expanded": lambda: torch.ones(200, 1).expand(200, 150),
    "lazily negated": lazily_negated,
    "freed": freed,
    "freed, with gaps": lambda: freed(lambda tensor: tensor[::2]),
    "zeros of autograd": lambda: torch._efficientzerotensor((20_000,)),
    "meta": lambda: torch.ones(20_000, device="meta"),
    "sparse": lambda: torch.ones(20_000).to_sparse(),
    "infinite": lambda: torch.full((20_000,), INF),
    "sum too large": lambda: torch.full((20_000,), 3e38),
}


@pytest.mark.parametrize("make", [lambda t: t, lambda t: t[::2]], ids=["whole", "gaps"])
@pytest.mark.usefixtures("one_thread")
def test_usual_tensor_with_one_nan_has_only_nan(make):
    tensor = random(40_000)
    tensor[20_000] = NAN
    assert usual(make(tensor)) == near([NAN] * 4, 0)


@pytest.mark.parametrize("make", UNUSUAL.values(), ids=UNUSUAL)
def test_unusual_tensor_is_left_to_the_general_way(make):
    assert usual(make()) is None


# ---- memory that is no longer there ------------------------------------------------------------

VIEWS = {
    "whole": lambda t: t,
    "offset": lambda t: t[2:],
    "gaps": lambda t: t[::2],
    "transposed": lambda t: t.view(-1, 8).t(),
    "columns": lambda t: t.view(-1, 8)[:, 1:3],
    "expanded": lambda t: t[-1:].expand(8),
    "negated lazily": lambda t: t.view(torch.complex64).conj().imag,
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("count", [96, 4_000, 40_000])
@pytest.mark.parametrize("left", [0, 8], ids=["freed", "shrunk"])
def test_tensor_beyond_its_memory_is_not_read(view, count, left):
    tensor = view(torch.ones(count))
    tensor.untyped_storage().resize_(left)
    assert usual(tensor) is None
    assert small.elements_of_any(tensor, 4) is None
    for measure in (statistics, crc32, xor64):
        with pytest.raises(CannotMeasure, match="freed"):
            measure(tensor)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_tensor_whose_memory_just_suffices_is_read(view):
    tensor = view(torch.ones(4_000))
    assert statistics(tensor)[0] in (1.0, -1.0)
    assert crc32(tensor)
