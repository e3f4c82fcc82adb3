"""Per-sample gradients of broadcast parameters in Triton.

The definition is ``fastlr.ops.linear.broadcast_sums``.

The limit is reading g once (in bf16 2 bytes an element), and the other factor once where there is
one; 4 bytes for each element of the parameter and sample are written. Sums over more than two axes
that do not lie one inside the other in memory, and parameters with more than two such axes, are
left to plain torch, as is the case with nothing to sum.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fastlr.kernels.strided_sums import strided_sums


def broadcast_sums(
    g: Tensor,  # [B, ...]
    other: Tensor | None,  # broadcastable to the shape of g
    axes: Sequence[int],
) -> Tensor:  # [B, *axes of g that are left]
    """See fastlr.ops.linear.broadcast_sums; the result is float32."""
    if all(g.shape[axis] == 1 for axis in axes):
        return NotImplemented
    sums = strided_sums(g, None if other is None else other.broadcast_to(g.shape), axes)
    return sums if sums is NotImplemented else sums[0]
