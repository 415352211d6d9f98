"""How to hear of a gradient through the existing autograd graph (the only autograd code).

No node is inserted and no tensor is touched, so training stays bit-equal. Before a call a `Watch`
remembers where each input hangs in the graph; after it `attach` finds, among the nodes the call
made, those that own an edge to an input, and hooks them. One function serves APIs and modules.

A hook never refers to a node that can reach the node it is registered on: such a cycle
runs through C++ and the garbage collector could not free it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from .edges import Watch, accumulator, owners
from .passes import Passes

_add = torch.add
_OfUser: Any = torch.autograd.function.BackwardCFunction
graph_task: Any = getattr(torch._C, "_current_graph_task_id", lambda: 0)  # torch >= 2.1


class Listener(Protocol):
    """Who wants the gradients of one call. All but `guard` run under `guard`."""

    def guard(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function so that no error leaves into the backward."""

    def begin(self, graph_task: int) -> None:
        """A backward pass has reached the call."""

    def grad_output(self, place: int, grad: Any) -> None:
        """Gradient of output number ``place`` has arrived."""

    def grad_input(self, place: int, grad: Any) -> None:
        """Gradient of input number ``place`` is complete."""

    def done(self) -> None:
        """All gradients that this backward pass brings have arrived."""


class Backward:
    """Collects the gradients of one call over one backward pass at a time."""

    __slots__ = (
        "_casts",
        "_contributions",
        "_edges",
        "_left",
        "_passes",
        "_task",
        "hooks",
        "listener",
    )

    def __init__(self, listener: Listener, passes: Passes, casts: dict[int, Any]) -> None:
        self.listener = listener
        self._casts = casts  # place of an input that autocast has cast → its dtype
        self._passes = passes
        self._edges: dict[int, int] = {}  # place of an input → edges that lead to it
        self._contributions: dict[int, list[Any]] | None = None
        self._left = 0
        self._task: int | None = None
        self.hooks = 0  # hooks registered: all fired means that the record is complete

    def hook_output(self, node: Any, places: list[tuple[int, list[int], Sequence[int]]]) -> None:
        """Listen for the gradients that enter ``node``: (output_nr, outputs, inputs) there."""
        node.register_prehook(_Entering(self, places))
        self.hooks += 1

    def enter_outputs(self, places: Any, grads: Any) -> None:
        """Gradients enter a node: report those of our outputs."""
        if self._task != graph_task():
            self._enter()
        listener = self.listener
        for number, outputs, inputs in places:
            grad = grads[number] if number < len(grads) else None
            if grad is not None:
                for place in outputs:
                    listener.grad_output(place, grad)
                for place in inputs:
                    listener.grad_input(place, grad)
        self._left -= 1
        if self._left == 0:
            self._finish()

    def hook_owner(self, node: Any, places: list[tuple[int, list[int]]]) -> None:
        """Listen for the gradients that leave ``node``: (position, inputs) of ours there."""
        self._expect(places)
        node.register_hook(_Leaving(self, places))
        self.hooks += 1

    def hook_both(
        self,
        node: Any,
        entering: list[tuple[int, list[int], Sequence[int]]],
        leaving: list[tuple[int, list[int]]],
    ) -> None:
        """Listen with one hook for what enters and what leaves ``node``."""
        self._expect(leaving)
        node.register_hook(_Passing(self, entering, leaving))
        self.hooks += 2

    def _expect(self, places: list[tuple[int, list[int]]]) -> None:
        edges = self._edges
        for _, inputs in places:
            for place in inputs:
                edges[place] = edges.get(place, 0) + 1

    def leave_inputs(self, places: Any, grads: Any) -> None:
        """Gradients leave a node: report those of our inputs."""
        if self._task != graph_task():
            self._enter()
        for position, inputs in places:
            grad = grads[position] if position < len(grads) else None
            if grad is not None:
                for place in inputs:
                    if self._edges[place] == 1 and not self._casts:
                        self.listener.grad_input(place, grad)
                    else:
                        self._contribute(place, grad)
        self._left -= 1
        if self._left == 0:
            self._finish()

    def _contribute(self, place: int, grad: Any) -> None:
        if place in self._casts:
            grad = grad.to(self._casts[place])
        if self._contributions is None:
            self._contributions = {}
        self._contributions.setdefault(place, []).append(grad)

    def _enter(self) -> None:
        if self._task is not None:
            self._finish()  # what an earlier pass has left open
        self._task = task = graph_task()
        self._left = self.hooks
        self._passes.join(task, self)  # first: interrupted or not, it is finished some time
        self.listener.begin(task)

    def finish(self, task: int) -> None:
        """Report the record of pass ``task`` unless that has been done."""
        if self._task == task:
            self.listener.guard(self._finish)

    def _finish(self) -> None:
        self._task = None
        if self._contributions:
            parts, self._contributions = self._contributions, None
            for place, grads in parts.items():
                self.listener.grad_input(place, _total(grads))
        self.listener.done()


