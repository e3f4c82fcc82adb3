"""Calls of every op that has a kernel, on which kernels are held to plain torch.

They have odd sizes, many memory formats and strides, and each kind of tile and of split. An op is
compared on them before it is timed, and by the tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from bench.convolution_cases import (
    channels_last,
    conv_cases,
    draw,
    folded_calls,
    moments_cases,
    swapped,
)


def linear_cases() -> dict[str, tuple]:
    """a, g of every form and layout; shapes (B, N, T, I, O)."""
    cases: dict[str, tuple] = {}
    shapes = {
        "one": (1, 1, 1, 1, 1),
        "one-row": (3, 2, 1, 7, 5),
        "two-rows": (2, 3, 2, 33, 17),
        "tall": (2, 1, 133, 12, 10),
        "two-tiles": (2, 1, 20, 9, 131),
        "two-tiles-square": (2, 1, 150, 70, 70),
        "whole-tiles": (1, 2, 64, 64, 32),
        "gram": (2, 2, 9, 67, 130),
        "gram-one-block": (1, 1, 32, 64, 128),
        "gram-blocks": (2, 1, 70, 300, 257),
        "gram-vectors": (1, 2, 60, 200, 132),
        "gram-blocks-vectors": (1, 1, 124, 256, 260),
    }
    for name, (count, groups, rows, inputs, outputs) in shapes.items():
        a, g = draw(count, groups, rows, inputs), draw(count, groups, rows, outputs, seed=1)
        cases[name] = (a, g)
        if inputs + outputs < 140 or name == "gram-vectors":
            cases[f"{name}-rows-last"] = (swapped(a, 2, 3), swapped(g, 2, 3))
            cases[f"{name}-mixed"] = (swapped(a, 2, 3), g)
            cases[f"{name}-strided"] = (
                draw(count, groups, rows, 2, 2 * inputs, seed=2)[..., 1, ::2],
                draw(count + 1, groups, rows, outputs, 3, seed=3)[1:, ..., 1],
            )
    # Activations far from zero and gradients that sum to nearly nothing: uncentred Gram matrices
    # err by 4e-4 here.
    a, g = draw(2, 1, 48, 150, offset=100), draw(2, 1, 48, 170)
    cases["gram-common-part"] = (a, g - g.mean(2, keepdim=True) + 1e-4)
    # A view, as attention has them.
    cases["heads"] = tuple(draw(2, 5, 3, n).transpose(1, 2) for n in (8, 20))
    cases["expanded"] = (draw(2, 1, 20, 6), draw(2, 1, 1, 6).expand(2, 1, 20, 6))
    return cases


# -- small reductions, activations, cotangents
# --------------------------------------------------------------------------


def channel_cases() -> dict[str, tuple]:
    """x, g [B, K, C, ...]."""
    cases: dict[str, tuple] = {}
    shapes = {
        "one": (1, 1, 1),
        "no-positions": (3, 5, 7),
        "1d": (2, 1, 3, 23),
        "2d": (2, 1, 5, 7, 9),
        "images": (2, 3, 35, 3, 5),
        "wide": (1, 1, 70, 5, 7),
        "long": (1, 1, 3, 91, 97),  # more than one program a sum
        "3d": (2, 1, 3, 3, 2, 5),
    }
    for name, shape in shapes.items():
        x, g = draw(*shape), draw(*shape, seed=1)
        cases[name] = (x, g)
        cases[f"{name}-channels-last"] = (channels_last(x), channels_last(g))
    cases["long-pair"] = tuple(torch.cat([t, t.flip(-1)]) for t in cases["long"])
    for name in ("1d", "images", "long", "no-positions"):
        x, g = cases[name]
        cases[f"{name}-centred"] = (x + 100, g, draw(len(x), x.shape[2], offset=100, seed=2))
    cases["centred-channels-last"] = (*cases["2d-channels-last"], draw(1, 5, seed=2))
    x, g = draw(2, 1, 20, 5, 7), draw(2, 1, 20, 5, 7, seed=1)
    cases["mixed-formats"] = (x, channels_last(g))
    cases["expanded"] = (x, g[..., :1, :1].expand_as(x))  # what a mean over positions gives
    cases["sliced"] = (draw(3, 1, 20, 5, 14)[1:, ..., ::2], draw(2, 2, 40, 5, 7)[:, 1:, 1::2])
    cases["batch-first-in-memory-last"] = (
        draw(5, 7, 20, 2).movedim(-1, 0)[:, None],
        draw(2, 1, 5, 7, 20),
    )
    return cases


def row_cases(statistics: int) -> dict[str, tuple]:
    """x, g [B, T, D] and row statistics."""
    cases: dict[str, tuple] = {}
    shapes = {"one": (1, 1, 1), "small": (3, 17, 5), "wide": (2, 33, 70), "long": (1, 600, 3)}
    shapes["longer"] = (1, 2100, 17)  # more than one program a sum
    for name, (count, rows, width) in shapes.items():
        x, g = draw(count, rows, width), draw(count, rows, width, seed=1)
        cases[name] = (x, g, *(draw(count, rows, 1, seed=2 + k) for k in range(statistics)))
    x, g, *rest = cases["wide"]
    cases["columns-first"] = (swapped(x, 1, 2), swapped(g, 1, 2), *rest)
    cases["rows-first"] = tuple(swapped(t) for t in (x, g, *rest))
    cases["statistics-in-other-orders"] = (x, g, swapped(rest[0]), *rest[1:])
    return cases


def broadcast_cases() -> dict[str, tuple]:
    """g, another factor or None, axes."""
    g = draw(2, 3, 4, 5, 6)
    cases: dict[str, tuple] = {
        f"sum-{''.join(map(str, axes))}": (g, None, axes)
        for axes in [(1,), (1, 2), (1, 4), (2, 4), (1, 2, 3, 4)]
    }
    cases |= {
        "bias-of-linear": (draw(2, 37, 70), None, (1,)),
        "bias-of-convolution-channels-last": (channels_last(draw(2, 1, 20, 5, 7)), None, (1, 3, 4)),
        "layer-scale": (draw(2, 1, 4, 5, 20), draw(2, 1, 4, 5, 20, seed=1), (1, 2, 3)),
        "layer-scale-channels-first": (
            draw(2, 1, 20, 5, 7),
            draw(2, 1, 20, 5, 7, seed=1),
            (1, 3, 4),
        ),
        "factor-broadcast": (g, draw(5, 1), (1, 2)),
        "factor-of-a-sample": (draw(2, 3, 4), draw(2, 1, 1), (1,)),
        "one-number": (draw(3, 1, 5, 7), draw(3, 1, 5, 7, seed=1), (1, 2, 3)),
        "bias-table": (draw(2, 9, 3, 16, 16), None, (1,)),
        "expanded": (draw(2, 1, 6).expand(2, 40, 6), draw(2, 40, 6), (1,)),
        "long": (draw(1, 9000, 2).mT, None, (2,)),
    }
    return cases


def embedding_cases() -> dict[str, tuple]:
    """Row numbers [B, T], g [B, T, D]."""
    cases: dict[str, tuple] = {}
    sizes = {
        "one": (1, 1, 1, 1),
        "small": (3, 16, 5, 4),
        "tiles": (2, 67, 33, 9),
        "distinct": (2, 40, 7, 10**6),
    }
    for name, (count, rows, width, numbers) in sizes.items():
        ids = torch.randint(numbers, (count, rows), generator=torch.Generator().manual_seed(0))
        cases[name] = (ids, draw(count, rows, width))
    ids, g = cases["tiles"]
    cases["one-id"] = (torch.zeros_like(ids), g)
    cases["strides"] = (swapped(ids).int(), swapped(g, 1, 2))
    cases["large-ids"] = (ids + (1 << 40), swapped(g))
    cases["expanded"] = (ids[:1].expand(2, -1), g[:, :1].expand(-1, 67, -1))
    return cases


def cotangent_cases() -> dict[str, tuple]:
    """Logits [B, P, C], the samples' numbers, a seed."""

    def index(count: int, first: int = 0) -> Tensor:
        return torch.arange(first, first + count)

    cases: dict[str, tuple] = {}
    for classes in (2, 3, 10, 17, 129, 1000):
        z = 2 * draw(3, 2, classes)
        cases[f"{classes}-classes"] = (z, index(3), 5)
        cases[f"{classes}-classes-float64"] = (z.double() + 1e-12, index(3, 7), 5)
    z = draw(2, 3, 10)
    cases |= {
        "many-positions": (draw(1, 67, 5), index(1), 0),
        "classes-first": (draw(2, 5, 3, 4).movedim(1, -1).flatten(1, 2), index(2), 1),
        "strided-index": (z, index(4)[::2], 1),
        "large-index": (z, index(2, (1 << 32) - 1), 1),
        "huge-index": (z, index(2, (1 << 62) + 3), 1),
        "large-seed": (z, index(2), (1 << 63) + (1 << 31) + 9),
        "ties": (torch.zeros(2, 3, 10), index(2), 3),
        "almost-ties": (torch.tensor([1e-30, 2e-30, 0.0]).expand(2, 3, 3), index(2), 3),
        "gap-of-100": (z + 100 * (torch.arange(10) == 4), index(2), 2),
        "gap-of-900": (z.double() + 900 * (torch.arange(10) == 4), index(2), 2),
        "impossible-classes": (torch.where(torch.arange(10) % 3 == 1, -math.inf, z), index(2), 2),
    }
    bad = z.clone()
    bad[0, 0, 3], bad[0, 2, 9], bad[1, 1] = math.nan, math.inf, -math.inf
    cases["no-distribution"] = (bad, index(2), 2)
    return cases


