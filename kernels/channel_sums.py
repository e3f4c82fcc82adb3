"""Sum g x and g for each sample and channel in one pass, in Triton.

The definition is ``fastlr.ops.linear.channel_sums``.

The limit is reading x and g once (in bf16 4 bytes a position and channel); 8 bytes a channel are
written.
"""

from __future__ import annotations

from torch import Tensor

from fastlr.kernels.strided_sums import strided_sums


def channel_sums(
    x: Tensor,  # [B, K, C, *spatial]
    g: Tensor,  # [B, K, C, *spatial]
    mean: Tensor | None = None,  # [1, C] or [B, C]
) -> tuple[Tensor, Tensor]:  # [B, C], [B, C]
    """See fastlr.ops.linear.channel_sums; the results are float32."""
    centre = None if mean is None else mean.expand(len(g), g.shape[2]).contiguous()
    return strided_sums(g, x, [1, *range(3, g.ndim)], centre=centre, plain=True)
