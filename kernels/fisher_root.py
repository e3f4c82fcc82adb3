"""Rademacher cotangents of softmax outputs in Triton.

The definition is ``fastlr.ops.fisher.categorical_root_cotangent``.

One launch from the logits: log-softmax, the signs (Philox, the same bits as the reference) and the
Householder root of the outputs' Fisher matrix. One program takes the classes of one position; all
arithmetic on values is in float64, as a logit gap of 100 must lose nothing and the tensor is small.
The words of the signs are drawn again for each of their 32 bits.

The limit is reading the logits once and writing the cotangent once (bf16 to float64: 10 bytes an
element).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlr.kernels import launching
from fastlr.kernels.counter import halves, philox4x32
from fastlr.kernels.launching import launch, on_device
from fastlr.ops.philox import STREAMS, check_seed

_STREAM = tl.constexpr(STREAMS["cotangent"])
DTYPES = {torch.float64: "fp64"} | launching.DTYPES
BLOCKS = {16: 1, 128: 1, 1024: 4, 4096: 16}  # classes of a program: warps


@triton.jit(do_not_specialize=["positions", "classes", "seed_low", "seed_high"])
def fisher_root_kernel(
    out,
    z,
    index,
    positions,
    classes,
    z_sample,
    z_position,
    z_class,
    index_stride,
    seed_low,
    seed_high,
    BLOCK: tl.constexpr,
):
    """Write the cotangent at one position of one sample to ``out`` [B, P, C]."""
    row = tl.program_id(0).to(tl.int64)
    sample, position = row // positions, row % positions
    c = tl.arange(0, BLOCK)
    exists = c < classes
    place = z + sample * z_sample + position * z_position + c * z_class
    shifted = tl.load(place, exists, float("-inf")).to(tl.float64)
    shifted -= tl.max(shifted, 0)
    # Sqrt(p), without cancellation.
    root = tl.exp(0.5 * (shifted - tl.log(tl.sum(tl.exp(shifted), 0))))
    # Triton 3.9's interpreter knows none where all are NaN.
    best = tl.argmax(tl.where(root == root, root, 0.0), 0)

    number = tl.zeros([BLOCK], tl.int64) + tl.load(index + sample * index_stride)
    element = position.to(tl.int32) * classes + c
    zero = tl.zeros([BLOCK], tl.uint32)
    w0, w1, w2, w3 = philox4x32(
        (element >> 7).to(tl.uint32),
        zero + _STREAM,
        number.to(tl.uint32),
        (number >> 32).to(tl.uint32),
        zero + seed_low.to(tl.uint32, bitcast=True),
        zero + seed_high.to(tl.uint32, bitcast=True),
    )
    lane = (element >> 5) & 3
    word = tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))
    bit = (word >> (element & 31).to(tl.uint32)) & 1
    xi = tl.where(c == best, 0.0, bit.to(tl.float64) * 2 - 1)

    top = tl.sum(tl.where(c == best, root, 0.0), 0)
    t = tl.sum(root * xi, 0)
    v = tl.where(c == best, -top * t, xi * root - root * root * (t / (1 + top)))
    tl.store(out + row * classes + c, v, exists)


def categorical_root_cotangent(
    z: Tensor,  # [B, P, C]
    index: Tensor,  # [B]
    seed: int,
) -> Tensor:  # [B, P, C]
    """See fastlr.ops.fisher.categorical_root_cotangent; up to 4096 classes."""
    count, positions, classes = z.shape
    block = next((block for block in BLOCKS if classes <= block), None)
    covered = z.dtype in DTYPES and index.dtype == torch.int64
    if (
        block is None
        or not covered
        or z.numel() == 0
        or positions * classes >= 1 << 31
        or count * positions >= 1 << 31
    ):
        return NotImplemented
    if z.stride(-1) * block >= 1 << 31:  # these offsets are 32-bit
        z = z.contiguous()
    out = z.new_empty(z.shape, dtype=torch.float64)
    with on_device(z):
        launch(
            fisher_root_kernel,
            count * positions,
            out,
            z,
            index,
            positions,
            classes,
            *z.stride(),
            *index.stride(),
            *halves(check_seed(seed)),
            BLOCK=block,
            num_warps=BLOCKS[block],
        )
    return out
