"""Run a plan: one backward pass that stops at the uses, turning each gradient into per-sample norms as it passes."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils.checkpoint import CheckpointError

from fastlr.errors import ModelError
from fastlr.ghost import rules_embedding  # noqa: F401 - registers its rules
from fastlr.ghost.factors import Factor, added, batch_size, chunks, combined_sq_norms
from fastlr.ghost.fallback import by_node
from fastlr.ghost.fuse import OURS
from fastlr.ghost.graph import CASTS, Graph, Use, full_precision, position_map
from fastlr.ghost.layout import Layout
from fastlr.ghost.rules import RULES, Site, Unsupported

Source = tuple[int, int]


class Rerouted(Exception):
    """A rule turned out not to apply, in a pass that cannot be completed: the routes are updated, run again."""


@dataclass
class Group:
    """Parameters that share sources, and how the sources' gradients become theirs.

    ``separate``: views that show disjoint elements of one parameter, norms add. ``flips``: every source is the parameter
    (False) or its transpose (True). ``same``: all sources show the same elements at the same positions. Otherwise the
    parameter side is differentiated sample by sample.
    """

    parameters: list[int]
    sources: list[Source]
    separate: bool = False
    flips: dict[Source, bool] | None = None
    same: bool = False


@dataclass
class Structure:
    """What of a graph does not depend on its shapes: uses by node, and the groups of parameters."""

    uses: list[Use]
    by_node: dict[int, list[Use]] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)

    @staticmethod
    def of(graph: Graph) -> Structure:
        """Find the uses and group the parameters of a classified graph."""
        structure = Structure(graph.uses())
        for use in structure.uses:
            structure.by_node.setdefault(use.node, []).append(use)
        sources = list(dict.fromkeys(use.source for use in structure.uses))
        below = {s: graph.parameters_below(s[0]) for s in sources}
        group_of: dict[int, tuple[set[int], list[Source]]] = {}
        for s in sources:
            touching = _distinct(group_of[p] for p in below[s] if p in group_of)
            joined = (set(below[s]).union(*(g[0] for g in touching)), [t for g in touching for t in g[1]] + [s])
            group_of |= dict.fromkeys(joined[0], joined)
        for parameters, members in _distinct(group_of.values()):
            structure.groups.append(_describe(graph, sorted(parameters), members))
        return structure


def _distinct(groups: Iterable[tuple[set[int], list[Source]]]) -> list[tuple[set[int], list[Source]]]:
    """Each group once."""
    return list({id(g): g for g in groups}.values())


def _describe(graph: Graph, parameters: list[int], sources: list[Source]) -> Group:
    group = Group(parameters, sources)
    chains = {}
    for node, output in sources:
        chain = graph.view_chain(node)
        if chain is None or len(parameters) > 1:
            return group
        chains[node, output] = [(chain[0][0], output), *chain[1:]] if chain else []
    if len(sources) == 1:
        group.separate = True
        return group
    flips = {s: _flips(graph, chain) for s, chain in chains.items()}
    if all(f is not None for f in flips.values()):
        group.flips = {s: bool(f) for s, f in flips.items()}
        return group
    maps = [position_map(graph, chain, graph.shape(*s)) for s, chain in chains.items()]
    if float(torch.stack([seen for seen, _ in maps]).sum(0).max()) <= 1:
        group.separate = True
    elif all(torch.equal(m[0], maps[0][0]) and torch.equal(m[1], maps[0][1]) for m in maps[1:]):
        group.same = len({graph.shape(*s) for s in sources}) == 1
    return group


def _flips(graph: Graph, chain: list[tuple[int, int]]) -> bool | None:
    """Whether a chain of views of a matrix is a transposition (True), nothing (False), or something else (None)."""
    flip = False
    for node, _ in chain:
        name = graph.names[node]
        if name in CASTS:
            continue
        if len(graph.shape(node)) != 2 or name not in ("TBackward0", "TransposeBackward0"):
            return None
        flip = not flip
    return flip


Layouts = Mapping[tuple[int, int], Layout]  # (node, output) -> layout, fitted to the shapes at hand


def backward(
    graph: Graph,
    structure: Structure,
    z: Tensor,
    v: Tensor,
    visit: Callable[[int, tuple[Tensor | None, ...]], None],
    *,
    retain: bool,
) -> None:
    """One backward pass of ``v`` that calls ``visit(node, gradients at its outputs)`` once for every node with uses.

    No weight gradient is computed, nor the input gradient of a node with no other parameters below. Raises ModelError
    if a planned node is not visited exactly once.
    """
    visited: dict[int, int] = dict.fromkeys(structure.by_node, 0)
    handles, edges, owners = [], [], []

    def hook_for(i: int) -> Callable:
        def hook(gradients: tuple[Tensor | None, ...]) -> None:
            visited[i] += 1
            visit(i, tuple(gradients))

        return hook

    for i in structure.by_node:
        if graph.is_root(i):
            for output in range(graph.outputs(i)):
                edges.append(GradientEdge(graph.nodes[i], output))
                owners.append(i)
        else:
            handles.append(graph.nodes[i].register_prehook(hook_for(i)))
    folded = [node for node, name in zip(graph.nodes, graph.names, strict=True) if name in OURS]
    for node in folded:
        node.norms_only = True
    try:
        with full_precision(z.device):
            captured = torch.autograd.grad(z, edges, v, retain_graph=retain, allow_unused=True)
    finally:
        for node in folded:
            node.norms_only = False
        for handle in handles:
            handle.remove()
    found: dict[int, list[Tensor | None]] = {}
    for i, gradient in zip(owners, captured, strict=True):
        found.setdefault(i, []).append(gradient)
    del captured
    with full_precision(z.device):
        for i in list(found):
            visited[i] += 1
            visit(i, tuple(found.pop(i)))
    missed = [graph.names[i] for i, times in visited.items() if times != 1]
    if missed:
        raise ModelError(
            f"{len(missed)} planned uses of parameters were not visited exactly once ({', '.join(missed[:5])}); "
            "this is a defect of fastlr: please report the model"
        )


def sq_norms(
    graph: Graph,
    structure: Structure,
    z: Tensor,
    v: Tensor,
    layouts: Layouts,
    count: int,
    routes: dict[tuple, str],
    *,
    retain: bool = False,
    skip: frozenset[str] = frozenset(),
    reasons: dict[tuple, str] | None = None,
    tolerant: bool = False,
) -> dict[str, Tensor]:
    """Squared norms [B] (float64) of every parameter in the graph but those in ``skip``.

    ``routes`` maps a use's key to "rule" or "node"; where a rule turns out not to apply it is set to "node", with the
    reason in ``reasons``. ``tolerant`` (during a proof) treats any error of a rule so. Raises Rerouted where that happens
    in a pass that does not keep the graph: run the model again.
    """
    home = {s: group for group in structure.groups for s in group.sources}
    waiting = Counter(u.source for u in structure.uses)
    skipped = {s for s, group in home.items() if all(graph.parameters[p] in skip for p in group.parameters)}
    stash: dict[Source, list[Factor]] = {}
    norms: dict[str, Tensor] = {}

    def add(name: str, value: Tensor) -> None:
        norms[name] = norms[name] + value if name in norms else value

    def site_of(i: int, gradients: tuple[Tensor | None, ...]) -> tuple[Site, list[Use]]:
        uses = [u for u in structure.by_node[i] if u.source not in skipped]
        shapes = {u.slot: graph.shape(*u.source) for u in uses}
        own = {o: layouts[i, o] for o in range(len(gradients)) if (i, o) in layouts}
        return Site(graph.nodes[i], gradients, own, count, shapes), uses

    def deliver(factors: Mapping[int, Factor], uses: list[Use]) -> None:
        for use in uses:
            group = home[use.source]
            if group.separate and waiting[use.source] == 1:
                add(graph.parameters[group.parameters[0]], factors[use.slot].sq_norms())
            else:
                stash.setdefault(use.source, []).append(factors[use.slot])

    later: list[tuple[Site, list[Use]]] = []
    keep = retain or any(routes.get(use.key, "rule") == "node" for use in structure.uses)

    @torch.no_grad()
    def visit(i: int, gradients: tuple[Tensor | None, ...]) -> None:
        site, uses = site_of(i, gradients)
        if not uses or all(g is None for g in gradients):
            return
        factors = _by_rule(graph, site, uses, routes, reasons, tolerant)
        if factors is not None:
            deliver(factors, uses)
        elif keep:  # within a backward pass the engine would skip the weight gradients of the node
            later.append((site, uses))
        else:
            raise Rerouted

    backward(graph, structure, z, v, visit, retain=keep)
    with torch.no_grad(), full_precision(z.device):
        for site, uses in later:
            deliver(by_node(site, [u.slot for u in uses]), uses)
        for group in structure.groups:
            held = {s: stash.pop(s) for s in group.sources if s in stash}
            if held:
                for name, value in _settle(graph, group, held).items():
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
    """Factors of a node's parameter slots by its rule; None, with the route set to "node", where no rule applies."""
    if any(routes.get(u.key, "rule") != "rule" for u in uses):
        return None
    name = graph.names[uses[0].node]
    errors = (Unsupported, RuntimeError, ValueError, IndexError, AttributeError) if tolerant else (Unsupported,)
    try:
        if name not in RULES:
            raise Unsupported(f"no rule for {name}")
        complex_gradient = any(g is not None and g.is_complex() for g in site.gradients)
        if complex_gradient or any(graph.dtype(*u.source).is_complex for u in uses):
            raise Unsupported("complex numbers")
        return RULES[name](site, [u.slot for u in uses])
    except errors as error:
        if isinstance(error, CheckpointError):
            raise
        for u in uses:
            routes[u.key] = "node"
            if reasons is not None:
                reasons[u.key] = str(error)
        return None


