"""Files of tensors: read by torch in every way it knows, equal to those it writes itself."""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from msprobe.pytorch.dump import ptfile

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.uint8),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64, torch.complex128),
]
SHAPES = [(), (1,), (7,), (2, 3, 4), (1, 5, 1), (0, 3), (300, 400)]
WAYS: dict[str, dict[str, Any]] = {
    "weights_only": {"weights_only": True},
    "any pickle": {"weights_only": False},
    "mapped": {"weights_only": True, "mmap": True},
}


def save(tensor: torch.Tensor, path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        return ptfile.save(tensor, fd)
    finally:
        os.close(fd)


def octets(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def random(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_complex:
        return torch.randn(shape, dtype=dtype)
    return (torch.randn(shape) * 50).to(dtype)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_reads_the_same_tensor(
    dtype: torch.dtype, shape: tuple[int, ...], way: dict[str, Any], tmp_path: Path
) -> None:
    tensor = random(shape, dtype)
    size = save(tensor, tmp_path / "x.pt")
    found = torch.load(tmp_path / "x.pt", **way)
    assert size == (tmp_path / "x.pt").stat().st_size
    assert (found.dtype, found.shape, found.stride()) == (dtype, tensor.shape, tensor.stride())
    assert octets(found) == octets(tensor)
    assert not found.requires_grad


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_records_are_those_that_torch_writes(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = random((3, 1, 5), dtype)
    save(tensor, tmp_path / "x.pt")
    theirs = io.BytesIO()
    torch.save(tensor, theirs)
    with zipfile.ZipFile(tmp_path / "x.pt") as ours, zipfile.ZipFile(theirs) as other:
        for name in ("data.pkl", "byteorder", "version"):
            assert ours.read(f"archive/{name}") == other.read(f"archive/{name}")


@pytest.mark.parametrize("fast", [True, False], ids=["checksum", "no checksum"])
def test_zip_file_is_whole(fast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ptfile, "fast_crc32", zlib.crc32 if fast else None)
    tensor = torch.arange(1000.0)
    save(tensor, tmp_path / "x.pt")
    assert torch.equal(torch.load(tmp_path / "x.pt"), tensor)
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        info = archive.getinfo("archive/data/0")
        assert info.file_size == 4000
        if fast:
            assert archive.testzip() is None
            assert archive.read("archive/data/0") == octets(tensor)
        else:
            assert info.CRC == 0


ODD = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "float8": lambda: torch.ones(3).to(torch.float8_e4m3fn),
    "uint16": lambda: torch.ones(3, dtype=torch.uint16),
    "part of a large storage": lambda: torch.arange(1 << 16)[5:8],
    "gaps": lambda: torch.arange(12.0).view(3, 4)[:, :2],
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
}


@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
@pytest.mark.filterwarnings("ignore:.*TypedStorage")
@pytest.mark.filterwarnings("ignore:.*[qQ]uantiz")
def test_file_of_an_odd_tensor_holds_it_and_no_more(make, tmp_path: Path) -> None:
    tensor = make()
    size = save(tensor, tmp_path / "x.pt")
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert found.dtype == tensor.dtype
    if tensor.is_quantized:
        tensor, found = tensor.int_repr(), found.int_repr()
    assert torch.equal(found.to_dense().double(), tensor.to_dense().double())
    assert size == (tmp_path / "x.pt").stat().st_size < 4096


def test_write_that_the_system_cuts_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_a_little(fd: int, blocks: Any) -> int:
        return os.write(fd, b"".join(blocks)[:777])

    monkeypatch.setattr(os, "writev", write_a_little)
    tensor = torch.arange(5000)
    save(tensor, tmp_path / "x.pt")
    assert torch.equal(torch.load(tmp_path / "x.pt"), tensor)
