"""Checks on the real batch: the sample axes by a marked backward pass, one sample's exact gradient.

Three samples prove nothing about a batch of 64. With the cotangent of sample j scaled by a known c_j, the gradient that
arrives at a use must be scaled, row by row, by the c_j of the sample that the planned layout says the row belongs to.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fastlr.ghost.execute import Structure, backward
from fastlr.ghost.graph import Graph, exact_grads
from fastlr.ghost.layout import Layout, Ragged, explains, marks, row_sums
from fastlr.ghost.ledger import Ledger

Place = tuple[int, int]  # node, output


def sample_axes(
    graph: Graph, structure: Structure, ledger: Ledger, z: Tensor, v: Tensor, out_dim: int, *, data_dependent: bool
) -> tuple[dict[Place, Layout], set[int]]:
    """Find and verify the layout of every use; also return the nodes for which none holds.

    ``v`` should be dense: a cotangent with zeros would leave rows undecided. Where rows depend on data, any order of rows
    along one axis is a candidate too.
    """
    count = z.shape[out_dim]
    candidates: dict[Place, list[Layout]] = {}
    for node, uses in structure.by_node.items():
        known = [ledger.uses[u.key].layouts for u in uses if u.key in ledger.uses]
        for output in range(graph.outputs(node)):
            shape = graph.shape(node, output)
            fitted = [fit for layouts in known for c in layouts.get(output, []) if (fit := c.fits(shape, count))]
            loose: list[Layout] = [Ragged(d) for d in range(len(shape))] if data_dependent else []
            candidates[node, output] = [*fitted, *loose]
    factors = marks(count, v.device)
    broadcast = [1] * v.ndim
    broadcast[out_dim] = count
    marked = v * factors.view(broadcast).to(v.dtype)
    before, after = (_row_sums(graph, structure, z, w, candidates) for w in (v, marked))
    tolerance = {torch.float64: 1e-6, torch.float32: 1e-2}.get(graph.lowest_dtype(), 0.1)
    arrived = {(node, output) for node, output, _ in before}
    layouts: dict[Place, Layout] = {}
    lost: set[int] = set()
    for place, options in candidates.items():
        if place not in arrived:
            layouts |= dict.fromkeys([place], options[0]) if options else {}
            continue
        rows = ((o, before[(*place, o.dim)], after[(*place, o.dim)]) for o in options)
        held = (explains(o, plain, scaled, factors, tolerance) for o, plain, scaled in rows)
        layout = next((h for h in held if h is not None), None)
        if layout is None:
            lost.add(place[0])
        else:
            layouts[place] = layout
    return layouts, lost


def _row_sums(
    graph: Graph, structure: Structure, z: Tensor, v: Tensor, options: Mapping[Place, list[Layout]]
) -> dict[tuple[int, int, int], Tensor]:
    """Row sums of the gradients along every candidate axis (axis -1 stands for a gradient without candidates)."""
    sums: dict[tuple[int, int, int], Tensor] = {}

    def visit(i: int, gradients: tuple[Tensor | None, ...]) -> None:
        for output, g in enumerate(gradients):
            if g is not None:
                for dim in {option.dim for option in options[i, output]} or {-1}:
                    sums[i, output, dim] = row_sums(g, max(dim, 0))

    backward(graph, structure, z, v, visit, retain=True)
    return sums


def spot_check(
    z: Tensor, v: Tensor, out_dim: int, parameters: Mapping[str, Tensor], seed: int
) -> tuple[int, dict[str, Tensor]]:
    """Exact squared norms of one random sample of the batch, by a plain backward pass: (sample, name -> scalar)."""
    j = int(torch.randint(z.shape[out_dim], (), generator=torch.Generator().manual_seed(seed)))
    only = torch.zeros_like(v)
    only.narrow(out_dim, j, 1).copy_(v.narrow(out_dim, j, 1))
    return j, dict(zip(parameters, exact_grads(z, parameters, only, retain=True), strict=True))
