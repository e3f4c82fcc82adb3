"""Folded convolutions in Triton: which kernel serves which call, of fastlr.reference.folded.

Pointwise (folded_pointwise.py) and depthwise (folded_depthwise.py) convolutions of one and two axes have kernels; dense
K x K and grouped ones are NotImplemented: cuDNN serves, through plain torch, whose parts are ops with kernels again. So
are pointwise backward passes whose weight gradient is too large for the registers of a program.

Traffic, counted by layer (not measured): MobileNetV3-Large at 224 x 224 in bf16, channels_last, moves 21.2 MB an image
forward and 38.1 MB backward, what is left to plain torch included; each tensor moved once would be 20.8 and 34.2 MB.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastlr.kernels import folded_depthwise, folded_pointwise
from fastlr.kernels.moments import finish_cases
from fastlr.reference.folded import ACTIVATIONS


def kind_of(weight: Tensor, padding: Sequence[int], groups: int) -> str | None:
    """``"pointwise"``, ``"depthwise"`` or None: which kernels serve a convolution with this weight."""
    if not 3 <= weight.ndim <= 4:
        return None
    if groups == 1 and max(weight.shape[2:]) == 1 and max(padding) == 0:
        return "pointwise"
    return "depthwise" if groups == len(weight) and weight.shape[1] == 1 else None


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
    kind = kind_of(weight, padding, groups)
    if kind is None or act not in ACTIVATIONS or x.ndim != weight.ndim or weight.dtype != x.dtype:
        return NotImplemented
    if residual is not None and residual.dtype != x.dtype:
        return NotImplemented
    flat = x.ndim == 3
    x, weight = (t[:, :, None] if flat else t for t in (x, weight))
    residual = residual[:, :, None] if flat and residual is not None else residual
    stride, padding, dilation = _two(stride, 1), _two(padding, 0), _two(dilation, 1)
    if kind == "pointwise":
        found = folded_pointwise.folded_conv(x, weight, bias, act, stride, residual)
    else:
        found = folded_depthwise.folded_conv(x, weight, bias, act, stride, padding, dilation, residual)
    if found is NotImplemented or not flat:
        return found
    out, kept = found
    narrow = out.squeeze(2)
    return narrow, narrow if kept is out else kept.squeeze(2)


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
    """See fastlr.reference.folded.folded_conv_backward; ``product`` is not needed."""
    kind = kind_of(weight, padding, groups)
    if kind is None or act not in ACTIVATIONS or x.ndim != weight.ndim:
        return NotImplemented
    if torch.float64 in (weight.dtype, scale.dtype):
        return NotImplemented
    flat = x.ndim == 3
    x, grad, kept, folded, weight = (t[:, :, None] if flat else t for t in (x, grad, kept, folded, weight))
    stride, padding, dilation = _two(stride, 1), _two(padding, 0), _two(dilation, 1)
    given = (x, grad, kept, act, folded, weight, scale, stride)
    if kind == "pointwise":
        found = folded_pointwise.folded_conv_backward(*given, want_input)
    else:
        found = folded_depthwise.folded_conv_backward(*given, padding, dilation, want_input)
    if found is NotImplemented or not flat or found[0] is None:
        return found
    return found[0].squeeze(2), *found[1:]


def _two(option: Sequence[int], missing: int) -> tuple[int, int]:
    """An option of one or two axes for two: a single axis is the columns."""
    return (missing, option[0]) if len(option) == 1 else (option[0], option[1])


def compile_cases() -> list[tuple]:
    """What both kinds of convolution launch, to compile ahead of time in the tests; their own is with them."""
    return finish_cases()
