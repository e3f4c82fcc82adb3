"""Squared norms of given gradients and of one-row products in Triton, in one launch.

Otherwise these take three launches or six.

``dense_sq_norms``, ``one_row_sq_norms`` and the case of one row of ``linear_sq_norms``
(fastlr.ops.linear). A program takes one sample and adds in float64, always in the same
order; samples too long for that are left to plain torch. The limit is reading the inputs once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlr.kernels.launching import covered, launch, on_device

BLOCK, WARPS = 1024, 4
LONGEST = 1 << 16  # elements of a sample


@triton.jit
def _square_sum(row, column, width, BLOCK: tl.constexpr):
    """Sum of squares of one row, float64."""
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, width, BLOCK):
        place = start + tl.arange(0, BLOCK)
        value = tl.load(row + place * column, place < width, 0.0).to(tl.float64)
        total += value * value
    return tl.sum(total)


@triton.jit(do_not_specialize=["groups", "inputs", "outputs"])
def row_norms_kernel(
    norms,
    a,
    g,
    norms_of_g,
    a_sample,
    a_group,
    a_column,
    g_sample,
    g_group,
    g_column,
    groups,
    inputs,
    outputs,
    BLOCK: tl.constexpr,
):
    """Sum over the groups of |a|^2 |g|^2, or of |a|^2 where g is None, for one sample.

    The sum over the groups of |g|^2 goes to ``norms_of_g`` unless that is None.
    """
    sample = tl.program_id(0).to(tl.int64)
    total, total_of_g = tl.zeros([1], tl.float64), tl.zeros([1], tl.float64)
    for group in range(0, groups):
        part = _square_sum(a + sample * a_sample + group * a_group, a_column, inputs, BLOCK)
        if g is not None:
            of_g = _square_sum(g + sample * g_sample + group * g_group, g_column, outputs, BLOCK)
            part *= of_g
            total_of_g += of_g
        total += part
    tl.store(norms + sample + tl.arange(0, 1), total)
    if norms_of_g is not None:
        tl.store(norms_of_g + sample + tl.arange(0, 1), total_of_g)


def row_norms(a: Tensor, g: Tensor | None, norms_of_g: Tensor | None = None) -> Tensor:
    """Return squared norms [B], float64, of g_n a_n^T, or of a_n, summed over N.

    Args:
        a: [B, N, I].
        g: [B, N, O]; None for one.
        norms_of_g: Is filled with the squared norms [B] of g_n, summed over N; float64.
    """
    count, groups, inputs = a.shape
    strides = (0, 0, 0) if g is None else g.stride()
    outputs = 0 if g is None else g.shape[2]
    if not covered(a, a if g is None else g) or groups * (inputs + outputs) > LONGEST:
        return NotImplemented
    norms = torch.empty(count, dtype=torch.float64, device=a.device)
    with on_device(a):
        launch(
            row_norms_kernel,
            count,
            norms,
            a,
            g,
            norms_of_g,
            *a.stride(),
            *strides,
            groups,
            inputs,
            outputs,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return norms


def dense_sq_norms(
    grads: Tensor,  # [B, ...]
) -> Tensor:  # [B]
    """See fastlr.ops.linear.dense_sq_norms."""
    return (
        row_norms(grads.reshape(len(grads), 1, grads[0].numel()), None)
        if len(grads)
        else NotImplemented
    )


def one_row_sq_norms(
    a: Tensor,  # [B, I]
    g: Tensor,  # [B, O]
) -> tuple[Tensor, Tensor]:  # [B], [B]
    """See fastlr.ops.linear.one_row_sq_norms."""
    of_bias = torch.empty(len(g), dtype=torch.float64, device=g.device)
    of_weight = row_norms(a[:, None], g[:, None], of_bias)
    return NotImplemented if of_weight is NotImplemented else (of_weight, of_bias)
