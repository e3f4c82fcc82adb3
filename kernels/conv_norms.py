"""Per-sample norms of convolutions' weight gradients in Triton.

These are conv_sq_norms, and folded_conv_sq_norms on the same tiles.

An implicit matrix product (product_norms): a tile of the weight gradient M[o, (c, tap)] = sum over
the sample's images and output positions of g[o, t] x[c, t stride + tap dilation - padding] is added
up in registers; patches are never written. Convolutions in one or two dimensions, transposed or
not, grouped; others are left to plain torch. Depthwise ones have a kernel of their own (depthwise).

The limit is reading x and g once. A window makes x be read again for each tap, and a wide side
makes the other one be read again for each tile, by programs of the same sample at about the same
time: from L2. Written: one number a tile, and 4 O bytes a sample and tile of inputs in the folded
form.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastlr.kernels.depthwise import depthwise_norms, depthwise_sq_norms
from fastlr.kernels.launching import covered, merged
from fastlr.kernels.linear_norms import linear_sq_norms
from fastlr.kernels.moments import finish_norms
from fastlr.kernels.product_norms import Operand, Sizes, Window, product_norms
from fastlr.ops import gram
from fastlr.ops.block import Block
from fastlr.ops.geometry import ConvGeometry


def _operands(
    x: Tensor,  # [B, K, C, H, W]
    g: Tensor,  # [B, K, O, H', W']
    kernel: Sequence[int],
    geometry: ConvGeometry,
) -> tuple[Operand, Operand, Sizes, Window | None]:
    """Operands of a product, its sizes, and its window if it has one."""
    groups = geometry.groups
    channels, outputs = (t.shape[2] // groups for t in (x, g))
    left, right = (
        Operand(t, t.stride(0), n * t.stride(2), t.stride(2), t.stride(1), *t.stride()[3:])
        for t, n in ((x, channels), (g, outputs))
    )
    sizes = Sizes(len(x), groups, g.shape[1] * g.shape[3] * g.shape[4], channels, outputs)
    if tuple(kernel) == (1, 1) and not any(geometry.padding):
        axes = (g.shape[1], *g.shape[3:])
        down, across = geometry.stride
        columns = (
            merged(*zip(axes, (left.image, left.row * down, left.column * across), strict=True)),
            merged(*zip(axes, (right.image, right.row, right.column), strict=True)),
        )
        if None not in columns:
            plain = (
                o._replace(image=0, row=0, column=c)
                for o, c in zip((left, right), columns, strict=True)
            )
            return *plain, sizes, None
    return left, right, sizes, Window(*x.shape[3:], *g.shape[3:], tuple(kernel), *geometry[:3])


def conv_sq_norms(
    x: Tensor,  # [B, K, C, *spatial]
    g: Tensor,  # [B, K, O, *spatial']
    weight: Tensor,  # [O, C / groups, *kernel]
    geometry: ConvGeometry,
) -> Tensor:  # [B]
    """See fastlr.ops.convolution.conv_sq_norms."""
    if geometry.transposed:
        x, g, geometry = g, x, geometry.forward()
    if not 4 <= x.ndim <= 5 or not covered(x, g):
        return NotImplemented
    kernel = tuple(weight.shape[2:])
    if x.ndim == 4:
        x, g, kernel, geometry = x.unsqueeze(3), g.unsqueeze(3), (1, *kernel), geometry.with_rows()
    if geometry.groups == x.shape[2] == g.shape[2] and x.shape[1] == 1:
        return depthwise_sq_norms(x[:, 0], g[:, 0], kernel, geometry)
    left, right, sizes, window = _operands(x, g, kernel, geometry)
    if window is None:
        shape = (sizes.count, sizes.groups, sizes.rows)
        a = x.as_strided(
            (*shape, sizes.inputs), (left.sample, left.group, left.column, left.channel)
        )
        b = g.as_strided(
            (*shape, sizes.outputs), (right.sample, right.group, right.column, right.channel)
        )
        return linear_sq_norms(a, b)
    return product_norms(left, right, sizes, window)[0].sum(1, dtype=torch.float64)


def folded_conv_sq_norms(
    x: Tensor,  # [B, C, *spatial]
    g: Tensor,  # [B, O, *spatial']
    block: Block,
    product: Tensor | None = None,  # [B, O, *spatial']
) -> tuple[Tensor, ...]:  # four of [B]
    """See fastlr.ops.folded.folded_conv_sq_norms.

    Sums over positions are float32; ``product`` is not needed. NotImplemented also where
    fastlr.ops.gram serves.
    """
    narrow = block.weight.is_floating_point() and block.weight.dtype != torch.float64
    if not narrow or not 3 <= x.ndim <= 4 or not covered(x, g):
        return NotImplemented
    if gram.serves_norms(x, g, block):
        return NotImplemented
    if x.ndim == 3:
        x, g = x.unsqueeze(2), g.unsqueeze(2)
        block = block._replace(
            weight=block.weight.unsqueeze(2), geometry=block.geometry.with_rows()
        )
    weight, geometry = block.weight, block.geometry
    if geometry.groups == x.shape[1] == g.shape[1]:
        return depthwise_norms(x, g, block)
    operands = _operands(x[:, None], g[:, None], weight.shape[2:], geometry)
    statistics = block.statistics.contiguous()
    squares, inner, sums = product_norms(*operands, folded=(weight, statistics))
    return finish_norms(squares, inner, sums, sums, weight, statistics)
