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

from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlr import ops
from fastlr.ops.block import Block
from fastlr.ops.geometry import ConvGeometry, kind_of
from fastlr.ops.linear import chunks, raised
from fastlr.ops.tuning import tuned

LOW = (torch.bfloat16, torch.float16)
FEW_POSITIONS = 64  # at most, for Gram matrices where the tuning table says nothing
MOST_POSITIONS = 256  # at most, for Gram matrices at all
LEAST_WEIGHTS = 1 << 16  # smaller weights are a few tiles of a kernel
HELD = 1 << 27  # elements of Gram matrices held at once
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
    taps, positions = prod(block.weight.shape[2:]), prod(g.shape[2:])
    pixels = prod(_padded_size(x, block.geometry)) if taps > 1 else positions
    with _on_device_of(x):
        return norms_form(x.dtype, x.shape[1], g.shape[1], taps, pixels, positions).gram


def serves_backward(x: Tensor, g: Tensor, block: Block) -> bool:
    """Return True if the backward pass of a pointwise block runs apart; see `serves_norms`."""
    if not _covers(x, g, block) or kind_of(block.weight, block.geometry) != "pointwise":
        return False
    with _on_device_of(x):
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
    """Return what `fastlr.ops.reference.folded.folded_conv_sq_norms` defines, by Gram matrices.

    The pixels of each channel are centred, so that inputs that are nearly constant keep their
    digits. With p_t = p'_t + m, M = sum_t g_t p'_t^T + (sum_t g_t) m^T, whose second part has the
    digits of float32; so has <W_c, m> in y_ct = <W_c, p'_t> + <W_c, m>.
    """
    geometry = block.geometry
    if kind_of(block.weight, geometry) == "pointwise":
        x, geometry = x[_pixels_met(geometry)], geometry._replace(stride=(1, 1))
        block = block._replace(geometry=geometry)
    pixels, positions = prod(_padded_size(x, geometry)), prod(g.shape[2:])
    ranges = chunks(len(x), pixels**2 + 2 * positions**2, HELD)
    parts = [_of_samples(x[lo:hi], g[lo:hi], block) for lo, hi in ranges]
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


def _of_samples(x: Tensor, g: Tensor, block: Block) -> tuple[Tensor, ...]:
    """`gram_sq_norms` of some samples; a pointwise convolution has the pixels that it meets."""
    weight, geometry = block.weight, block.geometry
    s, rstd, shift = block.statistics.float()
    above, left = geometry.padding
    mean = x.mean((2, 3), dtype=torch.float32).to(x.dtype)
    x = F.pad(x, (left, left, above, above)) - mean[:, :, None, None]
    x = x.contiguous(memory_format=torch.channels_last)
    unfolded = convolved(x, weight.to(x.dtype), geometry._replace(padding=(0, 0)))
    of_mean = mean.float() @ weight.float().flatten(2).sum(2).mT
    # sum_t g (y + shift) is sigma times the gradient of gamma
    of_gamma, sums = ops.run("channel_sums", unfolded[:, None], g[:, None], -(of_mean + shift))
    of_channels = (sums * s, of_gamma * rstd, sums)
    of_weight = _of_weight(x, mean, g, s, sums, block)
    return of_weight, *(t.double().square().sum(1) for t in of_channels)


def _of_weight(
    x: Tensor,  # [B, C, H, W], centred, with padding
    mean: Tensor,  # [B, C]
    g: Tensor,  # [B, O, H', W']
    s: Tensor,  # [O]
    sums: Tensor,  # [B, O], of g over the positions
    block: Block,
) -> Tensor:  # [B], float64
    """Return the squared norm of S M, with S = diag(s).

    The scales are divided by the largest, as float16 has a narrow range.
    """
    largest = s.abs().amax().clamp_min(torch.finfo(s.dtype).tiny)
    scales = s / largest
    rows = _rows(x)
    scaled = _rows(torch.mul(g, scales[:, None, None], out=torch.empty_like(g)))
    size = x.shape[2:]
    products = _over_taps(_product(rows, rows.mT).view(-1, *size, *size), g, block)
    inner = (products.double() * _product(scaled, scaled.mT)).sum((1, 2))
    with_mean = _over_taps(_product(rows, mean[:, :, None]).view(-1, *size), g, block)
    of_sums = sums.float() * scales
    with_sums = _product(scaled, _in_two(of_sums, g.dtype)).sum(2)
    cross = (with_mean.double() * with_sums).sum(1)
    taps = prod(block.weight.shape[2:])
    common = of_sums.double().square().sum(1) * mean.double().square().sum(1) * taps
    return (inner + 2 * cross + common).clamp_min(0) * largest.double().square()


