"""Fast plain torch for the ops of fastlr.reference.folded, same names and signatures; inputs stay in their dtype.

The backward pass goes through the batch a few samples at a time, so that the gradient before the activation stays in the
cache between its three uses (input gradient, weight gradients, sums) and no large temporary is made.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastlr import ops
from fastlr.reference.folded import ACTIVATIONS, KEEPS_OUTPUT, output_size
from fastlr.torch_conv import conv_sq_norms, gram_pays, weight_grads
from fastlr.torch_ops import raised

SLICE_BYTES = 8 << 20  # of gradients worked on at once on a CPU
aten = torch.ops.aten


def folded_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    act: str,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See fastlr.reference.folded.folded_conv."""
    zero = [0] * len(stride)
    pre = aten.convolution(x, weight, bias.to(x.dtype), stride, padding, dilation, False, zero, groups)
    return _activated(pre, act, residual)


def keeps_product(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> bool:
    """Whether `folded_conv_moments` will ask for the convolution of ``x`` with the unfolded weight, and it is cheap to keep.

    So it is where Gram matrices serve (few positions), on a CPU. In low precision what is kept would be too coarse.
    """
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64) or x.ndim != 4 or groups > 1:
        return False
    size = output_size(x.shape[2:], weight.shape[2:], stride, padding, dilation)
    return gram_pays(x, x.new_empty(0, len(weight), *size), weight.shape, padding)


def conv_and_product(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor, act: str, options: tuple, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`folded_conv` by the unfolded weight, whose output is scaled [O] afterwards: (output, kept, unfolded convolution).

    ``options`` are those of `folded_conv`: stride, padding, dilation and groups.
    """
    *geometry, groups = options
    product = aten.convolution(x, weight.to(x.dtype), None, *geometry, False, [0] * len(geometry[0]), groups)
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


def activation_grad(grad: Tensor, kept: Tensor, act: str) -> Tensor:
    """See fastlr.reference.folded.activation_grad."""
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


def gate_grad(g: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """See fastlr.reference.folded.gate_grad. On a CPU sample by sample, so that the product stays in the cache."""
    axes = list(range(2, x.ndim))
    wide = torch.promote_types(x.dtype, torch.float32)
    if x.device.type != "cpu":
        return g * gate, (g * x).sum(axes, keepdim=True, dtype=wide).to(gate.dtype)
    gx, sums = torch.empty_like(x), []
    for one, of, factor, out in zip(g, x, gate, gx, strict=True):
        torch.mul(one, factor, out=out)
        sums.append((one * of).flatten(1).sum(1, dtype=wide))
    return gx, torch.stack(sums).to(gate.dtype).view(gate.shape)


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
    """See fastlr.reference.folded.folded_conv_moments. Sums in float32 at least."""
    x, g = raised(x), raised(g)
    w = weight.to(g.dtype)
    s = scale.to(g.dtype)
    sums = g.flatten(2).sum(2)
    if groups == 1 and gram_pays(x, g, weight.shape, padding):
        options = (stride, padding, dilation)
        none = [0] * len(stride)
        scaled = g * s.view(-1, *[1] * (g.ndim - 2))
        sq = conv_sq_norms(x[:, None], scaled[:, None], weight, *options, False, none, 1)
        if product is None:
            product = aten.convolution(x, w, None, *options, False, none, groups)
        return sq, (product * g).flatten(2).sum(2), sums
    squares, inner = [], []
    flat = w.flatten(1)
    for _, _, grads in weight_grads(x, g, weight.shape, stride, padding, dilation, groups):
        squares.append(torch.linalg.vector_norm(grads, dim=2).mul_(s).double().square().sum(1))
        inner.append(torch.linalg.vecdot(grads, flat))
    return torch.cat(squares), torch.cat(inner), sums


def folded_conv_backward(
    x: Tensor,
    grad: Tensor,
    kept: Tensor,
    act: str,
    folded: Tensor,
    weight: Tensor,
    scale: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    want_input: bool,
    product: Tensor | None = None,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """See fastlr.reference.folded.folded_conv_backward: its parts in turn, on a CPU for a few samples at a time."""
    options = (stride, padding, dilation)
    ranges = [(0, len(x))]
    size = grad.numel() * grad.element_size()
    # slices of the input gradient have to be joined: not where it is the larger one
    if x.device.type == "cpu" and size >= 2 * SLICE_BYTES and not (want_input and x.numel() > grad.numel()):
        step = -(-len(x) // -(-size // SLICE_BYTES))
        step += step % 2  # samples are shared out among the cores
        ranges = [(lo, min(len(x), lo + step)) for lo in range(0, len(x), step)]
    inputs, parts = [], []
    for lo, hi in ranges:
        g = ops.run("activation_grad", grad[lo:hi], kept[lo:hi], act)
        if want_input:
            inputs.append(_input_grad(g, x[lo:hi], folded, *options, groups))
        own = () if product is None else (product[lo:hi],)
        parts.append(ops.run("folded_conv_moments", x[lo:hi], g, weight, scale, *options, groups, *own))
    sq, inner, sums = (torch.cat(part) if len(part) > 1 else part[0] for part in zip(*parts, strict=True))
    gx = None
    if want_input:
        gx = inputs[0] if len(inputs) == 1 else torch.cat(inputs)
    return gx, sq, inner, sums


def _input_grad(g: Tensor, x: Tensor, weight: Tensor, *options: object) -> Tensor:
    *rest, groups = options
    zero = [0] * (x.ndim - 2)
    return aten.convolution_backward(g, x, weight, None, *rest, False, zero, groups, [True, False, False])[0]


def fold_weights(
    weight: Tensor,
    bias: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    mean: Tensor,
    var: Tensor,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See fastlr.reference.folded.fold_weights. In float32 at least."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    rstd = torch.rsqrt(var.to(wide) + eps)
    scale = rstd if gamma is None else gamma.to(wide) * rstd
    shift = -mean.to(wide) if bias is None else bias.to(wide) - mean.to(wide)
    folded_bias = shift * scale if beta is None else torch.addcmul(beta.to(wide), shift, scale)
    folded = (weight.to(wide) * scale.view(-1, *[1] * (weight.ndim - 1))).to(dtype)
    return folded, folded_bias, scale, rstd, shift
