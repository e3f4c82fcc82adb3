"""Per-sample sums and squared gradient norms in plain torch, of all layers but convolutions.

Throughout, ``B`` is the number of samples; a sample may own several rows. Sums are float32 or
wider. The form of a product is chosen by its cost, from shapes.

Low-precision inputs are raised to float32 before products, so that sums are accumulated in float32
at least. The choice depends on shapes alone: the same call gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 1 << 23  # elements of intermediate products held at once
# Elements of a sample from which a call for each costs less than temporaries of the batch.
ONE_BY_ONE = 1 << 16
RUN = 1 << 12  # elements that a norm in float32 adds up at once
FAINT = 1e-30  # a sum of squares in float32 below which those that vanish may show
# Rows of products that a row costs of a Gram matrix on a CPU beside its products: centring, and the
# sums.
CENTRING = 40
# Rows of a Gram matrix made at once on a CPU, or a multiple: what the BLAS' inner loops take on a
# side.
GRAM_STRIP = 64
# Elements of gradients held at once on a CPU, so that they stay in the cache for their sums.
CACHED = 1 << 19
COPIED = 1 << 21  # elements centred at once on a CPU: near the cache, and enough for all cores


def raised(t: Tensor) -> Tensor:
    """Low precision to float32; complex numbers as they are."""
    return t if t.dtype in (torch.float32, torch.float64) or t.is_complex() else t.float()


def chunks(count: int, elements: int, block: int | None = None) -> list[tuple[int, int]]:
    """Ranges of samples such that ``elements`` for each stay within ``block`` (default BLOCK)."""
    step = max(1, min(count, (block or BLOCK) // max(1, elements)))
    return [(lo, min(count, lo + step)) for lo in range(0, count, step)]


def square_sum(t: Tensor) -> Tensor:
    """Sum of squares of each sample: [B, ...] -> [B], float64.

    In runs of a few thousand: over a long row, torch's norm in float32 on a CPU is off by 1e-4 at 4
    million elements and by 1e-2 at 67 million (torch 2.11).
    """
    t = t.flatten(1)
    whole = t.shape[1] // RUN * RUN
    rest = t[:, whole:] if whole else t
    total = torch.linalg.vector_norm(rest, dim=1).double().square()
    if whole:
        runs = t[:, :whole].unflatten(1, (-1, RUN))
        total += torch.linalg.vector_norm(runs, dim=2).double().square().sum(1)
    if t.device.type == "cpu" and t.dtype == torch.float32 and bool((faint := total < FAINT).any()):
        total[faint] = torch.linalg.vector_norm(t[faint], dim=1, dtype=torch.float64).square()
    return total


def dense_sq_norms(
    grads: Tensor,  # [B, ...]
) -> Tensor:  # [B]
    """Squared norm of each sample's gradient, which is given. Returns [B], float64."""
    rows = grads.reshape(len(grads), -1).double()
    return torch.linalg.vecdot(rows, rows)


def one_row_sq_norms(
    a: Tensor,  # [B, I]
    g: Tensor,  # [B, O]
) -> tuple[Tensor, Tensor]:  # [B], [B]
    """Return the squared norms of the gradients of a weight and of a bias, g a^T and g.

    Where a sample is one row of a product with a bias.

    Args:
        a: inputs [B, I].
        g: output gradients [B, O].

    Returns:
        ||g a^T||_F^2 and ||g||^2 of each sample, float64.
    """
    a, g = a.double(), g.double()
    of_bias = (g * g).sum(1)
    return of_bias * (a * a).sum(1), of_bias


def linear_sq_norms(
    a: Tensor,  # [B, N, T, I]
    g: Tensor,  # [B, N, T, O]
) -> Tensor:  # [B]
    """Squared Frobenius norm of each sample's weight gradient sum_t g_t a_t^T of a matrix product.

    Args:
        a: inputs [B, N, T, I]; N independent products (groups, heads), T rows.
        g: output gradients [B, N, T, O].

    Returns:
        [B], float64: sum over n of ||G_n^T A_n||_F^2.

    It has three forms: one row, Gram matrices, or the product itself.
    """
    count, groups, rows, inputs = a.shape
    outputs = g.shape[-1]
    if rows == 1:
        lengths = (
            torch.linalg.vector_norm(t, dim=-1, dtype=torch.float64).square() for t in (a, g)
        )
        return torch.mul(*lengths).sum((1, 2))
    on_cpu = a.device.type == "cpu"
    copied = groups * rows * (inputs + outputs)  # by centring or raising them
    if (rows + CENTRING * on_cpu) * (inputs + outputs) < inputs * outputs:
        ranges = chunks(count, max(2 * groups * rows * rows, copied), COPIED if on_cpu else None)
        parts = [_gram(raised(a[lo:hi]), raised(g[lo:hi])) for lo, hi in ranges]
    else:
        # The longer side last: up to six times as fast.
        small, large = (a, g) if outputs >= inputs else (g, a)
        copied = 0 if a.dtype == g.dtype == raised(g).dtype else copied
        ranges = chunks(count, max(groups * inputs * outputs, copied), CACHED if on_cpu else None)
        parts = [_of_product(raised(small[lo:hi]), raised(large[lo:hi])) for lo, hi in ranges]
    return torch.cat(parts)


