"""Pointwise convolutions as products of matrices, on a GPU.

cuDNN would plan each shape and direction in every process, and cuBLAS plans none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastlr import ops
from fastlr.ops.geometry import ConvGeometry, kind_of

aten = torch.ops.aten


def convolved(x: Tensor, weight: Tensor, geometry: ConvGeometry) -> Tensor:
    """Return a convolution without bias, pointwise ones as a product of matrices."""
    if not runs_as_matmul(x, weight, geometry):
        return aten.convolution(x, weight, None, *geometry)
    met = x[strided_pixels(geometry)]
    return (met.movedim(1, -1) @ weight.flatten(1).mT).movedim(-1, 1)


def input_gradient(g: Tensor, x: Tensor, weight: Tensor, geometry: ConvGeometry) -> Tensor:
    """Return the gradient at the input of a convolution, pointwise ones by a product of matrices.

    Args:
        g: Gradient at the output [B, O, *spatial'].
        x: Input [B, C, *spatial], of which only shape and layout matter.
        weight: Weight [O, C / groups, *kernel], in the dtype of ``g``.
        geometry: Geometry of the convolution.
    """
    if not runs_as_matmul(x, weight, geometry):
        mask = [True, False, False]
        return aten.convolution_backward(g, x, weight, None, *geometry, mask)[0]
    at_pixels_met = (g.movedim(1, -1) @ weight.flatten(1)).movedim(-1, 1)
    if max(geometry.stride) == 1:
        return at_pixels_met
    found = torch.zeros_like(x)
    found[strided_pixels(geometry)] = at_pixels_met
    return found


def runs_as_matmul(x: Tensor, weight: Tensor, geometry: ConvGeometry) -> bool:
    """Return True if a convolution of ``x`` runs as a product of matrices: 16 bits, channels last.

    In float32 cuDNN may use TF32, and products of matrices do not by default.
    """
    last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
    fast = last and x.element_size() == 2 and ops.backend_for(x) == "triton"
    return fast and kind_of(weight, geometry) == "pointwise"


def strided_pixels(geometry: ConvGeometry) -> tuple[slice, ...]:
    """Return the index of the pixels that a pointwise convolution meets in [B, C, H, W]."""
    return (slice(None), slice(None), *(slice(None, None, step) for step in geometry.stride))
