"""How gradients at the uses of a parameter become the gradient of that parameter.

In: a classified graph. Out: its `Uses`. A parameter may be used more than once: tied weights, views
of one parameter, weights that are computed of several. Such parameters form a `Group`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import GradientEdge

from fastlr.ghost.graph.walk import CASTS, OF_COMPLEX, SAMPLE, VIEWS, Graph, Place, Use


@dataclass(eq=False)
class Group:
    """Parameters that share sources, and how the sources' gradients become theirs.

    Attributes:
        parameters: AccumulateGrad nodes.
        sources: outputs at which the parameter side ends (see `Use.source`).
        relation: "norms add": views of one parameter that share no element. "whole": each is the
            parameter or its transpose (``transposed``). "computed": the parameter side is
            differentiated sample by sample.
        transposed: those that are the transpose of a matrix.
    """

    parameters: list[int]
    sources: list[Place]
    relation: str = "computed"
    transposed: frozenset[Place] = frozenset()


@dataclass
class Uses:
    """All uses of parameters in a graph.

    Attributes:
        every: Uses, in the order of the nodes.
        at_node: Uses by node.
        lowest: Outputs of nodes that have uses and no sample-side node below, by node. Their
            gradients are captured.
        of_name: Uses by name of parameter.
        groups: Groups of parameters.
        group_of: Group of each source.
        times_used: Number of uses of each source.
    """

    every: list[Use]
    at_node: dict[int, list[Use]] = field(default_factory=dict)
    lowest: dict[int, list[Place]] = field(default_factory=dict)
    of_name: dict[str, list[Use]] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)
    group_of: dict[Place, Group] = field(default_factory=dict)
    times_used: Counter[Place] = field(default_factory=Counter)

    @staticmethod
    def of(graph: Graph) -> Uses:
        """Find the uses and group the parameters of a classified graph."""
        uses = Uses(graph.uses())
        for use in uses.every:
            uses.at_node.setdefault(use.node, []).append(use)
            uses.times_used[use.source] += 1
            for name in graph.names_below(use.source):
                uses.of_name.setdefault(name, []).append(use)
        for node in uses.at_node:
            if all(c < 0 or graph.side[c] != SAMPLE for c, _ in graph.children[node]):
                uses.lowest[node] = graph.outputs(node)
        uses.groups = _groups(graph, uses.times_used)
        for group in uses.groups:
            uses.group_of |= dict.fromkeys(group.sources, group)
        return uses


def _groups(graph: Graph, sources: Iterable[Place]) -> list[Group]:
    """Join parameters that share sources into groups."""
    group_of: dict[int, Group] = {}  # by parameter
    for source in sources:
        below = graph.parameters_below(source[0])
        joined = Group([], [])
        for group in dict.fromkeys(group_of[p] for p in below if p in group_of):
            joined.parameters += group.parameters
            joined.sources += group.sources
        joined.parameters = sorted({*joined.parameters, *below})
        joined.sources.append(source)
        group_of |= dict.fromkeys(joined.parameters, joined)
    groups = list(dict.fromkeys(group_of.values()))
    for group in groups:
        _relate(graph, group)
    return groups


def _relate(graph: Graph, group: Group) -> None:
    """Note how the sources of a group are related, where all are views of one parameter."""
    views = {s: sorted(graph.below(s[0]) - graph.parameters.keys()) for s in group.sources}
    kinds = {graph.names[node] for nodes in views.values() for node in nodes}
    if len(group.parameters) > 1 or not kinds <= VIEWS:
        return
    if len(views) == 1:
        group.relation = "norms add"
        return
    turns = {source: _is_transposed(graph, nodes) for source, nodes in views.items()}
    if None not in turns.values():
        group.relation = "whole"
        group.transposed = frozenset(source for source, turned in turns.items() if turned)
    elif kinds.isdisjoint(OF_COMPLEX) and _are_disjoint(graph, group):
        group.relation = "norms add"


def _is_transposed(graph: Graph, views: Iterable[int]) -> bool | None:
    """Return True if views of a matrix, one of another, transpose it.

    False if they change nothing, None for anything else.
    """
    flip = False
    for node in views:
        name = graph.names[node]
        if name in CASTS:
            continue
        if len(graph.shape(node)) != 2 or name not in ("TBackward0", "TransposeBackward0"):
            return None
        flip = not flip
    return flip


def _are_disjoint(graph: Graph, group: Group) -> bool:
    """Return True if no two of the views of a parameter show the same element.

    The gradient of the sum of the views says how often they show each element.
    """
    variable = graph.nodes[group.parameters[0]].variable
    edges = [GradientEdge(graph.nodes[node], output) for node, output in group.sources]
    ones = [
        torch.ones(graph.shape(*source), dtype=graph.dtype(*source), device=variable.device)
        for source in group.sources
    ]
    (times_shown,) = torch.autograd.grad(edges, variable, ones, retain_graph=True)
    return bool((times_shown <= 1).all())
