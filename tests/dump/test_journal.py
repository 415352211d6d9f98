"""What has been collected reaches the file, whatever one record or one device does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import read_json
from msprobe.pytorch.dump import stats
from msprobe.pytorch.dump.deferred import Deferred
from msprobe.pytorch.dump.entries import TensorEntry
from msprobe.pytorch.dump.journal import Journal
from msprobe.pytorch.dump.small import REDUCTIONS, elements
from msprobe.pytorch.dump.writer import Writer

UNWRITABLE = {"output": [{("a", "b"): 1}]}  # JSON has no such keys


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    header = {"task": "statistics", "level": "L1", "framework": "pytorch"}
    writer = Writer(
        str(tmp_path / "step0" / "rank0"), header, keeps_tensors=False, extra=True, warned=set()
    )
    return Journal(writer, lambda: None)


def records(tmp_path: Path) -> dict[str, Any]:
    data: dict[str, Any] = read_json(tmp_path / "step0" / "rank0" / "dump.json")["data"]
    return data


def log(tmp_path: Path) -> str:
    return (tmp_path / "step0" / "rank0" / "dump_error_info.log").read_text(encoding="utf-8")


def waiting(journal: Journal, value: float) -> dict[str, Any]:
    """A record whose only tensor is measured later."""
    entry = TensorEntry(Max=None, Min=None, Mean=None, Norm=None)
    width, reduction = REDUCTIONS[False][torch.float32]
    copy = elements(torch.tensor([value]), width)
    assert copy is not None
    journal.small.append((entry, reduction, copy))
    return {"output": [entry]}


@pytest.mark.parametrize("waits", [False, True], ids=["at once", "with values to come"])
def test_record_that_is_no_json_costs_itself_only(
    waits: bool, journal: Journal, tmp_path: Path
) -> None:
    before = waiting(journal, 1.0) if waits else {"output": [1]}
    journal.add("a", before)
    journal.add("odd", UNWRITABLE)
    journal.add("b", {"output": [2]})
    journal.flush()
    journal.add("c", {"output": [3]})
    journal.flush()
    found = records(tmp_path)
    assert list(found) == ["a", "odd", "b", "c"]
    assert found["odd"] is None
    assert "odd: TypeError" in log(tmp_path)


def test_running_call_that_is_no_json_does_not_keep_others_out(
    journal: Journal, tmp_path: Path
) -> None:
    journal.draft("odd", UNWRITABLE)
    journal.add("a", {"output": [1]})
    journal.flush()
    assert records(tmp_path) == {"a": {"output": [1]}, "odd": None}


def test_values_that_a_device_does_not_give_back_are_null(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Any) -> Any:
        raise RuntimeError("device-side assert triggered")

    entry = TensorEntry(Max=None)
    on_host = waiting(journal, 2.0)
    journal.defer(Deferred(torch.ones(1), list), lambda read: entry.update(Max=read[0]))
    marks: list[None] = []
    journal.defer(None, marks.append)
    journal.add("a", {"output": [entry]})
    journal.add("b", on_host)
    monkeypatch.setattr(stats, "read_back", fail)
    journal.flush()
    journal.add("c", {"output": []})
    journal.flush()
    found = records(tmp_path)
    assert found["a"]["output"] == [{"Max": None}]
    assert found["b"]["output"][0]["Max"] == 2.0
    assert "c" in found
    assert marks == [None]
    assert "device-side assert" in log(tmp_path)


def test_interrupted_measurement_is_done_again(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from msprobe.pytorch.dump import small

    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    for number in range(3):
        journal.add(str(number), waiting(journal, float(number)))
    with monkeypatch.context() as patch:
        patch.setattr(small, "fill_in", interrupt)
        with pytest.raises(KeyboardInterrupt):
            journal.flush()
    journal.flush()
    tops = [record["output"][0]["Max"] for record in records(tmp_path).values()]
    assert tops == [0.0, 1.0, 2.0]
