"""Every kind of value that a dump may hold: recorded, checked, and read back."""

from __future__ import annotations

import enum
import json
import math
import types
import warnings
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from torch import nn

import msprobe
from helpers import debugger
from msprobe import check, reader
from msprobe.errors import UsageError
from msprobe.records import Rank
from msprobe.values import PlainValue, TensorValue

ROOT = Path(__file__).parents[1]
LETTER = enum.IntEnum("LETTER", "A B")


class Scale(nn.Module):
    """Its parameters have the names of fields of a tensor entry."""

    def __init__(self) -> None:
        super().__init__()
        self.shape = nn.Parameter(torch.ones(2))
        self.dtype = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.shape * self.dtype


def calls(f: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "prototype stage"
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    f(nested)
    f({"shape": [2], "dtype": torch.float32}, {"type": "a", "value": 1}, {"class_type": "b"})
    f(shape=(2, 3), dtype=torch.float32)
    f(2**9000, -(2**9000), 2**64, math.nan, -math.inf, complex(math.nan, -math.inf), LETTER.B)
    f(np.array(["a"]), np.array([1], dtype=">i4"), np.zeros((0, 3)), np.array([1 + 2j]))
    f(np.array(2.5), np.array([object()]), np.float32(math.inf), np.bool_(True))
    f(torch.eye(2).to_sparse(), torch.empty(0), torch.ones(2, device="meta"), torch.tensor(True))
    f(torch.tensor([2**63], dtype=torch.uint64), torch.tensor([math.nan, 1.0]), torch.tensor(3))
    f(torch.channels_last, torch.Size([1]), slice(0, None), ..., {3}, b"x", None, object())
    f({1: 2, "1": 3}, [[[]]], (), {}, torch.device("cpu"), {"device": "cpu"}, range(2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kinds")
    kernels = types.SimpleNamespace(f=lambda *args, **kwargs: (args, kwargs))
    watcher = debugger(path, task="tensor")
    watcher.register_custom_api(kernels, "f", "My")
    model = nn.Sequential(Scale())
    watcher.start(model, rank_id=0)
    calls(kernels.f)
    model(torch.ones(2)).sum().backward()
    watcher.stop()
    watcher.step()
    type(watcher)._instance = None
    return path


@pytest.fixture
def rank(folder: Path) -> Rank:
    return msprobe.read(folder).step(0).rank(0)


def places(content: Any) -> dict[str, Any]:
    """Place → value, for all values in what `Record.content` returned."""
    if isinstance(content, (TensorValue, PlainValue)):
        return {content.place: content}
    parts = content.values() if isinstance(content, dict) else content or ()
    return {place: value for part in parts for place, value in places(part).items()}


def test_check_finds_nothing_and_the_schema_fits(folder: Path) -> None:
    (found,) = reader.find_ranks(folder)
    assert list(check.check_folder(found, filtered=False)) == []
    schema = json.loads((ROOT / "docs" / "dump.schema.json").read_text())
    whole = json.loads((found.path / "dump.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(whole)


def test_every_value_is_read_with_the_types_that_are_promised(rank: Rank) -> None:
    """Whatever its place, and wherever the names of arguments are those of our fields."""
    for record in rank:
        for place, value in places(record.content).items():
            assert type(place) is str
            if isinstance(value, TensorValue):
                assert type(value.type) is type(value.dtype) is str
                assert value.shape is None or {type(size) for size in value.shape} <= {int}
                numbers = {type(n) for n in (value.max, value.min, value.mean, value.norm)}
                assert numbers <= {int, float, bool, type(None)}
                assert value.is_finite == ("nan" not in repr(value))


def test_nested_tensor_has_numbers_and_no_shape(rank: Rank) -> None:
    value = rank["My.f.0.forward"].tensor("input_args.0")
    assert (value.shape, value.max) == (None, 1.0)


def test_arguments_named_as_our_fields_are_arguments(rank: Rank) -> None:
    found = places(rank["My.f.1.forward"]["input_args"])
    assert found["input_args.0.shape.0"].value == 2
    assert found["input_args.0.dtype"].value == "torch.float32"
    assert found["input_args.1.value"].value == 1
    assert found["input_args.2.class_type"].value == "b"
    keywords = rank["My.f.2.forward"]["input_kwargs"]
    assert [size.value for size in keywords["shape"]] == [2, 3]
    parameters = rank["Module.0.Scale.forward.0"]["parameters"]
    assert {name: value.shape for name, value in parameters.items()} == {
        "shape": (2,), "dtype": (2,),
    }


def test_numbers_come_back_as_what_they_were(rank: Rank) -> None:
    *ints, nan, low, odd, letter = [v.value for v in rank["My.f.3.forward"]["input_args"]]
    assert ints == [2**9000, -(2**9000), 2**64]
    assert math.isnan(nan)
    assert low == -math.inf
    assert (math.isnan(odd.real), odd.imag, letter) == (True, -math.inf, 2)


def test_saved_array_is_loaded_as_a_tensor(rank: Rank) -> None:
    record = rank["My.f.4.forward"]
    big_endian, double = (record.tensor(f"input_args.{i}").load() for i in (1, 3))
    assert torch.equal(big_endian, torch.tensor([1], dtype=torch.int32))
    assert torch.equal(double, torch.tensor([1 + 2j], dtype=torch.complex128))
    with pytest.raises(UsageError, match=r"of <U1, which no tensor can hold: .*numpy\.load\("):
        record.tensor("input_args.0").load()


def test_place_without_a_tensor_is_a_key_error_that_names_the_places(rank: Rank) -> None:
    with pytest.raises(KeyError, match=r"'output\.9' in My\.f\.7\.forward; there are input_args"):
        rank["My.f.7.forward"].tensor("output.9")


def test_text_in_place_of_a_number_is_none_or_the_float(tmp_path: Path) -> None:
    """A broken file, or numbers with more digits than a float has."""
    entry = {"type": "numpy.ndarray", "dtype": "float128", "shape": [1], "Max": "1.5", "Min": "x"}
    data = {"a.0.debug": entry, "b.0.debug": {"type": "complex", "value": "no number"}}
    (tmp_path / "dump.json").write_text(json.dumps({"task": "statistics", "data": data}))
    (rank,) = msprobe.read(tmp_path).ranks
    value = rank["a.0.debug"].content
    assert (value.max, value.min, value.is_finite) == (1.5, None, True)
    assert rank["b.0.debug"].content.value == "no number"