def convolved(x: Tensor, weight: Tensor, geometry: ConvGeometry) -> Tensor:
    """Return a convolution without bias, pointwise ones as a product of matrices."""
    if not is_product(x, weight, geometry):
        return aten.convolution(x, weight, None, *geometry)
    met = x[_pixels_met(geometry)]
    return (met.movedim(1, -1) @ weight.flatten(1).mT).movedim(-1, 1)


def input_gradient(g: Tensor, x: Tensor, weight: Tensor, geometry: ConvGeometry) -> Tensor:
    """Return the gradient at the input of a convolution, pointwise ones by a product of matrices.

    Args:
        g: Gradient at the output [B, O, *spatial'].
        x: Input [B, C, *spatial], of which only shape and layout matter.
        weight: Weight [O, C / groups, *kernel], in the dtype of ``g``.
        geometry: Geometry of the convolution.
    """
    if not is_product(x, weight, geometry):
        mask = [True, False, False]
        return aten.convolution_backward(g, x, weight, None, *geometry, mask)[0]
    at_pixels_met = (g.movedim(1, -1) @ weight.flatten(1)).movedim(-1, 1)
    if max(geometry.stride) == 1:
        return at_pixels_met
    found = torch.zeros_like(x)
    found[_pixels_met(geometry)] = at_pixels_met
    return found


def is_product(x: Tensor, weight: Tensor, geometry: ConvGeometry) -> bool:
    """Return True if a convolution of ``x`` is a product of matrices as it lies in memory.

    This is for a GPU, where cuDNN would plan each shape and direction.
    """
    channels_last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return (
        kind_of(weight, geometry) == "pointwise"
        and channels_last
        and ops.backend_for(x) == "triton"
    )


def _pixels_met(geometry: ConvGeometry) -> tuple[slice, ...]:
    """Return where a pointwise convolution meets an image [B, C, H, W]."""
    return (slice(None), slice(None), *(slice(None, None, step) for step in geometry.stride))


def _on_device_of(t: Tensor) -> AbstractContextManager:
    """Make the tensor's device the current one, whose tuning table counts."""
    return torch.cuda.device(t.device) if t.is_cuda else nullcontext()


def _padded_size(x: Tensor, geometry: ConvGeometry) -> list[int]:
    return [n + 2 * zeros for n, zeros in zip(x.shape[2:], geometry.padding, strict=True)]


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


def _in_two(t: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, O] -> [B, O, 2] in a dtype of fewer digits, whose sum has twice as many as one."""
    high = t.to(dtype)
    return torch.stack([high, (t - high).to(dtype)], 2)


def _over_taps(products: Tensor, g: Tensor, block: Block) -> Tensor:
    """Return products of patches from products of padded pixels, as sums over the taps.

    Args:
        products: Products of pixels with a vector [B, H, W], or with each other [B, H, W, H, W].
        g: Gradient at the output [B, O, H', W'].
        block: Block of the convolution; a pointwise one has a pixel for each position.

    Returns:
        Products of patches [B, T] or [B, T, T], for T = H' W' positions.
    """
    kernel, geometry = block.weight.shape[2:], block.geometry
    patches, positions = (products.ndim - 1) // 2, g.shape[2:]
    if prod(kernel) > 1 or any(geometry.padding):
        first, *steps = products.stride()
        strides = [a * b for a, b in zip(steps, geometry.stride * patches, strict=True)]
        # A tap moves all patches of a product at once.
        of_rows, of_columns = (sum(steps[axis::2]) * geometry.dilation[axis] for axis in range(2))
        windows = products.as_strided(
            (len(products), *positions * patches, *kernel), (first, *strides, of_rows, of_columns)
        )
        products = windows.sum((-2, -1))
    return products.reshape(-1, *[prod(positions)] * patches)
