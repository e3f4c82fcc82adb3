"""How gradients at the uses of a parameter become the gradient of that parameter.

In: a classified graph. Out: its `Uses`. A parameter may be used more than once: tied weights, views
of one parameter, weights that are computed of several. Such parameters form a `Group`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fastlr.ghost.graph.formulas import call_node, dense
from fastlr.ghost.graph.walk import CASTS, OF_COMPLEX, Graph, Place, Use
from fastlr.ops.torch_private import output_metadata


@dataclass(eq=False)
class Group:
    """Parameters that share sources, and how the sources' gradients become theirs.

    Attributes:
        parameters: AccumulateGrad nodes.
        sources: outputs at which the parameter side ends (see `Use.source`).
        relation: "disjoint views": of elements of one parameter, whose norms add. "matrix": each is
            the parameter or its transpose (``transposed``). "equal views": all show the same
            elements at the same positions. "computed": the parameter side is differentiated sample
            by sample.
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
        of_name: Uses by name of parameter.
        groups: Groups of parameters.
        group_of: Group of each source.
        times_used: Number of uses of each source.
    """

    every: list[Use]
    at_node: dict[int, list[Use]] = field(default_factory=dict)
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
            for name in graph.names_below(use.child):
                uses.of_name.setdefault(name, []).append(use)
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
    chains = _view_chains(graph, group)
    if chains is None:
        return
    if len(chains) == 1:
        group.relation = "disjoint views"
        return
    turns = {source: _is_transposed(graph, chain) for source, chain in chains.items()}
    if None not in turns.values():
        group.relation = "matrix"
        group.transposed = frozenset(source for source, turned in turns.items() if turned)
        return
    nodes = [node for chain in chains.values() for node, _ in chain]
    if OF_COMPLEX.isdisjoint(graph.names[node] for node in nodes):
        group.relation = _relation_of_views(graph, chains)


def _view_chains(graph: Graph, group: Group) -> dict[Place, list[Place]] | None:
    """Return the views from each source of a group down to its parameter.

    None where a source is no view, or there are several parameters.
    """
    if len(group.parameters) > 1:
        return None
    chains: dict[Place, list[Place]] = {}
    for node, output in group.sources:
        chain = graph.view_chain(node)
        if chain is None:
            return None
        if chain:  # a use may take another output of the first view than the first
            chain = [(node, output), *chain[1:]]
        chains[node, output] = chain
    return chains


def _relation_of_views(graph: Graph, chains: dict[Place, list[Place]]) -> str:
    """Return how several views of a parameter are related (see `Group`)."""
    maps = [position_map(graph, chain, graph.shape(*source)) for source, chain in chains.items()]
    times_seen = torch.stack([seen for seen, _ in maps]).sum(0)
    if float(times_seen.max()) <= 1:
        return "disjoint views"
    shapes = {graph.shape(*source) for source in chains}
    if len(shapes) == 1 and all(all(map(torch.equal, one, maps[0])) for one in maps[1:]):
        return "equal views"
    return "computed"


def _is_transposed(graph: Graph, chain: list[Place]) -> bool | None:
    """Return True if a chain of views of a matrix transposes it.

    False if it changes nothing, None for anything else.
    """
    flip = False
    for node, _ in chain:
        name = graph.names[node]
        if name in CASTS:
            continue
        if len(graph.shape(node)) != 2 or name not in ("TBackward0", "TransposeBackward0"):
            return None
        flip = not flip
    return flip


def position_map(graph: Graph, chain: list[Place], shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Return how often and where a chain of views shows each element of a parameter.

    Where: at which position of a result of ``shape``.

    Found by running the views' own backward formulas on ones and on 0, 1, 2, ...; float64 is exact
    to 2^53.
    """
    size = math.prod(shape)
    device = output_metadata(graph.nodes[chain[0][0]])[0].device if chain else torch.device("cpu")
    seen = torch.ones(shape, dtype=torch.float64, device=device)
    position = torch.arange(size, dtype=torch.float64, device=device).view(shape)
    for node, output in chain:
        if graph.names[node] in CASTS:
            continue
        before, after = [None] * output, [None] * (graph.output_count(node) - output - 1)
        seen, position = (
            dense(call_node(graph.nodes[node], (*before, t, *after))[0]) for t in (seen, position)
        )
    return seen, position
