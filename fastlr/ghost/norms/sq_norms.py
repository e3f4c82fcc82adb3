"""The squared norms of all parameters' per-sample gradients, by one backward pass.

In: the classified graph of an output z [*], a cotangent v like it, and a plan. Out: the squared
norm of the gradient of <v_b, z_b> for each sample b and parameter, [B] in float64 (`sq_norms`).

`backward` hands the gradient that arrives at a use to a visitor. The rule of the node's kind turns
it into a factor (fastlr.ghost.norms.rules). A factor's norms are computed at once if its parameter
is used once. Otherwise it waits, as the gradient of a parameter is the sum over its uses. No
per-sample gradient is formed, hence "ghost" norms: Goodfellow 2015 (arXiv:1510.01799), Li et al.
2022 (arXiv:2110.05679).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils.checkpoint import CheckpointError

from fastlr import ops
from fastlr.ghost.graph.backward import backward
from fastlr.ghost.graph.layouts import Unsupported
from fastlr.ghost.graph.plan import Plan
from fastlr.ghost.graph.uses import Group, Uses
from fastlr.ghost.graph.walk import Graph, Place, Use

# Importing these registers their rules.
from fastlr.ghost.norms import rules_distance, rules_tables  # noqa: F401
from fastlr.ghost.norms.by_node import by_node
from fastlr.ghost.norms.factors import (
    CHUNK_ELEMENTS,
    Dense,
    Factor,
    NormsOnly,
    Sum,
    combined_sq_norms,
    join,
)
from fastlr.ghost.norms.rules import COMPLEX, RULES, Site
from fastlr.ops.autocast import full_precision
from fastlr.ops.linear import chunks
from fastlr.ops.process_state import warnings_ignored

SMALL = 1 << 16  # elements of a factor up to which a copy of it costs less than a call saves
HELD = 1 << 20  # elements of factors that wait for others like them
# What a rule may raise where it does not apply, by a new plan.
_OF_RULES = (RuntimeError, ValueError, IndexError, AttributeError)


class MeasureAgain(Exception):
    """A batch has to be measured again, as a rule or a plan turned out not to apply.

    Attributes:
        refused_blocks: Reasons why blocks cannot run folded, by the names of their weights. They
            run unfolded from now on.
    """

    def __init__(self, refused_blocks: Mapping[str, str] | None = None) -> None:
        self.refused_blocks = dict(refused_blocks or {})
        super().__init__(*self.refused_blocks.values())


def sq_norms(
    graph: Graph,
    z: Tensor,  # [*output]
    v: Tensor,  # [*output]
    plan: Plan,
    *,
    is_unaudited: bool = False,
    retain: bool = False,
) -> dict[str, Tensor]:
    """Return the squared norms [B] (float64) of the gradients of <v_b, z_b>.

    There is one tensor for every parameter that a gradient reaches. Those of parameters that are
    measured by sample, if there are any, are of no use.

    Args:
        graph: Classified graph below ``z``.
        z: Output.
        v: Cotangent.
        plan: Plan of the batch. Uses without a rule are added to ``plan.by_node``.
        is_unaudited: Whether any error of a rule means that it does not apply, as in a new plan.
        retain: Whether to keep the graph for another pass.

    Raises:
        MeasureAgain: A folded block has no rule, or a rule of an older plan no longer applies.
    """
    norms = _NormsOfUses(graph, plan.uses)
    by_name = plan.uses.of_name.items()
    wanted = {use.source for name, uses in by_name if name not in plan.by_sample for use in uses}
    without_rule: list[tuple[Site, list[Use]]] = []
    refused_blocks: dict[str, str] = {}
    keep = retain or is_unaudited or bool(plan.by_node)

    def by_rule(site: Site, uses: list[Use]) -> Mapping[int, Factor] | None:
        try:
            return _factors(graph, site, uses)
        except CheckpointError:
            raise
        except (Unsupported, *_OF_RULES) as error:
            if not is_unaudited and not isinstance(error, Unsupported):
                raise
            if _block_of(site.node):
                refused_blocks[_block_of(site.node)] = str(error)
            else:
                plan.by_node |= dict.fromkeys([use.key for use in uses], str(error))
        return None

    def visit(i: int, gradients: tuple[Tensor | None, ...]) -> None:
        uses = [use for use in plan.uses.at_node[i] if use.source in wanted]
        if not uses or all(g is None for g in gradients):
            return
        shapes = {use.slot: graph.shape(*use.source) for use in uses}
        site = Site(graph.nodes[i], gradients, plan.layouts.get(i, {}), plan.count, shapes)
        if not any(use.key in plan.by_node for use in uses):
            factors = by_rule(site, uses)
            if factors is not None:
                norms.add_factors(uses, factors)
                return
        if _block_of(site.node) in refused_blocks:
            return
        if not keep:
            raise MeasureAgain
        # Within a backward pass, autograd's engine would skip the weight gradients of the node.
        without_rule.append((site, uses))

    backward(graph, plan.uses, z, v, visit, retain=keep)
    if refused_blocks:
        raise MeasureAgain(refused_blocks)
    with torch.no_grad(), full_precision(z.device):
        for site, uses in without_rule:
            try:
                norms.add_factors(uses, by_node(site, [use.slot for use in uses]))
            except Unsupported as error:  # not even the node's own formula applies
                for use in uses:
                    plan.measure_by_sample(graph.names_below(use.source), str(error))
                raise MeasureAgain from error
        norms.add_waiting()
    return norms.by_name


def _block_of(node: Any) -> str:
    """Return the name of the folded block that a node is; "" for other nodes."""
    return getattr(node, "block", "")


class _NormsOfUses:
    """Computes norms of parameters from the factors of their uses.

    If a parameter is used once, its norms are computed as soon as its factor arrives. Small factors
    wait for others of their shape, so that one op serves all. Factors of other parameters wait
    until all have arrived, as a parameter's gradient is the sum over its uses.

    Args:
        graph: classified.
        uses: Its uses and groups of parameters.

    Attributes:
        by_name: squared norms [B] of each parameter, of the factors that are taken.
    """

    def __init__(self, graph: Graph, uses: Uses) -> None:
        self.graph, self.uses = graph, uses
        self.by_name: dict[str, Tensor] = {}
        self._small: dict[tuple, list[tuple[str, Factor]]] = {}  # by class, dtypes and shapes
        self._held = 0  # elements of these
        self._waiting: dict[Place, list[Factor]] = {}

    def add_factors(self, uses: list[Use], factors: Mapping[int, Factor]) -> None:
        """Add what stands for the gradients at uses of one node, by slot."""
        for use in uses:
            group, factor = self.uses.group_of[use.source], factors[use.slot]
            if group.relation == "norms add" and self.uses.times_used[use.source] == 1:
                self._add_factor(self.graph.parameters[group.parameters[0]], factor)
                continue
            if isinstance(factor, NormsOnly):  # they cannot be added to others
                if factor.whole is None:
                    block = _block_of(self.graph.nodes[use.node])
                    raise MeasureAgain({block: "a parameter is used more than once"})
                factor = factor.whole()
            self._waiting.setdefault(use.source, []).append(factor)

    def add_waiting(self) -> None:
        """Add the norms of all factors that have waited."""
        self._add_small()
        for group in self.uses.groups:
            factors = {s: self._waiting.pop(s) for s in group.sources if s in self._waiting}
            if factors:
                for name, value in _norms_of_group(self.graph, group, factors).items():
                    self._add(name, value)

    def _add_factor(self, name: str, factor: Factor) -> None:
        """Add the norms of a factor; a small one waits for others of its shape.

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
        """Add the norms of small factors that have waited, by one op per shape."""
        waiting, self._small, self._held = self._small, {}, 0
        for alike in waiting.values():
            names, factors = zip(*alike, strict=True)
            norms = join(factors, 0).sq_norms().view(len(names), -1)
            for name, value in zip(names, norms, strict=True):
                self._add(name, value)

    def _add(self, name: str, value: Tensor) -> None:
        before = self.by_name.get(name)
        self.by_name[name] = value if before is None else before + value


