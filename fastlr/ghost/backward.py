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

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, reduce

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils.checkpoint import CheckpointError

from fastlr import ops
from fastlr.errors import ModelError, warn

# Importing these registers their rules.
from fastlr.ghost import rules_distance, rules_embedding, rules_grouped  # noqa: F401
from fastlr.ghost.factors import (
    CHUNK_ELEMENTS,
    Dense,
    Factor,
    Norms,
    Sum,
    combined_sq_norms,
    join,
)
from fastlr.ghost.fallback import by_node
from fastlr.ghost.fusion.conv_bn import refuse_blocks, weight_of
from fastlr.ghost.fusion.mode import OURS
from fastlr.ghost.graph import CASTS, OF_COMPLEX, Graph, Place, Use, full_precision, position_map
from fastlr.ghost.recurrent import NODE as SCAN
from fastlr.ghost.rules import COMPLEX, RULES, Site
from fastlr.ghost.sample_axis import Layout, Unsupported
from fastlr.ops.linear import chunks
from fastlr.ops.process_state import warnings_ignored
from fastlr.ops.torch_private import own_function

_OWN = {*OURS, SCAN}
# A batch may take so long by a formula of the user's before anything is said.
_SECONDS_OF_A_FORMULA = 1.0
SMALL = 1 << 16  # elements of a factor up to which a copy of it costs less than a call saves
HELD = 1 << 20  # elements of factors that wait for others like them
# What a rule may raise where it does not apply, by a new plan.
_OF_RULES = (RuntimeError, ValueError, IndexError, AttributeError)
Visit = Callable[[int, tuple[Tensor | None, ...]], None]
Layouts = Mapping[Place, Layout]  # fitted to the shapes at hand


class Rerouted(Exception):
    """A rule turned out not to apply, in a pass that cannot be completed.

    The routes are updated: run the pass again.
    """


class Routes:
    """By which route each kind of use is measured: by its rule, or by its node's own formula.

    Args:
        given_up: Reasons why rules do not do uses, by the uses' keys.
        tolerant: Whether any error of a rule gives it up (by a new plan), not only `Unsupported`.

    Attributes:
        unfolded: Folded blocks without a rule, by names of their weights, with the reasons.
    """

    def __init__(self, given_up: Mapping[tuple, str], *, tolerant: bool = False) -> None:
        self.given_up, self.tolerant = dict(given_up), tolerant
        self.unfolded: dict[tuple[str, ...], str] = {}

    def by_rule(self, use: Use) -> bool:
        """Return True if the rule of its node's kind measures a use."""
        return use.key not in self.given_up

    def reason(self, use: Use) -> str:
        """Return why the rule does not measure a use; "" where it does."""
        return self.given_up.get(use.key, "")

    def give_up(self, use: Use, reason: str) -> None:
        """Have uses of this kind measured by their nodes' own formulas from now on."""
        self.given_up.setdefault(use.key, reason)


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
class Structure:
    """The part of a graph that does not depend on its shapes.

    Attributes:
        uses: of parameters.
        by_node: the same by node.
        groups: of parameters.
        group_of: the group of each source.
        times_used: how often a source is used.
    """

    uses: list[Use]
    by_node: dict[int, list[Use]] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)
    group_of: dict[Place, Group] = field(default_factory=dict)
    times_used: Counter[Place] = field(default_factory=Counter)

    @staticmethod
    def of(graph: Graph) -> Structure:
        """Find the uses and group the parameters of a classified graph."""
        structure = Structure(graph.uses())
        for use in structure.uses:
            structure.by_node.setdefault(use.node, []).append(use)
            structure.times_used[use.source] += 1
        structure.groups = _groups(graph, structure.times_used)
        for group in structure.groups:
            structure.group_of |= dict.fromkeys(group.sources, group)
        return structure


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
    if not structure.by_node:
        return
    visits = dict.fromkeys(structure.by_node, 0)

    def counted(i: int, gradients: tuple[Tensor | None, ...]) -> None:
        visits[i] += 1
        visit(i, gradients)

    lowest = dict.fromkeys(filter(graph.is_lowest, structure.by_node))
    above = [i for i in structure.by_node if i not in lowest]
    places = [(i, output) for i in lowest for output in range(graph.outputs(i))]
    edges = [GradientEdge(graph.nodes[i], output) for i, output in places]
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
        for i in lowest:
            counted(i, tuple(gradients.pop((i, output)) for output in range(graph.outputs(i))))
    missed = [graph.names[i] for i, times in visits.items() if times != 1]
    if missed:
        raise ModelError(
            f"{len(missed)} planned uses of parameters were not visited exactly once "
            f"({', '.join(missed[:5])}); this is a defect of fastlr: please report the model"
        )


