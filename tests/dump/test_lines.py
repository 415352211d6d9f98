"""A record's line is what the encoder of the json module makes of it, byte for byte."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe.pytorch.dump import jsonfile
from msprobe.pytorch.dump.entries import Entry, TensorEntry
from msprobe.pytorch.dump.lines import line, pair


def tensor(top=1.5, low=-2.0, mean=1e-30, norm=3.25, shape=(2, 3), grad=True) -> TensorEntry:
    return TensorEntry(
        type="torch.Tensor", dtype="torch.float32", shape=shape, Max=top, Min=low, Mean=mean,
        Norm=norm, requires_grad=grad,
    )


ENTRIES = {
    "finite": tensor(),
    "scalar": tensor(shape=()),
    "nan": tensor(mean=math.nan),
    "infinite": tensor(math.inf, -math.inf, math.nan, math.inf, grad=False),
    "unknown": tensor(None, None, None, None),
    "integers": tensor(5, -3, None, None),
    "booleans": tensor(True, False, None, None),
    "with a file": TensorEntry(tensor(), data_name="x.pt"),
    "with a checksum": TensorEntry(tensor(), md5="00000000"),
    "only a checksum": TensorEntry(type="torch.Tensor", dtype="torch.bool", shape=(2,), md5="0"),
    "a shard": TensorEntry(
        type="DTensor", dtype="d", device_mesh=[0], placements=[{"Shard": {"dim": 0}}], shape=(2,),
        md5="0", requires_grad=True, data_name="x.pt",
    ),
    "a number": Entry(type="int", value=1 << 20_000),
    "a text": Entry(type="str", value='"\\\n\u2028é\ud800'),
    "nothing": None,
    "a list": [tensor(), [tensor(math.nan)], {"key": tensor()}],
}


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_line_equals_that_of_the_encoder(entry) -> None:
    record = {
        "input_args": [entry, tensor(), entry],
        "input_kwargs": {'odd "key"\n': entry, "é\ud800": tensor()},
        "output": [entry],
        "parameters": {},
        "is_nan": 0,
    }
    name = 'Module.a"b\\.é.Linear.forward.0'
    found = line(name, record)
    assert found == jsonfile.member(name, record)
    assert name in json.loads(b"{" + found + b"}")


@given(st.text(), st.none() | st.text())
def test_pair_equals_that_of_the_encoder(name, value) -> None:
    assert pair(name, value) == jsonfile.member(name, value)


@given(st.lists(st.floats(), min_size=4, max_size=4), st.lists(st.integers(0, 9)), st.booleans())
def test_any_numbers_give_the_same_line(numbers, shape, grad) -> None:
    record = {"output": [tensor(*numbers, shape=tuple(shape), grad=grad)]}
    assert line("a", record) == jsonfile.member("a", record)


@pytest.mark.parametrize("record", [[1, 2.5], "text", {}, {"a": 1}, {"a": tensor()}], ids=str)
def test_record_of_any_form_has_a_line(record) -> None:
    assert line("a", record) == jsonfile.member("a", record)
