"""Fast plain torch for the ops of fastlr.ops.reference.folded.

Names and signatures are those of the definitions; inputs stay in their dtype.

The backward pass goes through the batch a few samples at a time, so that the gradient before the
activation stays in the cache between its three uses (input gradient, weight gradients, sums) and no
large temporary is made.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from fastlr import ops
from fastlr.ops.convolution import conv_sq_norms, gram_pays, weight_grads
from fastlr.ops.geometry import ConvGeometry
from fastlr.ops.linear import raised
from fastlr.ops.reference.folded import ACTIVATIONS, KEEPS_OUTPUT

SLICE_BYTES = 8 << 20  # of gradients worked on at once on a CPU
aten = torch.ops.aten


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
    residual = None if residual is None else ACTIVATIONS[residual_before](residual)
    pre = aten.convolution(entering(x, before, gate), weight, bias.to(x.dtype), *geometry)
    if mean:
        pre = pre if residual is None else pre.add_(residual)
        return pre, ACTIVATIONS[act](pre).mean(list(range(2, x.ndim)), keepdim=True)
    return _activated(pre, act, residual)


def entering(x: Tensor, before: str, gate: Tensor | None) -> Tensor:
    """What a convolution is of, of what is stored."""
    x = ACTIVATIONS[before](x)
    return x if gate is None else x * gate


def leaving(
    gx: Tensor, x: Tensor, before: str, settled: bool, gate: Tensor | None, more: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients at what is stored and at the gate.

    They are computed from the gradient at what entered a convolution.
    """
    of_gate = None
    if gate is not None:
        gx, of_gate = ops.run("gate_grad", gx, ACTIVATIONS[before](x), gate)
    gx = gx if more is None else gx + more
    return gx if settled else ops.run("activation_grad", gx, x, before), of_gate


def arriving(grad: Tensor, kept: Tensor, act: str, of_mean: Tensor | None) -> Tensor:
    """The gradient at a convolution's output from the one after it."""
    if of_mean is None:
        return ops.run("activation_grad", grad, kept, act)
    return grad + ops.run(
        "activation_grad", (of_mean / prod(grad.shape[2:])).expand_as(grad), kept, act
    )


def keeps_product(
    x: Tensor,  # [B, C, *spatial]
    weight: Tensor,  # [O, C / groups, *kernel]
    geometry: ConvGeometry,
) -> bool:
    """Return True if the unfolded convolution of ``x`` is needed later and cheap to keep.

    `folded_conv_sq_norms` will ask for it: ``x`` convolved with the unfolded weight.

    So it is where Gram matrices serve (few positions), on a CPU. In low precision what is kept
    would be too coarse.
    """
    if (
        x.device.type != "cpu"
        or x.dtype not in (torch.float32, torch.float64)
        or x.ndim != 4
        or geometry.groups > 1
    ):
        return False
    size = geometry.output_size(x.shape[2:], weight.shape[2:])
    return gram_pays(x, x.new_empty(0, len(weight), *size), weight.shape, geometry)


