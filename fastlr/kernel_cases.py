"""Small calls of every op that has a kernel: odd sizes, memory formats and strides, each kind of tile and of split.

What the tests and ``fastlr doctor --kernels`` hold the kernels to their definitions and to plain torch on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fastlr import ops
from fastlr.reference.folded import ACTIVATIONS

LAYOUTS = {  # of the input, of the output's gradient, of what is kept
    "last": ("last", "last", "last"),
    "planes": ("planes", "planes", "planes"),
    "x-last": ("last", "planes", "planes"),
    "sliced": ("sliced", "sliced", "sliced"),
    "expanded": ("last", "expanded", "planes"),
}
MIXED = {"g-last": ("planes", "last", "last"), "repeated": ("repeated", "planes", "planes")}
ACTS = ("relu", "relu6", "hardswish", "silu", "gelu", "gelu_tanh")


def draw(
    *shape: int, seed: int = 0, offset: float = 0.3, scale: float = 1.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Normal numbers with an offset, so that a missing or a doubled part would show."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale + offset).to(dtype)


def channels_last(t: Tensor, axis: int = 2) -> Tensor:
    """The same values with the channels last in memory."""
    return t.movedim(axis, -1).contiguous().movedim(-1, axis)


# -- convolutions ------------------------------------------------------------------------------------------------------

LARGE = ("3x3_large", "stem")  # slow in the interpreter
CONVOLUTIONS = {  # C, O, kernel, stride, padding, dilation, groups, size, images of a sample
    "pointwise": (6, 10, (1, 1), (1, 1), (0, 0), (1, 1), 1, (5, 7), 1),
    "pointwise_strided": (6, 10, (1, 1), (2, 3), (0, 0), (1, 1), 1, (5, 7), 1),
    "pointwise_grouped": (6, 9, (1, 1), (1, 1), (0, 0), (1, 1), 3, (5, 7), 2),
    "pointwise_padded": (6, 10, (1, 1), (1, 1), (1, 2), (1, 1), 1, (5, 7), 1),
    "3x3": (5, 7, (3, 3), (1, 1), (1, 1), (1, 1), 1, (9, 11), 1),
    "3x3_few_positions": (40, 50, (3, 3), (1, 1), (1, 1), (1, 1), 1, (3, 2), 2),
    "3x3_large": (16, 24, (3, 3), (1, 1), (1, 1), (1, 1), 1, (28, 29), 1),
    "3x3_strided": (5, 7, (3, 3), (2, 2), (1, 1), (1, 1), 1, (9, 12), 1),
    "3x3_dilated": (5, 7, (3, 3), (1, 2), (2, 1), (2, 1), 1, (9, 12), 2),
    "3x5_grouped": (6, 4, (3, 5), (2, 1), (0, 2), (1, 1), 2, (9, 12), 1),
    "stem": (3, 8, (7, 7), (2, 2), (3, 3), (1, 1), 1, (33, 31), 1),
    "depthwise": (12, 12, (3, 3), (1, 1), (1, 1), (1, 1), 12, (9, 7), 1),
    "depthwise_5_strided": (12, 12, (5, 5), (2, 2), (2, 2), (1, 1), 12, (13, 11), 2),
    "depthwise_twice": (6, 12, (3, 3), (1, 1), (1, 1), (1, 1), 6, (9, 7), 1),
    "even_kernel": (5, 7, (2, 4), (1, 1), (0, 2), (1, 1), 1, (9, 8), 1),
    "1d": (5, 7, (3,), (2,), (1,), (1,), 1, (23,), 2),
    "1d_depthwise": (6, 6, (5,), (1,), (2,), (2,), 6, (23,), 1),
    "3d": (3, 4, (3, 2, 3), (1, 2, 1), (1, 0, 1), (1, 1, 1), 1, (5, 6, 7), 1),
}


def convolution(name: str, dtype: torch.dtype, transposed: bool) -> tuple:
    """Arguments of conv_grads for a named case."""
    channels, outputs, kernel, stride, padding, dilation, groups, size, images = CONVOLUTIONS[name]
    x = draw(3, images, channels, *size, dtype=dtype)
    weight = draw(outputs, channels // groups, *kernel, dtype=dtype)
    extra = [0] * len(kernel)
    if transposed:
        weight = draw(channels, outputs // groups, *kernel, dtype=dtype)
        extra = [min(s - 1, 1) for s in stride]
    options = (list(stride), list(padding), list(dilation), transposed, extra, groups)
    y = torch.ops.aten.convolution(x.double().flatten(0, 1), weight.double(), None, *options)
    g = draw(3, images, *y.shape[1:], dtype=dtype, seed=2)
    return x, g, weight, *options


def laid_out(t: Tensor, layout: str) -> Tensor:
    """The values (for "expanded" and "repeated" other ones) with the strides of that layout; ``t`` [B, C, H, W]."""
    if layout == "last":
        return t.contiguous(memory_format=torch.channels_last)
    if layout in ("sliced", "repeated"):
        apart = torch.stack([t, -t], -1).flatten(3)[..., ::2]
        return apart if layout == "sliced" else apart[:, :, :1].expand_as(t)
    return t[:, :, :1, :1].expand_as(t) if layout == "expanded" else t


def case(
    count: int, inputs: int, outputs: int, size: tuple[int, ...], act: str = "relu", layout: str = "last", *,
    kernel: int | tuple[int, ...] = 1, stride: int = 1, padding: int = 0, dilation: int = 1, groups: int = 1,
    want: bool = True, residual: str | None = None,
) -> dict:  # fmt: skip
    """Arguments of a forward and a backward call of a folded convolution; ``layout`` is one of LAYOUTS or MIXED."""
    axes = len(size)
    taps = kernel if isinstance(kernel, tuple) else (kernel,) * axes
    options = ([stride] * axes, [padding] * axes, [dilation] * axes, groups)
    weight, bias = draw(outputs, inputs // groups, *taps), draw(outputs, seed=1, scale=2)
    scale = draw(outputs, seed=2, scale=2).abs() + 0.1
    folded = weight * scale.view(-1, 1, *[1] * axes)
    of_x, of_grad, of_kept = (LAYOUTS | MIXED)[layout]
    x = laid_out(draw(count, inputs, *size, seed=3, scale=2), of_x)
    out, kept = ops.get("folded_conv", "reference")(x, folded, bias, act, *options)
    grad, kept = laid_out(draw(*out.shape, seed=4, scale=2), of_grad), laid_out(kept, of_kept)
    added = () if residual is None else (laid_out(draw(*out.shape, seed=5, scale=2), residual),)
    forward = (x, folded, bias, act, *options, *added)
    return {"folded_conv": forward, "folded_conv_backward": (x, grad, kept, act, folded, weight, scale, *options, want)}


def pointwise_cases() -> dict[str, dict]:
    """Folded convolutions with a kernel of one."""
    cases = {act: case(2, 5, 17, (5, 7), act) for act in ACTIVATIONS}
    cases |= {f"{layout}": case(3, 16, 8, (6, 8), "hardswish", layout) for layout in LAYOUTS}
    cases |= {f"{layout}-odd": case(2, 17, 5, (9, 5), "silu", layout) for layout in LAYOUTS}
    cases |= {f"stride-{layout}": case(2, 5, 16, (9, 6), "relu", layout, stride=2) for layout in ("last", "planes")}
    return cases | {
        "norms-only": case(2, 16, 17, (5, 7), "gelu", want=False),
        "norms-only-stride": case(2, 16, 17, (5, 7), "gelu", "planes", want=False, stride=3),
        "one": case(1, 1, 1, (1, 1)),
        "one-position": case(3, 20, 6, (1, 1), "none"),
        "inputs-in-tiles": case(2, 40, 20, (5, 5), "hardswish"),
        "outputs-in-tiles": case(2, 12, 68, (5, 7), "relu6"),
        "split": case(2, 4, 5, (20, 20), "hardswish"),
        "split-in-tiles": case(1, 36, 3, (19, 20), "silu", "planes"),
        "residual": case(2, 8, 12, (6, 4), "relu", residual="last"),
        "residual-other": case(2, 5, 17, (6, 5), "gelu", residual="planes"),
        "residual-planes": case(2, 5, 7, (6, 5), "none", "planes", residual="planes"),
        "1d": case(2, 5, 17, (11,), "silu", "planes"),
        "1d-stride": case(2, 5, 17, (11,), "relu", "planes", stride=2),
        # the input's positions are a multiple of what is loaded at once, the output's are not, and the other way about
        "g-last": case(2, 8, 12, (4, 6), "silu", "g-last"),
        "stride-g-last": case(2, 8, 12, (4, 6), "relu", "g-last", stride=2),
        "stride-x-last": case(2, 8, 12, (7, 3), "relu", "x-last", stride=2),
        "repeated": case(2, 8, 12, (5, 1), "relu", "repeated"),
    }


def depthwise_cases() -> dict[str, dict]:
    """Folded convolutions with one channel a group."""

    def depthwise(count: int, channels: int, size: tuple[int, ...], *rest: str, **options: Any) -> dict:
        return case(count, channels, channels, size, *rest, groups=channels, **options)

    cases = {act: depthwise(2, 5, (5, 7), act, kernel=3, padding=1) for act in ACTIVATIONS}
    for layout in LAYOUTS:
        cases[f"{layout}"] = depthwise(2, 16, (6, 8), "hardswish", layout, kernel=3, padding=1)
        cases[f"{layout}-odd"] = depthwise(2, 17, (9, 6), "silu", layout, kernel=3, padding=1, stride=2)
    return cases | {
        "5x5": depthwise(2, 16, (9, 6), "hardswish", kernel=5, padding=2),
        "5x5-stride": depthwise(2, 5, (9, 6), "gelu", "planes", kernel=5, padding=2, stride=2),
        "7x7": depthwise(1, 5, (8, 9), "relu", kernel=7, padding=3),
        "3x5": depthwise(2, 5, (8, 9), "relu", kernel=(3, 5), padding=1),
        "even": depthwise(2, 5, (9, 8), "relu", kernel=2, stride=2),
        "1x1-stride": depthwise(2, 5, (9, 8), "relu", kernel=1, stride=3),
        "stride-3": depthwise(2, 5, (9, 7), "relu6", kernel=3, stride=3),
        "no-padding": depthwise(2, 5, (9, 6), "gelu", kernel=3),
        "norms-only": depthwise(2, 5, (9, 6), "gelu", kernel=3, padding=1, want=False),
        "wide-padding": depthwise(2, 5, (9, 8), "relu", kernel=3, padding=2),
        "wider-padding": depthwise(2, 5, (6, 7), "relu", kernel=3, padding=4, stride=2),
        "dilation": depthwise(2, 5, (9, 6), "silu", kernel=3, padding=2, dilation=2),
        "dilation-stride": depthwise(2, 5, (9, 7), "silu", kernel=3, padding=2, dilation=2, stride=2),
        "rows-split": depthwise(1, 5, (35, 8), "relu", kernel=3, padding=1),
        "rows-split-stride": depthwise(1, 5, (47, 9), "relu", kernel=5, padding=2, stride=2),
        "columns-split": depthwise(1, 17, (4, 140), "relu", kernel=3, padding=1, stride=2),
        "residual": depthwise(2, 8, (6, 4), "relu", kernel=3, padding=1, residual="last"),
        "residual-other": depthwise(2, 5, (6, 5), "gelu", kernel=3, residual="planes"),
        "1d": depthwise(2, 5, (11,), "silu", "planes", kernel=3, padding=1),
    }


# -- norms of matrix products and convolutions --------------------------------------------------------------------------


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
            cases[f"{name}-rows-last"] = (a.mT.contiguous().mT, g.mT.contiguous().mT)
            cases[f"{name}-mixed"] = (a.mT.contiguous().mT, g)
            cases[f"{name}-strided"] = (
                draw(count, groups, rows, 2, 2 * inputs, seed=2)[..., 1, ::2],
                draw(count + 1, groups, rows, outputs, 3, seed=3)[1:, ..., 1],
            )
    # Activations far from zero and gradients that sum to nearly nothing: uncentred Gram matrices err by 4e-4 here.
    a, g = draw(2, 1, 48, 150, offset=100), draw(2, 1, 48, 170)
    cases["gram-common-part"] = (a, g - g.mean(2, keepdim=True) + 1e-4)
    cases["heads"] = tuple(draw(2, 5, 3, n).transpose(1, 2) for n in (8, 20))  # a view, as attention has them
    cases["expanded"] = (draw(2, 1, 20, 6), draw(2, 1, 1, 6).expand(2, 1, 20, 6))
    return cases


def _product(name: str) -> bool:
    """One or two dimensions; depthwise with one image a sample is among the folded ones."""
    channels, outputs, kernel, *_, groups, _, images = CONVOLUTIONS[name]
    return len(kernel) < 3 and not (groups == channels == outputs and images == 1)


def conv_cases() -> dict[str, tuple]:
    """Arguments of conv_sq_norms: every form and layout."""
    cases: dict[str, tuple] = {}
    for name in filter(_product, CONVOLUTIONS):
        x, g, *rest = convolution(name, torch.float32, False)
        cases[name] = (x, g, *rest)
        cases[f"{name}-channels-last"] = (channels_last(x, 2), channels_last(g, 2), *rest)
        if name not in LARGE:
            cases[f"{name}-mixed"] = (x, channels_last(g, 2), *rest)
            cases[f"{name}-transposed"] = convolution(name, torch.float32, True)
    x, g, *rest = convolution("3x3", torch.float32, False)
    wide = torch.stack([x, 0 * x], -1)[..., 0]  # a view with strides that are all larger than 1
    cases["3x3-strided-view"] = (wide, torch.cat([g, g], 2)[:, :, : g.shape[2]], *rest)
    none = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    cases["3x3-tap-a-tile"] = (draw(2, 1, 33, 5, 6), draw(2, 1, 34, 3, 4), draw(34, 33, 3, 3), *none)
    vectors = (draw(2, 1, 40, 6, 6), draw(2, 1, 72, 4, 4), draw(72, 40, 3, 3))  # channels divisible by the load width
    cases["3x3-vectors"] = (*vectors, *none)
    cases["3x3-vectors-channels-last"] = (*(channels_last(t, 2) for t in vectors[:2]), vectors[2], *none)
    grouped = (draw(2, 2, 80, 5, 5), draw(2, 2, 70, 3, 3), draw(70, 40, 3, 3), *none[:-1], 2)
    cases["3x3-tap-a-tile-grouped"] = grouped
    cases["dilated"] = (draw(2, 1, 5, 9, 12), draw(2, 1, 7, 5, 8), draw(7, 5, 3, 3), [1, 1], [0, 1], [2, 3], *none[3:])
    one = ([2], [0], [1], False, [0], 1)
    cases["1d-pointwise-strided"] = (draw(2, 1, 20, 17), draw(2, 1, 10, 9), draw(10, 20, 1), *one)
    cases["images-kept-apart"] = tuple(
        t[:, ::2] if k < 2 else t for k, t in enumerate((draw(2, 4, 6, 5, 7), draw(2, 4, 9, 5, 7), draw(9, 6, 1, 1)))
    ) + ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    return cases


def moments_cases() -> dict[str, tuple]:
    """Arguments of folded_conv_moments, of the same convolutions and some more."""
    cases: dict[str, tuple] = {}
    for name, (x, g, weight, stride, padding, dilation, transposed, _, groups) in conv_cases().items():
        if not transposed and not groups == x.shape[2] == g.shape[2]:
            scale = draw(g.shape[2], seed=4)
            cases[name] = (x[:, 0], g[:, 0], weight, scale, stride, padding, dilation, groups)
    x, g, weight, scale, *rest = cases["3x3-tap-a-tile"]
    cases["weight-channels-last"] = (x, g, channels_last(weight, 1), scale, *rest)
    for inputs, outputs, size in ((16, 70, 12), (70, 24, 7), (8, 8, 14)):  # whole and broken tiles on either side
        x, g = draw(2, inputs, size, size), draw(2, outputs, size, size)
        shape = (draw(outputs, inputs, 1, 1), draw(outputs, seed=4), [1, 1], [0, 0], [1, 1], 1)
        cases[f"pointwise-{inputs}-{outputs}"] = (x, g, *shape)
        cases[f"pointwise-{inputs}-{outputs}-channels-last"] = (channels_last(x, 1), channels_last(g, 1), *shape)
    return cases


# -- small reductions, activations, cotangents --------------------------------------------------------------------------


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
    cases["batch-first-in-memory-last"] = (draw(5, 7, 20, 2).movedim(-1, 0)[:, None], draw(2, 1, 5, 7, 20))
    return cases


def row_cases(statistics: int) -> dict[str, tuple]:
    """x, g [B, T, D] and row statistics."""
    cases: dict[str, tuple] = {}
    for name, (count, rows, width) in {
        "one": (1, 1, 1),
        "small": (3, 17, 5),
        "wide": (2, 33, 70),
        "long": (1, 600, 3),
        "longer": (1, 2100, 17),  # more than one program a sum
    }.items():
        x, g = draw(count, rows, width), draw(count, rows, width, seed=1)
        cases[name] = (x, g, *(draw(count, rows, 1, seed=2 + k) for k in range(statistics)))
    x, g, *rest = cases["wide"]
    cases["columns-first"] = (x.mT.contiguous().mT, g.mT.contiguous().mT, *rest)
    cases["rows-first"] = tuple(t.transpose(0, 1).contiguous().transpose(0, 1) for t in (x, g, *rest))
    other = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in rest]
    cases["statistics-in-other-orders"] = (x, g, *other[:1], *rest[1:])
    return cases


def broadcast_cases() -> dict[str, tuple]:
    """g, another factor or None, axes."""
    g = draw(2, 3, 4, 5, 6)
    cases: dict[str, tuple] = {
        f"sum-{''.join(map(str, axes))}": (g, None, axes) for axes in [(1,), (1, 2), (1, 4), (2, 4), (1, 2, 3, 4)]
    }
    cases |= {
        "bias-of-linear": (draw(2, 37, 70), None, (1,)),
        "bias-of-convolution-channels-last": (channels_last(draw(2, 1, 20, 5, 7)), None, (1, 3, 4)),
        "layer-scale": (draw(2, 1, 4, 5, 20), draw(2, 1, 4, 5, 20, seed=1), (1, 2, 3)),
        "layer-scale-channels-first": (draw(2, 1, 20, 5, 7), draw(2, 1, 20, 5, 7, seed=1), (1, 3, 4)),
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
    sizes = {"one": (1, 1, 1, 1), "small": (3, 16, 5, 4), "tiles": (2, 67, 33, 9), "distinct": (2, 40, 7, 10**6)}
    for name, (count, rows, width, numbers) in sizes.items():
        ids = torch.randint(numbers, (count, rows), generator=torch.Generator().manual_seed(0))
        cases[name] = (ids, draw(count, rows, width))
    ids, g = cases["tiles"]
    cases["one-id"] = (torch.zeros_like(ids), g)
    cases["strides"] = (ids.T.contiguous().T.int(), g.mT.contiguous().mT)
    cases["large-ids"] = (ids + (1 << 40), g.transpose(0, 1).contiguous().transpose(0, 1))
    cases["expanded"] = (ids[:1].expand(2, -1), g[:, :1].expand(-1, 67, -1))
    return cases


def activation_cases() -> dict[str, tuple]:
    """Gradient, what was kept, the activation."""
    cases: dict[str, tuple] = {}
    edges = torch.tensor([-1e4, -100, -30, -5, -3, -2.5, -0.0, 0, 1e-30, 0.5, 3, 5.999, 6, 30, 100, 1e4])
    for act in ACTS:
        kept = 3 * draw(3, 7, 5, 11)
        cases[act] = (draw(3, 7, 5, 11, seed=1), kept, act)
        cases[f"{act}-edges"] = (draw(len(edges), seed=1), edges, act)
        last = {"memory_format": torch.channels_last}
        cases[f"{act}-channels-last"] = (draw(3, 7, 5, 11, seed=1).contiguous(**last), kept.contiguous(**last), act)
    cases["permuted"] = (draw(5, 3, 4).permute(2, 0, 1), draw(5, 3, 4, seed=1).permute(2, 0, 1), "silu")
    cases["inside-a-tensor"] = (draw(4, 5)[1:3], draw(4, 5, seed=1)[2:], "gelu")
    return cases


def gate_cases() -> dict[str, tuple]:
    """g, x [B, C, H, W], gate [B, C, 1, 1]."""
    last = {"memory_format": torch.channels_last}
    cases: dict[str, tuple] = {}
    for name, shape in {
        "one": (1, 1, 1, 2),
        "small": (3, 5, 3, 4),
        "wide": (2, 72, 7, 7),
        "long": (1, 17, 13, 11),
    }.items():
        g, x, gate = draw(*shape), draw(*shape, seed=1), draw(*shape[:2], 1, 1, seed=2)
        cases[name] = (g, x, gate)
        cases[f"{name}-channels-last"] = (g.contiguous(**last), x.contiguous(**last), gate)
        cases[f"{name}-mixed"] = (g.contiguous(**last), x, gate.contiguous(**last))
    g, x, gate = cases["small"]
    return cases | {
        "expanded": (g[..., :1, :1].expand_as(g), x, gate),
        "same-gate": (g, x, gate[:1].expand(3, 5, 1, 1)),
    }


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
        "many-positions": (draw(2, 67, 5), index(2), 0),
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


def fold_cases() -> dict[str, tuple]:
    """Weight, bias, gamma, beta, mean, var, eps, dtype."""
    generator = torch.Generator().manual_seed(0)
    cases: dict[str, tuple] = {}
    for name, shape in {
        "pointwise": (5, 7, 1, 1),
        "3x3": (6, 35, 3, 3),
        "depthwise": (9, 1, 5, 5),
        "1d": (4, 3, 3),
    }.items():
        weight = torch.randn(shape, generator=generator)
        bias, gamma, beta, mean = torch.randn(4, shape[0], generator=generator)
        var = torch.rand(shape[0], generator=generator) + 0.1
        cases[name] = (weight, bias, gamma, beta, mean, var, 1e-3, torch.float32)
        cases[f"{name}-bare"] = (weight, None, None, None, mean, var, 1e-5, torch.float32)
    cases["channels-last"] = (cases["3x3"][0].to(memory_format=torch.channels_last), *cases["3x3"][1:])
    return cases


@cache
def folded_calls() -> dict[str, dict[str, tuple]]:
    """Every folded convolution: name -> op -> arguments."""
    kinds = {"pointwise": pointwise_cases(), "depthwise": depthwise_cases()}
    return {f"{kind}-{name}": calls for kind, found in kinds.items() for name, calls in found.items()}


CASES: dict[str, Callable[[], dict[str, tuple]]] = {
    "linear_sq_norms": linear_cases,
    "conv_sq_norms": conv_cases,
    "folded_conv_moments": moments_cases,
    "folded_conv": lambda: {name: calls["folded_conv"] for name, calls in folded_calls().items()},
    "folded_conv_backward": lambda: {name: calls["folded_conv_backward"] for name, calls in folded_calls().items()},
    "fold_weights": fold_cases,
    "activation_grad": activation_cases,
    "gate_grad": gate_cases,
    "channel_sums": channel_cases,
    "layer_norm_sums": lambda: row_cases(2),
    "rms_norm_sums": lambda: row_cases(1),
    "broadcast_sums": broadcast_cases,
    "embedding_sq_norms": embedding_cases,
    "categorical_root_cotangent": cotangent_cases,
}
IMAGES = [  # options of shape_images and its like
    {"size": size, "rectangles": 3, "circles": 4, "seed": 1, "table": None, "dtype": dtype, "channels_last": last}
    for size, dtype, last in (
        ((3, 33, 35), torch.float32, False),
        ((3, 64, 32), torch.bfloat16, True),
        ((1, 7, 70), torch.uint8, False),
        ((4, 16, 16), torch.float16, True),
    )
]
LOW = {
    "folded_conv": (1,),
    "folded_conv_backward": (4,),
}  # of the arguments without samples, those in the dtype of the data


def moved(op: str, args: tuple, device: torch.device, dtype: torch.dtype) -> tuple:
    """Arguments on a device with the same strides, data that is float32 in ``dtype``; parameters and statistics stay."""
    data = (*ops.SAMPLES[op], *LOW.get(op, ()))
    wanted = [
        dtype if i in data and isinstance(a, Tensor) and a.dtype == torch.float32 else None for i, a in enumerate(args)
    ]
    if op == "fold_weights":
        return *(_as(a, device, None) for a in args[:-1]), dtype
    return tuple(_as(a, device, low) for a, low in zip(args, wanted, strict=True))


def _as(a: object, device: torch.device, dtype: torch.dtype | None) -> object:
    if not isinstance(a, Tensor):
        return a
    own = a[tuple(slice(0, 1) if s == 0 else slice(None) for s in a.stride())]
    made = torch.empty_strided(own.shape, a.stride(), dtype=dtype or a.dtype, device=device)
    return made.copy_(own).expand(a.shape)
