"""A few small calls of every op that has a kernel, for ``fastlr doctor --kernels``.

Their sizes are odd, so that tiles are broken, and most ops have a call whose memory is laid out
another way. Benchmarks and tests hold kernels to a table of hundreds, bench/kernel_cases.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastlr import ops
from fastlr.ops.block import Block, Gradients, Loaded, changed
from fastlr.ops.geometry import ConvGeometry
from fastlr.ops.kernel_checks import with_strides, without_repeats

Calls = dict[str, tuple]  # name -> arguments


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


def _linear() -> Calls:
    """A [B, N, T, I], g [B, N, T, O]: by the gradient itself and by Gram matrices."""
    few = draw(2, 1, 20, 9), draw(2, 1, 20, 131, seed=1)
    many = draw(2, 2, 9, 67), draw(2, 2, 9, 130, seed=1)
    return {"gradient": few, "gram": many, "rows-last": tuple(swapped(t, 2, 3) for t in few)}


def _dense() -> Calls:
    """Gradients [B, ...]."""
    return {"matrix": (draw(2, 7, 5),), "strided": (swapped(draw(3, 9, 6), 1, 2)[:, 1:, ::2],)}


def _convolution() -> Calls:
    """X [B, images, C, H, W], g [B, images, O, H', W'], weight, geometry."""
    x, g, weight = draw(2, 1, 5, 9, 11), draw(2, 1, 7, 9, 11, seed=1), draw(7, 5, 3, 3)
    same = ConvGeometry((1, 1), (1, 1), (1, 1))
    pointwise = draw(2, 1, 20, 5, 7), draw(2, 1, 17, 5, 7), draw(17, 20, 1, 1)
    return {
        "3x3": (x, g, weight, same),
        "3x3-channels-last": (channels_last(x), channels_last(g), weight, same),
        "pointwise": (*pointwise, ConvGeometry((1, 1), (0, 0), (1, 1))),
    }


def _moments() -> Calls:
    """X [B, C, H, W], g [B, O, H', W'], block."""
    calls: Calls = {}
    for name, (x, g, weight, geometry) in _convolution().items():
        calls[name] = (
            x[:, 0],
            g[:, 0],
            plain_block(weight, draw(3, len(weight), seed=4), geometry),
        )
    return calls


def plain_block(weight: Tensor, statistics: Tensor, geometry: ConvGeometry) -> Block:
    """Return a block of which only norms are wanted: nothing is folded, and nothing follows."""
    channels = torch.cat([torch.zeros_like(statistics[:1]), statistics])
    return Block(weight, weight, channels, "none", geometry)


def _folded(op: str) -> Calls:
    """Calls of ``folded_conv`` or ``folded_conv_backward``."""
    pointwise = ConvGeometry((1, 1), (0, 0), (1, 1))
    depthwise = ConvGeometry((1, 1), (1, 1), (1, 1), groups=16)
    calls: Calls = {}
    for name, act, geometry, kernel in (
        ("pointwise", "hardswish", pointwise, (24, 16, 1, 1)),
        ("depthwise", "relu", depthwise, (16, 1, 3, 3)),
    ):
        x = draw(2, 16, 6, 8, scale=2).contiguous(memory_format=torch.channels_last)
        weight, bias = draw(*kernel), draw(kernel[0], seed=1)
        statistics = draw(3, kernel[0], seed=2).abs() + 0.1
        channels = torch.cat([bias[None], statistics])
        forward = Loaded(x), Block(weight, weight, channels, act, geometry)
        out, kept = ops.get("folded_conv", "reference")(*forward)
        grad = draw(*out.shape, seed=4).contiguous(memory_format=torch.channels_last)
        backward = forward[0], Gradients(grad), kept, forward[1], True
        calls[name] = forward if op == "folded_conv" else backward
    return calls


def _fold_weights() -> Calls:
    """Dtype, eps, and of a convolution weight, bias, gamma, beta, mean, var."""
    vectors = [draw(6, seed=k) for k in range(4)]
    var = draw(6, seed=4).abs() + 0.1
    return {
        "3x3": (torch.float32, (1e-3,), draw(6, 35, 3, 3), *vectors, var),
        "bare": (torch.float32, (1e-3,), draw(6, 1, 3), None, None, None, vectors[3], var),
    }


def _channels() -> Calls:
    """x, g [B, K, C, ...]."""
    x, g = draw(2, 3, 35, 3, 5), draw(2, 3, 35, 3, 5, seed=1)
    return {"images": (x, g), "channels-last": (channels_last(x), channels_last(g))}


def _rows(statistics: int) -> Calls:
    """x, g [B, T, D] and row statistics [B, T, 1]."""
    given = (
        draw(2, 33, 70),
        draw(2, 33, 70, seed=1),
        *(draw(2, 33, 1, seed=2 + k) for k in range(statistics)),
    )
    return {"wide": given, "rows-first": tuple(swapped(t) for t in given)}


def _broadcast() -> Calls:
    """g, another factor or None, axes."""
    g = draw(2, 37, 70)
    return {"bias": (g, None, (1,)), "scale": (swapped(g, 1, 2), draw(2, 37, 70, seed=1), (1,))}


def _embedding() -> Calls:
    """Row numbers [B, T], g [B, T, D]."""
    ids = torch.randint(9, (2, 67), generator=torch.Generator().manual_seed(0))
    g = draw(2, 67, 33)
    return {"tiles": (ids, g), "strides": (swapped(ids).int(), swapped(g, 1, 2))}


def _cotangent() -> Calls:
    """Logits [B, P, C], the samples' numbers, a seed."""
    index = torch.arange(7, 10)
    few, many = 2 * draw(3, 2, 10), 2 * draw(3, 2, 1000)
    return {"few": (few, index, 5), "many": (many, index, 5), "float64": (few.double(), index, 5)}