def conv_and_product(
    x: Tensor,  # [B, C, *spatial]
    weight: Tensor,  # [O, C / groups, *kernel]
    scale: Tensor,  # [O]
    bias: Tensor,  # [O]
    act: str,
    geometry: ConvGeometry,
    residual: Tensor | None = None,  # [B, O, *spatial']
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `folded_conv` by the unfolded weight, whose output is scaled afterwards.

    Returns (output, kept, unfolded convolution).
    """
    product = aten.convolution(x, weight.to(x.dtype), None, *geometry)
    scale, bias = (t.to(x.dtype).view(-1, *[1] * (x.ndim - 2)) for t in (scale, bias))
    return *_activated(torch.addcmul(bias, product, scale), act, residual), product


def _activated(pre: Tensor, act: str, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """(output, kept) of an activation, of ``pre`` changed in place."""
    if residual is not None:
        pre.add_(residual)
    if act in KEEPS_OUTPUT:
        out = pre if act == "none" else pre.relu_() if act == "relu" else pre.clamp_(0, 6)
        return out, out
    return ACTIVATIONS[act](pre), pre


def activation_grad(
    grad: Tensor,  # [...]
    kept: Tensor,  # [...]
    act: str,
) -> Tensor:  # [...]
    """See fastlr.ops.reference.folded.activation_grad."""
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


def gate_grad(
    g: Tensor,  # [B, C, *spatial]
    x: Tensor,  # [B, C, *spatial]
    gate: Tensor,  # [B, C, 1, ...]
) -> tuple[Tensor, Tensor]:  # of the shapes of x and gate
    """See fastlr.ops.reference.folded.gate_grad.

    On a CPU it goes sample by sample, so that the product stays in the cache.
    """
    axes = list(range(2, x.ndim))
    wide = torch.promote_types(x.dtype, torch.float32)
    if x.device.type != "cpu":
        return g * gate, (g * x).sum(axes, keepdim=True, dtype=wide).to(gate.dtype)
    gx, sums = torch.empty_like(x), []
    for one, of, factor, out in zip(g, x, gate, gx, strict=True):
        torch.mul(one, factor, out=out)
        sums.append((one * of).flatten(1).sum(1, dtype=wide))
    return gx, torch.stack(sums).to(gate.dtype).view(gate.shape)


def folded_conv_sq_norms(
    x: Tensor,  # [B, C, *spatial]
    g: Tensor,  # [B, O, *spatial']
    weight: Tensor,  # [O, C / groups, *kernel]
    statistics: Tensor,  # [3, O]
    geometry: ConvGeometry,
    product: Tensor | None = None,  # [B, O, *spatial']
) -> tuple[Tensor, ...]:  # four of [B]
    """See fastlr.ops.reference.folded.folded_conv_sq_norms. Sums in float32 at least."""
    x, g = raised(x), raised(g)
    w = weight.to(g.dtype)
    s, rstd, shift = statistics.to(g.dtype)
    sums = g.flatten(2).sum(2)
    if geometry.groups == 1 and gram_pays(x, g, weight.shape, geometry):
        scaled = g * s.view(-1, *[1] * (g.ndim - 2))
        sq = conv_sq_norms(x[:, None], scaled[:, None], weight, geometry)
        if product is None:
            product = aten.convolution(x, w, None, *geometry)
        inner = (product * g).flatten(2).sum(2)
    else:
        squares, along = [], []
        flat = w.flatten(1)
        for _, _, grads in weight_grads(x, g, weight.shape, geometry):
            squares.append(torch.linalg.vector_norm(grads, dim=2).mul_(s).double().square().sum(1))
            along.append(torch.linalg.vecdot(grads, flat))
        sq, inner = torch.cat(squares), torch.cat(along)
    return sq, *(
        t.double().square().sum(1) for t in (sums * s, (inner + shift * sums) * rstd, sums)
    )


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
    """See fastlr.ops.reference.folded.folded_conv_backward.

    It runs the parts of the backward pass in turn, on a CPU for a few samples at a time.
    """
    if of_mean is not None:
        grad, act = arriving(grad, kept, act, of_mean), "none"
    if before != "none" or gate is not None or more is not None:
        given = (grad, kept, act, folded, weight, statistics, geometry, want_input, product)
        gx, *of_parameters = folded_conv_backward(entering(x, before, gate), *given)
        gx, of_gate = (gx, None) if gx is None else leaving(gx, x, before, settled, gate, more)
        return gx, *of_parameters, *(() if of_gate is None else (of_gate,))
    ranges = [(0, len(x))]
    size = grad.numel() * grad.element_size()
    # slices of the input gradient have to be joined: not where it is the larger one
    if (
        x.device.type == "cpu"
        and size >= 2 * SLICE_BYTES
        and not (want_input and x.numel() > grad.numel())
    ):
        step = -(-len(x) // -(-size // SLICE_BYTES))
        step += step % 2  # samples are shared out among the cores
        ranges = [(lo, min(len(x), lo + step)) for lo in range(0, len(x), step)]
    inputs, parts = [], []
    for lo, hi in ranges:
        g = ops.run("activation_grad", grad[lo:hi], kept[lo:hi], act)
        if want_input:
            backward = aten.convolution_backward
            inputs.append(backward(g, x[lo:hi], folded, None, *geometry, [True, False, False])[0])
        products = () if product is None else (product[lo:hi],)
        parts.append(
            ops.run("folded_conv_sq_norms", x[lo:hi], g, weight, statistics, geometry, *products)
        )
    norms = (torch.cat(part) if len(part) > 1 else part[0] for part in zip(*parts, strict=True))
    gx = None
    if want_input:
        gx = inputs[0] if len(inputs) == 1 else torch.cat(inputs)
    return gx, *norms


def fold_weights(
    dtype: torch.dtype,
    eps: tuple[float, ...],
    *tensors: Any,  # six a convolution: [O, C / groups, *kernel], five of [O]
) -> list[tuple[Tensor, Tensor]]:  # of the shape of the weight, [4, O]
    """See fastlr.ops.reference.folded.fold_weights. In float32 at least."""
    return [_folded(dtype, one, *tensors[6 * i : 6 * i + 6]) for i, one in enumerate(eps)]


def _folded(
    dtype: torch.dtype,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    mean: Tensor,
    var: Tensor,
) -> tuple[Tensor, Tensor]:
    """`fold_weights` of one convolution."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    rstd = torch.rsqrt(var.to(wide) + eps)
    scale = rstd if gamma is None else gamma.to(wide) * rstd
    shift = -mean.to(wide) if bias is None else bias.to(wide) - mean.to(wide)
    folded_bias = shift * scale if beta is None else torch.addcmul(beta.to(wide), shift, scale)
    folded = (weight.to(wide) * scale.view(-1, *[1] * (weight.ndim - 1))).to(dtype)
    return folded, torch.stack([folded_bias, scale, rstd, shift])
