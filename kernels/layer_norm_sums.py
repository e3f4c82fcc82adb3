"""Per-sample gradients of the parameters of layer norm and RMS norm in Triton.

The definitions are in ``fastlr.ops.linear``.

The normalised rows are never written: the limit is reading x and g once (in bf16 4 bytes an
element), and of the row statistics 8 bytes (RMS norm: 4) a row for each 64 columns.
"""

from __future__ import annotations

from torch import Tensor

from fastlr.kernels.strided_sums import strided_sums


def layer_norm_sums(
    x: Tensor,  # [B, T, D]
    g: Tensor,  # [B, T, D]
    mean: Tensor,  # [B, T, 1]
    rstd: Tensor,  # [B, T, 1]
) -> tuple[Tensor, Tensor]:  # [B, D], [B, D]
    """See fastlr.ops.linear.layer_norm_sums; the results are float32."""
    if mean.stride() != rstd.stride():
        mean, rstd = mean.contiguous(), rstd.contiguous()
    return strided_sums(g, x, [1], shift=mean.expand_as(g), factor=rstd.expand_as(g), plain=True)


def rms_norm_sums(
    x: Tensor,  # [B, T, D]
    g: Tensor,  # [B, T, D]
    rrms: Tensor,  # [B, T, 1]
) -> Tensor:  # [B, D]
    """See fastlr.ops.linear.rms_norm_sums; the result is float32."""
    sums = strided_sums(g, x, [1], factor=rrms.expand_as(g))
    return sums if sums is NotImplemented else sums[0]
