"""Squared norms of a table's gradient in Triton, as ``fastlr.reference.norms.embedding_sq_norms``, without the table.

With g_t the gradient of row t, the squared norm is the sum of <g_t, g_s> over all t, s of one id. One program takes one
sample and a tile of rows t, and goes through the tiles of rows s up to its own: those without an equal id are left out, so
that distinct ids cost a pass over the ids and the tiles on the diagonal. No table, no sort, no atomics.

The limit is reading g once for each tile of rows s that shares an id with a tile of rows t: at least once, bytes of g.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlr.kernels.launching import DTYPES, on_device

IDS = {torch.int64: "i64", torch.int32: "i32"}
ROWS = (16, 32)
WIDTH, WARPS = 32, 4


@triton.jit(do_not_specialize=["rows"])
def embedding_kernel(
    out, ids, g, rows, width, ids_sample, ids_row, g_sample, g_row, g_column, ROWS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
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
                    (t < rows)[:, None] & (column < width)[None, :], 0.0,
                )  # fmt: skip
                right = tl.load(
                    g + s[None, :] * g_row + column[:, None] * g_column,
                    (s < rows)[None, :] & (column < width)[:, None], 0.0,
                )  # fmt: skip
                gram = tl.dot(left, right, gram, input_precision="ieee")
                first += WIDTH
            part = tl.sum(tl.sum(tl.where(same, gram, 0.0), 1), 0).to(tl.float64)
            total += tl.where(other < tile, 2 * part, part)
        other += 1
    tl.store(out + tl.program_id(0) + tl.arange(0, 1), total)


def embedding_sq_norms(ids: Tensor, g: Tensor) -> Tensor:
    """See fastlr.reference.norms.embedding_sq_norms."""
    count, rows, width = g.shape
    span = sum((n - 1) * s for n, s in zip(g.shape[1:], g.stride()[1:], strict=True))  # offsets in a sample: 32-bit
    if g.dtype not in DTYPES or ids.dtype not in IDS or g.numel() == 0 or span >= 1 << 31:
        return NotImplemented
    size = ROWS[0] if rows <= ROWS[0] else ROWS[1]
    tiles = triton.cdiv(rows, size)
    if count * tiles >= 1 << 31:
        return NotImplemented
    parts = g.new_empty(count, tiles, dtype=torch.float64)
    with on_device(g):
        embedding_kernel[(count * tiles,)](
            parts, ids, g, rows, width, *ids.stride(), *g.stride(), ROWS=size, WIDTH=WIDTH, num_warps=WARPS
        )
    return parts.sum(1)


def compile_cases() -> list[tuple]:
    """Variants to compile ahead of time in the tests: dtypes, tiles, and rows that are contiguous and aligned or not."""
    cases = []
    strides = ("ids_sample", "ids_row", "g_sample", "g_row", "g_column")
    for dtype in DTYPES.values():
        for number in IDS.values():
            for size in ROWS:
                for contiguous in (True, False):
                    name = f"embedding_sq_norms[{dtype}, ids {number}, {size}{', contiguous' * contiguous}]"
                    constants: dict[str, object] = {"ROWS": size, "WIDTH": WIDTH}
                    if contiguous:
                        constants |= {"ids_row": 1, "g_column": 1}
                    kinds = {"out": "*fp64", "ids": f"*{number}", "g": f"*{dtype}"}
                    numbers = [key for key in ("rows", "width", *strides) if key not in constants]
                    divisible = [*kinds, *(key for key in numbers if key != "rows")] if contiguous else list(kinds)
                    options = {"num_warps": WARPS, "divisible": divisible}
                    signature = {**kinds, **dict.fromkeys(numbers, "i32")}
                    cases.append((name, embedding_kernel, signature, constants, options))
    # Triton turns an argument of 1 into a constant.
    name, kernel, signature, constants, options = cases[-1]
    rest = {key: kind for key, kind in signature.items() if key != "width"}
    cases.append((f"{name[:-1]}, one column]", kernel, rest, {**constants, "width": 1}, options))
    return cases
