"""Per-sample squared norms of matrix products in Triton.

The op is ``fastlr.ops.linear.linear_sq_norms``.

Three forms, by shape alone. One row: the product of two squared lengths. Otherwise the weight
gradient's tiles (product_norms) or, where rows are few, Gram matrices: <A A^T, G G^T> = ||G^T
A||^2, one program for a pair of blocks of rows, which adds up both blocks of inner products in fp32
registers and writes the sum of their products.

The limit is reading a and g once, T (I + O) elements a sample. The Gram form reads them once for
each block of 64 or 128 rows, by programs of the same sample next to each other, so all but once
from L2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlr.kernels.launching import covered, launch, multiple, on_device, workspace
from fastlr.kernels.product_norms import Operand, Sizes, alignment, choose_tile, product_norms
from fastlr.kernels.row_norms import row_norms

_SIZES = (
    "a_sample",
    "a_group",
    "g_sample",
    "g_group",
    "groups",
    "rows",
    "inputs",
    "outputs",
    "blocks",
)
_UNIT = ("a_row", "a_column", "g_row", "g_column")
CENTRED = {torch.float32: True, torch.bfloat16: False}  # see gram_pays


@triton.jit
def _inner_products(
    base,
    mean,
    row,
    column,
    first,
    second,
    rows,
    width,
    CENTRED: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Return inner products of two blocks of rows [BLOCK, BLOCK], and with the mean [BLOCK].

    Those with the mean of all rows are of the first block.
    """
    t, s = first + tl.arange(0, BLOCK), second + tl.arange(0, BLOCK)
    products = tl.zeros([BLOCK, BLOCK], tl.float32)
    with_mean = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, CHUNK):
        c = start + tl.arange(0, CHUNK)
        left_mask, right_mask = (
            (t < rows)[:, None] & (c < width)[None, :],
            (c < width)[:, None] & (s < rows)[None, :],
        )
        left = tl.load(base + ((t * row)[:, None] + (c * column)[None, :]), left_mask, other=0.0)
        right = tl.load(base + ((c * column)[:, None] + (s * row)[None, :]), right_mask, other=0.0)
        if CENTRED:
            m = tl.load(mean + c, c < width, other=0.0)
            left = tl.where(left_mask, left - m[None, :], 0.0)
            right = tl.where(right_mask, right - m[:, None], 0.0)
            with_mean += tl.sum(left * m[None, :], 1)
        products = tl.dot(left, right, products, input_precision="ieee")
    return products, with_mean


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_UNIT)
def gram_norms_kernel(
    a,
    g,
    a_mean,
    g_mean,
    squares,
    a_sample,
    a_group,
    a_row,
    a_column,
    g_sample,
    g_group,
    g_row,
    g_column,
    groups,
    rows,
    inputs,
    outputs,
    blocks,
    A_LAST: tl.constexpr,
    G_LAST: tl.constexpr,
    ALIGN: tl.constexpr,
    CENTRED: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Take one pair of blocks of one sample's rows.

    The pairs above the diagonal count twice, those below write zero.

    CENTRED: both sides less their means over rows. With s = sum_t g_t, M = sum_t g'_t a'_t^T + s
    mean(a)^T, so that ||M||^2 = <A'A'^T, G'G'^T> + 2 sum_t (g'_t . s)(a'_t . mean a) + |s|^2 |mean
    a|^2; the launcher adds the last term.
    """
    first, second = tl.program_id(0) % blocks, tl.program_id(0) // blocks % blocks
    which = (tl.program_id(0) // (blocks * blocks)).to(tl.int64)
    if second < first:
        tl.store(squares + tl.program_id(0), 0.0)
    else:
        group, sample = which % groups, which // groups
        a += sample * a_sample + group * a_group
        g += sample * g_sample + group * g_group
        if ALIGN > 1:
            bytes: tl.constexpr = ALIGN * a.dtype.element_ty.primitive_bitwidth // 8
            a, g = tl.multiple_of(a, bytes), tl.multiple_of(g, bytes)
            if A_LAST:
                inputs, a_row = multiple(inputs, ALIGN), multiple(a_row, ALIGN)
            else:
                rows, a_column = multiple(rows, ALIGN), multiple(a_column, ALIGN)
            if G_LAST:
                outputs, g_row = multiple(outputs, ALIGN), multiple(g_row, ALIGN)
            else:
                rows, g_column = multiple(rows, ALIGN), multiple(g_column, ALIGN)
        a_products, a_along = _inner_products(
            a,
            a_mean + which * inputs,
            a_row,
            a_column,
            first * BLOCK,
            second * BLOCK,
            rows,
            inputs,
            CENTRED,
            BLOCK,
            CHUNK,
        )
        g_products, g_along = _inner_products(
            g,
            g_mean + which * outputs,
            g_row,
            g_column,
            first * BLOCK,
            second * BLOCK,
            rows,
            outputs,
            CENTRED,
            BLOCK,
            CHUNK,
        )
        total = tl.sum(a_products * g_products)
        if second > first:
            total += total
        elif CENTRED:
            total += 2.0 * rows * tl.sum(a_along * g_along)
        tl.store(squares + tl.program_id(0), total)


def gram_block(dtype: torch.dtype, rows: int, align: int) -> tuple[int, int, int, int]:
    """Rows of a block, columns of a step, warps and stages of the Gram form."""
    if dtype == torch.float32:
        return (64, 16, 8, 3) if align > 1 else (32, 16, 4, 3)
    if align == 1:  # single elements go through registers
        return 64, 32, 8, 3
    return (64, 64, 4, 3) if rows <= 64 else (128, 64, 8, 3)


def gram_pays(dtype: torch.dtype, rows: int, inputs: int, outputs: int, align: int) -> bool:
    """Return True if the Gram form takes fewer products than the direct one.

    Both are filled up to whole tiles.

    Activations after a ReLU have a large common part that the weight gradient hardly sees and that
    Gram matrices square. In float32 both sides are centred. bf16 inputs are not: with a ratio r of
    the common part's square to the rest's, the rounding of the inputs themselves contributes 2^-16
    r / 3, more than the sums in fp32 lose. fp16 inputs are finer than that: they take the direct
    form.
    """
    if dtype not in CENTRED:
        return False
    block = gram_block(dtype, rows, align)[0]
    blocks = triton.cdiv(rows, block)
    tile = choose_tile(dtype, outputs, inputs, vector=align > 1, packed=False, folded=False)
    across, along = (
        triton.cdiv(n, b) * b for n, b in ((outputs, tile.outputs), (inputs, tile.columns))
    )
    return blocks * (blocks + 1) // 2 * block * block * (inputs + outputs) < rows * across * along


def linear_sq_norms(
    a: Tensor,  # [B, N, T, I]
    g: Tensor,  # [B, N, T, O]
) -> Tensor:  # [B]
    """See fastlr.ops.linear.linear_sq_norms."""
    if not covered(a, g):
        return NotImplemented
    count, groups, rows, inputs = a.shape
    outputs = g.shape[-1]
    if rows == 1:
        return row_norms(a[:, :, 0], g[:, :, 0])
    # An operand's columns are positions, its channels the inputs or outputs: what convolutions
    # need.
    x, y = (Operand(t, *t.stride()[:2], t.stride(3), 0, 0, t.stride(2)) for t in (a, g))
    sizes = Sizes(count, groups, rows, inputs, outputs)
    align = alignment(x, y, sizes, window=False, g_plain=True)
    if not gram_pays(a.dtype, rows, inputs, outputs, align):
        return product_norms(x, y, sizes)[0].sum(1, dtype=torch.float64)
    block, chunk, num_warps, num_stages = gram_block(a.dtype, rows, align)
    blocks = triton.cdiv(rows, block)
    squares = workspace(count * groups * blocks * blocks, device=a.device)
    centred = CENTRED[a.dtype]
    means = (a.mean(2).contiguous(), g.mean(2).contiguous()) if centred else (squares, squares)
    with on_device(a):
        launch(
            gram_norms_kernel,
            len(squares),
            a,
            g,
            *means,
            squares,
            *a.stride(),
            *g.stride(),
            groups,
            rows,
            inputs,
            outputs,
            blocks,
            A_LAST=a.stride(3) == 1,
            G_LAST=g.stride(3) == 1,
            ALIGN=align,
            CENTRED=centred,
            BLOCK=block,
            CHUNK=chunk,
            num_warps=num_warps,
            num_stages=num_stages,
        )
    total = squares.view(count, -1).sum(1, dtype=torch.float64)
    if centred:
        mean_a, mean_g = (m.double().square().sum(-1) for m in means)
        total += rows**2 * (mean_a * mean_g).sum(1)
    return total
