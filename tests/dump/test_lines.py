"""A record's line is what the encoder of the json module makes of it.

Byte for byte; with orjson value for value.
"""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe.pytorch.dump import jsonfile, lines
from msprobe.pytorch.dump.entries import Entry, TensorEntry
from msprobe.pytorch.dump.lines import line, pair


@pytest.fixture(scope="module", autouse=True, params=["json", "orjson"])
def encoder(request):
    """Every test with the optional library and without it."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "json":
            patch.setattr(lines, "_dumps", None)
        else:
            pytest.importorskip("orjson")
            assert lines._dumps is not None
        yield request.param


def assert_same(found: bytes, expected: bytes, encoder: str) -> None:
    if encoder == "json":
        assert found == expected
    else:  # repr: 1 is not 1.0, nor 0.0 -0.0
        read = [json.loads(b"{%b}" % line, object_pairs_hook=list) for line in (found, expected)]
        assert repr(read[0]) == repr(read[1])


def tensor(top=1.5, low=-2.0, mean=1e-30, norm=3.25, shape=(2, 3), grad=True) -> TensorEntry:
    return TensorEntry(
        type="torch.Tensor", dtype="torch.float32", shape=shape, Max=top, Min=low, Mean=mean,
        Norm=norm, requires_grad=grad,
    )


class Length:
    """Stands for a torch.SymInt: the json module asks for its text."""

    def __str__(self) -> str:
        return "s0"


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
    "a number beyond 64 bits": Entry(type="int", value=1 << 64),
    "a whole number": Entry(type="float", value=1e16),
    "negative zero": Entry(type="float", value=-0.0),
    "not a number": Entry(type="float", value=math.nan),
    "null as text": Entry(type="str", value="null"),
    "null as text beside NaN": Entry(type="str", value=["null", None, math.nan]),
    "three nulls": Entry(type="slice", value=[None, None, None]),
    "a length that is no number": tensor(shape=(2, Length())),
    "nothing": None,
    "a list": [tensor(), [tensor(math.nan)], {"key": tensor()}],
}


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_line_equals_that_of_the_encoder(entry, encoder) -> None:
    record = {
        "input_args": [entry, tensor(), entry],
        "input_kwargs": {'odd "key"\n': entry, "é\ud800": tensor()},
        "output": [entry],
        "parameters": {},
        "is_nan": 0,
    }
    name = 'Module.a"b\\.é.Linear.forward.0'
    found = line(name, record)
    assert_same(found, jsonfile.member(name, record), encoder)
    assert name in json.loads(b"{" + found + b"}")


@given(st.text(), st.none() | st.text())
def test_pair_equals_that_of_the_encoder(name, value) -> None:
    assert pair(name, value) == jsonfile.member(name, value)


@given(st.lists(st.floats(), min_size=4, max_size=4), st.lists(st.integers(0, 9)), st.booleans())
def test_any_numbers_give_the_same_line(encoder, numbers, shape, grad) -> None:
    record = {"output": [tensor(*numbers, shape=tuple(shape), grad=grad)]}
    assert_same(line("a", record), jsonfile.member("a", record), encoder)


@pytest.mark.parametrize("record", [[1, 2.5], "text", {}, {"a": 1}, {"a": tensor()}], ids=str)
def test_record_of_any_form_has_a_line(record, encoder) -> None:
    assert_same(line("a", record), jsonfile.member("a", record), encoder)
