"""Convolution, batch norm in eval mode and activation as one op, in plain torch.

With sigma = sqrt(running variance + eps), s = gamma / sigma and, for each sample b and output
channel c, M_bc the gradient of the folded weight s_c W_c and S_bc = sum_t g_bct the gradient of the
folded bias, the gradients of the original parameters are

    dW_c = s_c M_c      dgamma_c = (<W_c, M_c> + (bias_c - mean_c) S_c) / sigma_c
    dbeta_c = S_c       dbias_c = s_c S_c

so one pass over the inputs and the gradients at the folded convolution's output gives the norms of
all of them. Throughout, x is [B, C, *spatial] with one image a sample, outputs are [B, O,
*spatial']; inputs stay in their dtype.

The backward pass goes through the batch a few samples at a time, so that the gradient before the
activation stays in the cache between its three uses (input gradient, weight gradients, sums) and no
large temporary is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from fastlr import ops
from fastlr.ops import gram
from fastlr.ops.activations import ACTIVATIONS, KEEPS_OUTPUT, value_of
from fastlr.ops.block import Block, Gradients, Loaded
from fastlr.ops.convolution import conv_sq_norms, gram_pays, weight_grads
from fastlr.ops.geometry import ConvGeometry
from fastlr.ops.linear import raised
from fastlr.ops.pointwise import input_gradient

SLICE_BYTES = 8 << 20  # of gradients worked on at once on a CPU
aten = torch.ops.aten


def folded_conv(
    x: Loaded,  # [B, C, *spatial]
    block: Block,
    residual: Loaded | None = None,  # [B, O, *spatial']
    mean: bool = False,
) -> tuple[Tensor, Tensor]:  # [B, O, *spatial'], both; with ``mean`` the second [B, O, 1, ...]
    """Return the activation of a folded convolution, or of its sum with a residual.

    Args:
        x: what is convolved [B, C, *spatial].
        block: its folded weight and bias, activation and geometry are looked at.
        residual: added before the activation, without a gate [B, O, *spatial'].
        mean: return (the activation's input, the mean of the activation over all positions [B, O,
            1, ...]) instead.

    Returns:
        (output, kept): kept is what `activation_grad` takes: the output itself for KEEPS_OUTPUT,
        else the activation's input; both [B, O, *spatial'] in the dtype of ``x``.
    """
    inputs, activation = value_of(x), block.activation
    added = None if residual is None else value_of(residual)
    pre = aten.convolution(inputs, block.folded, block.bias.to(inputs.dtype), *block.geometry)
    if not mean:
        return _activated(pre, activation, added)
    pre = pre if added is None else pre.add_(added)
    return pre, ACTIVATIONS[activation](pre).mean(list(range(2, pre.ndim)), keepdim=True)


def through_loading(
    gx: Tensor, x: Loaded, at_activation: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients at a loaded tensor, or its activation, and at its gate.

    Args:
        gx: the gradient at `value_of` the tensor [B, C, *spatial].
        x: the loaded tensor.
        at_activation: a gradient at its activation from elsewhere, which is added.
    """
    of_gate = None
    if x.gate is not None:
        active = ACTIVATIONS[x.activation](x.tensor)
        wide = torch.promote_types(gx.dtype, torch.float32)
        sums = (gx * active).sum(list(range(2, gx.ndim)), keepdim=True, dtype=wide)
        gx, of_gate = gx * x.gate, sums.to(x.gate.dtype)
    if at_activation is not None:
        gx = gx + at_activation
    if x.activation != "none" and not x.gradient_at_output:
        gx = ops.run("activation_grad", gx, x.tensor, x.activation)
    return gx, of_gate


def through_activation(gradients: Gradients, kept: Tensor, activation: str) -> Tensor:
    """Return the gradient at the input of a block's activation."""
    if gradients.mean is None:
        return ops.run("activation_grad", gradients.output, kept, activation)
    each = (gradients.mean / prod(kept.shape[2:])).expand(kept.shape)
    return gradients.output + ops.run("activation_grad", each, kept, activation)