def _of_product(small: Tensor, large: Tensor) -> Tensor:
    """Sum of squares of each sample's products small^T large, of [B, N, T, .] both: [B]."""
    product = torch.bmm(small.flatten(0, 1).mT, large.flatten(0, 1))
    return square_sum(product.view(len(small), -1))


def _gram(a: Tensor, g: Tensor) -> Tensor:
    """Return each sample's squared norm of G^T A, summed over groups, by Gram matrices.

    It is <A A^T, G G^T>, so that G^T A is not formed.

    Both sides are centred over the rows: M = sum_t g'_t a'_t^T + T mean(g) mean(a)^T. Rows that are
    nearly constant (activations after a ReLU, blank images) have a common part that M hardly sees
    and that Gram matrices would square: where the other side sums to zero, all but the noise would
    cancel.
    """
    count, groups, rows = a.shape[:3]
    a, g = _centred(a), _centred(g)
    inner = torch.zeros(count, dtype=torch.float64, device=a.device)
    with_means = a.new_zeros(())  # (a'_t . mean a) (g'_t . mean g), from the first strip
    for lo, hi in gram_strips(a[:, :, 1:]):
        # Both matrices are symmetric: a strip from its diagonal block down.
        product, other = (t[:, :, 1 + lo :] @ t[:, :, lo + (lo > 0) : hi + 1].mT for t in (a, g))
        product = product.double().mul_(other)  # in float32 the product of small ones would be zero
        if lo == 0:
            with_means, product = product[..., 0], product[..., 1:]
        sums = product.sum((1, 3))  # of each row
        inner += sums[:, : hi - lo].sum(1) + 2 * sums[:, hi - lo :].sum(1)
    cross = with_means.flatten(1).sum(1, dtype=torch.float64)
    mean_a, mean_g = (t[:, :, 0].double().square().sum(2) for t in (a, g))
    return inner + 2 * rows * cross + rows**2 * (mean_a * mean_g).sum(1)


def _centred(t: Tensor) -> Tensor:
    """Return the mean over rows and the rows less it, joined along the axis of rows.

    [B, groups, rows, C] -> [B, groups, 1 + rows, C].
    """
    count, groups, rows, width = t.shape
    if t.stride(2) == 1 < t.stride(3):  # the order in memory is kept
        both = t.new_empty(count, groups, width, rows + 1).mT
    else:
        both = t.new_empty(count, groups, rows + 1, width)
    mean = torch.mean(t.detach(), 2, keepdim=True, out=both[:, :, :1])
    torch.sub(t.detach(), mean, out=both[:, :, 1:])
    return both