@contextmanager
def _without_weight_gradients(graph: Graph) -> Iterator[None]:
    """Have fastlr's own nodes in a graph compute no gradients of weights in a backward pass."""
    nodes = [node for node, name in zip(graph.nodes, graph.names, strict=True) if name in _OWN]
    for node in nodes:
        node.norms_only = True
    try:
        yield
    finally:
        for node in nodes:
            node.norms_only = False


def sq_norms(
    graph: Graph,
    structure: Structure,
    z: Tensor,  # [*output]
    v: Tensor,  # [*output]
    layouts: Layouts,
    count: int,
    routes: Routes,
    *,
    retain: bool = False,
    skip: frozenset[str] = frozenset(),
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
        routes: of the uses; a rule that turns out not to apply is given up.
        retain: keep the graph.
        skip: names of parameters that are measured in another way.

    Raises:
        Rerouted: a rule was given up in a pass that does not keep the graph; run the model again.
    """
    norms = _NormsOfUses(graph, structure, skip)
    by_formula: list[tuple[Site, list[Use]]] = []
    keep = retain or not all(map(routes.by_rule, structure.uses))

    def visit(i: int, gradients: tuple[Tensor | None, ...]) -> None:
        uses = norms.wanted(structure.by_node[i])
        if not uses or all(g is None for g in gradients):
            return
        by_output = {o: layouts[i, o] for o in range(len(gradients)) if (i, o) in layouts}
        shapes = {use.slot: graph.shape(*use.source) for use in uses}
        site = Site(graph.nodes[i], gradients, by_output, count, shapes)
        factors = _by_rule(graph, site, uses, routes)
        if factors is not None:
            norms.add_factors(uses, factors)
        elif graph.names[i] in OURS:  # its own formula knows no missing parameters
            return
        elif keep:  # within a backward pass the engine would skip the weight gradients of the node
            by_formula.append((site, uses))
        else:
            raise Rerouted

    backward(graph, structure, z, v, visit, retain=keep)
    if routes.unfolded:
        refuse_blocks(routes.unfolded, next(iter(routes.unfolded.values())))
    with torch.no_grad(), full_precision(z.device):
        for site, uses in by_formula:
            _add_by_formula(norms, site, uses)
        norms.add_waiting()
    zero = torch.zeros(count, dtype=torch.float64, device=z.device)
    names = {graph.parameters[p] for group in structure.groups for p in group.parameters}
    return {name: norms.by_name.get(name, zero) for name in names if name not in skip}


class _NormsOfUses:
    """Makes norms of parameters from the factors of their uses.

    Those of a parameter that is used once are taken as its factor comes, or with those of others
    where it is small; the factors of other parameters wait until all have come, as a parameter's
    gradient is the sum over its uses.

    Args:
        graph: classified.
        structure: its uses and groups of parameters.
        skip: names of parameters that are measured in another way.

    Attributes:
        by_name: squared norms [B] of each parameter, of the factors that are taken.
    """

    def __init__(self, graph: Graph, structure: Structure, skip: frozenset[str]) -> None:
        self.graph, self.structure = graph, structure
        self.by_name: dict[str, Tensor] = {}
        self._small: dict[tuple, list[tuple[str, Factor]]] = {}  # by class, dtypes and shapes
        self._held = 0  # elements of these
        self._waiting: dict[Place, list[Factor]] = {}
        self._skipped: set[Place] = set()
        for group in structure.groups if skip else ():
            if all(graph.parameters[p] in skip for p in group.parameters):
                self._skipped.update(group.sources)

    def wanted(self, uses: list[Use]) -> list[Use]:
        """Return those of the uses that parameters that are not skipped have a part in."""
        return [use for use in uses if use.source not in self._skipped]

    def add_factors(self, uses: list[Use], factors: Mapping[int, Factor]) -> None:
        """Add what stands for the gradients at uses of one node, by slot."""
        for use in uses:
            group, factor = self.structure.group_of[use.source], factors[use.slot]
            if group.relation == "disjoint views" and self.structure.times_used[use.source] == 1:
                self._add_factor(self.graph.parameters[group.parameters[0]], factor)
                continue
            if isinstance(factor, Norms):  # they cannot be added to others
                if factor.whole is None:
                    folded = weight_of(self.graph, use.node)
                    refuse_blocks([folded], "a parameter is used more than once")
                factor = factor.whole()
            self._waiting.setdefault(use.source, []).append(factor)

    def add_waiting(self) -> None:
        """Add the norms of factors that have waited: small ones, and those of parts of a sum."""
        self._add_small()
        for group in self.structure.groups:
            factors = {s: self._waiting.pop(s) for s in group.sources if s in self._waiting}
            if factors:
                for name, value in _norms_of_group(self.graph, group, factors).items():
                    self._add(name, value)

    def _add_factor(self, name: str, factor: Factor) -> None:
        """Add the norms of a factor: of a small one together with those of others of its shape.

        Of a few thousand elements an op costs its call more than its arithmetic.
        """
        tensors = [getattr(factor, part) for part in factor.joinable]
        elements = sum([t.numel() for t in tensors])
        if not 0 < elements <= SMALL or ops.backend_for(*tensors) != "torch":
            self._add(name, factor.sq_norms())
            return
        alike = type(factor), *[(t.dtype, t.shape) for t in tensors]
        self._small.setdefault(alike, []).append((name, factor))
        self._held += elements
        if self._held > HELD:
            self._add_small()

    def _add_small(self) -> None:
        """Add the norms of small factors that have waited: those of one shape by one op."""
        waiting, self._small, self._held = self._small, {}, 0
        for alike in waiting.values():
            names, factors = zip(*alike, strict=True)
            norms = join(factors, 0).sq_norms().view(len(names), -1)
            for name, value in zip(names, norms, strict=True):
                self._add(name, value)

    def _add(self, name: str, value: Tensor) -> None:
        before = self.by_name.get(name)
        self.by_name[name] = value if before is None else before + value


def _add_by_formula(norms: _NormsOfUses, site: Site, uses: list[Use]) -> None:
    """Add the norms of parameters by the formula of their node, run once a sample.

    Its time grows with the square of the batch: a user whose own Function takes long is told.
    """
    begun = time.perf_counter()
    norms.add_factors(uses, by_node(site, [use.slot for use in uses]))
    is_slow = time.perf_counter() - begun > _SECONDS_OF_A_FORMULA
    if is_slow and site.count > 1 and own_function(site.node) is not None:
        warn(
            f"the backward formula of {site.node.name()} runs {site.count} times, once a sample, "
            "each time on the whole batch, and takes long: smaller batches take less time in all "
            "(a batch_size= of estimate, or fewer samples a call of per_sample_grad_sq_norms)"
        )


def _by_rule(
    graph: Graph, site: Site, uses: list[Use], routes: Routes
) -> Mapping[int, Factor] | None:
    """Return the factors of a node's parameter slots by its rule.

    None where no rule applies, which is given up.
    """
    if not all(map(routes.by_rule, uses)):
        return None
    try:
        return _factors(graph, site, uses)
    except CheckpointError:
        raise
    except (Unsupported, *_OF_RULES) as error:
        if not routes.tolerant and not isinstance(error, Unsupported):
            raise
        if graph.names[uses[0].node] in OURS:
            routes.unfolded.setdefault(weight_of(graph, uses[0].node), str(error))
            return None
        for use in uses:
            routes.give_up(use, str(error))
        return None


def _factors(graph: Graph, site: Site, uses: list[Use]) -> Mapping[int, Factor]:
    """Return the factors of a node's parameter slots; raises Unsupported where no rule applies."""
    name = graph.names[uses[0].node]
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
        slot: factor if slot in complex_slots else factor.real() for slot, factor in factors.items()
    }


def _norms_of_group(
    graph: Graph, group: Group, factors: dict[Place, list[Factor]]
) -> dict[str, Tensor]:
    """Norms of the parameters of a group from the factors of its sources."""
    name = graph.parameters[group.parameters[0]]
    if group.relation == "disjoint views":
        parts = (combined_sq_norms(fs, graph.shape(*s)) for s, fs in factors.items())
        return {name: reduce(torch.add, parts)}
    if group.relation == "equal views":
        added = [factor for fs in factors.values() for factor in fs]
        return {name: combined_sq_norms(added, graph.shape(*group.sources[0]))}
    if group.relation == "matrix":
        upright = _upright(group, factors)
        if upright is not None:
            return {name: combined_sq_norms(upright, graph.shape(group.parameters[0]))}
    return _through_parameter_side(graph, group, factors)


def _upright(group: Group, factors: dict[Place, list[Factor]]) -> list[Factor] | None:
    """Return factors of a matrix, where some are of its transpose; None if one cannot be turned."""
    upright: list[Factor] = []
    for source, of_source in factors.items():
        for factor in of_source:
            turned = factor.transpose() if source in group.transposed else factor
            if turned is None:
                return None
            upright.append(turned)
    return upright


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
