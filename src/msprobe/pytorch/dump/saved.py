"""Level debug: values and gradients that the user saves one by one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from msprobe.errors import warn_user

from . import edges, gradients
from .describe import describe
from .entries import TensorEntry, fill, places

if TYPE_CHECKING:
    from .run import StepRun

_logger = logging.getLogger("msprobe")


def check_saved(variable: Any, name: Any, save_backward: Any) -> bool:
    """Whether these arguments can be saved; a warning says what is wrong."""
    if not isinstance(name, str) or not name:
        problem = f"name is {name!r}; expected a non-empty str"
    elif not isinstance(save_backward, bool):
        problem = f"save_backward is {save_backward!r}; expected True or False"
    else:
        problem = _unfit(variable)
    if problem:
        try:
            warn_user(f"save() skipped: {problem}.")
        except UserWarning as warning:  # `python -W error`: it must not end the training
            _logger.warning("%s", warning)
    return not problem


def _unfit(variable: Any) -> str:
    seen: set[int] = set()  # lists may hold themselves, or each other many times
    todo = [variable]
    while todo:
        value = todo.pop()
        if value is None or isinstance(value, (torch.Tensor, int, float, str)) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            bad = next((key for key in value if not isinstance(key, str)), None)
            if bad is not None:
                return f"a dict has the key {bad!r}; expected keys of type str"
            todo += value.values()
        elif isinstance(value, (list, tuple)):
            todo += value
        else:
            return (
                f"it holds an object of type {type(value).__name__}; expected tensors, int, float,"
                " str, None, and lists, tuples and dicts of these"
            )
    return ""


class SavedGradients:
    """Listener of the gradients of one saved variable: record ``<name>_grad.<count>.debug``."""

    def __init__(self, run: StepRun, name: str, entries: Any) -> None:
        self._run = run
        self._name = name
        self._shape = places(entries)
        self._grads: dict[int, Any] = {}
        self._paths: list[str] = []
        fill(self._shape, name, self._paths.append)

    def guard(self, function: Callable[..., None], *args: Any) -> None:
        """What runs the work of a hook."""
        self._run.guard(self._name, function, *args)

    def grad_output(self, place: int, grad: Any) -> None:
        """Gradient of the ``place``-th tensor of the variable."""
        self._grads[place] = self._run.saved_entry(grad, self._paths[place])

    def grad_input(self, place: int, grad: Any) -> None:
        """A saved variable has no inputs."""

    def begin(self, graph_task: int) -> None:
        """Nothing to prepare."""

    def done(self) -> None:
        """The pass is over: what has arrived stands in the record from now on."""
        self.write()

    def write(self) -> None:
        """(Re)write the record."""
        numbers = iter(range(len(self._paths)))
        record = fill(self._shape, self._name, lambda _: self._grads.get(next(numbers)))
        self._run.journal.draft(self._name, record)


def save(run: StepRun, variable: Any, name: str, save_backward: bool) -> None:
    """Record a variable and, if asked for, listen for its gradients."""
    count = run.count(name)
    record = f"{name}.{count}.debug"
    found: list[Any] = []

    def visit(value: Any, path: str) -> Any:
        entry = run.saved_entry(value, path)
        if type(entry) is TensorEntry:
            found.append(value)
        return entry

    entries = describe(variable, record, visit)
    run.journal.add(record, entries)
    if save_backward:
        listener = SavedGradients(run, f"{name}_grad.{count}.debug", entries)
        listener.write()
        if torch.is_grad_enabled():
            watch = edges.Watch((), False)
            # A leaf's accumulator lives only as long as somebody holds it.
            leaves = [t for t in found if t.requires_grad and t.grad_fn is None]
            run.kept_nodes += [edges.accumulator(t) for t in leaves]
            gradients.attach(watch, found, run.passes, listener)
