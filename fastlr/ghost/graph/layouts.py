"""Where the samples are in a tensor: layouts of its axes, and marks that decide which layout holds.

A `Regular` layout says that along axis ``dim`` the index runs over outer x sample x inner. A
`Ragged` one lists the sample of each index. `explains` decides whether one holds, by marked
gradients: with the cotangent of sample j scaled by a known c_j, the gradient at every row is scaled
by the c_j of the sample that the row belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class Unsupported(Exception):
    """Samples cannot be separated here, or not in the way that a rule needs."""


@dataclass(frozen=True)
class Regular:
    """Axis ``dim`` is outer x B x inner."""

    dim: int
    outer: int
    inner: int

    def samples(self, count: int, device: torch.device) -> Tensor:
        """Sample of each index along the axis."""
        return torch.arange(count, device=device).repeat_interleave(self.inner).repeat(self.outer)

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


SAMPLES_FIRST = Regular(0, 1, 1)


@dataclass(frozen=True, eq=False)
class Ragged:
    """Axis ``dim`` holds rows of samples in any order.

    ``ids`` [size] has the sample of each row (None until marks have found them).
    """

    dim: int
    ids: Any = None

    def samples(self, count: int, device: torch.device) -> Tensor:
        """Sample of each index along the axis."""
        return self.ids

    def split(self, t: Tensor, dim: int, count: int) -> Tensor:
        """Bring the rows of each sample together, zero-padded.

        The result is [B, most rows of a sample, other axes].
        """
        t = t.movedim(dim, 0)
        ids = self.ids
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


def possible_layouts(shape: torch.Size, count: int) -> list[Regular]:
    """Every regular layout that an output of this shape could have, likelier ones first."""
    layouts = []
    for dim, size in enumerate(shape):
        if size % count:
            continue
        rest = size // count
        factors = range(1, rest + 1) if rest <= 1 << 16 else (1, rest)
        layouts += [Regular(dim, k, rest // k) for k in factors if rest % k == 0]
    return layouts
