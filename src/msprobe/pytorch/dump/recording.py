"""One call becomes one record: what is noted before it, after it, and when its gradients come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from . import gradients
from .describe import describe, describe_kwargs, describe_output

if TYPE_CHECKING:
    from .call import Call
    from .run import StepRun


def begin(call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """The call is about to run: record its inputs as they are now."""
    run, spec = call.run, call.spec
    run.decide(call)
    if call.wanted:
        call.stack = run.journal.capture_stack()
    takes = call.wanted and run.takes("forward")
    found: list[Any] = []
    visit = run.visitor(call, found, described=takes and run.takes("input"), before=True)
    if spec is not None and spec.ignore_input:
        args = [None if ignores(spec.ignore_input, i) else a for i, a in enumerate(args)]
        kwargs = {k: None if ignores(spec.ignore_input, k) else v for k, v in kwargs.items()}
    listed = [
        run.argument(describe, a, f"{call.forward}.input.{i}", visit) for i, a in enumerate(args)
    ]
    named = run.argument(describe_kwargs, kwargs, f"{call.forward}.kwargs", visit)
    call.inputs = [*listed, *named.values()]
    if takes:
        if run.takes("input"):
            call.record = {"input_args": listed, "input_kwargs": named}
        if not run.takes("output"):
            run.journal.add(call.forward, call.record)  # complete already
            call.record = {}
        elif run.verdicts is None:
            run.journal.begin(call)
    if run.listens and not (spec and spec.writes_arguments):
        call.seen = gradients.watch(found)


def finish(call: Call, result: Any, parameters: Any = None) -> None:
    """The call has returned: record its outputs and listen for its gradients."""
    run, spec = call.run, call.spec
    takes = call.wanted and run.takes("forward")
    found: list[Any] = []
    described = takes and run.takes("output")
    if described or call.seen is not None:
        visit = run.visitor(call, found, described=described, before=False)
        if spec is not None and spec.ignore_output:
            parts = result if type(result) is tuple else (result,)
            rule = spec.ignore_output
            result = tuple(None if ignores(rule, i) else p for i, p in enumerate(parts))
        output = run.argument(describe_output, result, f"{call.forward}.output", visit)
        call.outputs = output
        if described:
            call.record["output"] = output
            if parameters is not None:
                call.record["parameters"] = _parameters(call, parameters)
    _emit(call, takes)
    if call.seen is not None:
        seen, call.seen = call.seen, None
        gradients.attach(seen, found, run.passes, lambda: call)
    call.record, call.held = {}, []


def _emit(call: Call, takes: bool) -> None:
    run = call.run
    if takes and call.record:
        run.mark(call.record, call.outputs)
        if run.verdicts is not None:
            run.journal.read_back()
            takes = run.verdicts.judge(call.forward, call.outputs, call.held)
    run.journal.end(call)
    if takes and call.record:
        run.journal.add(call.forward, call.record)
    run.note(call.forward, call.parent_name())
    if call.wanted and (takes or not run.task.only_bad):
        run.journal.stack(call.forward, call.stack)
    run.selection.leave(call.forward)


def fail(call: Call) -> None:
    """The call has raised: its record ends with its inputs."""
    run = call.run
    call.failed = True
    call.seen, call.held = None, []
    run.note(call.forward, call.parent_name())
    if call.wanted and not run.task.only_bad:
        run.journal.stack(call.forward, call.stack)
    run.selection.leave(call.forward)


def _parameters(call: Call, parameters: Any) -> dict[str, Any]:
    visit = call.run.on_tensor(call.forward)
    return {
        name: call.run.argument(describe, value, f"{call.forward}.parameters.{name}", visit)
        for name, value in parameters
    }


def finish_backward(call: Call, record: dict[str, Any]) -> None:
    """All gradients of one pass over the call have arrived."""
    run, name = call.run, call.backward_name()
    if call.takes_backward:
        for section in ("input", "output"):
            if not run.takes(section):
                del record[section]
        _emit_backward(run, call, name, record)
    run.note(name, call.parent_backward())
    run.selection.leave(call.backward)


def _emit_backward(run: StepRun, call: Call, name: str, record: dict[str, Any]) -> None:
    if not record:
        return
    run.mark(record, list(record.values()))
    if run.verdicts is not None:
        run.journal.read_back()
        results = list(record.values()) if run.task.only_bad else record.get("output")
        if not run.verdicts.judge(name, results, call.held_grads):
            return
    run.journal.add(name, record)


def ignores(rule: Any, place: int | str) -> bool:
    """Whether an ignore rule of builtin_ignore_ops.yaml names this place."""
    return bool(rule) and (rule == "all" or place in rule)
