"""Where the samples are in a tensor: layouts of its axes, and marks that decide which layout holds.

A `Regular` layout says that along axis ``dim`` the index runs over outer x sample x inner. A
`Ragged` one lists the sample of each index. `explains` decides whether one holds, by marked
gradients: with the cotangent of sample j scaled by a known c_j, the gradient at every row is scaled
by the c_j of the sample that the row belongs to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


class Unsupported(Exception):
    """Samples cannot be told apart here, or not in the way that a rule needs."""


@dataclass(frozen=True)
class Regular:
    """Axis ``dim`` is outer x B x inner."""

    dim: int
    outer: int
    inner: int

    def samples(self, size: int, count: int, device: torch.device) -> Tensor:
        """Sample of each index along the axis: [size]."""
        ids = torch.arange(count, device=device).view(1, count, 1)
        return ids.expand(self.outer, count, self.inner).reshape(size)

    def split(self, t: Tensor, dim: int, count: int) -> Tensor:
        """Bring the samples of axis ``dim`` of ``t`` first.

        The result is [B, outer*inner, other axes in order].
        """
        t = t.movedim(dim, 0) if dim else t
        rest = t.shape[1:]
        if self.outer == 1:
            return t.reshape(count, self.inner, *rest)
        t = t.reshape(self.outer, count, self.inner, *rest)
        return t.transpose(0, 1).reshape(count, self.outer * self.inner, *rest)

    def __str__(self) -> str:
        parts = [str(part) for part in (self.outer, "B", self.inner) if part != 1]
        return f"axis {self.dim}" + (f" ({' x '.join(parts)})" if len(parts) > 1 else "")


@dataclass(frozen=True, eq=False)
class Ragged:
    """Axis ``dim`` holds rows of samples in any order.

    ``ids`` [size] has the sample of each row (None until marks tell).
    """

    dim: int
    ids: Tensor | None = None

    def samples(self, size: int, count: int, device: torch.device) -> Tensor:
        """Sample of each index along the axis: [size]."""
        if self.ids is None:
            raise Unsupported("the rows of the samples are unknown")
        return self.ids

    def split(self, t: Tensor, dim: int, count: int) -> Tensor:
        """Bring the rows of each sample together, zero-padded.

        The result is [B, most rows of a sample, other axes].
        """
        t = t.movedim(dim, 0)
        ids = self.samples(len(t), count, t.device)
        order = torch.argsort(ids, stable=True)
        lengths = torch.bincount(ids, minlength=count)
        starts = lengths.cumsum(0) - lengths
        sample = ids[order]
        place = torch.arange(len(order), device=t.device) - starts[sample]
        padded = t.new_zeros(count, max(1, int(lengths.max())), *t.shape[1:])
        padded[sample, place] = t[order]
        return padded

    def __str__(self) -> str:
        return f"axis {self.dim} (rows in any order)"


Layout = Regular | Ragged


def candidates(shape: torch.Size, count: int) -> list[Regular]:
    """Every regular layout that an output of this shape could have, likelier ones first."""
    layouts = []
    for dim, size in enumerate(shape):
        if size % count:
            continue
        rest = size // count
        most = math.isqrt(rest) if rest <= 1 << 16 else 1
        small = [k for k in range(1, most + 1) if rest % k == 0]
        divisors = sorted({*small, *(rest // k for k in small)})
        layouts += [Regular(dim, k, rest // k) for k in divisors]
    return layouts


def row_sums(gradient: Tensor, dim: int) -> Tensor:
    """Sum of absolute values over all axes but ``dim``: [size of dim], float64."""
    if gradient.layout != torch.strided:
        return _row_sums_of_sparse(gradient, dim)
    others = [d for d in range(gradient.ndim) if d != dim]
    if not others:
        return gradient.detach().abs().double()
    wide = torch.complex128 if gradient.is_complex() else torch.float64
    return torch.linalg.vector_norm(gradient.detach(), 1, others, dtype=wide)


def _row_sums_of_sparse(gradient: Tensor, dim: int) -> Tensor:
    """Row sums of a sparse gradient, such as that of an adjacency matrix; it stays sparse."""
    entries = gradient.detach().to_sparse_coo().coalesce()
    values, sparse_axes = entries.values(), entries.sparse_dim()  # [entries, *axes that are dense]
    if dim >= sparse_axes:
        return row_sums(values, 1 + dim - sparse_axes)
    sums = torch.zeros(gradient.shape[dim], dtype=torch.float64, device=gradient.device)
    return sums.index_add_(0, entries.indices()[dim], row_sums(values, 0))


OCTAVES = {torch.float64: 18}  # that marks span, by the least precise dtype of the graph
IN_SINGLE = 8
# Of a row's factor: less than what a share of 2^-OCTAVES of another sample makes.
TOLERANCE = {torch.float64: 1e-6}
SINGLE = 1e-3


@dataclass(frozen=True)
class Marks:
    """Known factors for the samples' cotangents, that tell the samples apart.

    There is one row of factors for each marked backward pass.

    All are powers of two: they change no rounding, so that a row of one sample is scaled by its
    factor to the last bit, be it little else than rounding. The last pass is a check: each sample
    has a random factor. Those before it spell the samples' numbers, digit by digit: thousands of
    samples need three or four. A row that mixes two samples differs from a power of two wherever
    their factors differ, unless their shares conspire, and they would have to in every pass.

    Attributes:
        factors: [passes, B], float64.
        owner: [K^digits] which sample a number stands for; those beyond B stand for none (-1).
        size: K, the number of factors of a digit: 2^0 to 2^(K - 1).
        tolerance: relative, of a row's factor.
    """

    factors: Tensor
    owner: Tensor
    size: int
    tolerance: float

    @staticmethod
    def make(count: int, dtype: torch.dtype, device: torch.device) -> Marks:
        """Return marks for ``count`` samples in a graph of this dtype."""
        generator = torch.Generator().manual_seed(count)
        size = OCTAVES.get(dtype, IN_SINGLE) + 1
        digits = max(1, math.ceil(math.log(count, size) - 1e-9))
        numbers = torch.randperm(size**digits, generator=generator)[:count]
        owner = torch.full((size**digits,), -1)
        owner[numbers] = torch.arange(count)
        places = [numbers // size**place % size for place in range(digits)]
        check = torch.randint(size, (count,), generator=generator)
        factors = torch.exp2(torch.stack([*places, check]).double())
        return Marks(factors.to(device), owner.to(device), size, TOLERANCE.get(dtype, SINGLE))

    def read(self, ratios: Tensor) -> Tensor:
        """Samples [rows] that factors [digits, rows] spell; -1 for a number of none."""
        digits = ratios.clamp_min(0.5).log2().round().long().clamp(0, self.size - 1)
        places = self.size ** torch.arange(len(digits), device=digits.device)
        return self.owner[(digits * places[:, None]).sum(0)]


def explains(layout: Layout, plain: Tensor, marked: Tensor, marks: Marks) -> Layout | None:
    """Return the layout if it explains how marking changed the row sums, else None.

    A ragged layout is returned with its ids.

    Args:
        layout: what is tried.
        plain: row sums [size of the layout's axis] without marks.
        marked: row sums [passes, size] with marks.
        marks: the marks.
    """
    # In parts of the largest sum: what is nothing but rounding, and nobody's.
    noise = max(1e-12, marks.tolerance**3)
    alive = plain > plain.max() * noise if plain.numel() else plain.bool()
    if isinstance(layout, Regular):
        factors = marks.factors[:, layout.samples(len(plain), marks.factors.shape[1], plain.device)]
        wrong = (marked - plain * factors).abs() > marks.tolerance * plain * factors
        return None if bool((wrong & alive).any()) else layout
    ratios = torch.where(plain > 0, marked / plain.clamp_min(torch.finfo(torch.float64).tiny), 1.0)
    ids = marks.read(ratios[:-1])
    unknown = ids < 0
    ids = ids.clamp_min(0)
    wrong = ((ratios / marks.factors[:, ids] - 1).abs() > marks.tolerance).any(0) | unknown
    return None if bool((wrong & alive).any()) else Ragged(layout.dim, ids)
