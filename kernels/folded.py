"""Folded convolutions in Triton: which kernel serves which call, of fastlr.ops.reference.folded.

Pointwise (folded_pointwise.py) and depthwise (folded_depthwise.py) convolutions of one and two axes
have kernels; dense K x K and grouped ones are NotImplemented: cuDNN serves, through plain torch,
whose parts are ops with kernels again. So are pointwise backward passes whose weight gradient is
too large for the registers of a program.

What is stored of an input may be before its activation, and its gate apart: kernels apply both on
loading, and the derivative on storing the input's gradient, to which they add that of who else has
read it. `python -m bench.traffic` counts launches and bytes of a network.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastlr.kernels import folded_depthwise, folded_pointwise
from fastlr.kernels.depthwise import depthwise_backward
from fastlr.ops.geometry import ConvGeometry, kind_of
from fastlr.ops.reference.folded import ACTIVATIONS


def folded_conv(
    x: Tensor,  # [B, C, *spatial]
    weight: Tensor,  # [O, C / groups, *kernel]
    bias: Tensor,  # [O]
    act: str,
    geometry: ConvGeometry,
    residual: Tensor | None = None,  # [B, O, *spatial']
    before: str = "none",
    gate: Tensor | None = None,  # [B, C, 1, ...]
    residual_before: str = "none",
    mean: bool = False,
) -> tuple[Tensor, Tensor]:  # [B, O, *spatial'], both; with ``mean`` the second [B, O, 1, ...]
    """See fastlr.ops.reference.folded.folded_conv."""
    kind = kind_of(weight, geometry)
    if kind is None or act not in ACTIVATIONS or x.ndim != weight.ndim or weight.dtype != x.dtype:
        return NotImplemented
    if residual is not None and residual.dtype != x.dtype:
        return NotImplemented
    if gate is not None and (gate.dtype != x.dtype or gate.shape[:2] != x.shape[:2]):
        return NotImplemented
    flat = x.ndim == 3
    x, weight, residual = (
        t[:, :, None] if flat and t is not None else t for t in (x, weight, residual)
    )
    kernels = folded_pointwise if kind == "pointwise" else folded_depthwise
    gate, geometry = contiguous(gate), geometry.with_rows() if flat else geometry
    result = kernels.folded_conv(
        x, weight, bias, act, geometry, residual, before, gate, residual_before, mean
    )
    if result is NotImplemented or not flat:
        return result
    out, kept = result
    narrow = out.squeeze(2)
    return narrow, narrow if kept is out else kept.squeeze(2)


def contiguous(t: Tensor | None) -> Tensor | None:
    """The same numbers of channels [B, C, 1, ...], those of a sample next to each other."""
    return None if t is None else t if t.stride()[:2] == (t.shape[1], 1) else t.contiguous()


def folded_conv_backward(
    x: Tensor,  # [B, C, *spatial]
    grad: Tensor,  # [B, O, *spatial']
    kept: Tensor,  # [B, O, *spatial']
    act: str,
    folded: Tensor,  # [O, C / groups, *kernel]
    weight: Tensor,  # [O, C / groups, *kernel]
    statistics: Tensor,  # [3, O]
    geometry: ConvGeometry,
    want_input: bool,
    product: Tensor | None = None,  # [B, O, *spatial']
    before: str = "none",
    settled: bool = False,
    gate: Tensor | None = None,  # [B, C, 1, ...]
    more: Tensor | None = None,  # [B, C, *spatial]
    of_mean: Tensor | None = None,  # [B, O, 1, ...]
) -> tuple[Tensor | None, ...]:  # of the shape of x, four of [B], with a gate one of its shape
    """See fastlr.ops.reference.folded.folded_conv_backward; ``product`` is not needed."""
    kind = kind_of(weight, geometry)
    if kind is None or act not in ACTIVATIONS or x.ndim != weight.ndim:
        return NotImplemented
    if torch.float64 in (weight.dtype, statistics.dtype) or {
        t.dtype for t in (gate, more) if t is not None
    } - {x.dtype}:
        return NotImplemented
    flat = x.ndim == 3
    tensors = (x, grad, kept, folded, weight, more)
    x, grad, kept, folded, weight, more = (
        t[:, :, None] if flat and t is not None else t for t in tensors
    )
    gate, of_mean = contiguous(gate), contiguous(of_mean)
    backward = folded_pointwise.folded_conv_backward if kind == "pointwise" else depthwise_backward
    geometry = geometry.with_rows() if flat else geometry
    given = (x, grad, kept, act, folded, weight, statistics, geometry, want_input)
    result = backward(*given, before, settled, gate, more, of_mean)
    if result is NotImplemented or not flat or result[0] is None:
        return result
    return result[0].squeeze(2), *result[1:]
