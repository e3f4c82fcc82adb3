"""Convolution, batch norm in eval mode and activation as one op: the definition of the folded path (DESIGN: kernels).

With sigma = sqrt(running variance + eps), s = gamma / sigma and, for each sample b and output channel c, M_bc the gradient
of the folded weight s_c W_c and S_bc = sum_t g_bct the gradient of the folded bias, the gradients of the original
parameters are

    dW_c = s_c M_c      dgamma_c = (<W_c, M_c> + (bias_c - mean_c) S_c) / sigma_c      dbeta_c = S_c      dbias_c = s_c S_c

so one pass over the inputs and the gradients at the folded convolution's output gives the norms of all of them.
Throughout, x is [B, C, *spatial] with one image a sample, outputs are [B, O, *spatial'].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlr.reference.norms import conv_grads

ACTIVATIONS = {
    "none": lambda t: t,
    "relu": F.relu,
    "relu6": F.relu6,
    "hardswish": F.hardswish,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
}
# Where the derivative can be told from the output, that is what is kept; elsewhere the activation's input.
KEEPS_OUTPUT = frozenset({"none", "relu", "relu6"})


def output_size(
    size: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> list[int]:
    """Size of a convolution's output along each spatial axis; below 1 where the kernel does not fit."""
    return [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(size, kernel, stride, padding, dilation, strict=True)
    ]


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
    """Activation of a convolution with folded weight and bias, and perhaps of its sum with another tensor.

    Args:
        x: inputs [B, C, *spatial].
        weight: folded weight [O, C/groups, *kernel].
        bias: folded bias [O].
        act: a key of ACTIVATIONS.
        stride: one number for each spatial axis, as in torch.nn.functional.conv2d; likewise padding and dilation.
        padding: as in conv2d.
        dilation: as in conv2d.
        groups: as in conv2d.
        residual: added before the activation, [B, O, *spatial'].

    Returns:
        (output, kept): kept is what `activation_grad` takes: the output itself for KEEPS_OUTPUT, else the activation's
        input; both [B, O, *spatial'] in the dtype of ``x``.
    """
    zero = [0] * len(stride)
    pre = torch.ops.aten.convolution(
        x.double(), weight.double(), bias.double(), stride, padding, dilation, False, zero, groups
    )
    pre = pre if residual is None else pre + residual.double()
    out = ACTIVATIONS[act](pre).to(x.dtype)
    return out, out if act in KEEPS_OUTPUT else pre.to(x.dtype)


def activation_grad(grad: Tensor, kept: Tensor, act: str) -> Tensor:
    """Gradient at the input of an activation from the one at its output; ``kept`` as returned by `folded_conv`.

    ReLU and ReLU6 pass nothing where the output is at a bound. Shapes and dtype are those of ``grad``.
    """
    if act == "none":
        return grad
    if act in KEEPS_OUTPUT:
        inside = kept > 0 if act == "relu" else (kept > 0) & (kept < 6)
        return torch.where(inside, grad, torch.zeros((), dtype=grad.dtype, device=grad.device))
    with torch.enable_grad():
        leaf = kept.detach().double().requires_grad_()
        (found,) = torch.autograd.grad(ACTIVATIONS[act](leaf), leaf, grad.double())
    return found.to(grad.dtype)


def gate_grad(g: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``x * gate``, of which ``gate`` has one number for each sample and channel.

    Args:
        g: gradient of the product [B, C, *spatial].
        x: [B, C, *spatial].
        gate: [B, C, 1, ...].

    Returns:
        (g gate, sum of g x over the positions), in the shapes and dtypes of ``x`` and ``gate``.
    """
    axes = list(range(2, x.ndim))
    return (g.double() * gate.double()).to(x.dtype), (g.double() * x.double()).sum(axes, keepdim=True).to(gate.dtype)


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
    """What the norms of all parameters of a folded convolution need, from its input and the gradient at its output.

    Args:
        x: inputs [B, C, *spatial].
        g: gradients at the folded convolution's output (before the activation) [B, O, *spatial'].
        weight: the *unfolded* weight W [O, C/groups, *kernel].
        scale: s [O].
        stride: as in `folded_conv`, like the other options.
        padding: as in conv2d.
        dilation: as in conv2d.
        groups: as in conv2d.
        product: the convolution of ``x`` with the unfolded weight [B, O, *spatial'], if it is known: <W_c, M_bc> is also
            its sum with ``g``. Not needed here.

    Returns:
        (sum_c ||s_c M_bc||^2 [B], <W_c, M_bc> [B, O], S_bc [B, O]), float64.
    """
    zero = [0] * len(stride)
    options = (stride, padding, dilation, False, zero, groups)
    grads = conv_grads(x.double()[:, None], g.double()[:, None], weight, *options).flatten(2)
    w = weight.double().flatten(1)
    sq = (scale.double()[:, None] * grads).square().sum((1, 2))
    return sq, (grads * w).sum(2), g.double().flatten(2).sum(2)


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
    """The whole backward pass of a folded block: input gradient and moments.

    Args:
        x: inputs [B, C, *spatial].
        grad: gradients at the activation's output [B, O, *spatial'].
        kept: from `folded_conv`.
        act: a key of ACTIVATIONS.
        folded: folded weight s W, in the dtype of ``x``.
        weight: unfolded weight W.
        scale: s [O].
        stride: as in `folded_conv`, like the other options.
        padding: as in conv2d.
        dilation: as in conv2d.
        groups: as in conv2d.
        want_input: whether the input gradient is wanted.
        product: as in `folded_conv_moments`.

    Returns:
        (gradient of x in its dtype or None, *what `folded_conv_moments` returns*).
    """
    g = activation_grad(grad.double(), kept, act)
    zero = [0] * len(stride)
    wide = folded.double()
    gx = None
    if want_input:
        mask = [True, False, False]
        gx = torch.ops.aten.convolution_backward(
            g, x.double(), wide, None, stride, padding, dilation, False, zero, groups, mask
        )[0].to(x.dtype)
    return gx, *folded_conv_moments(x, g, weight, scale, stride, padding, dilation, groups)


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
    """Folded weight and bias of a convolution and the batch norm (running statistics) after it.

    Args:
        weight: W [O, C/groups, *kernel].
        bias: of the convolution [O], or None for zero.
        gamma: weight of the batch norm [O], or None for one.
        beta: bias of the batch norm [O], or None for zero.
        mean: running mean [O].
        var: running variance [O].
        eps: added to the variance.
        dtype: of the folded weight.

    Returns:
        (s W in ``dtype``, beta + s (bias - mean), s, 1/sigma, bias - mean), the last four [O], float64.
    """
    rstd = (var.double() + eps).rsqrt()
    scale = rstd if gamma is None else gamma.double() * rstd
    shift = -mean.double() if bias is None else bias.double() - mean.double()
    folded = weight.double() * scale.view(-1, *[1] * (weight.ndim - 1))
    return folded.to(dtype), scale * shift + (0.0 if beta is None else beta.double()), scale, rstd, shift
