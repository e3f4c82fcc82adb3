"""Rule for distances to points that are parameters (torch.cdist to prototypes).

See fastlr.ghost.norms.rules.

The gradient of a point p_m is the sum over the rows x_t of a sample of g_tm times the derivative of
||x_t - p_m||: torch's own formula gives it for all samples at once where they are an axis before
those of the rows and of the points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastlr.ghost.graph.layouts import Regular
from fastlr.ghost.graph.rows import Step
from fastlr.ghost.norms.factors import Factor
from fastlr.ghost.norms.rules import Site, Unsupported, rule
from fastlr.ops.torch_private import distance_gradients


@dataclass
class Distances(Factor):
    """Gradients of points from their distances to a sample's rows.

    ``groups`` of rows have points of their own.

    Attributes:
        rows: Rows of the samples, [B, *groups, T, D].
        points: [*groups, M, D].
        distances: [B, *groups, M, T].
        g: gradient at them, [B, *groups, M, T].
        p: Exponent of the p-norm.
        shape: Shape of the tensor of points: [*, M, D], where axes of groups that share points are
            missing or of size 1.
    """

    rows: Tensor
    points: Tensor
    distances: Tensor
    g: Tensor
    p: float
    shape: torch.Size

    def dense(self, lo: int, hi: int) -> Tensor:  # noqa: D102
        points = self.points.expand(hi - lo, *self.points.shape)
        grads = distance_gradients(
            self.g[lo:hi], points, self.rows[lo:hi], self.p, self.distances[lo:hi]
        )
        missing = [1] * (points.ndim - 1 - len(self.shape))
        return grads.sum_to_size(hi - lo, *missing, *self.shape).reshape(hi - lo, *self.shape)


def _rows_of_distances(s: Step) -> Regular | None:
    """Rows of the distances are rows of the first matrix, their columns are rows of the second."""
    from_end = len(s.out_shape) - s.layout.dim
    if from_end > 2:
        return s.at(len(s.in_shape) - from_end)
    return s.at(len(s.in_shape) - 2) if from_end == 2 - s.slot else None


@rule(
    "CdistBackward0",
    about="distances to points that are parameters (cdist), any norm",
    rows=_rows_of_distances,
)
def distance(site: Site, slots: Sequence[int]) -> dict[int, Factor]:
    """The rule where one side is the parameter.

    The samples are along the rows of the other, or along an axis of groups of them.
    """
    if len(slots) != 1:
        raise Unsupported("both sides are parameters")
    (slot,) = slots
    n, last, dim = site.node, site.g.ndim - 1, site.layout.dim
    points, rows, g, distances = n._saved_x1, n._saved_x2, site.g, n._saved_result
    if slot == 1:  # as if they were the first
        points, rows, g, distances = rows, points, g.mT, distances.mT
        dim = {last: last - 1, last - 1: last}.get(dim, dim)
    if dim == last - 1:
        raise Unsupported("the samples are along the points")
    axis = dim - g.ndim + points.ndim
    if dim < last and axis >= 0 and points.shape[axis] != 1:
        raise Unsupported("the parameter has the sample axis")
    rows = rows.expand(*g.shape[:-2], *rows.shape[-2:])

    def by_sample(t: Tensor, along: int) -> Tensor:
        """The samples first, what is left of their axis where it was."""
        return site.split(t, along).movedim(1, 1 + along)

    g, distances = by_sample(g, dim), by_sample(distances, dim)
    rows = by_sample(rows, min(dim, last - 1))
    points = points.expand(*g.shape[1:-2], *points.shape[-2:])
    p = getattr(n, "_saved_p", 2.0)  # of the kind for many points it is no choice
    return {slot: Distances(rows, points, distances, g, p, site.shapes[slot])}
