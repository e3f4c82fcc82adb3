"""Norms of a folded convolution from inner products of positions, for few positions on a GPU.

The squared norm of M = sum_t g_t p_t^T, over the positions t of a sample, is also

    ||M||^2 = sum_ts <g_t, g_s> <p_t, p_s>,

so that M is not formed. Products of patches p_t are sums over the taps of products of pixels.

With few positions and many channels this takes a small part of the multiplications of M, and
matrices of 16-bit numbers are multiplied by the library, with sums in float32. The gradients of
gamma need the convolution with the unfolded weight, which is made again: <W_c, M_c> = sum_t g_ct
y_ct. The output that a block keeps gives y as well, but not where gamma is zero or a residual was
added.

`norms_form` and `backward_form` choose between this and the kernels. They are asked for calls that
both can serve; `python -m bench.tune` times both.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlr import ops
from fastlr.ops.block import Block
from fastlr.ops.geometry import ConvGeometry, kind_of
from fastlr.ops.linear import chunks, raised
from fastlr.ops.pointwise import convolved, strided_pixels
from fastlr.ops.tuning import on_device, tuned

LOW = (torch.bfloat16, torch.float16)
# Unless the tuning table decides, Gram matrices are chosen up to this number of positions, and from
# this number of weights. For fewer weights, kernels move fewer bytes in fewer launches.
FEW_POSITIONS, LEAST_WEIGHTS = 64, 1 << 19
MOST_POSITIONS = 256  # Largest number of positions that the tuning table may choose them for.
HELD = 1 << 27  # Elements of Gram matrices held at once.
aten = torch.ops.aten


class NormsForm(NamedTuple):
    """How the norms are made: from Gram matrices, else tile by tile from M."""

    gram: bool


class BackwardForm(NamedTuple):
    """How the backward pass of a pointwise convolution runs.

    Attributes:
        apart: Input gradient by the library and norms by `norms_form`, else both by one kernel.
    """

    apart: bool


@tuned("gram")
def norms_form(
    dtype: torch.dtype, inputs: int, outputs: int, taps: int, pixels: int, positions: int
) -> NormsForm:
    """Return the form of the norms for a convolution of these sizes."""
    return NormsForm(_few_positions_of_many_weights(inputs * taps * outputs, positions))


@tuned("apart")
def backward_form(dtype: torch.dtype, inputs: int, outputs: int, positions: int) -> BackwardForm:
    """Return the form of the backward pass for a pointwise convolution of these sizes."""
    return BackwardForm(_few_positions_of_many_weights(inputs * outputs, positions))


def _few_positions_of_many_weights(weights: int, positions: int) -> bool:
    return positions <= FEW_POSITIONS and weights >= LEAST_WEIGHTS


def serves_norms(x: Tensor, g: Tensor, block: Block) -> bool:
    """Return True if Gram matrices give the norms of a block where kernels could.

    Args:
        x: Inputs [B, C, H, W].
        g: Gradients at the convolution's output [B, O, H', W'].
        block: Block of the convolution.
    """
    if not _covers(x, g, block):
        return False
    inputs, outputs = x.shape[1], g.shape[1]
    taps, positions = prod(block.weight.shape[2:]), prod(g.shape[2:])
    pixels = prod(_padded_size(x, block.geometry)) if taps > 1 else positions
    of_gram = pixels**2 * inputs + positions**2 * outputs
    if of_gram >= positions * taps * inputs * outputs:  # multiplications
        return False
    with on_device(x):
        return norms_form(x.dtype, inputs, outputs, taps, pixels, positions).gram


def serves_backward(x: Tensor, g: Tensor, block: Block) -> bool:
    """Return True if the backward pass of a pointwise block runs apart; see `serves_norms`."""
    if not _covers(x, g, block) or kind_of(block.weight, block.geometry) != "pointwise":
        return False
    with on_device(x):
        return backward_form(x.dtype, x.shape[1], g.shape[1], prod(g.shape[2:])).apart


def _covers(x: Tensor, g: Tensor, block: Block) -> bool:
    """Return True if Gram matrices can serve a call, and could pay."""
    dense = block.geometry.groups == 1 and not block.geometry.transposed
    fits = x.ndim == 4 and x.dtype == g.dtype and x.dtype in LOW and len(x) > 0
    return dense and fits and 0 < prod(g.shape[2:]) <= MOST_POSITIONS


def gram_sq_norms(
    x: Tensor,  # [B, C, H, W]
    g: Tensor,  # [B, O, H', W']
    block: Block,
) -> tuple[Tensor, ...]:  # four of [B]
    """Return what `fastlr.ops.folded.folded_conv_sq_norms` defines, by Gram matrices.

    Gamma's gradient has the digits of a 16-bit y, as in torch's own backward pass of batch norm.
    """
    geometry = block.geometry
    s, rstd, shift = block.statistics.float()
    unfolded = convolved(x, block.weight.to(x.dtype), geometry)
    # sum_t g (y + shift) is sigma times the gradient of gamma
    of_gamma, sums = ops.run("channel_sums", unfolded[:, None], g[:, None], -shift[None])
    of_channels = (sums * s, of_gamma * rstd, sums)
    if kind_of(block.weight, geometry) == "pointwise":
        x, geometry = x[strided_pixels(geometry)], geometry._replace(stride=(1, 1))
        block = block._replace(geometry=geometry)
    pixels, positions = prod(_padded_size(x, geometry)), prod(g.shape[2:])
    ranges = chunks(len(x), pixels**2 + 6 * positions**2, HELD)
    of_weight = torch.cat([_of_weight(x[lo:hi], g[lo:hi], s, block) for lo, hi in ranges])
    return of_weight, *(t.double().square().sum(1) for t in of_channels)


def _of_weight(
    x: Tensor,  # [B, C, H, W]; of a pointwise convolution the pixels that it meets
    g: Tensor,  # [B, O, H', W']
    s: Tensor,  # [O]
    block: Block,
) -> Tensor:  # [B], float64
    """Return the squared norm of S M, with S = diag(s).

    The pixels of each channel are centred, so that inputs that are nearly constant keep their
    digits: a tap k of a patch is p_tk = p'_tk + e_tk m, where e_tk is 0 in the padding and else 1.
    Then, with G_ts = <s g_t, s g_s>,

        ||S M||^2 = sum_ts G_ts (<p'_t, p'_s> + sum_k (2 <p'_tk, m> e_sk + e_tk e_sk <m, m>)).
    """
    mean = x.mean((2, 3), dtype=torch.float32).to(x.dtype)
    rows = _rows(_padded(x - mean[:, :, None, None], block))
    size = _padded_size(x, block.geometry)
    positions, taps = prod(g.shape[2:]), prod(block.weight.shape[2:])
    scaled, largest = _scaled(_rows(g), s)
    of_gradients = _product(scaled, scaled.mT).view(-1, 2, positions, 2, positions)
    of_gradients = of_gradients.sum((1, 3), dtype=torch.float64)

    of_pixels = _product(rows, rows.mT).view(-1, *size, *size)
    of_patches = _over_taps(of_pixels, g, block).sum((-2, -1)).flatten(1)
    with_mean = _over_taps(_product(rows, mean[:, :, None]).view(-1, *size), g, block)
    with_mean = with_mean.reshape(-1, positions, taps)
    inside = _padded(x.new_ones(1, *x.shape[2:], dtype=torch.float64), block)
    inside = _over_taps(inside, g, block).reshape(1, positions, taps)
    of_inside = of_gradients @ inside
    of_mean = mean.double().square().sum(1)
    return largest**2 * (
        (of_gradients.flatten(1) * of_patches).sum(1)
        + 2 * (of_inside * with_mean).sum((1, 2))
        + of_mean * (of_inside * inside).sum((1, 2))
    ).clamp_min(0)


def _scaled(g: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Return s g / largest as the sum of two 16-bit numbers, and the largest of each sample.

    One 16-bit number would be too coarse where M nearly vanishes: where inputs are nearly constant
    and gradients sum to zero. Without the division, float16 would lose small numbers.

    Args:
        g: Gradients [B, T, O].
        s: Scales [O].

    Returns:
        Rows of both numbers [B, 2 T, O] in the dtype of ``g``; largest [B], float64.
    """
    wide = g * s
    largest = wide.abs().amax((1, 2)).clamp_min(torch.finfo(wide.dtype).tiny)
    wide = wide / largest[:, None, None]
    high = wide.to(g.dtype)
    return torch.cat([high, (wide - high).to(g.dtype)], 1), largest.double()


def _padded_size(x: Tensor, geometry: ConvGeometry) -> list[int]:
    return [n + 2 * zeros for n, zeros in zip(x.shape[2:], geometry.padding, strict=True)]


def _padded(x: Tensor, block: Block) -> Tensor:
    above, left = block.geometry.padding
    return F.pad(x, (left, left, above, above))


def _rows(t: Tensor) -> Tensor:
    """[B, C, H, W] -> [B, H W, C]."""
    return t.flatten(2).mT if t.is_contiguous() else t.permute(0, 2, 3, 1).flatten(1, 2)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return the products of matrices [B, N, K] and [B, K, P] with sums in float32 at least.

    Products of 16-bit numbers are exact in float32.
    """
    if a.is_cuda and a.dtype in LOW and hasattr(aten.bmm, "dtype"):  # after torch 2.7
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(raised(a), raised(b))


def _over_taps(products: Tensor, g: Tensor, block: Block) -> Tensor:
    """Return the products of pixels that make those of patches, along two axes more for the taps.

    Args:
        products: Products of padded pixels, [B, H, W], or with each other [B, H, W, H, W].
        g: Gradient at the output [B, O, H', W'].
        block: Block of the convolution.

    Returns:
        A view [B, H', W', *kernel], or [B, H', W', H', W', *kernel].
    """
    geometry, patches = block.geometry, (products.ndim - 1) // 2
    first, *steps = products.stride()
    strides = [a * b for a, b in zip(steps, geometry.stride * patches, strict=True)]
    # A tap moves all patches of a product at once.
    of_taps = [sum(steps[axis::2]) * geometry.dilation[axis] for axis in range(2)]
    shape = (len(products), *tuple(g.shape[2:]) * patches, *block.weight.shape[2:])
    return products.as_strided(shape, (first, *strides, *of_taps))