def _settle(graph: Graph, group: Group, held: dict[Source, list[Factor]]) -> dict[str, Tensor]:
    """Norms of the parameters of a group from the factors of its sources."""
    first = graph.parameters[group.parameters[0]]
    if group.separate:
        total = sum(combined_sq_norms(factors, graph.shape(*s)) for s, factors in held.items())
        return {first: total}  # type: ignore[dict-item]
    if group.same:
        factors = [f for factors in held.values() for f in factors]
        return {first: combined_sq_norms(factors, graph.shape(*group.sources[0]))}
    if group.flips is not None:
        turned = [f.transpose() if group.flips[s] else f for s, factors in held.items() for f in factors]
        if all(f is not None for f in turned):
            return {first: combined_sq_norms([f for f in turned if f is not None], graph.shape(group.parameters[0]))}
    return _through_parameter_side(graph, group, held)


def _through_parameter_side(graph: Graph, group: Group, held: dict[Source, list[Factor]]) -> dict[str, Tensor]:
    """Dense per-sample gradients of the sources, sent through the parameter side's own backward formulas."""
    variables = [graph.nodes[p].variable for p in group.parameters]
    count = batch_size(next(iter(held.values()))[0])
    elements = sum(graph.shape(*s).numel() for s in held) + sum(v.numel() for v in variables)
    parts = []
    for lo, hi in chunks(count, elements):
        sums: dict[int, Tensor] = {}
        inner: dict[Source, Tensor] = {}
        for s, factors in held.items():
            dense = added([f.dense(lo, hi).reshape(hi - lo, *graph.shape(*s)) for f in factors])
            if s[0] in graph.parameters:
                sums[s[0]] = added([dense, sums[s[0]]]) if s[0] in sums else dense
            else:
                inner[s] = dense.to(graph.dtype(*s))
        if inner:
            for p, grad in zip(group.parameters, _pull_back(graph, inner, variables), strict=True):
                if grad is not None:
                    sums[p] = added([grad, sums[p]]) if p in sums else grad
        parts.append({p: g.reshape(hi - lo, -1).double().square().sum(1) for p, g in sums.items()})
    return {graph.parameters[p]: torch.cat([part[p] for part in parts]) for p in parts[0]}


def _pull_back(graph: Graph, grads: dict[Source, Tensor], variables: list[Tensor]) -> list[Tensor | None]:
    """Vector-Jacobian products [b, *shape] of the parameter side; batched, or one sample at a time where vmap cannot."""
    edges = [GradientEdge(graph.nodes[node], output) for node, output in grads]
    options = {"retain_graph": True, "allow_unused": True}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # vmap's remarks on slow operators
            return list(torch.autograd.grad(edges, variables, list(grads.values()), is_grads_batched=True, **options))
    except RuntimeError:
        rows = [
            torch.autograd.grad(edges, variables, [g[b] for g in grads.values()], **options)
            for b in range(len(next(iter(grads.values()))))
        ]
        return [None if column[0] is None else torch.stack(column) for column in zip(*rows, strict=True)]