def dense_cases() -> dict[str, tuple]:
    """Gradients [B, ...]."""
    return {
        "one": (draw(3, 1),),
        "matrix": (draw(2, 7, 5),),
        "strided": (swapped(draw(3, 9, 6), 1, 2)[:, 1:, ::2],),
        "long": (draw(2, 3000),),
        "small": (1e-25 * draw(2, 7),),
    }


def one_row_cases() -> dict[str, tuple]:
    """Inputs [B, I] and gradients [B, O]."""
    return {
        "one": (draw(1, 1), draw(1, 1, seed=1)),
        "narrow": (draw(3, 7), draw(3, 5, seed=1)),
        "long": (draw(2, 3000), draw(2, 1100, seed=1)),
        "columns-first": (swapped(draw(3, 9)), draw(3, 6, seed=1)),
        "strided": (draw(3, 2, 9)[:, 1], draw(4, 12, seed=1)[1:, ::2]),
        "expanded": (draw(1, 9).expand(3, 9), draw(3, 1, seed=1).expand(3, 6)),
        "small": (1e-25 * draw(2, 7), 1e-3 * draw(2, 5, seed=1)),
    }


def fold_cases() -> dict[str, tuple]:
    """Dtype, eps, and of each convolution weight, bias, gamma, beta, mean, var."""
    generator = torch.Generator().manual_seed(0)
    one: dict[str, tuple] = {}
    shapes = {
        "pointwise": (5, 7, 1, 1),
        "3x3": (6, 35, 3, 3),
        "depthwise": (9, 1, 5, 5),
        "1d": (4, 3, 3),
    }
    for name, shape in shapes.items():
        weight = torch.randn(shape, generator=generator)
        bias, gamma, beta, mean = torch.randn(4, shape[0], generator=generator)
        var = torch.rand(shape[0], generator=generator) + 0.1
        one[name] = (weight, bias, gamma, beta, mean, var)
        one[f"{name}-bare"] = (weight, None, None, None, mean, var)
    one["channels-last"] = (one["3x3"][0].to(memory_format=torch.channels_last), *one["3x3"][1:])
    return {name: (torch.float32, 1e-3, *tensors) for name, tensors in one.items()}


def folded_cases(op: str) -> dict[str, tuple]:
    """Return the calls of ``folded_conv`` or ``folded_conv_backward``."""
    return {name: calls[op] for name, calls in folded_calls().items()}


CASES: dict[str, Callable[[], dict[str, tuple]]] = {
    "linear_sq_norms": linear_cases,
    "dense_sq_norms": dense_cases,
    "one_row_sq_norms": one_row_cases,
    "conv_sq_norms": conv_cases,
    "folded_conv_sq_norms": moments_cases,
    "folded_conv": partial(folded_cases, "folded_conv"),
    "folded_conv_backward": partial(folded_cases, "folded_conv_backward"),
    "fold_weights": fold_cases,
    "channel_sums": channel_cases,
    "layer_norm_sums": partial(row_cases, 2),
    "rms_norm_sums": partial(row_cases, 1),
    "broadcast_sums": broadcast_cases,
    "embedding_sq_norms": embedding_cases,
    "categorical_root_cotangent": cotangent_cases,
}
