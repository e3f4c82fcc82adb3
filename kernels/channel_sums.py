"""Sums of g x and of g for each sample and channel in Triton, as ``fastlr.reference.norms.channel_sums``, in one pass.

The limit is reading x and g once (in bf16 4 bytes a position and channel); 8 bytes a channel are written.
"""

from __future__ import annotations

from torch import Tensor

from fastlr.kernels.strided_sums import strided_sums, sums_cases


def channel_sums(x: Tensor, g: Tensor, mean: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See fastlr.reference.norms.channel_sums; the results are float32."""
    centre = None if mean is None else mean.expand(len(g), g.shape[2]).contiguous()
    return strided_sums(g, x, [1, *range(3, g.ndim)], centre=centre, plain=True)


def compile_cases() -> list[tuple]:
    """Variants to compile ahead of time in the tests."""
    plain = sums_cases("channel_sums", product=True, plain=True)
    return plain + sums_cases("channel_sums of what is centred", product=True, plain=True, centre=True)
