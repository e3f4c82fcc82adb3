"""The reduction that channel_sums, broadcast_sums and the norms' sums launch: of g and of g x.

The norms' sums are layer_norm_sums and rms_norm_sums.

For each sample and each *kept* index the sums run over the *summed* indices, wherever the strides
of the tensors put them: NCHW, channels_last, rows, broadcast factors (stride 0), without a copy.
Adjacent axes are merged; up to two kept and two summed axes may be left. One program takes one
sample, a tile of kept indices and up to STEPS tiles of summed ones, adds in fp32 registers in a
fixed order, and writes one number for each kept index; torch adds the parts of long sums. How the
work is divided depends on the sample's shape alone, so a sample's sums have the same bits in every
batch.

The limit is reading every input once: (bytes of g + bytes of x) a sample, and 4 bytes for each kept
index written. Row statistics are read once for each tile of kept indices (64 where these are
contiguous in memory: 8 bytes to 256 of g and x in bf16).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlr.kernels.launching import DTYPES, launch, on_device

STEPS = 16  # tiles that a program adds up
# By the side contiguous in memory.
TILES = {
    "kept": ((64, 32), (16, 128)),
    "summed": ((4, 512), (4, 256), (16, 64)),
}
WARPS = 8  # with 4, LLVM in Triton 3.9 crashes as it compiles some of the cases for sm_90


@triton.jit(do_not_specialize=["samples", "outer_kept", "outer_summed", "steps", "splits"])
def sums_kernel(
    sum_g,
    sum_gx,
    g,
    x,
    centre,
    shift,
    factor,
    samples,
    outer_kept,
    kept,
    outer_summed,
    summed,
    steps,
    splits,
    g_sample,
    g_outer_kept,
    g_kept,
    g_outer_summed,
    g_summed,
    x_sample,
    x_outer_kept,
    x_kept,
    x_outer_summed,
    x_summed,
    row_sample,
    row_outer,
    row_summed,
    out_outer,
    out_kept,
    KEPT: tl.constexpr,
    SUMMED: tl.constexpr,
):
    """Write sums of g, and of g (x - centre - shift) factor, where their pointers are not None."""
    tiles = tl.cdiv(kept, KEPT)
    program = tl.program_id(0)
    tile, program = program % tiles, program // tiles
    split, program = program % splits, program // splits
    lead, sample = program % outer_kept, (program // outer_kept).to(tl.int64)
    k = tile * KEPT + tl.arange(0, KEPT)
    g += sample * g_sample + lead * g_outer_kept
    if x is not None:
        x += sample * x_sample + lead * x_outer_kept
    if centre is not None:
        own = sample * (outer_kept * kept) + lead * out_outer + k * out_kept
        middle = tl.load(centre + own, k < kept, 0.0).to(tl.float32)
    if sum_g is not None:
        plain = tl.zeros([KEPT, SUMMED], tl.float32)
    if sum_gx is not None:
        product = tl.zeros([KEPT, SUMMED], tl.float32)
    across = tl.cdiv(summed, SUMMED)
    step = split * steps
    end = tl.minimum(step + steps, outer_summed * across)
    while step < end:  # range() over a run-time value fails in the interpreter with NumPy 2.4
        row = step // across
        s = step % across * SUMMED + tl.arange(0, SUMMED)
        exists = (k < kept)[:, None] & (s < summed)[None, :]
        at = g + row * g_outer_summed + k[:, None] * g_kept + s[None, :] * g_summed
        value = tl.load(at, exists, 0.0).to(tl.float32)
        if sum_g is not None:
            plain += value
        if sum_gx is not None:
            at = x + row * x_outer_summed + k[:, None] * x_kept + s[None, :] * x_summed
            other = tl.load(at, exists, 0.0).to(tl.float32)
            place = sample * row_sample + row * row_outer + s * row_summed
            if centre is not None:
                other -= middle[:, None]
            if shift is not None:
                other -= tl.load(shift + place, s < summed, 0.0).to(tl.float32)[None, :]
            if factor is not None:
                other *= tl.load(factor + place, s < summed, 0.0).to(tl.float32)[None, :]
            product += value * other
        step += 1
    out = (split * samples + sample) * (outer_kept * kept) + lead * out_outer + k * out_kept
    if sum_g is not None:
        tl.store(sum_g + out, tl.sum(plain, 1), k < kept)
    if sum_gx is not None:
        tl.store(sum_gx + out, tl.sum(product, 1), k < kept)


class Axis(NamedTuple):
    """One axis of a sample: its size, and strides along it of g, x, row statistics and result."""

    size: int
    g: int = 0
    x: int = 0
    row: int = 0
    out: int = 0


def merged(axes: Iterable[Axis]) -> list[Axis]:
    """Join axes that lie one inside the other in every tensor; leave out those of size 1.

    Order: largest stride first.
    """
    joined: list[Axis] = []
    several = [axis for axis in axes if axis.size != 1]
    for axis in sorted(several, key=lambda a: (a.g, a.x), reverse=True):
        whole = [step * axis.size for step in axis[1:]]  # strides of the axis outside of it
        if joined and [*joined[-1][1:]] == whole:
            joined[-1] = Axis(joined[-1].size * axis.size, *axis[1:])
        else:
            joined.append(axis)
    return joined


def inner_last(axes: list[Axis]) -> list[Axis]:
    """Return two axes, the one that tiles run along last.

    That is the one contiguous in memory if there is such a one, else the longer.
    """
    axes = sorted(axes, key=lambda a: (a.g == 1, a.size))
    return [Axis(1)] * (2 - len(axes)) + axes


def tile_sizes(kept: Axis, summed: Axis) -> tuple[int, int]:
    """Tile (kept, summed) of 1024 or 2048 elements, its long side along memory: one of TILES."""
    if kept.g == 1 and kept.size > 1:
        return TILES["kept"][0 if kept.size > 32 else 1]
    wide, medium, narrow = TILES["summed"]
    if summed.size > 256:
        return wide
    return medium if summed.size > 64 else narrow


def _strides(t: Tensor | None, axes: int) -> tuple[int, ...]:
    """Return the strides of a tensor of so many axes; those of no tensor are 0."""
    return (0,) * axes if t is None else t.stride()


def aligned_space(like: Tensor, count: int, *shape: int) -> Tensor:
    """Space [count, *shape] for float32 results, each aligned.

    Else the number of samples would decide the compiled variant.
    """
    elements = prod(shape)
    rows = like.new_empty(count, triton.cdiv(elements, 4) * 4, dtype=torch.float32)
    return rows[:, :elements].unflatten(1, shape)


def strided_sums(
    g: Tensor,
    x: Tensor | None,
    axes: Sequence[int],
    *,
    centre: Tensor | None = None,
    shift: Tensor | None = None,
    factor: Tensor | None = None,
    plain: bool = False,
) -> tuple[Tensor, ...]:
    """Sum g ``[B, ...]`` and g (x - centre - shift) factor over ``axes``.

    The first is summed if ``plain``, or x is None; the second if x is given.

    Args:
        g: gradients [B, ...] in one of DTYPES.
        x: of the shape of g, likewise; strides of 0 are welcome. May have another dtype than g.
        axes: the summed axes, without 0.
        centre: of the shape of the result, contiguous.
        shift: of the shape of g, constant along the kept axes; ``factor`` has its shape and
            strides.
        factor: see ``shift``.
        plain: return the sum of g too.

    Returns:
        The wanted sums [B, *kept axes], float32: (of the product, of g), or NotImplemented.
    """
    tensors = [t for t in (g, x, centre, shift, factor) if t is not None]
    if any(t.dtype not in DTYPES for t in tensors) or g.numel() == 0:
        return NotImplemented
    rows = factor if shift is None else shift
    strides = [_strides(t, g.ndim) for t in (g, x, rows)]
    summed = {axis % g.ndim for axis in axes}
    shape = [size for axis, size in enumerate(g.shape) if axis not in summed]
    # Those of the result are contiguous.
    steps = iter(torch.empty(shape, device="meta").stride()[1:])
    along_kept, along_summed = [], []
    for a in range(1, g.ndim):
        axis = Axis(g.shape[a], *(stride[a] for stride in strides))
        if a in summed:
            along_summed.append(axis)
        else:
            along_kept.append(axis._replace(out=next(steps)))
    kept_axes, summed_axes = merged(along_kept), merged(along_summed)
    if len(kept_axes) > 2 or len(summed_axes) > 2:
        return NotImplemented
    for i in range(1, len(Axis._fields)):
        span = sum((axis.size - 1) * axis[i] for axis in along_kept + along_summed)
        if span >= 1 << 31:  # offsets inside a sample are 32-bit
            return NotImplemented
    (k0, k1), (s0, s1) = inner_last(kept_axes), inner_last(summed_axes)
    tile, along = tile_sizes(k1, s1)
    total = s0.size * triton.cdiv(s1.size, along)
    splits = triton.cdiv(total, STEPS)
    programs = len(g) * k0.size * triton.cdiv(k1.size, tile) * splits
    if programs >= 1 << 31:
        return NotImplemented
    want_g = plain or x is None
    buffers = aligned_space(g, (x is not None) + want_g, splits, *shape)
    sum_gx = None if x is None else buffers[0]
    sum_g = buffers[-1] if want_g else None
    with on_device(g):
        launch(
            sums_kernel,
            programs,
            sum_g,
            sum_gx,
            g,
            x,
            centre,
            shift,
            factor,
            len(g),
            k0.size,
            k1.size,
            s0.size,
            s1.size,
            triton.cdiv(total, splits),
            splits,
            strides[0][0],
            k0.g,
            k1.g,
            s0.g,
            s1.g,
            strides[1][0],
            k0.x,
            k1.x,
            s0.x,
            s1.x,
            strides[2][0],
            s0.row,
            s1.row,
            k0.out,
            k1.out,
            KEPT=tile,
            SUMMED=along,
            num_warps=WARPS,
        )
    return tuple(buffers[:, 0] if splits == 1 else buffers.sum(1))
