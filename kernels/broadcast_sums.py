"""Per-sample gradients of broadcast parameters in Triton, as ``fastlr.reference.norms.broadcast_sums``.

The limit is reading g once (in bf16 2 bytes an element), and the other factor once where there is one; 4 bytes for each
element of the parameter and sample are written. Sums over more than two axes that do not lie one inside the other in
memory, and parameters with more than two such axes, are left to plain torch, as is the case with nothing to sum.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fastlr.kernels.strided_sums import strided_sums, sums_cases


def broadcast_sums(g: Tensor, other: Tensor | None, axes: Sequence[int]) -> Tensor:
    """See fastlr.reference.norms.broadcast_sums; the result is float32."""
    if all(g.shape[axis] == 1 for axis in axes):
        return NotImplemented
    found = strided_sums(g, None if other is None else other.broadcast_to(g.shape), axes)
    return found if found is NotImplemented else found[0]


def compile_cases() -> list[tuple]:
    """Variants to compile ahead of time in the tests."""
    plain = sums_cases("broadcast_sums", product=False, plain=True)
    return plain + sums_cases("broadcast_sums with a factor", product=True, plain=False, mixed=True)
