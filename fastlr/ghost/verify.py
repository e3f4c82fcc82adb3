"""Checks on the real batch: the sample axes by a marked backward pass, one sample's exact gradient.

Three samples prove nothing about a batch of 64. With the cotangent of sample j scaled by a known c_j, the gradient that
arrives at a use must be scaled, row by row, by the c_j of the sample that the planned layout says the row belongs to.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fastlr.ghost import adapt
from fastlr.ghost.execute import Structure, backward
from fastlr.ghost.graph import Graph, exact_grads
from fastlr.ghost.layout import Layout, Ragged, explains, marks, row_sums
from fastlr.ghost.layout import candidates as regular_layouts
from fastlr.ghost.ledger import Ledger

Place = tuple[int, int]  # node, output
_PART = 1 << 22  # elements compared at once


def explained(
    graph: Graph,
    structure: Structure,
    z: Tensor,
    v: Tensor,
    out_dim: int,
    candidates: Mapping[Place, list[Layout]] | None = None,
) -> dict[Place, list[Layout]]:
    """For every output of a use where a gradient arrives: the candidate layouts that a marked backward pass confirms.

    ``v`` should be dense: a cotangent with zeros would leave rows undecided. Without ``candidates``, every regular layout
    that the shapes allow, and rows in any order where none of these holds.
    """
    count = z.shape[out_dim]
    factors = marks(count, v.device)
    broadcast = [1] * v.ndim
    broadcast[out_dim] = count
    marked = v * factors.view(broadcast).to(v.dtype)
    before, after = (_row_sums(graph, structure, z, w, candidates) for w in (v, marked))
    tolerance = {torch.float64: 1e-6, torch.float32: 1e-2}.get(graph.lowest_dtype(), 0.1)

    def confirmed(place: Place, options: list[Layout]) -> list[Layout]:
        rows = ((o, before[place][o.dim], after[place][o.dim]) for o in options)
        held = (explains(o, plain, scaled, factors, tolerance) for o, plain, scaled in rows)
        return [h for h in held if h is not None]

    found: dict[Place, list[Layout]] = {}
    for place in before:
        shape = graph.shape(*place)
        if candidates is None:
            any_order: list[Layout] = [Ragged(d) for d in range(len(shape))]
            found[place] = confirmed(place, [*regular_layouts(shape, count)]) or confirmed(place, any_order)
        else:
            found[place] = confirmed(place, candidates[place])
    return found


def sample_axes(
    graph: Graph, structure: Structure, ledger: Ledger, z: Tensor, v: Tensor, out_dim: int, *, data_dependent: bool
) -> tuple[dict[Place, Layout], set[int]]:
    """Find and verify the layout of every use; also return the nodes for which none holds.

    Candidates are the proven layouts fitted to the shapes; where rows depend on data, any order of rows along an axis too.
    """
    candidates: dict[Place, list[Layout]] = {}
    for node, uses in structure.by_node.items():
        known = [ledger.uses[u.key].layouts for u in uses if u.key in ledger.uses]
        for output in range(graph.outputs(node)):
            shape = graph.shape(node, output)
            fits = (c.fits(shape, z.shape[out_dim]) for layouts in known for c in layouts.get(output, []))
            loose: list[Layout] = [Ragged(d) for d in range(len(shape))] if data_dependent else []
            candidates[node, output] = [*(fit for fit in fits if fit is not None), *loose]
    layouts = {place: options[0] for place, options in candidates.items() if options}
    lost = set()
    for place, held in explained(graph, structure, z, v, out_dim, candidates).items():
        if held:
            layouts[place] = held[0]
        else:
            lost.add(place[0])
    return layouts, lost


def _row_sums(
    graph: Graph, structure: Structure, z: Tensor, v: Tensor, candidates: Mapping[Place, list[Layout]] | None
) -> dict[Place, dict[int, Tensor]]:
    """Row sums of the gradients that arrive at uses, along every axis or those of the candidates."""
    sums: dict[Place, dict[int, Tensor]] = {}

    def visit(i: int, gradients: tuple[Tensor | None, ...]) -> None:
        for output, g in enumerate(gradients):
            if g is not None:
                dims = range(g.ndim) if candidates is None else {c.dim for c in candidates[i, output]}
                sums[i, output] = {dim: row_sums(g, dim) for dim in dims}

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


def low_precision(device: torch.device, dtypes: Collection[torch.dtype]) -> bool:
    """Whether products are of fewer digits than float32: autocast, narrow parameters, or TF32 (torch's default in cuDNN)."""
    if torch.is_autocast_enabled(device.type) or any(d.itemsize < 4 for d in dtypes):
        return True
    tf32 = torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
    return device.type == "cuda" and tf32 and torch.float32 in dtypes


def same_output(model: nn.Module, x: Any, got: Tensor, output: adapt.OutputSelector) -> bool:
    """Whether ``got`` is the model's output for ``x`` to within what its precision explains.

    In low precision logits near zero are off by more than their size: there ``got`` may be as far from the float32
    output as some times the model's own.
    """
    with torch.no_grad():
        own = adapt.forward(model, x, output)
        low = low_precision(got.device, {p.dtype for p in model.parameters()})
        close = 0.02 if low else 1e-8 if got.dtype == torch.float64 else 1e-3
        if not far(own, got, close):
            return True
        if not low or own.shape != got.shape:
            return False
        tensors = {n: adapt.cast(t, torch.float32) for n, t in (*model.named_parameters(), *model.named_buffers())}
        with torch.autocast(got.device.type, enabled=False):
            exact = adapt.select_output(adapt.call_with(model, tensors, adapt.cast(x, torch.float32)), output)
        own_error, error = ((t.float() - exact.float()).abs().max() for t in (own, got))
        return bool(error <= 8 * own_error + close * exact.abs().max())


def far(a: Tensor, b: Tensor, relative: float) -> bool:
    """Whether two tensors differ by more than rounding, relative to the first one's size."""
    if a.shape != b.shape:
        return True
    a, b = a.detach().flatten(), b.detach().flatten()
    parts = [slice(lo, lo + _PART) for lo in range(0, len(a), _PART)]  # language models' logits are large
    size = max((float(_finite_size(a[part])) for part in parts), default=1.0)
    for part in parts:
        left, right = a[part].double(), b[part].double()
        same = (left == right) | (left.isnan() & right.isnan())
        gap = (left - right).abs().masked_fill(same, 0.0)
        if not bool((gap <= relative * max(size, 1e-30)).all()):
            return True
    return False


def _finite_size(a: Tensor) -> Tensor:
    """Largest finite absolute value."""
    return torch.where(a.isfinite(), a.abs(), 0).max().double()
