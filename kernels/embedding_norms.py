"""Squared norms of a table's gradient in Triton, without the table.

The definition is ``fastlr.ops.linear.embedding_sq_norms``.

With g_t the gradient of row t, the squared norm is the sum of <g_t, g_s> over all t, s of one id.
One program takes one sample and a tile of rows t, and goes through the tiles of rows s up to its
own: those without an equal id are left out, so that distinct ids cost a pass over the ids and the
tiles on the diagonal. No table, no sort, no atomics.

The limit is reading g once for each tile of rows s that shares an id with a tile of rows t: at
least once, bytes of g.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlr.kernels.launching import INT32, covered, launch, on_device

IDS = {torch.int64: "i64", torch.int32: "i32"}
ROWS = (16, 32)
WIDTH, WARPS = 32, 4


@triton.jit(do_not_specialize=["rows"])
def embedding_kernel(
    out,
    ids,
    g,
    rows,
    width,
    ids_sample,
    ids_row,
    g_sample,
    g_row,
    g_column,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write the part of one tile of rows t to ``out`` [B, tiles], float64."""
    tiles = tl.cdiv(rows, ROWS)
    sample, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    ids += sample * ids_sample
    g += sample * g_sample
    t = tile * ROWS + tl.arange(0, ROWS)
    row_id = tl.load(ids + t * ids_row, t < rows, 0)
    total = tl.zeros([1], tl.float64)
    other = tile * 0
    while other <= tile:  # range() over a run-time value fails in the interpreter with NumPy 2.4
        s = other * ROWS + tl.arange(0, ROWS)
        other_id = tl.load(ids + s * ids_row, s < rows, 0)
        same = (row_id[:, None] == other_id[None, :]) & (t < rows)[:, None] & (s < rows)[None, :]
        if tl.max(tl.max(same.to(tl.int32), 1), 0) > 0:
            gram = tl.zeros([ROWS, ROWS], tl.float32)
            first = tile * 0
            while first < width:
                column = first + tl.arange(0, WIDTH)
                left = tl.load(
                    g + t[:, None] * g_row + column[None, :] * g_column,
                    (t < rows)[:, None] & (column < width)[None, :],
                    0.0,
                )
                right = tl.load(
                    g + s[None, :] * g_row + column[:, None] * g_column,
                    (s < rows)[None, :] & (column < width)[:, None],
                    0.0,
                )
                gram = tl.dot(left, right, gram, input_precision="ieee")
                first += WIDTH
            part = tl.sum(tl.sum(tl.where(same, gram, 0.0), 1), 0).to(tl.float64)
            total += tl.where(other < tile, 2 * part, part)
        other += 1
    tl.store(out + tl.program_id(0) + tl.arange(0, 1), total)


def embedding_sq_norms(
    ids: Tensor,  # [B, T]
    g: Tensor,  # [B, T, D]
) -> Tensor:  # [B]
    """See fastlr.ops.linear.embedding_sq_norms."""
    count, rows, width = g.shape
    if ids.dtype not in IDS or not covered(g):
        return NotImplemented
    size = ROWS[0] if rows <= ROWS[0] else ROWS[1]
    tiles = triton.cdiv(rows, size)
    if count * tiles >= INT32:
        return NotImplemented
    parts = g.new_empty(count, tiles, dtype=torch.float64)
    with on_device(g):
        launch(
            embedding_kernel,
            count * tiles,
            parts,
            ids,
            g,
            rows,
            width,
            *ids.stride(),
            *g.stride(),
            ROWS=size,
            WIDTH=WIDTH,
            num_warps=WARPS,
        )
    return parts.sum(1)
