"""Fingerprints of a training run: what ``msprobe selfcheck`` compares between runs.

Off unless the environment variable MSPROBE_SELFCHECK names a folder. Then every backward, stop()
and step() adds a line of JSON to a file in it, with the debugger on or off, and the process ends
after MSPROBE_SELFCHECK_STEPS calls of step().
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .dump import device
from .dump.gradients import graph_task
from .dump.patches import Patches
from .dump.quiet import quiet
from .dump.session import Session
from .fingerprint import fingerprint, leaves_of, rng_states, synchronize

FOLDER = "MSPROBE_SELFCHECK"
STEPS = "MSPROBE_SELFCHECK_STEPS"
_WINDOWS_PER_STEP = 10  # a script that never calls step() ends after so many times more windows


def dump_path(given: Any) -> Any:
    """Where to dump: the user's own dumps stay untouched."""
    marks = _marks()
    return given if marks is None else marks.dump_path


def before_start(session: Session, model: Any) -> None:
    """start() is about to be called."""
    marks = _marks()
    if marks is not None:
        marks.start(session, model)


def after_stop(session: Session) -> None:
    """stop() has returned."""
    marks = _marks()
    if marks is not None:
        marks.stop(session)


def after_step() -> None:
    """step() has returned."""
    marks = _marks()
    if marks is not None:
        marks.step()


@functools.cache
def _marks() -> Marks | None:
    folder = os.environ.get(FOLDER)
    return Marks(folder, int(os.environ.get(STEPS, "3"))) if folder else None


class Marks:
    """Writes the fingerprints of one process, and ends it when it has seen enough steps."""

    def __init__(self, folder: str, limit: int) -> None:
        self.dump_path = os.path.join(folder, "dump")
        self._folder = folder
        self._limit = limit
        self._pid: int | None = None
        self._started: float | None = None
        self._patches = Patches()

    def start(self, session: Session, model: Any) -> None:
        """A window is about to open: know its models, begin to take the time."""
        if self._pid != os.getpid():
            self._begin()
        self._session = session
        if self._steps == 0 and self._windows >= self._limit * _WINDOWS_PER_STEP:
            self._end()
        model = session.model if model is None else model
        for one in model if isinstance(model, (list, tuple)) else [model]:
            if isinstance(one, nn.Module) and not any(one is known for known in self._models):
                self._models.append(one)
        if self._started is None:
            synchronize()
            self._started, self._own_s = time.perf_counter(), 0.0

    def stop(self, session: Session) -> None:
        """A window has been closed."""
        if self._pid != os.getpid():
            return
        self._windows += 1
        run = session.run
        folder = None if run is None else os.path.abspath(run.writer.folder)
        with self._unseen():
            self._write("stop", rng=rng_states(), folder=folder)

    def step(self) -> None:
        """A step has ended."""
        if self._pid != os.getpid():
            return
        self._steps += 1
        seconds = None
        if self._started is not None:
            synchronize()
            seconds = time.perf_counter() - self._started - self._own_s
        self._started = None
        with self._unseen():
            self._write("step", seconds=seconds, **self._everything())
        if self._steps >= self._limit:
            self._end()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._steps = self._windows = 0
        self._started = None
        self._own_s = 0.0  # what the fingerprints themselves took since then
        self._models: list[nn.Module] = []
        self._leaves: list[weakref.ref[torch.Tensor]] = []
        self._file = _open(self._folder)
        self._patches.restore()
        autograd: Any = torch.autograd
        self._patches.replace(autograd, "backward", self._watched(autograd.backward))
        atexit.register(self._at_exit, self._pid)

    def _watched(self, original: Any) -> Any:
        """``torch.autograd.backward``, which Tensor.backward() calls, with a line for each pass."""

        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if self._pid != os.getpid() or graph_task() != -1:
                original(tensors, *args, **kwargs)  # part of a pass: reentrant checkpointing
                return
            roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            with self._unseen():
                loss = [fingerprint(root) for root in roots]
                self._find_leaves(roots)
            original(tensors, *args, **kwargs)
            with self._unseen():
                self._write("backward", loss=loss, gradients=self._gradients())

        return backward

    def _end(self) -> None:
        """End the process: what the session has collected is written, nothing else runs."""
        self._session.close()
        self._at_exit(self._pid)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(0)

    def _at_exit(self, pid: int | None) -> None:
        if pid == os.getpid() and not self._file.closed:
            with self._unseen():
                self._write("end", **self._everything())
            self._file.close()

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        """Our own work: not recorded, not timed, without a trace in torch."""
        synchronize()
        begin = time.perf_counter()
        with self._session.gate.thread.silent(), quiet(), torch.no_grad():
            yield
        self._own_s += time.perf_counter() - begin

    def _write(self, event: str, **facts: Any) -> None:
        self._file.write(json.dumps({"event": event, "step": self._steps, **facts}) + "\n")
        self._file.flush()

    def _everything(self) -> dict[str, Any]:
        parameters = {name: fingerprint(tensor) for name, tensor in self._tensors().items()}
        gradients = self._gradients()
        return {"gradients": gradients, "parameters": parameters, "rng": rng_states()}

    def _gradients(self) -> dict[str, str | None]:
        return {name: fingerprint(tensor.grad) for name, tensor in self._tensors().items()}

    def _tensors(self) -> dict[str, torch.Tensor]:
        """The parameters of the models, and other leaves that a backward has reached."""
        found: dict[str, torch.Tensor] = {}
        for i, model in enumerate(self._models):
            prefix = f"{i}." if len(self._models) > 1 else ""
            found.update((prefix + name, p) for name, p in model.named_parameters())
        known = {id(tensor) for tensor in found.values()}
        for i, reference in enumerate(self._leaves):
            leaf = reference()
            if leaf is not None and id(leaf) not in known:
                found[f"leaf {i} {tuple(leaf.shape)}"] = leaf
        return found

    def _find_leaves(self, roots: Sequence[Any]) -> None:
        known = {id(leaf) for leaf in (reference() for reference in self._leaves)}
        for leaf in leaves_of(roots):
            if id(leaf) not in known:
                known.add(id(leaf))
                self._leaves.append(weakref.ref(leaf))


def _open(folder: str) -> Any:
    """The file of this process; its name is the same in each run if it has a rank."""
    rank = device.current_rank()
    stem = os.environ.get("RANK", "") if rank is None else str(rank)
    name = f"rank{stem}" if stem else "process"
    for number in range(1, 1 << 20):
        try:
            marked = name if number == 1 else f"{name}-{number}"
            return open(os.path.join(folder, f"{marked}.jsonl"), "x", encoding="utf-8")
        except FileExistsError:
            continue
    raise OSError(f"{folder}: too many files")