# Hooks: one small object each instead of closures, partials and bound methods. A step keeps
# them until backward, and the garbage collector walks through them meanwhile.


class _Entering:
    """Hook before a node."""

    __slots__ = ("_backward", "_places")

    def __init__(self, backward: Backward, places: Any) -> None:
        self._backward = backward
        self._places = places

    def __call__(self, grads: Any) -> None:
        backward = self._backward
        backward.listener.guard(backward.enter_outputs, self._places, grads)


class _Leaving:
    """Hook after a node."""

    __slots__ = ("_backward", "_places")

    def __init__(self, backward: Backward, places: Any) -> None:
        self._backward = backward
        self._places = places

    def __call__(self, left: Any, entered: Any) -> None:
        backward = self._backward
        backward.listener.guard(backward.leave_inputs, self._places, left)


class _Passing:
    """Hook after a node, for both sides."""

    __slots__ = ("_backward", "_entering", "_leaving")

    def __init__(self, backward: Backward, entering: Any, leaving: Any) -> None:
        self._backward = backward
        self._entering = entering
        self._leaving = leaving

    def __call__(self, left: Any, entered: Any) -> None:
        self._backward.listener.guard(self._report, left, entered)

    def _report(self, left: Any, entered: Any) -> None:
        self._backward.enter_outputs(self._entering, entered)
        self._backward.leave_inputs(self._leaving, left)


def _total(parts: list[Any]) -> Any:
    """Sum of the contributions to one input, in the order in which they arrived."""
    total = parts[0].detach() if len(parts) > 1 else parts[0]
    for part in parts[1:]:
        total = _add(total, part.detach())
    return total


def attach(
    seen: Watch, outputs: Sequence[Any], passes: Passes, listener: Listener
) -> Backward | None:
    """Hook the nodes that the call made, so that the listener hears of its gradients.

    ``outputs`` are the tensors the call returned. None if none of them hangs in the graph. Inputs
    no gradient flows to, and those that only an in-place write through a view connects, stay
    unreported.
    """
    roots: dict[Any, list[tuple[int, list[int], Sequence[int]]]] = {}
    passed_on: list[int] = []  # inputs that are outputs as well: they have no node of their own
    for place, tensor in enumerate(outputs):
        if tensor.requires_grad:
            node = tensor.grad_fn
            if node is None:
                inputs: Sequence[int] = seen.leaves.get(id(tensor), ())
                _root(roots, accumulator(tensor), 0, place, inputs)
            else:
                inputs = seen.edges.get((node, tensor.output_nr), ())
                _root(roots, node, tensor.output_nr, place, inputs)
            passed_on += inputs
    if not roots:
        return None
    if passed_on:
        seen.forget(passed_on)
    backward = Backward(listener, passes, seen.casts)
    _hook(backward, roots, owners(roots, seen))
    return backward


def _hook(backward: Backward, roots: dict[Any, Any], owned: dict[Any, Any]) -> None:
    for node, places in roots.items():
        # Not a function of the user's: it may change the gradient that it is given.
        if node in owned and not isinstance(node, _OfUser):
            backward.hook_both(node, places, owned.pop(node))
        else:
            backward.hook_output(node, places)
    for node, positions in owned.items():
        backward.hook_owner(node, positions)


def _root(roots: Any, node: Any, number: int, place: int, inputs: Sequence[int]) -> None:
    if node is None:
        return  # the leaf of a functorch transform: its graph is none of ours
    places = roots.get(node)
    if places is None:
        roots[node] = [(number, [place], inputs)]
        return
    for known, outputs, _ in places:
        if known == number:
            outputs.append(place)  # the same tensor twice
            return
    places.append((number, [place], inputs))