def gram_strips(t: Tensor) -> list[tuple[int, int]]:
    """Return the ranges of rows of [B, groups, rows, C] that Gram matrices are made of.

    On a CPU a Gram matrix is made strip by strip, at most nine; on a GPU at once.

    The first strip is one row narrower: one more column goes with it.
    """
    rows = t.shape[2]
    if t.device.type != "cpu" or rows < 2 * GRAM_STRIP:
        return [(0, rows)]
    step = GRAM_STRIP * -(-rows // (8 * GRAM_STRIP))
    edges = [0, *range(step - 1, rows, step), rows]
    return list(zip(edges, edges[1:], strict=False))


def embedding_sq_norms(
    ids: Tensor,  # [B, T]
    g: Tensor,  # [B, T, D]
) -> Tensor:  # [B]
    """Return the squared norm of each sample's gradient of a table of rows (an embedding).

    Rows with the same id add up first.

    Args:
        ids: row numbers [B, T].
        g: gradients of the rows [B, T, D].

    Returns:
        [B], float64.

    Rows of one id are added in a fixed order.
    """
    g = raised(g)
    count, rows, _ = g.shape
    if g.device.type == "cpu":
        number = int(ids.max()) + 1 if ids.numel() else 1
        unique, place = (
            (ids + number * torch.arange(count, device=ids.device)[:, None])
            .flatten()
            .unique(return_inverse=True)
        )
        table = g.new_zeros(len(unique), g.shape[-1]).index_add_(0, place, g.flatten(0, 1))
        norms = torch.zeros(count, dtype=torch.float64, device=g.device)
        return norms.index_add_(0, unique // number, table.square().sum(1).double())
    return torch.cat(
        [
            (g[lo:hi] @ g[lo:hi].mT)
            .mul_(ids[lo:hi, :, None] == ids[lo:hi, None, :])
            .flatten(1)
            .sum(1, dtype=torch.float64)
            for lo, hi in chunks(count, 2 * rows * rows)
        ]
    )


def channel_sums(
    x: Tensor,  # [B, K, C, *spatial]
    g: Tensor,  # [B, K, C, *spatial]
    mean: Tensor | None = None,  # [1, C] or [B, C]
) -> tuple[Tensor, Tensor]:  # [B, C], [B, C]
    """Sum g (x - mean) and g over rows and positions, for each sample and channel.

    These are the gradients of the affine parameters of batch norm.

    Args:
        x: inputs ``[B, K, C, *spatial]``.
        g: output gradients, same shape.
        mean: Mean of the channels, [1, C] or [B, C]; None: zero.

    Returns:
        (sum of g (x - mean), sum of g), both [B, C], float64.
    """
    x, g = raised(x), raised(g)
    axes = [1, *range(3, x.ndim)]
    if mean is None:
        return (g * x).sum(axes), g.sum(axes)
    mean = mean.to(x.dtype).view(len(mean), 1, x.shape[2], *[1] * (x.ndim - 3))
    return (x - mean).mul_(g).sum(axes), g.sum(axes)


def layer_norm_sums(
    x: Tensor,  # [B, T, D]
    g: Tensor,  # [B, T, D]
    mean: Tensor,  # [B, T, 1]
    rstd: Tensor,  # [B, T, 1]
) -> tuple[Tensor, Tensor]:  # [B, D], [B, D]
    """Return each sample's gradients of the weight and bias of a layer norm.

    They are the sums over rows of g x-hat and of g.

    Args:
        x: inputs [B, T, D].
        g: output gradients [B, T, D].
        mean: row means [B, T, 1].
        rstd: reciprocal standard deviations [B, T, 1].

    Returns:
        (weight gradients, bias gradients), both [B, D], float64.

    Large samples on a CPU go one by one, by PyTorch's own backward pass.
    """
    x, g = raised(x), raised(g)
    if x.device.type == "cpu" and x[0].numel() >= ONE_BY_ONE:
        one = x.new_ones(x.shape[2])
        sums = [
            torch.ops.aten.native_layer_norm_backward(
                gb, xb, [len(one)], m, r, one, one, [False, True, True]
            )[1:]
            for xb, gb, m, r in zip(x, g, mean.to(x.dtype), rstd.to(x.dtype), strict=True)
        ]
        products, gradients = zip(*sums, strict=True)
        return torch.stack(products), torch.stack(gradients)
    normal = (x - mean.to(x.dtype)) * rstd.to(x.dtype)
    return normal.mul_(g).sum(1), g.sum(1)


def rms_norm_sums(
    x: Tensor,  # [B, T, D]
    g: Tensor,  # [B, T, D]
    rrms: Tensor,  # [B, T, 1]
) -> Tensor:  # [B, D]
    """Each sample's gradient of the weight of an RMS norm: sum over rows of g x / rms.

    Args:
        x: inputs [B, T, D].
        g: output gradients [B, T, D].
        rrms: reciprocal root mean squares [B, T, 1].

    Returns:
        [B, D], float64.
    """
    x, g = raised(x), raised(g)
    return (x * rrms.to(x.dtype)).mul_(g).sum(1)


def broadcast_sums(
    g: Tensor,  # [B, ...]
    other: Tensor | None,  # broadcastable to the shape of g
    axes: Sequence[int],
) -> Tensor:  # [B, *axes of g that are left]
    """Return each sample's gradient of a parameter that was broadcast.

    It is the sum of g, or of g times the other factor.

    Args:
        g: output gradients [B, ...].
        other: what the parameter was multiplied with, broadcastable to the shape of ``g``; None: it
            was added.
        axes: the axes of ``g`` (not 0) along which the parameter was broadcast.

    Returns:
        ``[B, *axes of g that are left, in order]``, float64.
    """
    if other is not None:
        g = raised(g) * other
    if not axes:
        return raised(g)
    return g.sum(list(axes), dtype=torch.promote_types(g.dtype, torch.float32))
