"""Definitions of the ops of fastlr.ops.folded."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from fastlr.ops.activations import ACTIVATIONS, KEEPS_OUTPUT, value_of
from fastlr.ops.block import Block, Gradients, Loaded
from fastlr.ops.convolution import conv_grads


def folded_conv(
    x: Loaded,  # [B, C, *spatial]
    block: Block,
    residual: Loaded | None = None,  # [B, O, *spatial']
    mean: bool = False,
) -> tuple[Tensor, Tensor]:  # [B, O, *spatial'], both; with ``mean`` the second [B, O, 1, ...]
    """See fastlr.ops.folded.folded_conv."""
    inputs = value_of(_wide(x))
    pre = torch.ops.aten.convolution(
        inputs, block.folded.double(), block.bias.double(), *block.geometry
    )
    if residual is not None:
        pre = pre + value_of(_wide(residual))
    dtype = x.tensor.dtype
    out = ACTIVATIONS[block.activation](pre)
    if mean:
        return pre.to(dtype), out.mean(list(range(2, pre.ndim)), keepdim=True).to(dtype)
    out = out.to(dtype)
    return out, out if block.activation in KEEPS_OUTPUT else pre.to(dtype)


def _wide(loaded: Loaded) -> Loaded:
    """Return the same in float64."""
    gate = None if loaded.gate is None else loaded.gate.double()
    return loaded._replace(tensor=loaded.tensor.double(), gate=gate)


def activation_grad(
    grad: Tensor,  # [...]
    kept: Tensor,  # [...]
    act: str,
) -> Tensor:  # [...]
    """See fastlr.ops.folded.activation_grad."""
    if act == "none":
        return grad
    if act in KEEPS_OUTPUT:
        inside = kept > 0 if act == "relu" else (kept > 0) & (kept < 6)
        return torch.where(inside, grad, torch.zeros((), dtype=grad.dtype, device=grad.device))
    with torch.enable_grad():
        leaf = kept.detach().double().requires_grad_()
        (input_grad,) = torch.autograd.grad(ACTIVATIONS[act](leaf), leaf, grad.double())
    return input_grad.to(grad.dtype)


def folded_conv_sq_norms(
    x: Tensor,  # [B, C, *spatial]
    g: Tensor,  # [B, O, *spatial']
    block: Block,
    product: Tensor | None = None,  # [B, O, *spatial']
) -> tuple[Tensor, ...]:  # four of [B]
    """See fastlr.ops.folded.folded_conv_sq_norms."""
    wide = x.double()[:, None], g.double()[:, None]
    grads = conv_grads(*wide, block.weight, block.geometry).flatten(2)
    scale, rstd, shift = block.statistics.double()
    inner = (grads * block.weight.double().flatten(1)).sum(2)
    sums = g.double().flatten(2).sum(2)
    of_channels = (sums * scale, (inner + shift * sums) * rstd, sums)
    return (scale[:, None] * grads).square().sum((1, 2)), *(t.square().sum(1) for t in of_channels)


def folded_conv_backward(
    x: Loaded,  # [B, C, *spatial]
    gradients: Gradients,
    kept: Tensor,  # [B, O, *spatial']
    block: Block,
    want_input: bool,
    product: Tensor | None = None,  # [B, O, *spatial']
) -> tuple[Tensor | None, ...]:  # of the shape of x, four of [B], with a gate one of its shape
    """See fastlr.ops.folded.folded_conv_backward."""
    geometry = block.geometry
    if gradients.mean is None:
        g = activation_grad(gradients.output.double(), kept, block.activation)
    else:
        each = gradients.mean.double() / prod(kept.shape[2:])
        of_mean = activation_grad(each.expand(kept.shape), kept, block.activation)
        g = gradients.output.double() + of_mean
    wide = _wide(x)
    inputs = value_of(wide)
    norms = folded_conv_sq_norms(inputs, g, block)
    if not want_input:
        return None, *norms
    # As in fastlr.ops.convolution.conv_grads.
    given = (t.contiguous() for t in (g, inputs, block.folded.double()))
    gx = torch.ops.aten.convolution_backward(*given, None, *geometry, [True, False, False])[0]
    of_gate: list[Tensor] = []
    if x.gate is not None:
        product = gx * ACTIVATIONS[x.activation](wide.tensor)
        of_gate = [product.sum(list(range(2, gx.ndim)), keepdim=True).to(x.gate.dtype)]
        gx = gx * x.gate.double()
    if gradients.loaded is not None:
        gx = gx + gradients.loaded.double()
    if not x.gradient_at_output:
        gx = activation_grad(gx, x.tensor, x.activation)
    return gx.to(x.tensor.dtype), *norms, *of_gate


def fold_weights(
    dtype: torch.dtype,
    eps: float,
    weight: Tensor,  # [O, C / groups, *kernel]
    bias: Tensor | None,  # [O]
    gamma: Tensor | None,  # [O]
    beta: Tensor | None,  # [O]
    mean: Tensor,  # [O]
    var: Tensor,  # [O]
) -> tuple[Tensor, Tensor]:  # of the shape of the weight, [4, O]
    """See fastlr.ops.folded.fold_weights."""
    rstd = (var.double() + eps).rsqrt()
    scale = rstd if gamma is None else gamma.double() * rstd
    shift = -mean.double() if bias is None else bias.double() - mean.double()
    folded_bias = scale * shift
    if beta is not None:
        folded_bias = folded_bias + beta.double()
    folded = weight.double() * scale.view(-1, *[1] * (weight.ndim - 1))
    return folded.to(dtype), torch.stack([folded_bias, scale, rstd, shift])