def keeps_unfolded_convolution(
    x: Tensor,  # [B, C, *spatial]
    weight: Tensor,  # [O, C / groups, *kernel]
    geometry: ConvGeometry,
) -> bool:
    """Return True if the unfolded convolution of ``x`` is needed later and cheap to keep.

    `folded_conv_sq_norms` will ask for it: ``x`` convolved with the unfolded weight.

    So it is where Gram matrices serve (few positions), on a CPU. In low precision what is kept
    would be too coarse.
    """
    precise = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
    if not precise or x.ndim != 4 or geometry.groups > 1:
        return False
    size = geometry.output_size(x.shape[2:], weight.shape[2:])
    return gram_pays(x, x.new_empty(0, len(weight), *size), weight.shape, geometry)


def folded_and_unfolded_convolution(
    x: Tensor,  # [B, C, *spatial]
    block: Block,
    residual: Tensor | None = None,  # [B, O, *spatial']
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `folded_conv` by the unfolded weight, whose output is scaled afterwards.

    Returns (output, kept, unfolded convolution).
    """
    product = aten.convolution(x, block.weight.to(x.dtype), None, *block.geometry)
    bias, scale, _, _ = block.channels.to(x.dtype).view(4, -1, *[1] * (x.ndim - 2))
    pre = torch.addcmul(bias, product, scale)
    return *_activated(pre, block.activation, residual), product


def _activated(pre: Tensor, act: str, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (output, kept) of an activation; ``pre`` is changed in place."""
    if residual is not None:
        pre.add_(residual)
    if act not in KEEPS_OUTPUT:
        return ACTIVATIONS[act](pre), pre
    if act == "relu":
        pre.relu_()
    elif act == "relu6":
        pre.clamp_(0, 6)
    return pre, pre


def activation_grad(
    grad: Tensor,  # [...]
    kept: Tensor,  # [...]
    act: str,
) -> Tensor:  # [...]
    """Return the gradient at the input of an activation from the one at its output.

    ``kept`` is as returned by `folded_conv`.

    ReLU and ReLU6 pass nothing where the output is at a bound. Shapes and dtype are those of
    ``grad``.
    """
    if act == "none":
        return grad
    if act == "relu":
        return aten.threshold_backward(grad, kept, 0)
    if act == "relu6":
        return aten.hardtanh_backward(grad, kept, 0.0, 6.0)
    if act == "hardswish":
        return aten.hardswish_backward(grad, kept)
    if act == "silu":
        return aten.silu_backward(grad, kept)
    return aten.gelu_backward(grad, kept, approximate="tanh" if act == "gelu_tanh" else "none")


def folded_conv_sq_norms(
    x: Tensor,  # [B, C, *spatial]
    g: Tensor,  # [B, O, *spatial']
    block: Block,
    product: Tensor | None = None,  # [B, O, *spatial']
) -> tuple[Tensor, ...]:  # four of [B]
    """Return the squared norms of the gradients of a folded convolution's parameters.

    They are computed from sums over positions alone.

    Args:
        x: inputs [B, C, *spatial].
        g: gradients at the folded convolution's output (before the activation) [B, O, *spatial'].
        block: its unfolded weight, statistics and geometry are looked at.
        product: the convolution of ``x`` with the unfolded weight [B, O, *spatial'], if it is
            known: <W_c, M_bc> is also its sum with ``g``. Not needed here.

    Returns:
        Of weight, bias, gamma and beta, [B] each, float64.

    Sums in float32 at least.
    """
    if ops.backend_for(x) == "triton" and gram.serves_norms(x, g, block):
        return gram.gram_sq_norms(x, g, block)
    x, g, geometry = raised(x), raised(g), block.geometry
    weight = block.weight.to(g.dtype)
    s, rstd, shift = block.statistics.to(g.dtype)
    sums = g.flatten(2).sum(2)
    if geometry.groups == 1 and gram_pays(x, g, weight.shape, geometry):
        scaled = g * s.view(-1, *[1] * (g.ndim - 2))
        sq = conv_sq_norms(x[:, None], scaled[:, None], weight, geometry)
        if product is None:
            product = aten.convolution(x, weight, None, *geometry)
        inner = (product * g).flatten(2).sum(2)
    else:
        squares, along = [], []
        flat = weight.flatten(1)
        for _, _, grads in weight_grads(x, g, weight.shape, geometry):
            squares.append(torch.linalg.vector_norm(grads, dim=2).mul_(s).double().square().sum(1))
            along.append(torch.linalg.vecdot(grads, flat))
        sq, inner = torch.cat(squares), torch.cat(along)
    of_channels = (sums * s, (inner + shift * sums) * rstd, sums)
    return sq, *(t.double().square().sum(1) for t in of_channels)


def folded_conv_backward(
    x: Loaded,  # [B, C, *spatial]
    gradients: Gradients,
    kept: Tensor,  # [B, O, *spatial']
    block: Block,
    want_input: bool,
    product: Tensor | None = None,  # [B, O, *spatial']
) -> tuple[Tensor | None, ...]:  # of the shape of x, four of [B], with a gate one of its shape
    """Compute the whole backward pass of a folded block: input gradient and squared norms.

    Args:
        x: what was convolved.
        gradients: at all that the block has given out.
        kept: from `folded_conv`.
        block: as in `folded_conv`, all of it.
        want_input: compute the input gradient too.
        product: as in `folded_conv_sq_norms`.

    Returns:
        (gradient of x in its dtype or None, *what `folded_conv_sq_norms` returns*), and where there
        is a gate its gradient.

    It runs the parts of the backward pass in turn, on a CPU for a few samples at a time.
    """
    inputs = value_of(x)
    grad = gradients.output
    if gradients.mean is not None:
        grad = through_activation(gradients, kept, block.activation)
        block = block._replace(activation="none")
    input_grads, norms = [], []
    for lo, hi in _slices(inputs, grad, want_input):
        part, g = inputs[lo:hi], grad[lo:hi]
        g = ops.run("activation_grad", g, kept[lo:hi], block.activation)
        if want_input:
            input_grads.append(input_gradient(g, part, block.folded, block.geometry))
        known = None if product is None else product[lo:hi]
        norms.append(ops.run("folded_conv_sq_norms", part, g, block, known))
    of_parameters = [_joined(parts) for parts in zip(*norms, strict=True)]
    if not want_input:
        return None, *of_parameters
    gx, of_gate = through_loading(_joined(input_grads), x, gradients.loaded)
    return (gx, *of_parameters) if of_gate is None else (gx, *of_parameters, of_gate)


def _slices(x: Tensor, grad: Tensor, want_input: bool) -> list[tuple[int, int]]:
    """Return the ranges of samples that are worked on at a time."""
    whole = [(0, len(x))]
    size = grad.numel() * grad.element_size()
    if x.device.type != "cpu" or size < 2 * SLICE_BYTES:
        return whole
    if want_input and x.numel() > grad.numel():
        return whole  # slices of the input gradient would have to be joined, the larger of the two
    step = -(-len(x) // -(-size // SLICE_BYTES))
    step += step % 2  # samples are shared out among the cores
    return [(lo, min(len(x), lo + step)) for lo in range(0, len(x), step)]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Return the parts of a batch as one."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


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
    """Fold a batch norm into the weight and bias of the convolution before it.

    The batch norm uses its running statistics.

    Args:
        dtype: Dtype of the folded weight.
        eps: Number added to the variance.
        weight: Weight W of the convolution [O, C/groups, *kernel].
        bias: Bias of the convolution [O]; None for zero.
        gamma: Weight of the batch norm [O]; None for one.
        beta: Bias of the batch norm [O]; None for zero.
        mean: Running mean [O].
        var: Running variance [O].

    Returns:
        (s W in ``dtype``, numbers of the channels [4, O]: beta + s (bias - mean), s, 1/sigma, bias
            - mean, in float32 at least).
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    rstd = torch.rsqrt(var.to(wide) + eps)
    scale = rstd if gamma is None else gamma.to(wide) * rstd
    shift = -mean.to(wide) if bias is None else bias.to(wide) - mean.to(wide)
    folded_bias = shift * scale if beta is None else torch.addcmul(beta.to(wide), shift, scale)
    folded = (weight.to(wide) * scale.view(-1, *[1] * (weight.ndim - 1))).to(dtype)
    return folded, torch.stack([folded_bias, scale, rstd, shift])
