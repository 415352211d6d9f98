"""Where tensors hang in the autograd graph, and which nodes of a call own an edge to its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Places = tuple[int, ...]  # of tensors among the arguments, or among the results, of a call
_grad_enabled = torch.is_grad_enabled
_view_as = torch.Tensor.view_as
_LEAF = 2**64 - 1  # sequence number of AccumulateGrad: the engine runs it as soon as it can


def _probe_sequence_number() -> int:
    """Number of the next autograd node of this thread, found out by making one."""
    with torch.enable_grad():
        probe: Any = torch.empty(0, requires_grad=True).view(0)
    return int(probe.grad_fn._sequence_nr())


# The number that the next autograd node of this thread will get.
_sequence_number: Any = getattr(torch.autograd, "_get_sequence_nr", _probe_sequence_number)


class Watch:
    """Where the inputs of one call hang in the graph, before the call. Made in grad mode only."""

    __slots__ = ("autocast", "casts", "edges", "leaves", "sequence")

    def __init__(self, inputs: Sequence[Any], autocast: bool) -> None:
        self.sequence = _sequence_number()
        self.edges: dict[tuple[Any, int], Places] = {}
        self.leaves: dict[int, Places] = {}  # id of a leaf → its places among the inputs
        self.autocast = autocast
        self.casts: dict[int, Any] | None = None
        for place, tensor in enumerate(inputs):
            if tensor.requires_grad:
                node = tensor.grad_fn
                if node is None:
                    self.leaves[id(tensor)] = (*self.leaves.get(id(tensor), ()), place)
                else:
                    edge = node, tensor.output_nr
                    self.edges[edge] = (*self.edges.get(edge, ()), place)

    def places_of_cast(self, node: Any) -> Places | None:
        """Places of the leaf that ``node`` casts under autocast.

        Autocast casts a weight once and lets all calls use the result: the node of the cast may
        be older than this call or belong to others, too. What flows into it from here is ours.
        """
        leaf = node.next_functions[0][0] if node.name() == "ToCopyBackward0" else None
        if leaf is None or leaf._sequence_nr() != _LEAF:
            return None
        places = self.leaves.get(id(leaf.variable))
        if places:
            self.casts = {**(self.casts or {}), **dict.fromkeys(places, leaf.variable.dtype)}
        return places

    def forget(self, places: Places) -> None:
        """These inputs are outputs as well: they get their gradient as a whole, not in parts."""
        every: tuple[dict[Any, Places], ...] = (self.edges, self.leaves)
        for known in every:
            for key, found in list(known.items()):
                left = tuple(place for place in found if place not in places)
                if left:
                    known[key] = left
                else:
                    del known[key]


def accumulator(leaf: Any) -> Any:
    """AccumulateGrad node of a leaf that requires a gradient.

    None for a leaf that a functorch transform has wrapped: its graph is the transform's.
    """
    node: Any
    if _grad_enabled():
        node = _view_as(leaf, leaf).grad_fn
    else:
        with torch.enable_grad():
            node = _view_as(leaf, leaf).grad_fn
    return None if node is None else node.next_functions[0][0]


def owners(  # noqa: C901 - one frame, on the path of every call
    roots: Any, seen: Watch
) -> dict[Any, list[tuple[int, Places]]]:
    """Nodes of the call → the positions at which they own an edge to an input."""
    owners: dict[Any, list[tuple[int, Places]]] = {}
    edges, leaves, first = seen.edges, seen.leaves, seen.sequence
    visited = set(roots)
    todo = list(roots)
    while todo:
        node = todo.pop()
        if not first <= node._sequence_nr() != _LEAF:
            continue
        for position, (below, number) in enumerate(node.next_functions):
            places = edges.get((below, number))
            if places is None and leaves and below is not None:
                if below._sequence_nr() == _LEAF:
                    places = leaves.get(id(below.variable))
                elif seen.autocast:
                    places = seen.places_of_cast(below)
            if places is not None:
                owners.setdefault(node, []).append((position, places))
            elif below is not None and below not in visited:
                visited.add(below)
                todo.append(below)
    return owners
