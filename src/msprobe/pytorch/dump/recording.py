"""One call becomes one record: what is noted before it, after it, and when its gradients come.

`begin` and `finish` are the path of every recorded call: what is fixed for the step has been
decided in `StepRun`, and plain tensors and scalars are described without the general walker.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from . import edges, gradients
from .call import ONE, Call
from .describe import describe, describe_kwargs, describe_output
from .entries import Entry, OnTensor, places
from .run import StepRun

_DONE: Any = types.MappingProxyType({})  # the record of a call that has been written
_SCALARS = frozenset({bool, int, float, str})
_tensor = torch.Tensor
_parameter = torch.nn.Parameter
_grad_enabled = torch.is_grad_enabled


def begin(call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """The call is about to run: record its inputs as they are now."""
    run, spec = call.run, call.spec
    if run.selection.takes_all:
        call.wanted = True
    else:
        call.decide()
    if call.wanted:
        call.stack = run.journal.capture_stack()
    if spec is not None and spec.ignore_input:
        args = [None if ignores(spec.ignore_input, i) else a for i, a in enumerate(args)]
        kwargs = {k: None if ignores(spec.ignore_input, k) else v for k, v in kwargs.items()}
    found: list[Any] = []
    described = run.takes_input and call.wanted
    visit = (described and run.describer) or run.visitor(call, described, before=True)
    listed, shape = _arguments(run, args, f"{call.forward}.input", visit, found)
    named: Any = {}
    if kwargs:
        named = run.argument(describe_kwargs, kwargs, f"{call.forward}.kwargs", visit, found)
        shape += places(list(named.values()))
    call.inputs = shape
    if call.wanted and run.takes_forward:
        _begun(call, listed, named)
    collective = spec is not None and spec.writes_arguments
    if run.listens and _grad_enabled() and not collective:
        call.seen = edges.Watch(found, run.thread.autocast)


def _arguments(
    run: StepRun, values: Sequence[Any], path: str, visit: OnTensor, found: list[Any]
) -> tuple[list[Any], tuple[Any, ...]]:
    """The entries of ``values``, and the places of tensors in them (as `places` tells them)."""
    entries: list[Any] = []
    shape: list[Any] = []
    for i, value in enumerate(values):
        kind = type(value)
        if kind is _tensor or kind is _parameter:
            entries.append(visit(value, f"{path}.{i}"))
            found.append(value)
            shape.append(True)
        elif kind in _SCALARS:
            entries.append(Entry(type=kind.__name__, value=value))
            shape.append(None)
        else:
            entry = run.argument(describe, value, f"{path}.{i}", visit, found)
            entries.append(entry)
            shape.append(places(entry))
    return entries, tuple(shape)


def _begun(call: Call, listed: list[Any], named: dict[str, Any]) -> None:
    run = call.run
    if run.takes_input:
        call.record = {"input_args": listed, "input_kwargs": named}
    if not run.takes_output:
        run.journal.add(call.forward, call.record)  # complete already
        call.record = _DONE
    elif run.verdicts is None:
        run.journal.begin(call)


def finish(call: Call, result: Any, parameters: Any = None) -> None:
    """The call has returned: record its outputs and listen for its gradients.

    ``parameters``: those of a module itself, by name; None for an API.
    """
    run, spec = call.run, call.spec
    takes = call.wanted and run.takes_output
    found: list[Any] = []
    output: Any = None
    if takes or call.seen is not None:
        if spec is not None and spec.ignore_output:
            parts = result if type(result) is tuple else (result,)
            rule = spec.ignore_output
            result = tuple(None if ignores(rule, i) else p for i, p in enumerate(parts))
        visit = (takes and run.describer) or run.visitor(call, takes, before=False)
        if type(result) is _tensor:
            output = [visit(result, f"{call.forward}.output.0")]
            found.append(result)
        else:
            path = f"{call.forward}.output"
            output = run.argument(describe_output, result, path, visit, found)
        if takes:
            call.record["output"] = output
            if parameters is not None:
                call.record["parameters"] = _parameters(call, parameters)
    _emit(call, output)
    if call.seen is not None:
        call.outputs = ONE if type(result) is _tensor else places(output)
        seen, call.seen = call.seen, None
        gradients.attach(seen, found, run.passes, call)
    call.record, call.held = _DONE, ()


def _emit(call: Call, output: Any) -> None:
    run = call.run
    if call.failed:  # its step ended while it was running: it has been written as it was then
        run.journal.running.pop(call.forward, None)
        return
    takes = call.wanted and run.takes_forward and bool(call.record)
    if takes and run.judges:
        run.mark(call.record, output)
        takes = run.judge(call.forward, output, call.held)
    # In this order a flush in between finds a record with its stack and parent, never without.
    if call.stack is not None and (takes or not run.task.only_bad):
        run.journal.stack(call.forward, call.stack)
    if not run.is_simple:
        _leave(call)
    call.noted = True
    if takes:
        run.journal.add(call.forward, call.record)
    run.journal.running.pop(call.forward, None)


def _leave(call: Call) -> None:
    """What most steps at level L1 need not: construct.json, and the end of a scope."""
    if call.run.constructs:
        call.run.note(call.forward, call.parent_name())
    if not call.run.selection.takes_all:
        call.run.selection.leave(call.forward)


def fail(call: Call) -> None:
    """The call has raised: its record ends with its inputs."""
    call.seen, call.held = None, ()
    if not call.failed:
        call.give_up()


def _parameters(call: Call, parameters: Mapping[str, Any]) -> dict[str, Any]:
    run, entries = call.run, {}
    visit = run.describer or run.on_tensor(call.forward)
    for name, p in list(parameters.items()):
        if type(p) is _parameter:
            entries[name] = visit(p, f"{call.forward}.parameters.{name}")
        elif p is not None:
            entries[name] = run.tensor(p, f"{call.forward}.parameters.{name}", visit)
    return entries


def ignores(rule: Any, place: int | str) -> bool:
    """Whether an ignore rule of builtin_ignore_ops.yaml names this place."""
    return rule == "all" or place in rule
