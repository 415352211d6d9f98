"""How to hear of a gradient through the existing autograd graph (the only autograd code).

No node is inserted and no tensor is touched, so training stays bit-equal. Before a call `watch`
remembers where each input hangs in the graph; after it `attach` finds, among the nodes the call
made, those that own an edge to an input, and hooks them. One function serves APIs and modules.

A hook closure never refers to a node that can reach the node it is registered on: such a cycle
runs through C++ and the garbage collector could not free it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

_engine: Any = torch.autograd.Variable._execution_engine
_grad_enabled = torch.is_grad_enabled
_view_as = torch.Tensor.view_as
_add = torch.add
graph_task: Any = getattr(torch._C, "_current_graph_task_id", lambda: 0)  # torch >= 2.1
_LEAF = 2**64 - 1  # sequence number of AccumulateGrad: the engine runs it as soon as it can


def _sequence_number() -> int:
    """Number that the next autograd node of this thread will get."""
    read: Any = getattr(torch.autograd, "_get_sequence_nr", None)
    if read is not None:
        return int(read())
    with torch.enable_grad():  # older torch: make a node and look at it
        probe = torch.empty(0, requires_grad=True).view(0)
    return int(probe.grad_fn._sequence_nr())  # type: ignore[union-attr]


class Watch:
    """Where the inputs of one call hang in the graph, before the call."""

    __slots__ = ("edges", "leaves", "sequence", "size")

    def __init__(self, inputs: Sequence[Any]) -> None:
        self.sequence = _sequence_number()
        self.edges: dict[tuple[Any, int], list[int]] = {}
        self.leaves: dict[int, list[int]] = {}  # id of a leaf → its places among the inputs
        self.size = len(inputs)
        for place, tensor in enumerate(inputs):
            if tensor.requires_grad:
                node = tensor.grad_fn
                if node is None:
                    self.leaves.setdefault(id(tensor), []).append(place)
                else:
                    self.edges.setdefault((node, tensor.output_nr), []).append(place)


def watch(inputs: Sequence[Any]) -> Watch | None:
    """Remember the gradient edges of ``inputs``; None when no graph is being built."""
    return Watch(inputs) if _grad_enabled() else None


class Listener(Protocol):
    """Who wants the gradients of one call. Errors must not leave its methods."""

    def grad_output(self, place: int, grad: Any) -> None:
        """Gradient of output number ``place`` has arrived."""

    def grad_input(self, place: int, grad: Any) -> None:
        """Gradient of input number ``place`` is complete."""

    def begin(self, graph_task: int) -> None:
        """A backward pass has reached the call."""

    def done(self) -> None:
        """All gradients that this backward pass brings have arrived."""


class Finisher(Protocol):
    """What collects gradients over one backward pass."""

    def finish(self, task: int) -> None:
        """The pass ``task`` has ended: report what has arrived."""


class Passes:
    """The backward passes that are running, with those that still wait for gradients."""

    def __init__(self) -> None:
        self._open: dict[int, list[Finisher]] = {}
        self._last: dict[int, list[Finisher]] = {}
        self._lock = threading.Lock()

    def join(self, graph_task: int, backward: Finisher) -> None:
        """Have ``backward`` finished at the end of this pass at the latest."""
        with self._lock:
            waiting = self._open.get(graph_task)
            if waiting is None:
                waiting = self._open[graph_task] = []
                _engine.queue_callback(lambda: self._end(graph_task))
            waiting.append(backward)

    def join_last(self, graph_task: int, finisher: Finisher) -> None:
        """Have ``finisher`` finished after whatever else waits for the end of this pass."""
        with self._lock:
            self._last.setdefault(graph_task, []).append(finisher)

    def _end(self, graph_task: int) -> None:
        with self._lock:
            waiting = self._open.pop(graph_task, [])
        for backward in waiting:
            backward.finish(graph_task)
        # DDP and FSDP reduce in callbacks of their own that are queued by now. A callback that
        # is queued while they run comes after them.
        if graph_task in self._last:
            _engine.queue_callback(lambda: self._end_last(graph_task))

    def _end_last(self, graph_task: int) -> None:
        with self._lock:
            waiting = self._last.pop(graph_task, [])
        for finisher in waiting:
            finisher.finish(graph_task)

    def finish_all(self) -> None:
        """Finish what a backward that raised has left open: its end is never called back."""
        with self._lock:
            left = [*self._open.items(), *self._last.items()]
            self._open, self._last = {}, {}
        for graph_task, waiting in left:
            for backward in waiting:
                backward.finish(graph_task)


class Backward:
    """Collects the gradients of one call over one backward pass at a time."""

    __slots__ = ("_contributions", "_edges", "_left", "_listener", "_passes", "_task", "hooks")

    def __init__(self, listener: Listener, passes: Passes) -> None:
        self._listener = listener
        self._passes = passes
        self._edges: dict[int, int] = {}  # place of an input → edges that lead to it
        self._contributions: dict[int, list[Any]] = {}
        self._left = 0
        self._task: int | None = None
        self.hooks = 0  # hooks registered: all fired means that the record is complete

    def _enter(self) -> None:
        task = graph_task()
        if self._task == task:
            return
        if self._task is not None:
            self.finish(self._task)
        self._task = task
        self._left = self.hooks
        self._listener.begin(task)
        self._passes.join(task, self)

    def _leave(self) -> None:
        self._left -= 1
        if self._left == 0 and self._task is not None:
            self.finish(self._task)

    def finish(self, task: int) -> None:
        """Report the record of pass ``task`` unless that has been done."""
        if self._task != task:
            return
        self._task = None
        for place, parts in self._contributions.items():
            self._listener.grad_input(place, _total(parts))
        self._contributions.clear()
        self._listener.done()

    def hook_output(self, node: Any, places: list[tuple[int, list[int], list[int]]]) -> None:
        """Listen for the gradients that enter ``node``: (output_nr, outputs, inputs) there."""

        def pre_hook(grads: Any) -> None:
            self._enter()
            for number, outputs, inputs in places:
                grad = grads[number] if number < len(grads) else None
                if grad is not None:
                    for place in outputs:
                        self._listener.grad_output(place, grad)
                    for place in inputs:
                        self._listener.grad_input(place, grad)
            self._leave()

        node.register_prehook(pre_hook)
        self.hooks += 1

    def hook_owner(self, node: Any, places: list[tuple[int, list[int]]]) -> None:
        """Listen for the gradients that leave ``node``: (position, inputs) of ours there."""
        for _, inputs in places:
            for place in inputs:
                self._edges[place] = self._edges.get(place, 0) + 1

        def hook(grad_inputs: Any, _grad_outputs: Any) -> None:
            self._enter()
            for position, inputs in places:
                grad = grad_inputs[position] if position < len(grad_inputs) else None
                if grad is not None:
                    for place in inputs:
                        self._contribute(place, grad)
            self._leave()

        node.register_hook(hook)
        self.hooks += 1

    def _contribute(self, place: int, grad: Any) -> None:
        if self._edges[place] == 1:
            self._listener.grad_input(place, grad)
            return
        self._contributions.setdefault(place, []).append(grad)


def _total(parts: list[Any]) -> Any:
    """Sum of the contributions to one input, in the order in which they arrived."""
    total = parts[0].detach() if len(parts) > 1 else parts[0]
    for part in parts[1:]:
        total = _add(total, part.detach())
    return total


def accumulator(leaf: Any) -> Any:
    """AccumulateGrad node of a leaf that requires a gradient."""
    with torch.enable_grad():
        node: Any = _view_as(leaf, leaf).grad_fn
    return node.next_functions[0][0]


def attach(
    seen: Watch, outputs: Sequence[Any], passes: Passes, make: Callable[[], Listener]
) -> Backward | None:
    """Hook the nodes that the call made, so that the listener hears of its gradients.

    ``outputs`` are the tensors the call returned, ``make`` builds the listener, only if some
    output hangs in the graph (None is returned otherwise). Inputs no gradient flows to, and
    those that only an in-place write through a view connects, stay unreported.
    """
    roots: dict[Any, dict[int, list[int]]] = {}
    for place, tensor in enumerate(outputs):
        if tensor.requires_grad:
            node = tensor.grad_fn
            number = 0 if node is None else tensor.output_nr
            roots.setdefault(accumulator(tensor) if node is None else node, {}).setdefault(
                number, []
            ).append(place)
    if not roots:
        return None
    backward = Backward(make(), passes)
    owners = _owners(roots, seen)
    for node, numbers in roots.items():
        # An output that is an input itself has no node of its own: both get the same gradient.
        backward.hook_output(
            node, [(nr, places, _same(seen, node, nr)) for nr, places in numbers.items()]
        )
    for node, positions in owners.items():
        backward.hook_owner(node, positions)
    return backward


def _same(seen: Watch, node: Any, number: int) -> list[int]:
    if node._sequence_nr() == _LEAF:
        return seen.leaves.get(id(node.variable), [])
    return seen.edges.get((node, number), [])


def _owners(roots: Any, seen: Watch) -> dict[Any, list[tuple[int, list[int]]]]:
    """Nodes of the call → the positions at which they own an edge to an input."""
    owners: dict[Any, list[tuple[int, list[int]]]] = {}
    edges, leaves, first = seen.edges, seen.leaves, seen.sequence
    todo = [node for node in roots if first <= node._sequence_nr() != _LEAF]
    visited = set(todo)
    while todo:
        node = todo.pop()
        for position, (below, number) in enumerate(node.next_functions):
            if below is None:
                continue
            places = edges.get((below, number)) if edges else None
            sequence = below._sequence_nr()
            if places is None and sequence == _LEAF and leaves:
                places = leaves.get(id(below.variable))
            if places is not None:
                owners.setdefault(node, []).append((position, places))
            elif first <= sequence != _LEAF and below not in visited:
                visited.add(below)
                todo.append(below)
    return owners
