from __future__ import annotations

import csv
import io
import logging
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import msprobe
from msprobe.errors import UsageError
from msprobe.pytorch.random_calls import OWNERS
from msprobe.pytorch.random_save import random_save, stop_random_save

GOLDEN = Path(__file__).parent / "goldens" / "random_save"
SOURCE = str(Path(msprobe.__file__).parents[1])
TORCH = str(Path(torch.__file__).parents[1])


@pytest.fixture(autouse=True)
def stopped() -> Iterator[None]:
    """Every test ends without wrappers, and draws from generators whose state it puts back."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    stop_random_save()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def read(folder: Path) -> list[tuple[str, str]]:
    """Rows of the one CSV file in `folder`, without the header."""
    (path,) = folder.glob("random_*.csv")
    rows = list(csv.reader(io.StringIO(path.read_bytes().decode("utf-8-sig"), newline="")))
    assert rows[0] == ["api_name", "stack"]
    return [(name, stack) for name, stack in rows[1:]]


def names(folder: Path) -> list[str]:
    return [name for name, _ in read(folder)]


def run(script: str, *args: Any, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, args)],
        env=environment, capture_output=True, text=True, timeout=120, **kwargs,
    )


def without_lines_of_torch(stack: str) -> str:
    """Line numbers inside torch belong to its version."""
    return re.sub(r"(File SITE/[^,]*), line \d+", r"\1, line N", stack)


def test_golden_script_gives_the_rows_of_the_original_and_ours(tmp_path: Path) -> None:
    """Golden random_save. Adapted: dropout and numpy Generators are rows too (issue 3)."""
    script = GOLDEN / "script.py"
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    subprocess.run([sys.executable, str(script), str(tmp_path)], env=environment, check=True)
    (path,) = (tmp_path / "rs").glob("random_proc*.csv")
    assert re.fullmatch(r"random_proc\d+_\d{14}\.csv", path.name)
    content = path.read_bytes()
    assert content.startswith(b"\xef\xbb\xbfapi_name,stack\r\n")
    replaced = content.decode("utf-8-sig").replace(TORCH, "SITE").replace(str(GOLDEN), "WORK")
    got = list(csv.reader(io.StringIO(replaced, newline="")))
    ours = {f"functional_random.dropout.{n}" for n in (0, 1)} | {"numpy_random.Generator.random.0"}
    assert ours <= {name for name, _ in got}
    kept = [[name, without_lines_of_torch(stack)] for name, stack in got if name not in ours]
    (expected_path,) = (GOLDEN / "expected" / "rs").iterdir()
    text = expected_path.read_bytes().decode("utf-8-sig")
    expected = csv.reader(io.StringIO(text, newline=""))
    assert kept == [[name, without_lines_of_torch(stack)] for name, stack in expected]


CALLS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "torch.rand": (lambda: torch.rand(2), ["torch_random.rand.0"]),
    "Tensor.bernoulli": (lambda: torch.zeros(2).bernoulli(), ["tensor_random.bernoulli.0"]),
    "torch.normal": (lambda: torch.normal(0.0, 1.0, (2,)), ["torch_random.normal.0"]),
    "random.shuffle": (lambda: random.shuffle([1, 2]), ["python_random.shuffle.0"]),
    "numpy.random.rand": (lambda: np.random.rand(2), ["numpy_random.rand.0"]),
    "default_rng": (
        lambda: np.random.default_rng(0).integers(3), ["numpy_random.Generator.integers.0"],
    ),
    "F.dropout": (lambda: F.dropout(torch.ones(3)), ["functional_random.dropout.0"]),
    "F.dropout p=0": (lambda: F.dropout(torch.ones(3), p=0), []),
    "F.dropout not training": (lambda: F.dropout(torch.ones(3), 0.5, False), []),
    "nn.Dropout": (lambda: nn.Dropout()(torch.ones(3)), ["functional_random.dropout.0"]),
    "nn.Dropout eval": (lambda: nn.Dropout().eval()(torch.ones(3)), []),
    "nn.Dropout1d": (lambda: nn.Dropout1d()(torch.ones(3, 3)), ["functional_random.dropout1d.0"]),
    "F.alpha_dropout": (
        lambda: F.alpha_dropout(torch.ones(3), training=True),
        ["functional_random.alpha_dropout.0"],
    ),
    "F.alpha_dropout default": (lambda: F.alpha_dropout(torch.ones(3)), []),
    "torch.dropout": (lambda: torch.dropout(torch.ones(3), 0.5, True), ["torch_random.dropout.0"]),
    "torch.dropout off": (lambda: torch.dropout(torch.ones(3), 0.5, train=False), []),
    "F.rrelu": (lambda: F.rrelu(-torch.ones(3), training=True), ["functional_random.rrelu.0"]),
    "F.rrelu off": (lambda: F.rrelu(-torch.ones(3)), []),
    "nn.RReLU": (lambda: nn.RReLU()(-torch.ones(3)), ["functional_random.rrelu.0"]),
    "attention": (
        lambda: F.scaled_dot_product_attention(*[torch.ones(1, 2, 2)] * 3, dropout_p=0.1),
        ["functional_random.scaled_dot_product_attention.0"],
    ),
    "attention off": (lambda: F.scaled_dot_product_attention(*[torch.ones(1, 2, 2)] * 3), []),
    "gumbel_softmax": (lambda: F.gumbel_softmax(torch.ones(2)), ["tensor_random.exponential_.0"]),
    "distribution": (
        lambda: torch.distributions.Gamma(torch.ones(1), 1.0).sample(),
        ["torch_random._standard_gamma.0"],
    ),
    "torch.manual_seed": (lambda: torch.manual_seed(1), []),
}


@pytest.mark.parametrize("case", CALLS, ids=list(CALLS))
def test_call_that_draws_gives_its_row(case: str, tmp_path: Path) -> None:
    call, expected = CALLS[case]
    random_save(tmp_path)
    call()
    assert names(tmp_path) == expected


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN], ids=lambda kind: kind.__name__)
def test_recurrent_net_gives_a_row_only_with_dropout(
    kind: Any, packed: bool, tmp_path: Path
) -> None:
    nets = [kind(2, 2, 2, dropout=p) for p in (0.0, 0.5)]
    x: Any = torch.ones(3, 1, 2)
    if packed:
        x = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3]))
    random_save(tmp_path)
    for net in nets:
        net(x)
        net.eval()(x)
    name = {"LSTM": "lstm", "GRU": "gru", "RNN": "rnn_tanh"}[kind.__name__]
    assert names(tmp_path) == [f"vf_random.{name}.0"]


def test_calls_of_one_function_are_counted(tmp_path: Path) -> None:
    random_save(tmp_path)
    torch.rand(1), torch.rand(1), torch.randn(1), torch.rand(1)
    assert names(tmp_path) == [
        "torch_random.rand.0", "torch_random.rand.1", "torch_random.randn.0", "torch_random.rand.2",
    ]


def test_stack_is_innermost_first_with_a_line_per_frame(tmp_path: Path) -> None:
    random_save(tmp_path)
    F.gumbel_softmax(torch.ones(2))
    ((_, stack),) = read(tmp_path)
    first, second = re.findall(r"File (.*), line \d+, in (\w+), \n (.*) \n", stack)[:2]
    assert (first[0].endswith("functional.py"), first[1]) == (True, "gumbel_softmax")
    assert second == (__file__, stack_test_name(), "F.gumbel_softmax(torch.ones(2))")
    assert stack.endswith(" \n")
    assert str(Path(SOURCE, "msprobe")) + os.sep not in stack


def stack_test_name() -> str:
    return "test_stack_is_innermost_first_with_a_line_per_frame"


def test_results_and_random_states_are_those_of_a_run_without(tmp_path: Path) -> None:
    def draw() -> list[Any]:
        random.seed(3), np.random.seed(3), torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
        values = [net(torch.rand(2, 4)).tolist(), np.random.default_rng(1).normal(size=2).tolist()]
        return [*values, random.gauss(0, 1), np.random.rand(), torch.get_rng_state().tolist()]

    without = draw()
    random_save(tmp_path)
    assert draw() == without


def test_stop_brings_every_attribute_back(tmp_path: Path) -> None:
    def snapshot() -> dict[str, Any]:
        values = {f"{k}.{name}": v for k, o in OWNERS.items() for name, v in vars(o).items()}
        return values | {"script": torch.jit.script}

    before = snapshot()
    random_save(tmp_path)
    assert snapshot()["torch_random.rand"] is not before["torch_random.rand"]
    generator = np.random.default_rng(0)
    stop_random_save()
    stop_random_save()
    after = snapshot()
    assert list(after) == list(before)
    assert all(value is before[name] for name, value in after.items())
    generator.random()
    assert names(tmp_path) == []


def test_row_is_on_disk_before_the_call_runs(tmp_path: Path) -> None:
    random_save(tmp_path)
    with pytest.raises(ValueError, match="empty range"):
        random.randrange(0)
    assert names(tmp_path) == ["python_random.randrange.0"]


def test_killed_process_leaves_all_its_rows(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys, torch\n"
        "from msprobe.pytorch.random_save import random_save\n"
        "random_save(sys.argv[1])\n"
        "for _ in range(20): torch.rand(1)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert run(script, tmp_path).returncode == -signal.SIGKILL
    assert names(tmp_path) == [f"torch_random.rand.{n}" for n in range(20)]


def test_threads_lose_no_row_and_no_count(tmp_path: Path) -> None:
    random_save(tmp_path)
    threads = [
        threading.Thread(target=lambda: [torch.rand(1) for _ in range(50)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert names(tmp_path) == [f"torch_random.rand.{n}" for n in range(200)]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_writes_nothing_and_draws(tmp_path: Path) -> None:
    random_save(tmp_path)
    child = os.fork()
    if child == 0:
        try:
            ok = 0 <= random.random() < 1
        finally:
            os._exit(0 if ok else 1)
    assert os.waitpid(child, 0)[1] == 0
    random.random()
    assert names(tmp_path) == ["python_random.random.0"]


@pytest.mark.distributed
def test_late_rank_renames_the_file(tmp_path: Path) -> None:
    script = (
        "import sys, torch\n"
        "from msprobe.pytorch import random_save\n"
        "random_save(sys.argv[1] + '/rs')\n"
        "torch.rand(1)\n"
        "store = 'file://' + sys.argv[1] + '/store'\n"
        "torch.distributed.init_process_group('gloo', init_method=store, rank=0, world_size=1)\n"
        "torch.rand(1)\n"
        "torch.distributed.destroy_process_group()\n"
        "torch.rand(1)\n"
    )
    result = run(script, tmp_path)
    assert result.returncode == 0, result.stderr
    (path,) = (tmp_path / "rs").iterdir()
    assert re.fullmatch(r"random_rank0_\d{14}\.csv", path.name)
    assert names(tmp_path / "rs") == [f"torch_random.rand.{n}" for n in range(3)]


def test_second_call_with_the_same_path_keeps_the_file(tmp_path: Path) -> None:
    random_save(str(tmp_path))
    torch.rand(1)
    random_save(tmp_path)
    torch.rand(1)
    assert names(tmp_path) == ["torch_random.rand.0", "torch_random.rand.1"]


def test_second_call_with_another_path_says_where_rows_go(tmp_path: Path) -> None:
    random_save(tmp_path / "one")
    with pytest.raises(UsageError, match=r"rows already go to .*one.random_proc\d+.*\.csv.*stop"):
        random_save(tmp_path / "two")
    assert not (tmp_path / "two").exists()


def test_restart_within_a_second_opens_a_new_file(tmp_path: Path) -> None:
    for _ in range(2):
        random_save(tmp_path)
        torch.rand(1)
        stop_random_save()
    files = sorted(tmp_path.iterdir())
    assert len(files) == 2
    assert [file.read_bytes().count(b"torch_random.rand.0") for file in files] == [1, 1]


def test_default_path_is_output_below_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    random_save()
    assert names(tmp_path / "output") == []


def test_path_that_is_a_file_is_a_usage_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UsageError, match=r"cannot write to .*file: .*Pass a writable directory"):
        random_save(file)
    before = torch.rand
    assert before.__name__ == "rand"
    random_save(tmp_path / "good")


def test_path_of_another_type_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="output_path is 3; expected a path"):
        random_save(3)  # type: ignore[arg-type]


def test_full_disk_ends_the_rows_with_one_warning_and_whole_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    random_save(tmp_path)
    torch.rand(1)
    (path,) = tmp_path.iterdir()
    size = path.stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, limits[1]))
    try:
        with caplog.at_level(logging.WARNING):
            assert torch.rand(1).shape == torch.rand(1).shape
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert names(tmp_path) == ["torch_random.rand.0"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "the program goes on" in caplog.text


def test_tensor_call_of_a_subclass_is_one_row(tmp_path: Path) -> None:
    class Sub(torch.Tensor):
        pass

    random_save(tmp_path)
    out = F.dropout(torch.ones(3).as_subclass(Sub), 0.5)
    assert type(out) is Sub
    assert names(tmp_path) == ["functional_random.dropout.0"]