def _factors(graph: Graph, site: Site, uses: list[Use]) -> Mapping[int, Factor]:
    """Return the factors of a node's parameter slots; raises Unsupported where no rule applies."""
    name = graph.names[uses[0].node]
    if name not in RULES:
        raise Unsupported(f"no rule for {name}")
    is_complex = any([g is not None and g.is_complex() for g in site.gradients])
    if is_complex and name not in COMPLEX:
        raise Unsupported("complex numbers")
    factors = RULES[name](site, [use.slot for use in uses])
    # Where complex numbers are computed of a real tensor, it gets the real part. Torch multiplies
    # matrices of one dtype only, so its factor is dense.
    for use in uses if is_complex else ():
        factor = factors[use.slot]
        if isinstance(factor, Dense) and not graph.dtype(*use.source).is_complex:
            factors[use.slot] = Dense(factor.grads.real)
    return factors


def _norms_of_group(
    graph: Graph, group: Group, factors: dict[Place, list[Factor]]
) -> dict[str, Tensor]:
    """Norms of the parameters of a group from the factors of its sources."""
    name = graph.parameters[group.parameters[0]]
    if group.relation == "norms add":
        parts = (combined_sq_norms(fs, graph.shape(*s)) for s, fs in factors.items())
        return {name: reduce(torch.add, parts)}
    if group.relation == "whole":
        turned = [
            factor.transpose() if source in group.transposed else factor
            for source, of_source in factors.items()
            for factor in of_source
        ]
        upright = [factor for factor in turned if factor is not None]
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
        grads = {s: total.dense(lo, hi).to(graph.dtype(*s)) for s, total in totals.items()}
        by_parameter = zip(group.parameters, _pull_back(graph, grads, variables), strict=True)
        parts.append({p: Dense(g).sq_norms() for p, g in by_parameter if g is not None})
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
