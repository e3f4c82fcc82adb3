"""The gradient of each sample with respect to one tensor, in the form that makes its norm cheapest.

Every factor answers `sq_norms()` ([B], float64), `dense(lo, hi)` ([hi-lo, *shape]) and `transpose()` where it can.
`combine` adds the factors of several uses of one parameter: the gradient is the *sum* over uses, so norms do not add.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastlr import ops
from fastlr.torch_ops import raised

CHUNK_ELEMENTS = 1 << 24  # of dense per-sample gradients held at once


@dataclass
class Dense:
    """The gradients themselves: [B, *shape]."""

    grads: Tensor

    def sq_norms(self) -> Tensor:
        """Squared norm of each sample."""
        return self.grads.reshape(len(self.grads), -1).double().square().sum(1)

    def dense(self, lo: int, hi: int) -> Tensor:
        """Gradients of samples lo..hi."""
        return self.grads[lo:hi]

    def transpose(self) -> Dense | None:
        """Gradients of the transposed matrix."""
        return Dense(self.grads.mT) if self.grads.ndim == 3 else None


@dataclass
class Outer:
    """sum_t g_t a_t^T for each of N groups: a [B, N, T, I], g [B, N, T, O].

    The tensor has shape ``shape``, that of (N, O, I), or of (N, I, O) if ``inputs_first``.
    """

    a: Tensor
    g: Tensor
    shape: tuple[int, ...]
    inputs_first: bool = False

    def sq_norms(self) -> Tensor:
        """Squared norm of each sample."""
        return ops.run("linear_sq_norms", self.a, self.g)

    def dense(self, lo: int, hi: int) -> Tensor:
        """Gradients of samples lo..hi."""
        a, g = self.a[lo:hi], self.g[lo:hi]
        grads = a.mT @ g if self.inputs_first else g.mT @ a
        return grads.reshape(hi - lo, *self.shape)

    def transpose(self) -> Outer | None:
        """Gradients of the transposed matrix."""
        if len(self.shape) != 2:
            return None
        return replace(self, shape=self.shape[::-1], inputs_first=not self.inputs_first)


@dataclass
class Rows:
    """Gradients of rows of a table: ids [B, T], g [B, T, D]; the table has ``shape`` (number of rows, ...)."""

    ids: Tensor
    g: Tensor
    shape: tuple[int, ...]

    def sq_norms(self) -> Tensor:
        """Squared norm of each sample."""
        return ops.run("embedding_sq_norms", self.ids, self.g)

    def dense(self, lo: int, hi: int) -> Tensor:
        """Gradients of samples lo..hi."""
        table = self.g.new_zeros(hi - lo, self.shape[0], self.g.shape[-1])
        index = self.ids[lo:hi, :, None].expand(-1, -1, self.g.shape[-1])
        return table.scatter_add_(1, index, self.g[lo:hi]).reshape(hi - lo, *self.shape)

    def transpose(self) -> None:
        """No cheap form."""
        return None


@dataclass
class Bilinear:
    """sum_t g_t (x_t y_t^T) for x [B, T, I], y [B, T, J], g [B, T, O]: a tensor of shape (O, I, J)."""

    x: Tensor
    y: Tensor
    g: Tensor
    shape: tuple[int, ...]

    def _outer(self, lo: int, hi: int) -> Outer:
        products = raised(self.x[lo:hi, :, :, None]) * raised(self.y[lo:hi, :, None])
        return Outer(products.flatten(2)[:, None], self.g[lo:hi, None], self.shape)

    def sq_norms(self) -> Tensor:
        """Squared norm of each sample."""
        elements = self.x.shape[1] * self.x.shape[2] * self.y.shape[2]
        return torch.cat([self._outer(lo, hi).sq_norms() for lo, hi in chunks(len(self.g), elements)])

    def dense(self, lo: int, hi: int) -> Tensor:
        """Gradients of samples lo..hi."""
        return self._outer(lo, hi).dense(0, hi - lo)

    def transpose(self) -> None:
        """No matrix."""
        return None


@dataclass
class Conv:
    """Weight gradients of a convolution: x [B, K, C, *], g [B, K, O, *], options as in reference.norms.conv_grads."""

    x: Tensor
    g: Tensor
    weight: Tensor
    options: tuple[Any, ...]

    def sq_norms(self) -> Tensor:
        """Squared norm of each sample."""
        return ops.run("conv_sq_norms", self.x, self.g, self.weight, *self.options)

    def dense(self, lo: int, hi: int) -> Tensor:
        """Gradients of samples lo..hi."""
        return ops.run("conv_grads", self.x[lo:hi], self.g[lo:hi], self.weight, *self.options)

    def transpose(self) -> None:
        """No cheap form."""
        return None


@dataclass
class Norms:
    """Squared norms [B] of gradients that were not kept, of a tensor that is used once."""

    values: Tensor

    def sq_norms(self) -> Tensor:
        """Squared norm of each sample."""
        return self.values

    def dense(self, lo: int, hi: int) -> Tensor:
        """Raise TypeError: the gradients are gone."""
        raise TypeError("only the norms of these gradients are known, so they cannot be added to others")

    def transpose(self) -> None:
        """No gradients to transpose."""
        return None


Factor = Dense | Outer | Rows | Bilinear | Conv | Norms


def _tied(rows: Rows, outer: Outer) -> Tensor:
    """Inner product of an embedding's and a linear layer's gradients of one table (tied weights): [B], float64."""
    a, g = outer.a[:, 0], outer.g[:, 0]  # a [B, S, D], g [B, S, V]
    if outer.inputs_first:
        a, g = g, a
    similar = raised(rows.g) @ raised(a).mT  # [B, T, S]
    picked = g.mT.gather(1, rows.ids[:, :, None].expand(-1, -1, g.shape[1]))
    return (similar.double() * picked.double()).sum((1, 2))


def _merge(factors: list[Factor]) -> list[Factor]:
    """Join factors of the same form along their rows, where that gives the sum."""
    outers = [f for f in factors if isinstance(f, Outer)]
    rows = [f for f in factors if isinstance(f, Rows)]
    merged: list[Factor] = [f for f in factors if not isinstance(f, (Outer, Rows))]
    for flag in (False, True):
        same = [f for f in outers if f.inputs_first is flag]
        if same:
            merged.append(replace(same[0], a=_joined([f.a for f in same], 2), g=_joined([f.g for f in same], 2)))
    for shape in dict.fromkeys(f.shape for f in rows):
        alike = [f for f in rows if f.shape == shape]
        merged.append(replace(alike[0], ids=_joined([f.ids for f in alike], 1), g=_joined([f.g for f in alike], 1)))
    return merged


def _joined(tensors: list[Tensor], dim: int) -> Tensor:
    """Concatenate, without a copy of one alone: it may be as large as the logits."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)


