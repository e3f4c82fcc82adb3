"""The gradient of each sample with respect to one tensor, in the form that makes its norm cheapest.

In: what a rule found, such as the input and output gradient of a linear layer. Out: squared norms
[B] in float64, or the gradients themselves for a range of samples. The gradient of a parameter is
the *sum* over its uses, so norms do not add: `combined_sq_norms` joins factors of one form along
their rows, takes the inner product of a tied embedding's two forms by itself, ||E + L||^2 = ||E||^2
+ ||L||^2 + 2 <E, L>, and adds dense gradients otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastlr import ops
from fastlr.ops.geometry import ConvGeometry
from fastlr.ops.linear import chunks, raised

CHUNK_ELEMENTS = 1 << 24  # of dense per-sample gradients held at once


class Factor:
    """Gradients [B, *shape] of one tensor in some form.

    What its first field holds has the samples first.

    Attributes:
        shape: Shape of the tensor.
        joinable: names of the tensors that are joined where factors are (see `join`).
        axis_of_rows: Axis of rows of these tensors.
    """

    shape: Sequence[int]
    joinable: ClassVar[tuple[str, ...]] = ()
    axis_of_rows = 0

    @property
    def form(self) -> Any:
        """What factors have in common whose sum is had by joining them along their rows."""
        return id(self)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(next(iter(vars(self).values())))

    def sq_norms(self) -> Tensor:
        """Squared norm of each sample's gradient: [B], float64."""
        ranges = chunks(len(self), math.prod(self.shape), CHUNK_ELEMENTS)
        return torch.cat([Dense(self.dense(lo, hi)).sq_norms() for lo, hi in ranges])

    def dense(self, lo: int, hi: int) -> Tensor:
        """Gradients of samples lo to hi: [hi - lo, *shape]."""
        raise NotImplementedError

    def transpose(self) -> Factor | None:
        """Gradients of the transposed matrix; None where there is no cheap form."""
        return None


@dataclass
class Dense(Factor):
    """The gradients themselves: [B, *shape]."""

    grads: Tensor
    joinable = ("grads",)

    def sq_norms(self) -> Tensor:  # noqa: D102
        return ops.run(
            "dense_sq_norms",
            torch.view_as_real(self.grads) if self.grads.is_complex() else self.grads,
        )

    def dense(self, lo: int, hi: int) -> Tensor:  # noqa: D102
        return raised(self.grads[lo:hi])  # to be added to others

    def transpose(self) -> Dense:  # noqa: D102
        return Dense(self.grads.mT)


@dataclass
class Outer(Factor):
    """sum_t g_t a_t^T, without a conjugate, for each of N groups: a [B, N, T, I], g [B, N, T, O].

    The tensor has shape ``shape``: (N, O, I), or (N, I, O) if ``inputs_first``.
    """

    a: Tensor
    g: Tensor
    shape: tuple[int, ...]
    inputs_first: bool = False
    joinable, axis_of_rows = ("a", "g"), 2

    @property
    def form(self) -> Any:  # noqa: D102
        return Outer, self.inputs_first

    def sq_norms(self) -> Tensor:
        """Squared norms; of complex a and g those of twice as many real rows.

        They are products of the real part above the imaginary one.
        """
        a, g = self.a, self.g
        if g.is_complex():
            upper = torch.cat([g.real, g.imag], 3)
            lower = torch.cat([-g.imag, g.real], 3)
            a, g = torch.cat([a.real, a.imag], 2), torch.cat([upper, lower], 2)
        return ops.run("linear_sq_norms", a, g)

    def dense(self, lo: int, hi: int) -> Tensor:  # noqa: D102
        a, g = self.a[lo:hi], self.g[lo:hi]
        grads = a.mT @ g if self.inputs_first else g.mT @ a
        return grads.reshape(hi - lo, *self.shape)

    def transpose(self) -> Outer:  # noqa: D102
        return replace(self, shape=self.shape[::-1], inputs_first=not self.inputs_first)


