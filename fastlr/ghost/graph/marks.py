"""Which rows of the gradients belong to which sample, by marked backward passes.

The passes run on the batch at hand.

With the cotangent of sample j scaled by known factors, the gradient that arrives at a use must be
scaled, row by row, by the factors of the sample that the row belongs to. This finds the rows where
the graph does not show them (fastlr.ghost.graph.rows), in every batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastlr.ghost.graph.backward import backward
from fastlr.ghost.graph.formulas import dense
from fastlr.ghost.graph.layouts import Layout, Ragged, possible_layouts
from fastlr.ghost.graph.uses import Uses
from fastlr.ghost.graph.walk import Graph, Place

Options = Mapping[Place, Sequence[Layout]]


def layouts_by_marks(
    graph: Graph, uses: Uses, z: Tensor, v: Tensor, out_dim: int, places: Iterable[Place]
) -> dict[Place, Layout | None]:
    """Find the layouts of some places by marked backward passes.

    Args:
        graph: Classified graph below ``z``, which is kept.
        uses: Uses of parameters in the graph.
        z: Output.
        v: Dense cotangent. Zeros would leave rows undecided.
        out_dim: Sample axis of the output.
        places: Outputs of nodes with uses.

    Returns:
        For each place that a gradient reaches, the likeliest layout that the passes confirm; None
        if they confirm none.
    """
    options: dict[Place, list[Layout]] = {}
    for place in places:
        shape = graph.shape(*place)
        regular = possible_layouts(shape, z.shape[out_dim])
        options[place] = [*regular, *map(Ragged, range(len(shape)))]
    likeliest = {place: layouts[:1] for place, layouts in options.items()}
    found = _confirmed(graph, uses, z, v, out_dim, likeliest)
    others = {place: options[place][1:] for place, layout in found.items() if layout is None}
    if any(others.values()):
        found |= _confirmed(graph, uses, z, v, out_dim, others)
    return found


def _confirmed(
    graph: Graph, uses: Uses, z: Tensor, v: Tensor, out_dim: int, options: Options
) -> dict[Place, Layout | None]:
    """Return for each place the first of its options that marked passes confirm, or None."""
    count = z.shape[out_dim]
    marks = Marks.make(count, graph.lowest_dtype(), v.device)
    broadcast = [1] * v.ndim
    broadcast[out_dim] = count
    plain = _row_sums(graph, uses, z, v, options)
    passes = [
        _row_sums(graph, uses, z, v * c.view(broadcast).to(v.dtype), options) for c in marks.factors
    ]
    found: dict[Place, Layout | None] = {}
    for place, sums in plain.items():
        found[place] = None
        for option in options[place]:
            marked = torch.stack([sums_of_pass[place][option.dim] for sums_of_pass in passes])
            found[place] = explains(option, sums[option.dim], marked, marks)
            if found[place] is not None:
                break
    return found


def _row_sums(
    graph: Graph, uses: Uses, z: Tensor, v: Tensor, options: Options
) -> dict[Place, dict[int, Tensor]]:
    """Return row sums of the gradients at each place, along the axes of its options."""
    sums: dict[Place, dict[int, Tensor]] = {}

    def visit(i: int, gradients: Iterable[Tensor | None]) -> None:
        for output, g in enumerate(gradients):
            axes = {option.dim for option in options.get((i, output), ())}
            if g is not None and axes:
                sums[i, output] = {dim: row_sums(g, dim) for dim in axes}

    backward(graph, uses, z, v, visit, retain=True)
    return sums


def row_sums(gradient: Tensor, dim: int) -> Tensor:
    """Sum of absolute values over all axes but ``dim``: [size of dim], float64."""
    gradient = dense(gradient.detach())
    others = [d for d in range(gradient.ndim + 1) if d != dim]
    wide = torch.complex128 if gradient.is_complex() else torch.float64
    return torch.linalg.vector_norm(gradient[..., None], 1, others, dtype=wide)


# Octaves that marks span, and the tolerance and the noise of `Marks`, by the least precise dtype of
# the graph. The tolerance is less than what a share of 2^-octaves of another sample makes.
_IN_DOUBLE = 18, 1e-6, 1e-12
_IN_SINGLE = 8, 1e-3, 1e-9


@dataclass(frozen=True)
class Marks:
    """Known factors of the samples' cotangents, which identify the samples.

    There is one row of factors for each marked backward pass.

    All are powers of two: they change no rounding, so that a row of one sample is scaled by its
    factor to the last bit, be it little else than rounding. The last pass is a check: each sample
    has a random factor. Those before it spell the samples' numbers, digit by digit: thousands of
    samples need three or four. A row that mixes two samples differs from a power of two wherever
    their factors differ, unless their shares conspire, and they would have to in every pass.

    Attributes:
        factors: [passes, B], float64.
        sample_of_number: Sample that each number stands for [base^digits]; -1 for none.
        base: Number of factors of a digit: 2^0 to 2^(base - 1).
        tolerance: relative, of a row's factor.
        noise: Row sums that are nothing but rounding, in parts of the largest one.
    """

    factors: Tensor
    sample_of_number: Tensor
    base: int
    tolerance: float
    noise: float

    @staticmethod
    def make(count: int, dtype: torch.dtype, device: torch.device) -> Marks:
        """Return marks for ``count`` samples in a graph of this dtype."""
        generator = torch.Generator().manual_seed(count)
        octaves, tolerance, noise = _IN_DOUBLE if dtype == torch.float64 else _IN_SINGLE
        base = octaves + 1
        length = max(1, math.ceil(math.log(count, base) - 1e-9))
        number_of_sample = torch.randperm(base**length, generator=generator, device="cpu")[:count]
        sample_of_number = torch.full((base**length,), -1, device="cpu")
        sample_of_number[number_of_sample] = torch.arange(count, device="cpu")
        digits = [number_of_sample // base**place % base for place in range(length)]
        check = torch.randint(base, (count,), generator=generator, device="cpu")
        factors = torch.exp2(torch.stack([*digits, check]).double())
        return Marks(factors.to(device), sample_of_number.to(device), base, tolerance, noise)

    def read(self, ratios: Tensor) -> Tensor:
        """Samples [rows] that factors [digits, rows] spell; -1 for a number of none."""
        digits = ratios.clamp_min(0.5).log2().round().long().clamp(0, self.base - 1)
        places = self.base ** torch.arange(len(digits), device=digits.device)
        return self.sample_of_number[(digits * places[:, None]).sum(0)]


def explains(layout: Layout, plain: Tensor, marked: Tensor, marks: Marks) -> Layout | None:
    """Return the layout if it explains how marking changed the row sums, else None.

    A ragged layout is returned with its ids.

    Args:
        layout: what is tried.
        plain: row sums [size of the layout's axis] without marks.
        marked: row sums [passes, size] with marks.
        marks: the marks.
    """
    if isinstance(layout, Ragged):
        ratios = torch.where(plain > 0, marked / plain, 1.0)
        # A number of no sample is taken as sample 0, whose factors differ from what was read.
        layout = Ragged(layout.dim, marks.read(ratios[:-1]).clamp_min(0))
    ids = layout.samples(marks.factors.shape[1], plain.device)
    expected = plain * marks.factors[:, ids]
    is_wrong = (marked - expected).abs() > marks.tolerance * expected
    is_alive = plain > plain.max() * marks.noise if plain.numel() else plain.bool()
    return None if bool((is_wrong & is_alive).any()) else layout