def combined_sq_norms(factors: list[Factor], shape: torch.Size) -> Tensor:
    """Squared norms [B] of the sum of several factors of one tensor of this shape."""
    merged = _merge(factors)
    if len(merged) == 1:
        return merged[0].sq_norms()
    if len(merged) == 2:
        outer = next((f for f in merged if isinstance(f, Outer)), None)
        rows = next((f for f in merged if isinstance(f, Rows)), None)
        if outer and rows and len(outer.shape) == 2 and outer.shape == rows.shape:
            return outer.sq_norms() + rows.sq_norms() + 2 * _tied(rows, outer)
    parts = []
    for lo, hi in chunks(batch_size(merged[0]), shape.numel()):
        total = added([f.dense(lo, hi).reshape(hi - lo, *shape) for f in merged])
        parts.append(total.reshape(hi - lo, -1).double().square().sum(1))
    return torch.cat(parts)


def chunks(count: int, elements: int) -> list[tuple[int, int]]:
    """Ranges of samples such that dense gradients of ``elements`` each stay within CHUNK_ELEMENTS."""
    step = max(1, min(count, CHUNK_ELEMENTS // max(1, elements)))
    return [(lo, min(count, lo + step)) for lo in range(0, count, step)]


def added(grads: list[Tensor]) -> Tensor:
    """Sum of dense gradients, in order."""
    total = grads[0]
    for g in grads[1:]:
        total = total + g
    return total


def batch_size(factor: Factor) -> int:
    """Return the number of samples of a factor."""
    if isinstance(factor, Norms):
        return len(factor.values)
    return len(factor.grads if isinstance(factor, Dense) else factor.g)