@dataclass
class PickedRows(Factor):
    """Gradients of rows of a table: ids [B, T], g [B, T, D].

    The table has ``shape`` (number of rows, ...).
    """

    ids: Tensor
    g: Tensor
    shape: tuple[int, ...]
    joinable, axis_of_rows = ("ids", "g"), 1

    @property
    def form(self) -> Any:  # noqa: D102
        return PickedRows, self.shape

    def sq_norms(self) -> Tensor:  # noqa: D102
        return ops.run("embedding_sq_norms", self.ids, self.g)

    def dense(self, lo: int, hi: int) -> Tensor:  # noqa: D102
        table = self.g.new_zeros(hi - lo, self.shape[0], self.g.shape[-1])
        index = self.ids[lo:hi, :, None].expand(-1, -1, self.g.shape[-1])
        return table.scatter_add_(1, index, self.g[lo:hi]).reshape(hi - lo, *self.shape)


@dataclass
class Conv(Factor):
    """Weight gradients of a convolution, from x [B, K, C, *] and g [B, K, O, *].

    The geometry is as in fastlr.ops.convolution.conv_grads.
    """

    x: Tensor
    g: Tensor
    weight: Tensor
    geometry: ConvGeometry

    def sq_norms(self) -> Tensor:  # noqa: D102
        return ops.run("conv_sq_norms", self.x, self.g, self.weight, self.geometry)

    def dense(self, lo: int, hi: int) -> Tensor:  # noqa: D102
        return ops.run("conv_grads", self.x[lo:hi], self.g[lo:hi], self.weight, self.geometry)


@dataclass
class NormsOnly(Factor):
    """Squared norms [B] of gradients that were found together with others' norms.

    ``whole`` gives the factor of these gradients, if it can be had at all.
    """

    values: Tensor
    whole: Callable[[], Factor] | None = None

    def sq_norms(self) -> Tensor:  # noqa: D102
        return self.values


@dataclass
class Sum(Factor):
    """Sum of the gradients of several uses of one tensor of this shape."""

    factors: list[Factor]
    shape: torch.Size

    def __len__(self) -> int:
        return len(self.factors[0])

    def dense(self, lo: int, hi: int) -> Tensor:  # noqa: D102
        return reduce(
            torch.add, (f.dense(lo, hi).reshape(hi - lo, *self.shape) for f in self.factors)
        )


def _inner_product(rows: PickedRows, outer: Outer) -> Tensor:
    """Return the inner product of an embedding's and a linear layer's gradients: [B], float64.

    Both are gradients of one table (tied weights).
    """
    a, g = outer.a[:, 0], outer.g[:, 0]  # [B, S, D], [B, S, V]
    if outer.inputs_first:
        a, g = g, a
    similar = raised(rows.g) @ raised(a).mT  # [B, T, S]
    picked = g.mT.gather(1, rows.ids[:, :, None].expand(-1, -1, g.shape[1]))
    return (similar.double() * picked.double()).sum((1, 2))


def _merge(factors: list[Factor]) -> list[Factor]:
    """Join factors of the same form along their rows, where that gives the sum."""
    by_form: dict[Any, list[Factor]] = {}
    for factor in factors:
        by_form.setdefault(factor.form, []).append(factor)
    return [join(alike, alike[0].axis_of_rows) for alike in by_form.values()]


def join(alike: Sequence[Any], axis: int) -> Any:
    """Return one factor of several of the same form: a single one itself, as it may be large.

    Along axis 0 it has the samples of all. Along the axis of the rows it is their sum.
    """
    if len(alike) == 1:
        return alike[0]
    tensors = {}
    for name in alike[0].joinable:
        tensors[name] = torch.cat([getattr(factor, name) for factor in alike], axis)
    return replace(alike[0], **tensors)


def combined_sq_norms(factors: list[Factor], shape: torch.Size) -> Tensor:
    """Squared norms [B] of the sum of several factors of one tensor of this shape."""
    merged = _merge(factors)
    if len(merged) == 1:
        return merged[0].sq_norms()
    if len(merged) == 2:
        outer = next((f for f in merged if isinstance(f, Outer)), None)
        rows = next((f for f in merged if isinstance(f, PickedRows)), None)
        if (
            outer is not None
            and rows is not None
            and len(outer.shape) == 2
            and outer.shape == rows.shape
        ):
            return outer.sq_norms() + rows.sq_norms() + 2 * _inner_product(rows, outer)
    return Sum(merged, shape).sq_norms()
