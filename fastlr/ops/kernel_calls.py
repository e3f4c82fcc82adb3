"""Small calls of ops: the tensors that they are made of, and how they are moved.

``fastlr doctor --kernels``, benchmarks and tests hold kernels to plain torch by such calls.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastlr import ops
from fastlr.ops.block import Block, changed
from fastlr.ops.geometry import ConvGeometry
from fastlr.ops.kernel_checks import with_strides, without_repeats


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


def copied(a: Any, by_sample: bool) -> Any:
    """Return a tensor of its own with the values and strides of another; anything else as it is."""
    return with_strides(without_repeats(a.detach()), a) if isinstance(a, Tensor) else a


def _on(a: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Return a tensor on a device, with the same strides; anything else as it is.

    Numbers in float32 get ``dtype`` if there is one.
    """
    if not isinstance(a, Tensor):
        return a
    kind = dtype if dtype is not None and a.dtype == torch.float32 else a.dtype
    return with_strides(without_repeats(a).to(device, kind), a)