CALLS: dict[str, Callable[[], Calls]] = {
    "linear_sq_norms": _linear,
    "dense_sq_norms": _dense,
    "conv_sq_norms": _convolution,
    "folded_conv_sq_norms": _moments,
    "folded_conv": partial(_folded, "folded_conv"),
    "folded_conv_backward": partial(_folded, "folded_conv_backward"),
    "fold_weights": _fold_weights,
    "channel_sums": _channels,
    "layer_norm_sums": partial(_rows, 2),
    "rms_norm_sums": partial(_rows, 1),
    "broadcast_sums": _broadcast,
    "embedding_sq_norms": _embedding,
    "categorical_root_cotangent": _cotangent,
}
IMAGES = [  # options of shape_images and its like
    {
        "size": size,
        "rectangles": 3,
        "circles": 4,
        "seed": 1,
        "table": None,
        "dtype": dtype,
        "channels_last": last,
    }
    for size, dtype, last in (
        ((3, 33, 35), torch.float32, False),
        ((3, 64, 32), torch.bfloat16, True),
        ((1, 7, 70), torch.uint8, False),
        ((4, 16, 16), torch.float16, True),
    )
]


def moved(op: str, args: tuple, device: torch.device, dtype: torch.dtype) -> tuple:
    """Return a call's arguments on a device, their float32 data in ``dtype``.

    Strides are the same; parameters and statistics keep their dtype.
    """
    if op == "fold_weights":
        return dtype, *(_on(a, device, None) for a in args[1:])

    def on_device(a: Any, by_sample: bool) -> Any:
        return _on(a, device, dtype if by_sample else None)

    given = changed(on_device, args, ops.SAMPLES[op])
    for i, a in enumerate(given):
        if isinstance(a, Block):
            given[i] = a._replace(folded=_on(a.folded, device, dtype))
    return tuple(given)


def _on(a: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Return a tensor on a device, with the same strides; anything else as it is.

    Numbers in float32 get ``dtype`` if there is one.
    """
    if not isinstance(a, Tensor):
        return a
    kind = dtype if dtype is not None and a.dtype == torch.float32 else a.dtype
    return with_strides(without_repeats(a).to(device, kind), a)
