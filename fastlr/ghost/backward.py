"""One backward pass that turns gradients at the uses of parameters into norms.

It stops at the uses; the norms are per sample.

In: the classified graph of an output z [*], a cotangent v like it, where the samples are (layouts),
and routes. Out: the squared norm of the gradient of <v_b, z_b> for each sample b and parameter, [B]
in float64 (`sq_norms`).

`Structure` finds once for each graph which uses there are and how their gradients become those of
parameters. `backward` hands the gradient that arrives at a use to a visitor; the rule of the node's
kind makes factors of it (fastlr.ghost.rules), whose norms are taken at once, or which wait for the
other uses of the same parameter: its gradient is the sum over all. "Ghost" norms, as no per-sample
gradient is formed: Goodfellow 2015 (arXiv:1510.01799), Li et al. 2022 (arXiv:2110.05679).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial, reduce

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils.checkpoint import CheckpointError

from fastlr.distributed import on_demand
from fastlr.errors import ModelError

# Importing these registers their rules.
from fastlr.ghost import rules_distance, rules_embedding, rules_grouped  # noqa: F401
from fastlr.ghost.factors import CHUNK_ELEMENTS, Dense, Factor, Norms, Sum, combined_sq_norms
from fastlr.ghost.fallback import by_node
from fastlr.ghost.fusion.conv_bn import NODE as FOLDED
from fastlr.ghost.fusion.conv_bn import refuse_blocks, weight_of
from fastlr.ghost.fusion.mode import OURS
from fastlr.ghost.graph import CASTS, OF_COMPLEX, Graph, Place, Use, full_precision, position_map
from fastlr.ghost.process_state import warnings_ignored
from fastlr.ghost.recurrent import NODE as SCAN
from fastlr.ghost.rules import COMPLEX, RULES, Site
from fastlr.ghost.sample_axis import Layout, Unsupported
from fastlr.ops.linear import chunks

Visit = Callable[[int, tuple[Tensor | None, ...]], None]
Layouts = Mapping[Place, Layout]  # fitted to the shapes at hand


class Rerouted(Exception):
    """A rule turned out not to apply, in a pass that cannot be completed.

    The routes are updated: run the pass again.
    """


@dataclass(eq=False)
class Group:
    """Parameters that share sources, and how the sources' gradients become theirs.

    Attributes:
        parameters: AccumulateGrad nodes.
        sources: outputs at which the parameter side ends (see `Use.source`).
        relation: "separate": views of disjoint elements of one parameter, whose norms add.
            "matrix": each is the parameter or its transpose (``transposed``). "same": all show the
            same elements at the same positions. "computed": the parameter side is differentiated
            sample by sample.
        transposed: those that are the transpose of a matrix.
    """

    parameters: list[int]
    sources: list[Place]
    relation: str = "computed"
    transposed: frozenset[Place] = frozenset()


@dataclass
class Structure:
    """The part of a graph that does not depend on its shapes.

    These are the uses by node, and the groups of parameters.
    """

    uses: list[Use]
    by_node: dict[int, list[Use]] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)

    @staticmethod
    def of(graph: Graph) -> Structure:
        """Find the uses and group the parameters of a classified graph."""
        structure = Structure(graph.uses())
        for use in structure.uses:
            structure.by_node.setdefault(use.node, []).append(use)
        group_of: dict[int, Group] = {}
        for source in dict.fromkeys(use.source for use in structure.uses):
            below = graph.parameters_below(source[0])
            touching = dict.fromkeys(group_of[p] for p in below if p in group_of)
            parameters = sorted({*below, *(p for group in touching for p in group.parameters)})
            joined = Group(parameters, [*(s for group in touching for s in group.sources), source])
            group_of |= dict.fromkeys(parameters, joined)
        structure.groups = [_related(graph, group) for group in dict.fromkeys(group_of.values())]
        return structure


def _related(graph: Graph, group: Group) -> Group:
    """Note how the sources of a group are related, where all are views of one parameter."""
    chains: dict[Place, list[Place]] = {}
    for node, output in group.sources:
        chain = graph.view_chain(node)
        if chain is None or len(group.parameters) > 1:
            return group
        chains[node, output] = [(chain[0][0], output), *chain[1:]] if chain else []
    if len(chains) == 1:
        group.relation = "separate"
        return group
    turns = {source: _is_transposed(graph, chain) for source, chain in chains.items()}
    if None not in turns.values():
        group.relation, group.transposed = (
            "matrix",
            frozenset(s for s, turned in turns.items() if turned),
        )
        return group
    if any(graph.names[node] in OF_COMPLEX for chain in chains.values() for node, _ in chain):
        return group
    seen, positions = zip(
        *(position_map(graph, chain, graph.shape(*s)) for s, chain in chains.items()), strict=True
    )
    if float(torch.stack(seen).sum(0).max()) <= 1:
        group.relation = "separate"
    elif len({graph.shape(*s) for s in chains}) == 1:
        if all(torch.equal(t, maps[0]) for maps in (seen, positions) for t in maps[1:]):
            group.relation = "same"
    return group


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


def backward(
    graph: Graph,
    structure: Structure,
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
    visits = dict.fromkeys(structure.by_node, 0)

    def counted(i: int, gradients: tuple[Tensor | None, ...]) -> None:
        visits[i] += 1
        visit(i, tuple(gradients))

    roots = [i for i in structure.by_node if graph.is_root(i)]
    places = [(i, output) for i in roots for output in range(graph.outputs(i))]
    ours = [
        node
        for node, name in zip(graph.nodes, graph.names, strict=True)
        if name in OURS or name == SCAN
    ]
    handles = [
        graph.nodes[i].register_prehook(partial(counted, i))
        for i in structure.by_node
        if i not in set(roots)
    ]
    for node in ours:
        node.norms_only = True
    try:
        with full_precision(z.device):
            edges = [GradientEdge(graph.nodes[i], output) for i, output in places]
            captured = on_demand.gradients(z, edges, v, retain=retain)
    finally:
        for node in ours:
            node.norms_only = False
        for handle in handles:
            handle.remove()
    gradients = dict(zip(places, captured, strict=True))
    del captured  # each is freed once it was visited
    with torch.no_grad(), full_precision(z.device):
        for i in roots:
            counted(i, tuple(gradients.pop((i, output)) for output in range(graph.outputs(i))))
    missed = [graph.names[i] for i, times in visits.items() if times != 1]
    if missed:
        raise ModelError(
            f"{len(missed)} planned uses of parameters were not visited exactly once "
            f"({', '.join(missed[:5])}); this is a defect of fastlr: please report the model"
        )


def sq_norms(
    graph: Graph,
    structure: Structure,
    z: Tensor,  # [*output]
    v: Tensor,  # [*output]
    layouts: Layouts,
    count: int,
    routes: dict[tuple, str],
    *,
    retain: bool = False,
    skip: frozenset[str] = frozenset(),
    reasons: dict[tuple, str] | None = None,
    tolerant: bool = False,
) -> dict[str, Tensor]:
    """Return the squared norms [B] (float64) of the gradients of <v_b, z_b>.

    There is one tensor for every parameter in the graph but those in ``skip``.

    Args:
        graph: below ``z``, classified.
        structure: its uses and groups of parameters.
        z: the output.
        v: the cotangent.
        layouts: where the samples are in the outputs of the nodes with uses.
        count: number of samples B.
        routes: by a use's key, "rule" or "node"; where a rule turns out not to apply it is set to
            "node".
        retain: keep the graph.
        skip: names of parameters that are measured in another way.
        reasons: by a use's key, filled with the reason why its route was changed.
        tolerant: any error of a rule changes the route (during a proof), not only `Unsupported`.

    Raises:
        Rerouted: a route was changed in a pass that does not keep the graph; run the model again.
    """
    group_of = {source: group for group in structure.groups for source in group.sources}
    times_used = Counter(use.source for use in structure.uses)
    skipped = {
        s
        for s, group in group_of.items()
        if all(graph.parameters[p] in skip for p in group.parameters)
    }
    waiting: dict[Place, list[Factor]] = {}
    by_formula: list[tuple[Site, list[Use]]] = []
    norms: dict[str, Tensor] = {}
    keep = retain or any(routes.get(use.key, "rule") == "node" for use in structure.uses)

    def add(name: str, value: Tensor) -> None:
        norms[name] = norms[name] + value if name in norms else value

    def deliver(factors: Mapping[int, Factor], uses: list[Use]) -> None:
        for use in uses:
            group, factor = group_of[use.source], factors[use.slot]
            if group.relation == "separate" and times_used[use.source] == 1:
                add(graph.parameters[group.parameters[0]], factor.sq_norms())
                continue
            if isinstance(factor, Norms):  # they cannot be added to others
                if factor.whole is None:
                    refuse_blocks(
                        [weight_of(graph, use.node)], "a parameter is used more than once"
                    )
                factor = factor.whole()
            waiting.setdefault(use.source, []).append(factor)

    def visit(i: int, gradients: tuple[Tensor | None, ...]) -> None:
        uses = [use for use in structure.by_node[i] if use.source not in skipped]
        if not uses or all(g is None for g in gradients):
            return
        by_output = {o: layouts[i, o] for o in range(len(gradients)) if (i, o) in layouts}
        shapes = {use.slot: graph.shape(*use.source) for use in uses}
        site = Site(graph.nodes[i], gradients, by_output, count, shapes)
        factors = _by_rule(graph, site, uses, routes, reasons, tolerant)
        if factors is not None:
            deliver(factors, uses)
        elif keep:  # within a backward pass the engine would skip the weight gradients of the node
            by_formula.append((site, uses))
        else:
            raise Rerouted

    backward(graph, structure, z, v, visit, retain=keep)
    with torch.no_grad(), full_precision(z.device):
        for site, uses in by_formula:
            deliver(by_node(site, [use.slot for use in uses]), uses)
        for group in structure.groups:
            factors = {s: waiting.pop(s) for s in group.sources if s in waiting}
            if factors:
                for name, value in _norms_of_group(graph, group, factors).items():
                    add(name, value)
    zero = torch.zeros(count, dtype=torch.float64, device=z.device)
    names = {graph.parameters[p] for group in structure.groups for p in group.parameters}
    return {name: norms.get(name, zero) for name in names if name not in skip}


def _by_rule(
    graph: Graph,
    site: Site,
    uses: list[Use],
    routes: dict[tuple, str],
    reasons: dict[tuple, str] | None,
    tolerant: bool,
) -> Mapping[int, Factor] | None:
    """Return the factors of a node's parameter slots by its rule.

    None, with the route set to "node", where no rule applies.
    """
    if any(routes.get(use.key, "rule") != "rule" for use in uses):
        return None
    name = graph.names[uses[0].node]
    errors = (
        (Unsupported, RuntimeError, ValueError, IndexError, AttributeError)
        if tolerant
        else (Unsupported,)
    )
    try:
        if name not in RULES:
            raise Unsupported(f"no rule for {name}")
        complex_gradient = any(g is not None and g.is_complex() for g in site.gradients)
        complex_slots = {use.slot for use in uses if graph.dtype(*use.source).is_complex}
        if (complex_gradient or complex_slots) and name not in COMPLEX:
            raise Unsupported("complex numbers")
        factors = RULES[name](site, [use.slot for use in uses])
        if not complex_gradient:
            return factors
        return {
            slot: factor if slot in complex_slots else factor.real()
            for slot, factor in factors.items()
        }
    except errors as error:
        if isinstance(error, CheckpointError):
            raise
        if name == FOLDED and not tolerant:
            # The node's own formula, sample by sample, knows no missing parameters.
            refuse_blocks([weight_of(graph, uses[0].node)], str(error))
        for use in uses:
            routes[use.key] = "node"
            if reasons is not None:
                reasons[use.key] = str(error)
        return None


def _norms_of_group(
    graph: Graph, group: Group, factors: dict[Place, list[Factor]]
) -> dict[str, Tensor]:
    """Norms of the parameters of a group from the factors of its sources."""
    name = graph.parameters[group.parameters[0]]
    if group.relation == "separate":
        return {
            name: reduce(
                torch.add, (combined_sq_norms(fs, graph.shape(*s)) for s, fs in factors.items())
            )
        }
    if group.relation == "same":
        return {
            name: combined_sq_norms(
                [f for fs in factors.values() for f in fs], graph.shape(*group.sources[0])
            )
        }
    if group.relation == "matrix":
        turned = [
            f.transpose() if s in group.transposed else f for s, fs in factors.items() for f in fs
        ]
        upright = [f for f in turned if f is not None]
        if len(upright) == len(turned):
            return {name: combined_sq_norms(upright, graph.shape(group.parameters[0]))}
    return _through_parameter_side(graph, group, factors)


def _through_parameter_side(
    graph: Graph, group: Group, factors: dict[Place, list[Factor]]
) -> dict[str, Tensor]:
    """Return the squared norms of a group's parameters, through the parameter side.

    Dense per-sample gradients of the sources are sent through the parameter side's own backward
    formulas.
    """
    variables = [graph.nodes[p].variable for p in group.parameters]
    totals = {s: Sum(fs, graph.shape(*s)) for s, fs in factors.items()}
    elements = sum(t.shape.numel() for t in (*totals.values(), *variables))
    parts = []
    for lo, hi in chunks(len(next(iter(totals.values()))), elements, CHUNK_ELEMENTS):
        grads = {s: total.dense(lo, hi) for s, total in totals.items()}
        # Parameters that are used as they are.
        sums = {s[0]: grads.pop(s) for s in totals if s[0] in graph.parameters}
        if grads:
            cast = {s: g.to(graph.dtype(*s)) for s, g in grads.items()}
            for p, grad in zip(group.parameters, _pull_back(graph, cast, variables), strict=True):
                if grad is not None:
                    sums[p] = grad + sums[p] if p in sums else grad
        parts.append({p: Dense(g).sq_norms() for p, g in sums.items()})
    return {graph.parameters[p]: torch.cat([part[p] for part in parts]) for p in parts[0]}


def _pull_back(
    graph: Graph, grads: dict[Place, Tensor], variables: list[Tensor]
) -> list[Tensor | None]:
    """Return vector-Jacobian products [b, *shape] of the parameter side.

    They are batched, or made one sample at a time where vmap cannot.
    """
    edges = [GradientEdge(graph.nodes[node], output) for node, output in grads]
    options = {"retain_graph": True, "allow_unused": True}
    try:
        with warnings_ignored():  # vmap's remarks on slow operators
            return list(
                torch.autograd.grad(
                    edges, variables, list(grads.values()), is_grads_batched=True, **options
                )
            )
    except RuntimeError:
        rows = [
            torch.autograd.grad(edges, variables, sample, **options)
            for sample in zip(*grads.values(), strict=True)
        ]
        return [
            None if column[0] is None else torch.stack(column) for column in zip(*rows, strict=True)
        ]
