"""Per-sample norms of convolutions' weight gradients in Triton: conv_sq_norms, and folded_conv_moments on the same tiles.

An implicit matrix product (product_norms): a tile of the weight gradient M[o, (c, tap)] = sum over the sample's images and
output positions of g[o, t] x[c, t stride + tap dilation - padding] is added up in registers; patches are never written.
Convolutions in one or two dimensions, transposed or not, grouped; others are left to plain torch. Depthwise ones have a
kernel of their own (depthwise).

The limit is reading x and g once. A window makes x be read again for each tap, and a wide side makes the other one be
read again for each tile, by programs of the same sample at about the same time: from L2. Written: one number a tile, and
4 O bytes a sample and tile of inputs in the folded form.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastlr.kernels.depthwise import depthwise_moments, depthwise_sq_norms
from fastlr.kernels.launching import merged
from fastlr.kernels.linear_norms import linear_sq_norms
from fastlr.kernels.product_norms import (
    Operand,
    Sizes,
    Window,
    covered,
    product_cases,
    product_norms,
)


def _depthwise(x: Tensor, g: Tensor, weight: Tensor, scale: Tensor | None, options: Sequence[Sequence[int]]) -> object:
    """Norms (moments, if there is a scale) of a depthwise convolution; x [B, C, *spatial], one image a sample."""
    kernel = weight.shape[2:]
    if len(kernel) == 1:
        x, g, weight, kernel = x.unsqueeze(2), g.unsqueeze(2), weight.unsqueeze(2), (1, *kernel)
        options = [(one, *axis) for one, axis in zip((1, 0, 1), options, strict=True)]
    if scale is None:
        return depthwise_sq_norms(x, g, tuple(kernel), *(tuple(o) for o in options))
    return depthwise_moments(x, g, weight, scale, *(tuple(o) for o in options))


def _operands(x: Tensor, g: Tensor, kernel: Sequence[int], options: Sequence[Sequence[int]], groups: int) -> tuple:
    """Operands of a product from x [B, K, C, H, W] and g [B, K, O, H', W'], its sizes, and its window if it has one."""
    channels, outputs = (t.shape[2] // groups for t in (x, g))
    stride, padding, dilation = (tuple(o) for o in options)
    left, right = (
        Operand(t, t.stride(0), n * t.stride(2), t.stride(2), t.stride(1), *t.stride()[3:])
        for t, n in ((x, channels), (g, outputs))
    )
    sizes = Sizes(len(x), groups, g.shape[1] * g.shape[3] * g.shape[4], channels, outputs)
    if tuple(kernel) == (1, 1) and not any(padding):
        axes = (g.shape[1], *g.shape[3:])
        columns = (
            merged(*zip(axes, (left.image, left.row * stride[0], left.column * stride[1]), strict=True)),
            merged(*zip(axes, (right.image, right.row, right.column), strict=True)),
        )
        if None not in columns:
            plain = (o._replace(image=0, row=0, column=c) for o, c in zip((left, right), columns, strict=True))
            return *plain, sizes, None
    return left, right, sizes, Window(*x.shape[3:], *g.shape[3:], tuple(kernel), stride, padding, dilation)


def _as_image(x: Tensor, g: Tensor, kernel: Sequence[int], options: Sequence[Sequence[int]]) -> tuple:
    """One spatial dimension as two, of which the first has size 1."""
    if len(kernel) == 1:
        x, g = x.unsqueeze(3), g.unsqueeze(3)
        kernel = (1, *kernel)
        options = [(one, *axis) for one, axis in zip((1, 0, 1), options, strict=True)]
    return x, g, kernel, options


def conv_sq_norms(
    x: Tensor,
    g: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """See fastlr.reference.norms.conv_sq_norms."""
    if transposed:  # the gradient of the weight is the same with input and output gradient exchanged
        x, g = g, x
    if not 4 <= x.ndim <= 5 or not covered(x, g):
        return NotImplemented
    if groups == x.shape[2] == g.shape[2] and x.shape[1] == 1:
        return _depthwise(x[:, 0], g[:, 0], weight, None, (stride, padding, dilation))  # type: ignore
    x, g, kernel, options = _as_image(x, g, weight.shape[2:], (stride, padding, dilation))
    left, right, sizes, window = _operands(x, g, kernel, options, groups)
    if window is None:
        shape = (sizes.count, sizes.groups, sizes.rows)
        a = x.as_strided((*shape, sizes.inputs), (left.sample, left.group, left.column, left.channel))
        b = g.as_strided((*shape, sizes.outputs), (right.sample, right.group, right.column, right.channel))
        return linear_sq_norms(a, b)
    return product_norms(left, right, sizes, window)[0]


def folded_conv_moments(
    x: Tensor,
    g: Tensor,
    weight: Tensor,
    scale: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    product: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See fastlr.reference.folded.folded_conv_moments; the sums over positions are float32, ``product`` is not needed."""
    if not 3 <= x.ndim <= 4 or not covered(x, g) or not weight.is_floating_point() or weight.dtype == torch.float64:
        return NotImplemented
    if groups == x.shape[1] == g.shape[1]:
        return _depthwise(x, g, weight, scale, (stride, padding, dilation))
    x, g, kernel, options = _as_image(x[:, None], g[:, None], weight.shape[2:], (stride, padding, dilation))
    operands = _operands(x, g, kernel, options, groups)
    return product_norms(*operands, folded=(weight.contiguous(), scale.contiguous()))


def compile_cases() -> list[tuple]:
    """Variants to compile ahead of time in the tests: (name, kernel, signature, constexprs, options)."""
    forms = ((False, True), (True, False), (True, True))
    return [case for window, folded in forms for case in product_cases(window=window, folded=folded)]
