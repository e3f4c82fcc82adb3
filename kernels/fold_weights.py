"""Folded weights in Triton: a convolution and the batch norm after it become one weight and one bias, in one launch.

See fastlr.reference.folded.fold_weights. A program makes one output channel. It reads the weight once and writes it once
in the activations' dtype (MobileNetV3-Large: 12 MB in, 6 MB out); what counts is that it is one launch for each
convolution, not eight, in a pass of a few hundred kernels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlr.kernels.launching import DTYPES, on_device

BLOCK = 1024


@triton.jit
def fold_weights_kernel(
    weight, bias, gamma, beta, mean, var, folded, channel, eps, channels, fan_in, taps,
    HAS_BIAS: tl.constexpr, HAS_GAMMA: tl.constexpr, HAS_BETA: tl.constexpr, REORDER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one output channel of ``folded``, and its four numbers to ``channel`` [4, O] (bias, scale, rstd, shift).

    ``REORDER``: the weight has its taps last, ``folded`` has its input channels last.
    """
    o = tl.program_id(0)
    rstd = tl.rsqrt(tl.load(var + o).to(tl.float32) + eps)
    scale, shift = rstd, -tl.load(mean + o).to(tl.float32)
    if HAS_GAMMA:
        scale *= tl.load(gamma + o).to(tl.float32)
    if HAS_BIAS:
        shift += tl.load(bias + o).to(tl.float32)
    folded_bias = scale * shift
    if HAS_BETA:
        folded_bias += tl.load(beta + o).to(tl.float32)
    tl.store(channel + o, folded_bias)
    tl.store(channel + channels + o, scale)
    tl.store(channel + 2 * channels + o, rstd)
    tl.store(channel + 3 * channels + o, shift)
    row = o.to(tl.int64) * fan_in
    start = 0
    while start < fan_in:
        element = start + tl.arange(0, BLOCK)
        inside = element < fan_in
        value = tl.load(weight + row + element, inside).to(tl.float32) * scale
        place = element
        if REORDER:
            place = element % taps * (fan_in // taps) + element // taps
        tl.store(folded + row + place, value.to(folded.dtype.element_ty), inside)
        start += BLOCK


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
    """See fastlr.reference.folded.fold_weights; the folded weight has its channels last, the numbers are float32."""
    given = [t for t in (bias, gamma, beta, mean, var) if t is not None]
    if dtype not in DTYPES or weight.dtype not in DTYPES or any(t.dtype not in DTYPES for t in given):
        return NotImplemented
    last = weight.ndim == 4 and weight.is_contiguous(memory_format=torch.channels_last)
    if not (last or weight.is_contiguous()) or not all(t.is_contiguous() for t in given):
        return NotImplemented
    memory_format = torch.channels_last if weight.ndim == 4 else torch.contiguous_format
    folded = torch.empty(weight.shape, dtype=dtype, device=weight.device, memory_format=memory_format)
    outputs, fan_in = len(weight), weight[0].numel()
    taps = weight[0, 0].numel()
    channel = torch.empty(4, outputs, dtype=torch.float32, device=weight.device)
    block = min(BLOCK, triton.next_power_of_2(fan_in))
    optional = [weight if t is None else t for t in (bias, gamma, beta)]
    with on_device(weight):
        fold_weights_kernel[(outputs,)](
            weight, *optional, mean, var, folded, channel, eps, outputs, fan_in, taps,
            HAS_BIAS=bias is not None, HAS_GAMMA=gamma is not None, HAS_BETA=beta is not None,
            REORDER=weight.ndim == 4 and not last and taps > 1, BLOCK=max(16, block),
        )  # fmt: skip
    return folded, *channel.unbind(0)


def compile_cases() -> list[tuple]:
    """Variants to compile ahead of time in the tests: (name, kernel, signature, constexprs)."""
    cases = []
    for dtype in ("fp32", "bf16", "fp16"):
        for block in (16, 64, BLOCK):
            pointers = dict.fromkeys(("weight", "bias", "gamma", "beta", "mean", "var"), "*fp32")
            numbers = {"eps": "fp32", "channels": "i32", "fan_in": "i32", "taps": "i32"}
            signature = {**pointers, "folded": f"*{dtype}", "channel": "*fp32", **numbers}
            flags = {"HAS_BIAS": True, "HAS_GAMMA": True, "HAS_BETA": True, "REORDER": True, "BLOCK": block}
            cases.append((f"fold[{dtype},{block}]", fold_weights_kernel, signature, flags))
    return cases
