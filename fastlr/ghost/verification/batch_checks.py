"""Which rows of the gradients belong to which sample, by marked backward passes.

The passes run on the batch at hand.

With the cotangent of sample j scaled by known factors, the gradient that arrives at a use must be
scaled, row by row, by the factors of the sample that the row belongs to. This finds the rows where
the graph does not show them (fastlr.ghost.ownership), in every batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fastlr.ghost.backward import Structure, backward
from fastlr.ghost.graph import Graph, Place
from fastlr.ghost.sample_axis import (
    Layout,
    Marks,
    Ragged,
    candidates,
    explains,
    row_sums,
)

Options = Mapping[Place, list[Layout]]


def explained(
    graph: Graph,
    structure: Structure,
    z: Tensor,
    v: Tensor,
    out_dim: int,
    options: Options,
) -> dict[Place, list[Layout]]:
    """Find the layouts among ``options`` that marked passes confirm.

    They are given for every output of a use where a gradient arrives.

    Args:
        graph: below ``z``, classified; kept.
        structure: its uses.
        z: the output.
        v: a dense cotangent: one with zeros would leave rows undecided.
        out_dim: the samples' axis of the output.
        options: layouts by place, likelier ones first.
    """
    count = z.shape[out_dim]
    marks = Marks.make(count, graph.lowest_dtype(), v.device)
    broadcast = [1] * v.ndim
    broadcast[out_dim] = count
    plain = _row_sums(graph, structure, z, v, options)
    passes = [
        _row_sums(graph, structure, z, v * c.view(broadcast).to(v.dtype), options)
        for c in marks.factors
    ]
    layouts: dict[Place, list[Layout]] = {}
    for place, sums in plain.items():
        layouts[place] = []
        for option in options[place]:
            marked = torch.stack([sums_of_pass[place][option.dim] for sums_of_pass in passes])
            layout = explains(option, sums[option.dim], marked, marks)
            if layout is not None:
                layouts[place].append(layout)
    return layouts


def first_explained(
    graph: Graph, structure: Structure, z: Tensor, v: Tensor, out_dim: int, options: Options
) -> dict[Place, list[Layout]]:
    """As `explained`, but at most the likeliest of the layouts that marks confirm.

    The others are looked at where it fails.
    """
    likeliest = {place: held[:1] for place, held in options.items()}
    found = explained(graph, structure, z, v, out_dim, likeliest)
    others = {place: options[place][1:] for place, held in found.items() if not held}
    if any(others.values()):
        found |= explained(graph, structure, z, v, out_dim, others)
    return found


def every_layout(graph: Graph, place: Place, count: int) -> list[Layout]:
    """All layouts that an output could have: regular ones, then rows in any order."""
    shape = graph.shape(*place)
    return [*candidates(shape, count), *map(Ragged, range(len(shape)))]


def _row_sums(
    graph: Graph, structure: Structure, z: Tensor, v: Tensor, options: Options
) -> dict[Place, dict[int, Tensor]]:
    """Row sums of the gradients that arrive at uses, along the axes of their options."""
    sums: dict[Place, dict[int, Tensor]] = {}

    def visit(i: int, gradients: Iterable[Tensor | None]) -> None:
        for output, g in enumerate(gradients):
            if g is not None and (i, output) in options:
                sums[i, output] = {
                    dim: row_sums(g, dim) for dim in {o.dim for o in options[i, output]}
                }

    backward(graph, structure, z, v, visit, retain=True)
    return sums
