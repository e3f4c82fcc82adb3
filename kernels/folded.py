"""Folded convolutions in Triton: which kernel serves which call, of fastlr.ops.folded.

Pointwise (folded_pointwise.py) and depthwise (folded_depthwise.py) convolutions of one and two axes
have kernels; dense K x K and grouped ones are NotImplemented: cuDNN serves, through plain torch,
whose parts are ops with kernels again. So are pointwise backward passes whose weight gradient is
too large for the registers of a program, and those that fastlr.ops.gram serves.

What is stored of an input may be before its activation, and its gate apart: kernels apply both on
loading, and the derivative on storing the input's gradient, to which they add that of who else has
read it. `python -m bench.traffic` counts launches and bytes of a network.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fastlr.kernels import folded_depthwise, folded_pointwise
from fastlr.kernels.launching import on_device
from fastlr.ops import gram
from fastlr.ops.activations import ACTIVATIONS
from fastlr.ops.block import Block, Gradients, Loaded
from fastlr.ops.geometry import kind_of


def _where_its_input_is(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """Make the input's device the current one, whose block sizes `tuned` has."""

    @functools.wraps(launcher)
    def launched(x: Loaded, *args: Any, **how: Any) -> Any:
        with on_device(x.tensor):
            return launcher(x, *args, **how)

    return launched


@_where_its_input_is
def folded_conv(
    x: Loaded,  # [B, C, *spatial]
    block: Block,
    residual: Loaded | None = None,  # [B, O, *spatial']
    mean: bool = False,
) -> tuple[Tensor, Tensor]:  # [B, O, *spatial'], both; with ``mean`` the second [B, O, 1, ...]
    """See fastlr.ops.folded.folded_conv."""
    kernels, dtype = _kernels_of(x.tensor, block), x.tensor.dtype
    if kernels is None or block.folded.dtype != dtype:
        return NotImplemented
    if residual is not None and residual.tensor.dtype != dtype:
        return NotImplemented
    gate = contiguous(x.gate)
    if gate is not None and (gate.dtype != dtype or gate.shape[:2] != x.tensor.shape[:2]):
        return NotImplemented
    x = x._replace(gate=gate)
    if x.tensor.ndim == 4:
        return kernels.folded_conv(x, block, residual, mean)
    if residual is not None:
        residual = residual._replace(tensor=with_rows(residual.tensor))
    x = x._replace(tensor=with_rows(x.tensor))
    result = kernels.folded_conv(x, _block_with_rows(block), residual, mean)
    if result is NotImplemented:
        return result
    out, kept = result
    narrow = out.squeeze(2)
    return narrow, narrow if kept is out else kept.squeeze(2)


@_where_its_input_is
def folded_conv_backward(
    x: Loaded,  # [B, C, *spatial]
    gradients: Gradients,
    kept: Tensor,  # [B, O, *spatial']
    block: Block,
    want_input: bool,
    product: Tensor | None = None,  # [B, O, *spatial']
) -> tuple[Tensor | None, ...]:  # of the shape of x, four of [B], with a gate one of its shape
    """See fastlr.ops.folded.folded_conv_backward; ``product`` is not needed."""
    kernels = _kernels_of(x.tensor, block)
    if kernels is None or torch.float64 in (block.weight.dtype, block.channels.dtype):
        return NotImplemented
    for t in (x.gate, gradients.loaded):
        if t is not None and t.dtype != x.tensor.dtype:
            return NotImplemented
    if gram.serves_backward(x.tensor, gradients.output, block):
        return NotImplemented
    x = x._replace(gate=contiguous(x.gate))
    gradients = gradients._replace(mean=contiguous(gradients.mean))
    if x.tensor.ndim == 4:
        return kernels.folded_conv_backward(x, gradients, kept, block, want_input)
    x = x._replace(tensor=with_rows(x.tensor))
    gradients = gradients._replace(
        output=with_rows(gradients.output), loaded=with_rows(gradients.loaded)
    )
    result = kernels.folded_conv_backward(
        x, gradients, with_rows(kept), _block_with_rows(block), want_input
    )
    if result is NotImplemented or result[0] is None:
        return result
    return result[0].squeeze(2), *result[1:]


def _kernels_of(x: Tensor, block: Block) -> ModuleType | None:
    """Return the module whose kernels serve a block with inputs ``x``; None if none does."""
    kind = kind_of(block.weight, block.geometry)
    if kind is None or block.activation not in ACTIVATIONS or x.ndim != block.weight.ndim:
        return None
    return folded_pointwise if kind == "pointwise" else folded_depthwise


def contiguous(t: Tensor | None) -> Tensor | None:
    """Return numbers of channels [B, C, 1, ...], those of a sample next to each other."""
    if t is None or t.stride()[:2] == (t.shape[1], 1):
        return t
    return t.contiguous()


def with_rows(t: Any) -> Any:
    """Return [B, C, L] as [B, C, 1, L]; None stays."""
    return None if t is None else t[:, :, None]


def _block_with_rows(block: Block) -> Block:
    """Return a block of one spatial axis as one of two."""
    return block._replace(
        weight=with_rows(block.weight),
        folded=with_rows(block.folded),
        geometry=block.geometry.with_rows(),
    )
