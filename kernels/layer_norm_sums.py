"""Per-sample gradients of the parameters of layer norm and RMS norm in Triton, as in ``fastlr.reference.norms``.

The normalised rows are never written: the limit is reading x and g once (in bf16 4 bytes an element), and of the row
statistics 8 bytes (RMS norm: 4) a row for each 64 columns.
"""

from __future__ import annotations

from torch import Tensor

from fastlr.kernels.strided_sums import strided_sums, sums_cases


def layer_norm_sums(x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """See fastlr.reference.norms.layer_norm_sums; the results are float32."""
    if mean.stride() != rstd.stride():
        mean, rstd = mean.contiguous(), rstd.contiguous()
    return strided_sums(g, x, [1], shift=mean.expand_as(g), factor=rstd.expand_as(g), plain=True)


def rms_norm_sums(x: Tensor, g: Tensor, rrms: Tensor) -> Tensor:
    """See fastlr.reference.norms.rms_norm_sums; the result is float32."""
    found = strided_sums(g, x, [1], factor=rrms.expand_as(g))
    return found if found is NotImplemented else found[0]


def compile_cases() -> list[tuple]:
    """Variants to compile ahead of time in the tests."""
    both = sums_cases("layer_norm_sums", product=True, plain=True, shift=True, factor=True)
    return both + sums_cases("rms_norm_sums", product=True, plain=False, factor=True)
