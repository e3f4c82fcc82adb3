"""Where the samples are in a tensor: the sample axis, found and verified, never assumed.

A regular layout says that along axis ``dim`` the index runs over outer x sample x inner. A ragged one lists the sample of
each index. Which one holds is decided by marked gradients: with the cotangent of sample j scaled by a known c_j, the
gradient at every row is scaled by the c_j of the sample that the row belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def row_sums(gradient: Tensor, dim: int) -> Tensor:
    """Sum of absolute values over all axes but ``dim``: [size of dim], float64."""
    rest = [d for d in range(gradient.ndim) if d != dim]
    if not rest:
        return gradient.detach().abs().double()
    wide = torch.complex128 if gradient.is_complex() else torch.float64
    return torch.linalg.vector_norm(gradient.detach(), 1, rest, dtype=wide)


@dataclass(frozen=True)
class Regular:
    """Axis ``dim`` is outer x B x inner."""

    dim: int
    outer: int
    inner: int

    def fits(self, shape: torch.Size, count: int) -> Regular | None:
        """Return this layout with the free factor set for ``shape``, or None if it cannot hold."""
        if self.dim >= len(shape):
            return None
        size = shape[self.dim]
        if self.outer * count * self.inner == size:
            return self
        if size % count:
            return None
        if self.outer == 1:
            return Regular(self.dim, 1, size // count)
        return Regular(self.dim, size // count, 1) if self.inner == 1 else None

    def samples(self, size: int, count: int, device: torch.device) -> Tensor:
        """Sample of each index along the axis."""
        ids = torch.arange(count, device=device).view(1, count, 1)
        return ids.expand(self.outer, count, self.inner).reshape(size)

    def split(self, t: Tensor, dim: int, count: int) -> Tensor:
        """Bring the samples of axis ``dim`` of ``t`` first: [B, outer*inner, other axes in order]."""
        rest = [s for d, s in enumerate(t.shape) if d != dim]
        if self.outer == 1:
            t = t.movedim(dim, 0)
            return t.reshape(count, self.inner, *rest)
        t = t.movedim(dim, 0).reshape(self.outer, count, self.inner, *rest)
        return t.transpose(0, 1).reshape(count, self.outer * self.inner, *rest)

    def __str__(self) -> str:
        parts = [str(f) for f in (self.outer,) if f > 1] + ["B"] + [str(f) for f in (self.inner,) if f > 1]
        return f"axis {self.dim}" + (f" ({' x '.join(parts)})" if len(parts) > 1 else "")


@dataclass(frozen=True, eq=False)
class Ragged:
    """Axis ``dim`` holds rows of samples in any order: ``ids`` [size] (None until a marked backward has told)."""

    dim: int
    ids: Tensor | None = None

    def fits(self, shape: torch.Size, count: int) -> Ragged | None:
        """Return itself if the axis exists."""
        return self if self.dim < len(shape) else None

    def split(self, t: Tensor, dim: int, count: int) -> Tensor:
        """Bring the rows of each sample together, zero-padded: [B, most rows of a sample, other axes]."""
        if self.ids is None:
            raise RuntimeError("a ragged layout was used before its rows were told apart")
        t = t.movedim(dim, 0)
        order = torch.argsort(self.ids, stable=True)
        lengths = torch.bincount(self.ids, minlength=count)
        starts = lengths.cumsum(0) - lengths
        owner = self.ids[order]
        place = torch.arange(len(order), device=t.device) - starts[owner]
        padded = t.new_zeros(count, max(1, int(lengths.max())), *t.shape[1:])
        padded[owner, place] = t[order]
        return padded

    def __str__(self) -> str:
        return f"axis {self.dim} (rows in any order)"


Layout = Regular | Ragged


def candidates(shape: torch.Size, count: int) -> list[Regular]:
    """Every regular layout that an output of this shape could have, likelier ones first."""
    found = []
    for dim, size in enumerate(shape):
        if size % count:
            continue
        rest = size // count
        divisors = [k for k in range(1, rest + 1) if rest % k == 0] if rest <= 1 << 16 else [1, rest]
        found += [Regular(dim, k, rest // k) for k in divisors]
    return found


def marks(count: int, device: torch.device) -> Tensor:
    """Factors c_j, evenly spaced in log2 between 1/64 and 64, exact in every dtype, shuffled by a fixed rule."""
    exponents = torch.linspace(-6, 6, count, dtype=torch.float64) if count > 1 else torch.zeros(1, dtype=torch.float64)
    generator = torch.Generator().manual_seed(count)
    return torch.exp2(exponents[torch.randperm(count, generator=generator)]).bfloat16().double().to(device)


def explains(layout: Layout, plain: Tensor, marked: Tensor, factors: Tensor, tolerance: float) -> Layout | None:
    """Return the layout (a ragged one with its ids) if it explains how marking changed the row sums, else None.

    ``plain`` and ``marked`` are row sums [size of the layout's axis]; ``factors`` the marks [B].
    """
    alive = plain > plain.max() * 1e-12 if plain.numel() else plain.bool()
    if isinstance(layout, Regular):
        expected = plain * factors[layout.samples(len(plain), len(factors), plain.device)]
        wrong = (marked - expected).abs() > tolerance * expected
        return None if bool((wrong & alive).any()) else layout
    spread = factors.sort().values
    if len(spread) > 1 and float((spread[1:] / spread[:-1]).min()) < 1 + 2.5 * tolerance:
        return None  # too many samples to tell them apart at this precision
    ratio = torch.where(plain > 0, marked / plain.clamp_min(torch.finfo(torch.float64).tiny), factors[0])
    order = torch.argsort(factors)
    nearest = torch.searchsorted(torch.log2(factors[order]), torch.log2(ratio).contiguous()).clamp_max(len(factors) - 1)
    below = (nearest - 1).clamp_min(0)
    logs, target = torch.log2(factors[order]), torch.log2(ratio)
    pick = torch.where((logs[nearest] - target).abs() <= (logs[below] - target).abs(), nearest, below)
    ids = order[pick]
    wrong = (factors[ids] / ratio - 1).abs() > tolerance
    return None if bool((wrong & alive).any()) else Ragged(layout.dim, ids)
