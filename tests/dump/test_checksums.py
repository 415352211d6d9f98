"""Checksums against zlib and numpy over the bytes, and the observed values of dump-format."""

from __future__ import annotations

import warnings
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from msprobe.pytorch.dump.checksums import crc32, device_xor64, xor64
from msprobe.pytorch.dump.deferred import CannotMeasure, read_back

BASE = torch.tensor([[1.5, -2, 0], [3, 4, -0.5]])
NAMES = (
    "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool "
    "complex128 complex64 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
)
DTYPES = [getattr(torch, name) for name in NAMES.split() if hasattr(torch, name)]
LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.t(),
    "columns": lambda t: t[:, ::2],
    "rows": lambda t: t[1:],
    "odd_offset": lambda t: t.reshape(-1)[1:],
    "expanded": lambda t: t[:1].expand(5, -1),
    "inner": lambda t: t[1:-1, 1:-1],
    "single": lambda t: t[0, 0],
}
LAYOUT = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
SHAPE = pytest.mark.parametrize("shape", [(3, 5), (137, 141), (1030, 700)], ids=str)


def integers(*shape: int) -> torch.Tensor:
    return torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(0))


def octets(tensor: torch.Tensor) -> bytes:
    """The bytes of the elements in C order, through numpy."""
    flat = torch.clone(tensor, memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def xor_of(content: bytes) -> str:
    words = np.frombuffer(content + bytes(-len(content) % 8), np.uint64)
    return f"0x{int(np.bitwise_xor.reduce(words)):016x}"


def quiet(make):
    """What ``make`` makes, without the warnings that torch gives for rare kinds of tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


OBSERVED_CRC = {
    "float32": (BASE, "0c245805"),
    "float64": (BASE.double(), "3315eba1"),
    "float16": (BASE.half(), "2914b0b6"),
    "bfloat16": (BASE.bfloat16(), "b992652e"),
    "int8": (BASE.to(torch.int8), "ebb0e767"),
    "int16": (BASE.to(torch.int16), "ae4cdf98"),
    "int32": (BASE.to(torch.int32), "447d2c39"),
    "int64": (BASE.to(torch.int64), "6f08a7c5"),
    "bool": (BASE.bool(), "28203056"),
    "complex64": (BASE.to(torch.complex64), "67535ed6"),
    "complex128": (BASE.to(torch.complex128), "c3ad678d"),
    "uint8": (BASE.abs().to(torch.uint8), "66745a3b"),
    "float8_e4m3fn": (BASE.to(torch.float8_e4m3fn), "af3ddd33"),
    "float8_e5m2": (BASE.to(torch.float8_e5m2), "4416c7b4"),
    "0dim": (torch.tensor(2.5), "c21cba2e"),
    "0dim_int64": (torch.tensor(7), "6fe7d670"),
    "0dim_bool": (torch.tensor(True), "a505df1b"),
    "nan": (torch.tensor([1, float("nan"), 2]), "70eee857"),
    "negative_zero": (torch.tensor([-0.0]), "ccfc5c3c"),
    "transposed": (BASE.t(), "2f3e1501"),
    "columns": (BASE[:, ::2], "020d9764"),
    "expanded": (torch.tensor([1.0, 2.0]).expand(3, 2), "17a6f8e1"),
    "empty": (torch.empty(0), "00000000"),
}
OBSERVED_XOR = {
    "float32": (BASE, "0x3f4000007f400000"),
    "float64": (BASE.double(), "0x4000000000000000"),
    "float16": (BASE.half(), "0x4200000078007a00"),
    "bfloat16": (BASE.bfloat16(), "0x404000007f007f40"),
    "int8": (BASE.to(torch.int8), "0x000000040300fe01"),
    "int32": (BASE.to(torch.int32), "0xfffffffd00000005"),
    "int64": (BASE.to(torch.int64), "0xfffffffffffffff8"),
    "bool": (BASE.bool(), "0x0000010101000101"),
    "complex64": (BASE.to(torch.complex64), "0x0000000040000000"),
    "arange": (torch.arange(100003, dtype=torch.float32), "0x3843508040400100"),
}


@pytest.mark.parametrize(("tensor", "expected"), OBSERVED_CRC.values(), ids=OBSERVED_CRC)
def test_crc32_is_the_observed_one(tensor, expected):
    assert crc32(tensor) == expected


@pytest.mark.parametrize(("tensor", "expected"), OBSERVED_XOR.values(), ids=OBSERVED_XOR)
def test_xor64_is_the_observed_one(tensor, expected):
    assert xor64(tensor) == expected
    assert read_back([device_xor64(tensor)]) == [[expected]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@LAYOUT
@SHAPE
def test_checksums_are_those_of_the_bytes_in_c_order(dtype, layout, shape):
    tensor = layout(integers(*shape).to(dtype))
    content = octets(tensor)
    assert crc32(tensor) == f"{zlib.crc32(content):08x}"
    assert xor64(tensor) == xor_of(content)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool], ids=str)
@LAYOUT
@SHAPE
def test_device_xor64_is_that_of_the_bytes_in_c_order(dtype, layout, shape):
    tensor = layout(integers(*shape).to(dtype))
    assert read_back([device_xor64(tensor)]) == [[xor_of(octets(tensor))]]


@given(
    count=st.integers(0, 70),
    begin=st.integers(0, 9),
    step=st.integers(1, 3),
    columns=st.integers(1, 5),
)
@settings(max_examples=150, deadline=None)
def test_checksums_hold_for_every_length_offset_and_stride(count, begin, step, columns):
    base = (integers(400, 3) + 1).to(torch.uint8)[:, 1:].reshape(-1)
    tensor = torch.as_strided(base, (count, columns), (step, 2), begin)
    content = octets(tensor)
    assert crc32(tensor) == f"{zlib.crc32(content):08x}"
    assert xor64(tensor) == xor_of(content)
    if count:
        assert read_back([device_xor64(tensor)]) == [[xor_of(content)]]


@pytest.mark.parametrize("shape", [(0,), (2, 0, 3)], ids=str)
def test_empty_tensors_have_checksums(shape):
    assert crc32(torch.empty(shape)) == "00000000"
    assert xor64(torch.empty(shape)) == "0x0000000000000000"


def test_quantized_tensor_is_summed_over_its_stored_integers():
    tensor = quiet(lambda: torch.quantize_per_tensor(BASE, 0.5, 2, torch.qint8))
    content = (BASE / 0.5 + 2).to(torch.int8).numpy().tobytes()
    assert crc32(tensor) == f"{zlib.crc32(content):08x}"
    assert xor64(tensor) == xor_of(content)


def test_conjugate_and_negative_views_are_summed_over_their_values():
    conjugate = torch.complex(BASE, BASE + 1).conj()
    content = np.conj(torch.complex(BASE, BASE + 1).numpy()).tobytes()
    assert crc32(conjugate) == f"{zlib.crc32(content):08x}"
    assert conjugate.imag.is_neg()
    assert xor64(conjugate.imag) == xor_of((-(BASE + 1)).numpy().tobytes())


def test_nested_tensor_is_summed_over_its_parts_in_order():
    parts = [BASE, BASE[:0], BASE[1:]]
    nested = quiet(lambda: torch.nested.nested_tensor(parts))
    content = b"".join(part.numpy().tobytes() for part in parts)
    assert crc32(nested) == f"{zlib.crc32(content):08x}"
    assert xor64(nested) == xor_of(content)
    assert read_back([device_xor64(nested)]) == [[xor_of(content)]]


@pytest.mark.parametrize("checksum", [crc32, xor64])
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.empty(2, device="meta"), "meta"),
        (lambda: BASE.to_sparse(), "sparse"),
        (lambda: freed(torch.ones(8)), "freed"),
        (lambda: freed(torch.ones(8)[3:]), "freed"),
    ],
    ids=["meta", "sparse", "freed", "freed_offset"],
)
def test_tensor_without_bytes_has_no_checksum(checksum, make, reason):
    tensor = make()
    with pytest.raises(CannotMeasure, match=reason):
        checksum(tensor)


def freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("checksum", [crc32, xor64])
def test_tensor_inside_vmap_has_no_checksum(checksum):
    def double(tensor):
        with pytest.raises(CannotMeasure):
            checksum(tensor)
        return tensor * 2

    assert torch.vmap(double)(torch.ones(3, 2)).sum() == 12


@pytest.mark.parametrize("checksum", [crc32, xor64, device_xor64])
@LAYOUT
def test_checksums_leave_the_tensor_and_its_storage_as_they_were(checksum, layout):
    tensor = layout(integers(6, 8))
    before, version = tensor.clone(), tensor._version
    checksum(tensor)
    assert torch.equal(tensor, before)
    assert tensor._version == version
    tensor.untyped_storage().resize_(1 << 16)  # raises after `Tensor.numpy`


def test_device_xor64_reads_no_value_back():
    seen = set()

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.add(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Recorder():
        deferred = device_xor64(torch.arange(7, dtype=torch.float32))
    assert seen
    assert not seen & {"_local_scalar_dense", "item", "_to_copy", "nonzero"}
    assert deferred.values.shape == (1,)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@LAYOUT
def test_checksums_of_cuda_tensors_are_those_of_the_cpu(layout):
    tensor = layout(integers(37, 41).to(torch.float16))
    assert crc32(tensor.cuda()) == crc32(tensor)
    assert read_back([xor64(tensor.cuda())]) == [[xor64(tensor)]]
