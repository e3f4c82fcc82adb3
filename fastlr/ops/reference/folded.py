"""Convolution, batch norm in eval mode and activation as one op.

This is the definition of the folded path (DESIGN: kernels).

With sigma = sqrt(running variance + eps), s = gamma / sigma and, for each sample b and output
channel c, M_bc the gradient of the folded weight s_c W_c and S_bc = sum_t g_bct the gradient of the
folded bias, the gradients of the original parameters are

    dW_c = s_c M_c      dgamma_c = (<W_c, M_c> + (bias_c - mean_c) S_c) / sigma_c
    dbeta_c = S_c       dbias_c = s_c S_c

so one pass over the inputs and the gradients at the folded convolution's output gives the norms of
all of them. Throughout, x is [B, C, *spatial] with one image a sample, outputs are [B, O,
*spatial'].
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlr.ops.block import Block, Gradients, Loaded
from fastlr.ops.reference.norms import conv_grads

ACTIVATIONS = {
    "none": lambda t: t,
    "relu": F.relu,
    "relu6": F.relu6,
    "hardswish": F.hardswish,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
}
# Where the derivative can be told from the output, that is what is kept; elsewhere the activation's
# input.
KEEPS_OUTPUT = frozenset({"none", "relu", "relu6"})


def value_of(loaded: Loaded) -> Tensor:
    """Return what a `Loaded` stands for, in the dtype of its tensor."""
    value = ACTIVATIONS[loaded.activation](loaded.tensor)
    return value if loaded.gate is None else value * loaded.gate


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
    """Return the gradient at the input of an activation from the one at its output.

    ``kept`` is as returned by `folded_conv`.

    ReLU and ReLU6 pass nothing where the output is at a bound. Shapes and dtype are those of
    ``grad``.
    """
    if act == "none":
        return grad
    if act in KEEPS_OUTPUT:
        inside = kept > 0 if act == "relu" else (kept > 0) & (kept < 6)
        return torch.where(inside, grad, torch.zeros((), dtype=grad.dtype, device=grad.device))
    with torch.enable_grad():
        leaf = kept.detach().double().requires_grad_()
        (input_grad,) = torch.autograd.grad(ACTIVATIONS[act](leaf), leaf, grad.double())
    return input_grad.to(grad.dtype)


def gate_grad(
    g: Tensor,  # [B, C, *spatial]
    x: Tensor,  # [B, C, *spatial]
    gate: Tensor,  # [B, C, 1, ...]
) -> tuple[Tensor, Tensor]:  # of the shapes of x and gate
    """Gradients of ``x * gate``, of which ``gate`` has one number for each sample and channel.

    Args:
        g: gradient of the product [B, C, *spatial].
        x: [B, C, *spatial].
        gate: [B, C, 1, ...].

    Returns:
        (g gate, sum of g x over the positions), in the shapes and dtypes of ``x`` and ``gate``.
    """
    axes = list(range(2, x.ndim))
    sums = (g.double() * x.double()).sum(axes, keepdim=True)
    return (g.double() * gate.double()).to(x.dtype), sums.to(gate.dtype)


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
    """
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
    """
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
    # As in fastlr.ops.reference.norms.conv_grads.
    given = (t.contiguous() for t in (g, inputs, block.folded.double()))
    gx = torch.ops.aten.convolution_backward(*given, None, *geometry, [True, False, False])[0]
    of_gate: list[Tensor] = []
    if x.gate is not None:
        gx, *of_gate = gate_grad(gx, ACTIVATIONS[x.activation](wide.tensor), x.gate)
    if gradients.loaded is not None:
        gx = gx + gradients.loaded.double()
    if not x.gradient_at_output:
        gx = activation_grad(gx, x.tensor, x.activation)
    return gx.to(x.tensor.dtype), *norms, *of_gate


def fold_weights(
    dtype: torch.dtype,
    eps: tuple[float, ...],
    *tensors: Any,  # six a convolution: [O, C / groups, *kernel], five of [O]
) -> list[tuple[Tensor, Tensor]]:  # of the shape of the weight, [4, O]
    """Fold batch norms into the weights and biases of the convolutions before them.

    The batch norms use their running statistics.

    Args:
        dtype: of the folded weights.
        eps: added to the variance, one number a convolution.
        tensors: six a convolution: weight W [O, C/groups, *kernel]; bias of the convolution or None
            for zero; weight of the batch norm or None for one; its bias or None for zero; running
            mean; running variance; the last five [O].

    Returns:
        For each: (s W in ``dtype``, numbers of the channels [4, O], float64: beta + s (bias -
            mean), s, 1/sigma, bias - mean).
    """
    results = []
    for i, one in enumerate(eps):
        weight, bias, gamma, beta, mean, var = tensors[6 * i : 6 * i + 6]
        rstd = (var.double() + one).rsqrt()
        scale = rstd if gamma is None else gamma.double() * rstd
        shift = -mean.double() if bias is None else bias.double() - mean.double()
        folded_bias = scale * shift
        if beta is not None:
            folded_bias = folded_bias + beta.double()
        folded = weight.double() * scale.view(-1, *[1] * (weight.ndim - 1))
        results.append((folded.to(dtype), torch.stack([folded_bias, scale, rstd, shift])))
    return results
