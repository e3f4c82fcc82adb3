"""Rule for products of groups of rows with a matrix each: the experts of a mixture.

See fastlr.ghost.rules.

The rows of a sample that went to one expert give that expert's matrix a sum of outer products, as
those of a linear layer do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastlr import ops
from fastlr.ghost.factors import Factor
from fastlr.ghost.rules import Site, Unsupported, rule
from fastlr.ghost.sample_axis import Ragged


@dataclass
class Grouped(Factor):
    """Gradients [B, E, I, O] of E matrices from pairs of a sample and a matrix.

    Each is sum_t a_t g_t^T over the rows of a pair.

    Attributes:
        a: rows before the product, those of a pair together, zero-padded [pairs, T, I].
        g: gradients after it, likewise [pairs, T, O].
        pairs: the number of the sample times E plus that of the matrix, ascending [pairs].
        count: number of samples B.
        shape: of the matrices (E, I, O).
    """

    a: Tensor
    g: Tensor
    pairs: Tensor
    count: int
    shape: torch.Size

    def __len__(self) -> int:
        return self.count

    def sq_norms(self) -> Tensor:  # noqa: D102
        norms = ops.run("linear_sq_norms", self.a[:, None], self.g[:, None])
        return norms.new_zeros(self.count).index_add_(0, self.pairs // self.shape[0], norms)

    def dense(self, lo: int, hi: int) -> Tensor:  # noqa: D102
        size = self.shape[0]
        chosen = ((self.pairs >= lo * size) & (self.pairs < hi * size)).nonzero()[:, 0]
        grads = self.a.new_zeros((hi - lo) * size, *self.shape[1:])
        grads[self.pairs[chosen] - lo * size] = self.a[chosen].mT @ self.g[chosen]
        return grads.view(hi - lo, *self.shape)


@rule(
    "GroupedMmBackward0",
    about="products of groups of rows with a matrix each (grouped_mm): mixtures of experts",
)
def grouped_product(site: Site, slots: Sequence[int]) -> dict[int, Factor]:
    """The rule for rows [S, I], sorted by matrix, with matrices [E, I, O].

    ``offs`` [E] says where the rows of each matrix end.
    """
    site.require_slot(slots, 1)
    site.require_axis(0)
    n = site.node
    rows, ends, shape = n._saved_self, n._saved_offs, site.shapes[1]
    if ends is None or rows.ndim != 2 or len(shape) != 3:
        raise Unsupported("a grouped product of another form than rows with matrices")
    matrix = torch.searchsorted(
        ends, torch.arange(len(rows), device=rows.device, dtype=ends.dtype), right=True
    )
    used = (matrix < shape[0]).nonzero()[:, 0]  # rows beyond the last end take no part
    ids = site.layout.samples(len(rows), site.count, rows.device)
    pairs, place = torch.unique(ids[used] * shape[0] + matrix[used], return_inverse=True)
    by_pair = Ragged(0, place)
    a, g = (by_pair.split(t[used], 0, len(pairs)) for t in (rows, site.g))
    return {1: Grouped(a, g, pairs, site.count, shape)}
