"""Fold a batch norm into the weight and bias of the convolution before it, in one launch.

The kernel is Triton's. Plain torch takes eight launches. See fastlr.ops.folded.fold_weights.
A program makes one output channel: it reads the weight once, and writes it once in the activations'
dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlr.kernels.launching import DTYPES, INT32, launch, on_device

BLOCK, WARPS = 256, 4
SIZES = ("outputs", "fan_in", "channel_step", "inner_step", "outer_step", "inner")


@triton.jit(do_not_specialize=SIZES)
def fold_weights_kernel(
    folded,
    numbers,
    weight,
    bias,
    gamma,
    beta,
    mean,
    var,
    eps,
    outputs,
    fan_in,
    channel_step,
    inner_step,
    outer_step,
    inner,
    BLOCK: tl.constexpr,
):
    """Write one output channel to ``folded``, and bias, scale, rstd and shift to ``numbers``.

    The elements of a channel are outer x ``inner`` in the weight, and have the steps given in
    ``folded``.
    """
    o = tl.program_id(0).to(tl.int64)
    rstd = tl.rsqrt(tl.load(var + o).to(tl.float32) + eps)
    scale = rstd
    if gamma is not None:
        scale *= tl.load(gamma + o).to(tl.float32)
    shift = -tl.load(mean + o).to(tl.float32)
    if bias is not None:
        shift += tl.load(bias + o).to(tl.float32)
    folded_bias = scale * shift
    if beta is not None:
        folded_bias += tl.load(beta + o).to(tl.float32)
    tl.store(numbers + o, folded_bias)
    tl.store(numbers + outputs + o, scale)
    tl.store(numbers + 2 * outputs + o, rstd)
    tl.store(numbers + 3 * outputs + o, shift)
    weight += o * fan_in
    folded += o * channel_step
    for begin in range(0, fan_in, BLOCK):
        element = begin + tl.arange(0, BLOCK)
        value = tl.load(weight + element, element < fan_in, 0.0).to(tl.float32) * scale
        at = element % inner * inner_step + element // inner * outer_step
        tl.store(folded + at, value.to(folded.dtype.element_ty), element < fan_in)


def _laid_out(flat: Tensor, weight: Tensor) -> tuple[Tensor, tuple[int, int, int, int]]:
    """Return ``flat`` in the shape of a weight, and the steps of the weight's memory.

    The channels of ``flat`` are last or, for a weight of one input, its taps are first. The steps
    are those of an output channel and of the inner and the outer elements of one; the last number
    says how many inner elements there are.
    """
    outputs, inputs, *kernel = weight.shape
    taps = weight[0, 0].numel()
    if inputs == 1:
        return flat.view(*kernel, outputs).movedim(-1, 0).unsqueeze(1), (1, outputs, 0, taps)
    if weight.ndim != 4:
        return flat.view(weight.shape), (inputs * taps, 1, 0, inputs * taps)
    folded = flat.view(outputs, *kernel, inputs).movedim(-1, 1)
    if weight.is_contiguous():
        return folded, (inputs * taps, inputs, 1, taps)
    return folded, (inputs * taps, 1, 0, inputs * taps)


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
    """See fastlr.ops.folded.fold_weights.

    Folded weights have channels last, or taps first where they have one input; the numbers are
    float32.
    """
    per_channel = bias, gamma, beta, mean, var
    if not _fits(dtype, weight, [t for t in per_channel if t is not None]):
        return NotImplemented
    outputs = len(weight)
    flat = weight.new_empty(weight.numel(), dtype=dtype)
    numbers = weight.new_empty(4, outputs, dtype=torch.float32)
    folded, steps = _laid_out(flat, weight)
    sizes = outputs, weight[0].numel(), *steps
    with on_device(weight):
        launch(
            fold_weights_kernel,
            outputs,
            flat,
            numbers,
            weight,
            *per_channel,
            eps,
            *sizes,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return folded, numbers


def _fits(dtype: torch.dtype, weight: Tensor, per_channel: list[Tensor]) -> bool:
    """Return True if the kernel takes this convolution: dtypes, memory formats, size."""
    dtypes = {dtype, weight.dtype, *[t.dtype for t in per_channel]}
    if not dtypes <= DTYPES.keys():
        return False
    last = weight.ndim == 4 and weight.is_contiguous(memory_format=torch.channels_last)
    lies_in_order = last or weight.is_contiguous()
    return (
        lies_in_order and 0 < weight.numel() < INT32 and all(t.is_contiguous() for t in per_channel)
    )
