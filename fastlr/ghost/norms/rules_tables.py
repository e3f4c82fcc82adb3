"""Rules for tables of which rows are picked.

These are embedding, bags of embeddings and indexing. See fastlr.ghost.norms.rules.

The gradient of a table is g_t in the row that position t has picked; positions that pick the same
row add up, so that the squared norm is the sum over the pairs with equal ids of <g_t, g_s> (see
fastlr.ops.linear).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from fastlr import ops
from fastlr.ghost.graph.layouts import Ragged
from fastlr.ghost.norms.factors import Factor, PickedRows
from fastlr.ghost.norms.rules import Site, Unsupported, rule

_SUM, _MEAN, _MAX = range(3)  # torch's numbers for the modes of embedding_bag


@rule("EmbeddingBackward0", about="embedding, with padding_idx")
def embedding(site: Site, slots: Sequence[int]) -> dict[int, Factor]:
    """Rows with the same id add up; the padding row has no gradient."""
    n = site.node
    if n._saved_scale_grad_by_freq:
        raise Unsupported("scale_grad_by_freq")
    site.require_slot(slots, 0)
    ids, g = n._saved_indices, site.g
    if n._saved_padding_idx >= 0:
        g = g * (ids != n._saved_padding_idx)[..., None]
    return {0: _table_rows(site, ids, g)}


def _table_rows(site: Site, ids: Tensor, g: Tensor) -> PickedRows:
    """Return the picked rows of the table in slot 0, with their gradients.

    ``ids`` [*] picked the rows; ``g`` [*, *row] are the gradients.
    """
    if site.layout.dim >= ids.ndim:
        raise Unsupported("the samples are not along an axis of the index")
    rows = site.split(ids, site.layout.dim).reshape(site.count, -1)
    width = prod(g.shape[ids.ndim :])
    flat = site.split(g, site.layout.dim).reshape(site.count, -1, width)
    shape = tuple(site.shapes[0])
    return PickedRows(rows % shape[0] if shape[0] else rows, flat, shape)


@rule(
    "EmbeddingBagBackward0",
    about="bags of embeddings: sum, mean and max, with weights and padding_idx",
)
def embedding_bag(site: Site, slots: Sequence[int]) -> dict[int, Factor]:
    """Return the gradient of an embedding bag's table.

    Each row of a bag has the bag's gradient, weighted; for max, each element of it belongs to one
    row.
    """
    n = site.node
    if n._saved_scale_grad_by_freq:
        raise Unsupported("scale_grad_by_freq")
    site.require_slot(slots, 0)
    site.require_axis(0)
    ids, g = n._saved_indices, site.g
    starts = n._saved_offsets[: len(g)]  # one more may say where the last bag ends
    bag = (
        torch.searchsorted(
            starts, torch.arange(len(ids), device=ids.device, dtype=starts.dtype), right=True
        )
        - 1
    )
    kept = (ids != n._saved_padding_idx).to(g.dtype)
    sizes = g.new_zeros(len(g)).index_add_(0, bag, kept)
    if n._saved_mode == _MAX:
        return {0: _largest(site, n._saved_result3, g * (sizes > 0)[:, None])}
    if n._saved_per_sample_weights is not None:
        kept = kept * n._saved_per_sample_weights
    if n._saved_mode == _MEAN:
        kept = kept / sizes.clamp_min(1)[bag]
    rows = Ragged(0, site.layout.samples(site.count, g.device)[bag])
    ids, g = (rows.split(t, 0, site.count) for t in (ids, g[bag] * kept[:, None]))
    return {0: PickedRows(ids, g, tuple(site.shapes[0]))}


def _largest(site: Site, picked: Tensor, g: Tensor) -> PickedRows:
    """Return the gradients of the elements of a table that were the largest.

    ``picked`` [bags, D] has the rows of these elements.
    """
    elements = picked.clamp_min(0) * g.shape[1] + torch.arange(g.shape[1], device=g.device)
    ids, g = (site.split(t, 0).flatten(1) for t in (elements, g))
    return PickedRows(ids.long(), g[..., None], (prod(site.shapes[0]), 1))


@rule(
    "IndexBackward0",
    about="rows picked from a parameter by an index tensor that has the sample axis",
)
def index(site: Site, slots: Sequence[int]) -> dict[int, Factor]:
    """Like an embedding, for one integer index tensor on the first axis."""
    indices = [i for i in site.node._saved_indices if i is not None]
    if (
        len(indices) != 1
        or site.node._saved_indices[0] is None
        or indices[0].dtype not in (torch.int64, torch.int32)
    ):
        raise Unsupported("more than one index tensor, or not on the first axis")
    site.require_slot(slots, 0)
    return {0: _table_rows(site, indices[0].long(), site.g)}


@dataclass
class Grouped(Factor):
    """Gradients [B, E, I, O] of E matrices from pairs of a sample and a matrix.

    Each is sum_t a_t g_t^T over the rows of a pair.

    Attributes:
        a: rows before the product, those of a pair together, zero-padded [pairs, T, I].
        g: gradients after it, likewise [pairs, T, O].
        pairs: the number of the sample times E plus that of the matrix, ascending [pairs].
        count: number of samples B.
        shape: Shape of the matrices (E, I, O).
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
    ids = site.layout.samples(site.count, rows.device)
    pairs, place = torch.unique(ids[used] * shape[0] + matrix[used], return_inverse=True)
    by_pair = Ragged(0, place)
    a, g = (by_pair.split(t[used], 0, len(pairs)) for t in (rows, site.g))
    return {1: Grouped(a, g, pairs, site.count, shape)}
