"""Calls of the ops on convolutions, for kernel_cases.py.

They have odd sizes, many memory formats and strides, and each kind of tile and of split.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastlr import ops
from fastlr.ops.activations import ACTIVATIONS
from fastlr.ops.block import Block, Gradients, Loaded
from fastlr.ops.geometry import ConvGeometry

LAYOUTS = {  # of the input, of the output's gradient, of what is kept
    "last": ("last", "last", "last"),
    "planes": ("planes", "planes", "planes"),
    "x-last": ("last", "planes", "planes"),
    "sliced": ("sliced", "sliced", "sliced"),
    "expanded": ("last", "expanded", "planes"),
}
MIXED = {"g-last": ("planes", "last", "last"), "repeated": ("repeated", "planes", "planes")}


# -- convolutions
# --------------------------------------------------------------------------------------------------


def draw(
    *shape: int,
    seed: int = 0,
    offset: float = 0.3,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return normal numbers with an offset, so that a missing or a doubled part would show."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale + offset).to(dtype)


def channels_last(t: Tensor, axis: int = 2) -> Tensor:
    """Return the same values with the channels last in memory."""
    return t.movedim(axis, -1).contiguous().movedim(-1, axis)


def swapped(t: Tensor, axis: int = 0, other: int = 1) -> Tensor:
    """Return the same values with two axes swapped in memory."""
    return t.transpose(axis, other).contiguous().transpose(axis, other)


def plain_block(weight: Tensor, statistics: Tensor, geometry: ConvGeometry) -> Block:
    """Return a block of which only norms are wanted: nothing is folded, and nothing follows."""
    channels = torch.cat([torch.zeros_like(statistics[:1]), statistics])
    return Block(weight, weight, channels, "none", geometry)


def geometry(
    axes: int,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    **options: Any,
) -> ConvGeometry:
    """The geometry of a convolution of so many axes; a single number is that of all of them."""
    strides, paddings, dilations = (
        o if isinstance(o, tuple) else (o,) * axes for o in (stride, padding, dilation)
    )
    return ConvGeometry(strides, paddings, dilations, **options)


class Convolution(NamedTuple):
    """A convolution of images [3, images, channels, *size]."""

    channels: int
    outputs: int
    kernel: tuple[int, ...]
    size: tuple[int, ...]
    stride: int | tuple[int, ...] = 1
    padding: int | tuple[int, ...] = 0
    dilation: int | tuple[int, ...] = 1
    groups: int = 1
    images: int = 1  # of a sample


LARGE = ("3x3_large", "stem")  # slow in the interpreter
CONVOLUTIONS = {
    "pointwise": Convolution(6, 10, (1, 1), (5, 7)),
    "pointwise_strided": Convolution(6, 10, (1, 1), (5, 7), stride=(2, 3)),
    "pointwise_grouped": Convolution(6, 9, (1, 1), (5, 7), groups=3, images=2),
    "pointwise_padded": Convolution(6, 10, (1, 1), (5, 7), padding=(1, 2)),
    "3x3": Convolution(5, 7, (3, 3), (9, 11), padding=1),
    "3x3_few_positions": Convolution(40, 50, (3, 3), (3, 2), padding=1, images=2),
    "3x3_large": Convolution(16, 24, (3, 3), (28, 29), padding=1),
    "3x3_strided": Convolution(5, 7, (3, 3), (9, 12), stride=2, padding=1),
    "3x3_dilated": Convolution(
        5, 7, (3, 3), (9, 12), stride=(1, 2), padding=(2, 1), dilation=(2, 1), images=2
    ),
    "3x5_grouped": Convolution(6, 4, (3, 5), (9, 12), stride=(2, 1), padding=(0, 2), groups=2),
    "stem": Convolution(3, 8, (7, 7), (33, 31), stride=2, padding=3),
    "depthwise": Convolution(12, 12, (3, 3), (9, 7), padding=1, groups=12),
    "depthwise_5_strided": Convolution(
        12, 12, (5, 5), (13, 11), stride=2, padding=2, groups=12, images=2
    ),
    "depthwise_twice": Convolution(6, 12, (3, 3), (9, 7), padding=1, groups=6),
    "even_kernel": Convolution(5, 7, (2, 4), (9, 8), padding=(0, 2)),
    "1d": Convolution(5, 7, (3,), (23,), stride=2, padding=1, images=2),
    "1d_depthwise": Convolution(6, 6, (5,), (23,), padding=2, dilation=2, groups=6),
    "3d": Convolution(3, 4, (3, 2, 3), (5, 6, 7), stride=(1, 2, 1), padding=(1, 0, 1)),
}


def convolution(
    name: str, dtype: torch.dtype, transposed: bool
) -> tuple[Tensor, Tensor, Tensor, ConvGeometry]:
    """Arguments of conv_grads for a named case: x, g, weight, geometry."""
    channels, outputs, kernel, size, *steps, groups, images = CONVOLUTIONS[name]
    how = geometry(len(kernel), *steps, groups=groups)
    x = draw(3, images, channels, *size, dtype=dtype)
    weight = draw(outputs, channels // groups, *kernel, dtype=dtype)
    if transposed:
        weight = draw(channels, outputs // groups, *kernel, dtype=dtype)
        how = how._replace(transposed=True, output_padding=tuple(min(s - 1, 1) for s in how.stride))
    y = torch.ops.aten.convolution(x.double().flatten(0, 1), weight.double(), None, *how)
    return x, draw(3, images, *y.shape[1:], dtype=dtype, seed=2), weight, how


def laid_out(t: Tensor, layout: str) -> Tensor:
    """Return the values of ``t`` [B, C, H, W] with the strides of that layout.

    For "expanded" and "repeated" the values are other ones.
    """
    if layout == "last":
        return t.contiguous(memory_format=torch.channels_last)
    if layout in ("sliced", "repeated"):
        apart = torch.stack([t, -t], -1).flatten(3)[..., ::2]
        return apart if layout == "sliced" else apart[:, :, :1].expand_as(t)
    return t[:, :, :1, :1].expand_as(t) if layout == "expanded" else t


def case(
    count: int,
    inputs: int,
    outputs: int,
    size: tuple[int, ...],
    act: str = "relu",
    layout: str = "last",
    *,
    kernel: int | tuple[int, ...] = 1,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    groups: int = 1,
    want: bool = True,
    residual: str | None = None,
    before: str = "none",
    gate: bool = False,
    gradient_at_output: bool = False,
    more: str | None = None,
    mean: bool = False,
) -> dict:
    """Return the arguments of a forward and a backward call of a folded convolution.

    ``layout`` is one of LAYOUTS or MIXED.

    ``before`` is applied to the inputs and to the residual as they are loaded;
    ``gradient_at_output``: the gradient at its output is wanted; ``more`` is the layout of a
    gradient that is added there.
    """
    axes = len(size)
    taps = kernel if isinstance(kernel, tuple) else (kernel,) * axes
    how = geometry(axes, stride, padding, dilation, groups=groups)
    weight, bias = draw(outputs, inputs // groups, *taps), draw(outputs, seed=1, scale=2)
    statistics = draw(3, outputs, seed=2, scale=2)
    statistics[0] = statistics[0].abs() + 0.1
    folded = weight * statistics[0].view(-1, 1, *[1] * axes)
    of_x, of_grad, of_kept = (LAYOUTS | MIXED)[layout]
    x = laid_out(draw(count, inputs, *size, seed=3, scale=2), of_x)
    block = Block(weight, folded, torch.cat([bias[None], statistics]), act, how)
    factors = draw(count, inputs, *[1] * axes, seed=6) if gate else None
    loaded = Loaded(x, before, factors, gradient_at_output)
    out, kept = ops.get("folded_conv", "torch")(loaded, block)
    grad, kept = laid_out(draw(*out.shape, seed=4, scale=2), of_grad), laid_out(kept, of_kept)
    added = others = of_mean = None
    if residual is not None:
        added = Loaded(laid_out(draw(*out.shape, seed=5, scale=2), residual), before)
    if more is not None:
        others = laid_out(draw(*x.shape, seed=7, scale=2), more)
    if mean:
        of_mean = draw(count, outputs, *[1] * axes, seed=8, scale=9)
    return {
        "folded_conv": (loaded, block, added, mean),
        "folded_conv_backward": (loaded, Gradients(grad, others, of_mean), kept, block, want),
    }


def closed(calls: dict) -> dict:
    """Return the calls with gradients that are infinite where an activation is closed.

    Nothing passes through the activation before or after the convolution there.
    """
    x, gradients, kept, block, want = calls["folded_conv_backward"]
    grad, others, _ = gradients
    if block.activation == "relu":
        grad = torch.where(kept > 0, grad, torch.inf)
    if others is not None:
        others = torch.where(x.tensor > 0, others, torch.inf)
    return calls | {"folded_conv_backward": (x, Gradients(grad, others), kept, block, want)}


def pointwise_cases() -> dict[str, dict]:
    """Folded convolutions with a kernel of one."""
    cases = {act: case(2, 5, 17, (5, 7), act) for act in ACTIVATIONS}
    cases |= {f"{layout}": case(3, 16, 8, (6, 8), "hardswish", layout) for layout in LAYOUTS}
    cases |= {f"{layout}-odd": case(2, 17, 5, (9, 5), "silu", layout) for layout in LAYOUTS}
    cases |= {
        f"stride-{layout}": case(2, 5, 16, (9, 6), "relu", layout, stride=2)
        for layout in ("last", "planes")
    }
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
        **{f"before-{act}": case(2, 5, 17, (5, 7), "none", before=act) for act in ACTIVATIONS},
        "closed": closed(case(2, 16, 24, (5, 7), "relu")),
        "before-closed": closed(case(2, 16, 24, (6, 8), "relu", before="relu", more="last")),
        "few-positions-closed": closed(
            case(1, 16, 136, (5, 5), "relu", before="relu", more="last")
        ),
        "before": case(
            2, 16, 24, (6, 8), "relu", before="hardswish", residual="planes", more="planes"
        ),
        "before-more": case(
            2, 8, 12, (6, 4), "none", before="hardswish", residual="last", more="last", gate=True
        ),
        "before-odd": case(
            2, 17, 5, (9, 5), "none", "planes", before="silu", gate=True, more="planes"
        ),
        "before-at-output": case(
            2,
            40,
            20,
            (5, 5),
            "hardswish",
            before="relu6",
            gate=True,
            gradient_at_output=True,
            more="last",
        ),
        "before-split": case(
            1, 4, 5, (20, 20), "none", before="relu", residual="last", more="last"
        ),
        "before-stride": case(2, 5, 16, (9, 6), "relu", before="hardswish", stride=2),
        "before-wanted-by-none": case(2, 16, 17, (5, 7), "none", before="gelu", want=False),
        "few-positions": case(2, 33, 140, (5, 7), "hardswish", before="relu", more="planes"),
        "few-positions-gate": case(
            2, 40, 136, (4, 6), "none", before="hardswish", gate=True, more="last"
        ),
        "few-positions-odd": case(1, 17, 131, (9, 5), "silu", "x-last"),
        "few-positions-planes": case(
            1, 24, 136, (6, 8), "relu", "planes", before="silu", gradient_at_output=True, gate=True
        ),
        "few-positions-norms": case(2, 17, 130, (5, 5), "gelu", want=False),
        "few-positions-expanded": case(2, 16, 136, (5, 5), "hardswish", "expanded"),
        "1d-before": case(
            2, 5, 17, (11,), "none", "planes", before="silu", gate=True, more="planes"
        ),
        "1d": case(2, 5, 17, (11,), "silu", "planes"),
        "1d-stride": case(2, 5, 17, (11,), "relu", "planes", stride=2),
        # the input's positions are a multiple of what is loaded at once, the output's are not, and
        # the other way about
        "g-last": case(2, 8, 12, (4, 6), "silu", "g-last"),
        "stride-g-last": case(2, 8, 12, (4, 6), "relu", "g-last", stride=2),
        "stride-x-last": case(2, 8, 12, (7, 3), "relu", "x-last", stride=2),
        "repeated": case(2, 8, 12, (5, 1), "relu", "repeated"),
    }


def depthwise_cases() -> dict[str, dict]:
    """Folded convolutions with one channel a group."""

    def depthwise(
        count: int, channels: int, size: tuple[int, ...], *rest: str, **options: Any
    ) -> dict:
        return case(count, channels, channels, size, *rest, groups=channels, **options)

    cases = {act: depthwise(2, 5, (5, 7), act, kernel=3, padding=1) for act in ACTIVATIONS}
    for layout in LAYOUTS:
        cases[f"{layout}"] = depthwise(2, 16, (6, 8), "hardswish", layout, kernel=3, padding=1)
        cases[f"{layout}-odd"] = depthwise(
            2, 17, (9, 6), "silu", layout, kernel=3, padding=1, stride=2
        )
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
        "dilation-stride": depthwise(
            2, 5, (9, 7), "silu", kernel=3, padding=2, dilation=2, stride=2
        ),
        "rows-split": depthwise(1, 5, (35, 8), "relu", kernel=3, padding=1),
        "rows-split-stride": depthwise(1, 5, (47, 9), "relu", kernel=5, padding=2, stride=2),
        "columns-split": depthwise(1, 17, (4, 140), "relu", kernel=3, padding=1, stride=2),
        "residual": depthwise(2, 8, (6, 4), "relu", kernel=3, padding=1, residual="last"),
        "residual-other": depthwise(2, 5, (6, 5), "gelu", kernel=3, residual="planes"),
        **{
            f"before-{act}": depthwise(2, 5, (5, 7), "none", kernel=3, padding=1, before=act)
            for act in ACTIVATIONS
        },
        "before": depthwise(
            2,
            16,
            (6, 8),
            "none",
            kernel=3,
            padding=1,
            before="hardswish",
            residual="last",
            more="last",
        ),
        "before-closed": closed(
            depthwise(2, 16, (6, 8), "relu", kernel=3, padding=1, before="relu", more="last")
        ),
        "before-mean": depthwise(
            2, 16, (9, 6), "hardswish", kernel=3, padding=1, before="relu", more="planes", mean=True
        ),
        "before-mean-stride": depthwise(
            2,
            17,
            (9, 7),
            "silu",
            "planes",
            kernel=5,
            padding=2,
            stride=2,
            before="gelu",
            gradient_at_output=True,
            mean=True,
        ),
        "before-mean-columns": depthwise(
            1, 5, (5, 140), "relu", kernel=3, padding=1, before="none", mean=True
        ),
        "before-stride-more": depthwise(
            2, 5, (9, 7), "relu", kernel=3, stride=3, before="relu6", more="last"
        ),
        "before-rows-split": depthwise(
            1, 5, (35, 8), "none", kernel=3, padding=1, before="hardswish", more="last"
        ),
        "1d-before": depthwise(
            2, 5, (11,), "relu", "planes", kernel=3, padding=1, before="silu", more="planes"
        ),
        "1d": depthwise(2, 5, (11,), "silu", "planes", kernel=3, padding=1),
    }


@cache
def folded_calls() -> dict[str, dict[str, tuple]]:
    """Every folded convolution: name -> op -> arguments."""
    kinds = {"pointwise": pointwise_cases(), "depthwise": depthwise_cases()}
    return {
        f"{kind}-{name}": calls for kind, cases in kinds.items() for name, calls in cases.items()
    }


# -- norms of the weight's gradient
# --------------------------------------------------------------------------------------


def _has_kernel(layer: Convolution) -> bool:
    """Return True if a kernel serves this convolution: one of one or two dimensions.

    Not a depthwise one with one image a sample, which is among the folded ones.
    """
    depthwise = layer.groups == layer.channels == layer.outputs
    return len(layer.kernel) < 3 and not (depthwise and layer.images == 1)


def conv_cases() -> dict[str, tuple]:
    """Arguments of conv_sq_norms: every form and layout."""
    cases: dict[str, tuple] = {}
    for name, layer in CONVOLUTIONS.items():
        if not _has_kernel(layer):
            continue
        x, g, *rest = convolution(name, torch.float32, False)
        cases[name] = (x, g, *rest)
        cases[f"{name}-channels-last"] = (channels_last(x), channels_last(g), *rest)
        if name not in LARGE:
            cases[f"{name}-mixed"] = (x, channels_last(g), *rest)
            cases[f"{name}-transposed"] = convolution(name, torch.float32, True)
    x, g, *rest = convolution("3x3", torch.float32, False)
    wide = torch.stack([x, 0 * x], -1)[..., 0]  # a view with strides that are all larger than 1
    apart = draw(2, 4, 6, 5, 7), draw(2, 4, 9, 5, 7)
    plain = geometry(2)
    vectors = (
        draw(2, 1, 40, 6, 6),
        draw(2, 1, 72, 4, 4),
        draw(72, 40, 3, 3),
    )  # channels divisible by the load width
    grouped = (
        draw(2, 2, 80, 5, 5),
        draw(2, 2, 70, 3, 3),
        draw(70, 40, 3, 3),
        geometry(2, groups=2),
    )
    dilated = geometry(2, padding=(0, 1), dilation=(2, 3))
    return cases | {
        "3x3-strided-view": (wide, torch.cat([g, g], 2)[:, :, : g.shape[2]], *rest),
        "3x3-tap-a-tile": (draw(2, 1, 33, 5, 6), draw(2, 1, 34, 3, 4), draw(34, 33, 3, 3), plain),
        "3x3-vectors": (*vectors, plain),
        "3x3-vectors-channels-last": (*(channels_last(t) for t in vectors[:2]), vectors[2], plain),
        "3x3-tap-a-tile-grouped": grouped,
        "dilated": (draw(2, 1, 5, 9, 12), draw(2, 1, 7, 5, 8), draw(7, 5, 3, 3), dilated),
        "1d-pointwise-strided": (
            draw(2, 1, 20, 17),
            draw(2, 1, 10, 9),
            draw(10, 20, 1),
            geometry(1, stride=2),
        ),
        "images-kept-apart": (*(t[:, ::2] for t in apart), draw(9, 6, 1, 1), plain),
    }


def moments_cases() -> dict[str, tuple]:
    """Arguments of folded_conv_sq_norms, of the same convolutions and some more."""
    cases: dict[str, tuple] = {}
    for name, (x, g, weight, how) in conv_cases().items():
        if not how.transposed and not how.groups == x.shape[2] == g.shape[2]:
            block = plain_block(weight, draw(3, g.shape[2], seed=4), how)
            cases[name] = (x[:, 0], g[:, 0], block)
    x, g, block = cases["3x3-tap-a-tile"]
    last = block._replace(weight=channels_last(block.weight, 1))
    cases["weight-channels-last"] = (x, g, last)
    for inputs, outputs, size in (
        (16, 70, 12),
        (70, 24, 7),
        (8, 8, 14),
    ):  # whole and broken tiles on either side
        x, g = draw(2, inputs, size, size), draw(2, outputs, size, size)
        weight, statistics = draw(outputs, inputs, 1, 1), draw(3, outputs, seed=4)
        block = plain_block(weight, statistics, geometry(2))
        cases[f"pointwise-{inputs}-{outputs}"] = (x, g, block)
        cases[f"pointwise-{inputs}-{outputs}-channels-last"] = (
            channels_last(x, 1),
            channels_last(g, 1),
            block,
        )
    return cases
