"""How to hear of a gradient through the existing autograd graph (the only autograd code).

No node is inserted and no tensor is touched, so training stays bit-equal. Before a call a `Watch`
remembers where each input hangs in the graph; after it `attach` finds, among the nodes the call
made, those that own an edge to an input, and hooks them. One function serves APIs and modules.

A hook never refers to a node that can reach the node it is registered on: such a cycle
runs through C++ and the garbage collector could not free it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from .edges import Places, Watch, accumulator, owners
from .passes import Passes

# Of one node: output_nr there, and which outputs and inputs of the call these are.
Entering = tuple[tuple[int, Places, Places], ...]
Leaving = tuple[tuple[int, Places], ...]  # position among its edges, which inputs of the call
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
    """Collects the gradients of one call over one backward pass at a time.

    Where a single hook hears of all of them, which is the usual case, this object is that hook.
    """

    __slots__ = (
        "_casts",
        "_contributions",
        "_entering",
        "_in_parts",
        "_leaving",
        "_left",
        "_passes",
        "_task",
        "hooks",
        "listener",
    )

    def __init__(self, listener: Listener, passes: Passes, casts: dict[int, Any] | None) -> None:
        self.listener = listener
        self._casts = casts  # place of an input that autocast has cast → its dtype
        self._passes = passes
        self._in_parts: frozenset[int] = frozenset()  # inputs whose gradient is put together here
        self._contributions: dict[int, list[Any]] | None = None
        self._entering: Entering = ()  # of the single hook
        self._leaving: Leaving = ()
        self._left = 0
        self._task: int | None = None
        self.hooks = 0  # hooks registered: all fired means that the record is complete

    def hook(self, roots: dict[Any, list[Any]], owned: dict[Any, list[Any]]) -> None:
        """Listen at the nodes of the outputs and at those that own an edge to an input."""
        places = [p for positions in owned.values() for _, inputs in positions for p in inputs]
        if len(set(places)) < len(places):
            self._in_parts = frozenset(place for place in places if places.count(place) > 1)
        if self._casts:
            self._in_parts |= self._casts.keys()
        self.hooks = len(roots) + len(owned)
        for node, entering in roots.items():
            # Not a function of the user's: it may change the gradient that it is given.
            if node not in owned or isinstance(node, _OfUser):
                node.register_prehook(_Entering(self, _shared(tuple(entering))))
                continue
            leaving = owned.pop(node)
            if self.hooks == 2:
                self._entering, self._leaving = _shared(tuple(entering)), _shared(tuple(leaving))
                node.register_hook(self)
            else:
                hook = _Passing(self, _shared(tuple(entering)), _shared(tuple(leaving)))
                node.register_hook(hook)
        for node, leaving in owned.items():
            node.register_hook(_Leaving(self, _shared(tuple(leaving))))

    def __call__(self, left: Any, entered: Any) -> None:
        """Be the single hook, after its node: all gradients of the call are here."""
        self.listener.guard(self._hear_all, left, entered)

    def _hear_all(self, left: Any, entered: Any) -> None:
        self.listener.begin(graph_task())
        try:
            self._hear_outputs(self._entering, entered)
            self._hear_inputs(self._leaving, left)
        finally:  # interrupted, it is finished with what has arrived
            self._finish()

    def enter_outputs(self, places: Entering, grads: Any) -> None:
        """Gradients enter a node: report those of our outputs."""
        if self._task != graph_task():
            self._enter()
        self._hear_outputs(places, grads)
        self._left -= 1
        if self._left == 0:
            self._finish()

    def _hear_outputs(self, places: Entering, grads: Any) -> None:
        listener = self.listener
        for number, outputs, inputs in places:
            grad = grads[number] if number < len(grads) else None
            if grad is not None:
                for place in outputs:
                    listener.grad_output(place, grad)
                for place in inputs:
                    listener.grad_input(place, grad)

    def leave_inputs(self, places: Leaving, grads: Any) -> None:
        """Gradients leave a node: report those of our inputs."""
        if self._task != graph_task():
            self._enter()
        self._hear_inputs(places, grads)
        self._left -= 1
        if self._left == 0:
            self._finish()

    def _hear_inputs(self, places: Leaving, grads: Any) -> None:
        for position, inputs in places:
            grad = grads[position] if position < len(grads) else None
            if grad is not None:
                for place in inputs:
                    if place in self._in_parts:
                        self._contribute(place, grad)
                    else:
                        self.listener.grad_input(place, grad)

    def _contribute(self, place: int, grad: Any) -> None:
        if self._casts and place in self._casts:
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

    def __init__(self, backward: Backward, places: Entering) -> None:
        self._backward = backward
        self._places = places

    def __call__(self, grads: Any) -> None:
        backward = self._backward
        backward.listener.guard(backward.enter_outputs, self._places, grads)


class _Leaving:
    """Hook after a node."""

    __slots__ = ("_backward", "_places")

    def __init__(self, backward: Backward, places: Leaving) -> None:
        self._backward = backward
        self._places = places

    def __call__(self, left: Any, entered: Any) -> None:
        backward = self._backward
        backward.listener.guard(backward.leave_inputs, self._places, left)


class _Passing:
    """Hook after a node, for both sides, of a call with others."""

    __slots__ = ("_backward", "_entering", "_leaving")

    def __init__(self, backward: Backward, entering: Entering, leaving: Leaving) -> None:
        self._backward = backward
        self._entering = entering
        self._leaving = leaving

    def __call__(self, left: Any, entered: Any) -> None:
        self._backward.listener.guard(self._report, left, entered)

    def _report(self, left: Any, entered: Any) -> None:
        self._backward.enter_outputs(self._entering, entered)
        self._backward.leave_inputs(self._leaving, left)


@functools.lru_cache(maxsize=4096)
def _shared(places: Any) -> Any:
    """One tuple for all that are equal: the hooks of a step then hold no objects of their own."""
    return places


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
    roots: dict[Any, list[tuple[int, Places, Places]]] = {}
    passed_on: Places = ()  # inputs that are outputs as well: they have no node of their own
    for place, tensor in enumerate(outputs):
        if tensor.requires_grad:
            node = tensor.grad_fn
            if node is None:
                inputs = seen.leaves.get(id(tensor), ())
                _root(roots, accumulator(tensor), 0, place, inputs)
            else:
                inputs = seen.edges.get((node, tensor.output_nr), ())
                _root(roots, node, tensor.output_nr, place, inputs)
            passed_on += inputs
    if not roots:
        return None
    if passed_on:
        seen.forget(passed_on)
    owned = owners(roots, seen)
    backward = Backward(listener, passes, seen.casts)
    backward.hook(roots, owned)
    return backward


def _root(roots: Any, node: Any, number: int, place: int, inputs: Places) -> None:
    if node is None:
        return  # the leaf of a functorch transform: its graph is none of ours
    places = roots.get(node)
    if places is None:
        roots[node] = [(number, (place,), inputs)]
        return
    for at, (known, outputs, same) in enumerate(places):
        if known == number:
            places[at] = known, (*outputs, place), same  # the same tensor twice
            return
    places.append((number, (place,), inputs))
