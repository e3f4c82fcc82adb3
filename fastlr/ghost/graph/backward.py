"""One backward pass that stops at the uses of parameters and visits each node that has some."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from fastlr.errors import ModelError
from fastlr.ghost.graph.uses import Uses
from fastlr.ghost.graph.walk import Graph
from fastlr.ops.autocast import full_precision

Visit = Callable[[int, tuple[Tensor | None, ...]], None]


def backward(
    graph: Graph,
    uses: Uses,
    z: Tensor,  # [*output]
    v: Tensor,  # [*output]
    visit: Visit,
    *,
    retain: bool,
) -> None:
    """Run one backward pass of ``v`` that visits every node with uses.

    It calls ``visit(node, gradients at its outputs)`` once for each of these nodes.

    No weight gradient is computed, nor the input gradient of a node with no other parameters below.
    Raises ModelError if a planned node is not visited exactly once.
    """
    if not uses.at_node:
        return
    visits = dict.fromkeys(uses.at_node, 0)

    def counted(i: int, gradients: tuple[Tensor | None, ...]) -> None:
        visits[i] += 1
        visit(i, gradients)

    places = [place for outputs in uses.lowest.values() for place in outputs]
    edges = [GradientEdge(graph.nodes[i], output) for i, output in places]
    above = uses.at_node.keys() - uses.lowest
    handles = [graph.nodes[i].register_prehook(partial(counted, i)) for i in above]
    try:
        with _without_weight_gradients(graph), full_precision(z.device):
            captured = torch.autograd.grad(z, edges, v, retain_graph=retain, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    gradients = dict(zip(places, captured, strict=True))
    del captured  # each is freed once it was visited
    with torch.no_grad(), full_precision(z.device):
        for i, outputs in uses.lowest.items():
            counted(i, tuple([gradients.pop(place) for place in outputs]))
    missed = [graph.names[i] for i, times in visits.items() if times != 1]
    if missed:
        raise ModelError(
            f"{len(missed)} planned uses of parameters were not visited exactly once "
            f"({', '.join(missed[:5])}); this is a defect of fastlr: please report the model"
        )


@contextmanager
def _without_weight_gradients(graph: Graph) -> Iterator[None]:
    """Have fastlr's own nodes in a graph compute no gradients of weights in a backward pass."""
    nodes = [
        n for n in graph.nodes if isinstance(n, BackwardCFunction) and hasattr(n, "norms_only")
    ]
    for node in nodes:
        node.norms_only = True
    try:
        yield
    finally:
        for node in nodes:
            node.norms_only = False
