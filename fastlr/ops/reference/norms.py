"""Per-sample squared gradient norms, one sample at a time in plain torch.

These are the definitions that the fast twins are tested against.

Throughout, ``B`` is the number of samples; a sample may own several rows. Results are float64,
whatever the inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastlr.ops.geometry import ConvGeometry


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
    """
    return torch.stack(
        [(gb.mT.double() @ ab.double()).square().sum() for ab, gb in zip(a, g, strict=True)]
    )


def column_sq_norms(
    a: Tensor,  # [B, T, I]
    g: Tensor,  # [B, T, O]
) -> Tensor:  # [B, I]
    """Return the squared norm of what each input contributes to a sample's weight gradient.

    That is of the columns of sum_t g_t a_t^T.

    Args:
        a: inputs [B, T, I].
        g: output gradients [B, T, O].

    Returns:
        [B, I], float64.
    """
    return (g.double().mT @ a.double()).square().sum(1)


def dense_sq_norms(
    grads: Tensor,  # [B, ...]
) -> Tensor:  # [B]
    """Squared norm of each sample's gradient, which is given. Returns [B], float64."""
    return grads.double().flatten(1).square().sum(1)


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
    return linear_sq_norms(a[:, None, None], g[:, None, None]), dense_sq_norms(g)


def conv_grads(
    x: Tensor,  # [B, K, C, *spatial]
    g: Tensor,  # [B, K, O, *spatial']
    weight: Tensor,  # [O, C / groups, *kernel]
    geometry: ConvGeometry,
) -> Tensor:  # [B, *weight.shape]
    """Weight gradient of each sample of a convolution.

    Args:
        x: inputs ``[B, K, C, *spatial]``; each sample owns K images.
        g: output gradients ``[B, K, O, *spatial']``.
        weight: the weight, for its shape ``[O, C/groups, *kernel]`` (``[C, O/groups, *kernel]`` if
            transposed).
        geometry: stride, padding, dilation, transposition and groups.

    Returns:
        ``[B, *weight.shape]`` in the dtype of ``g``.
    """
    # torch's own is wrong for some grouped convolutions whose channels are last in memory
    x, g, weight = x.contiguous(), g.contiguous(), weight.to(g.dtype).contiguous()
    backward = torch.ops.aten.convolution_backward
    mask = [False, True, False]
    return torch.stack(
        [backward(gb, xb, weight, None, *geometry, mask)[1] for xb, gb in zip(x, g, strict=True)]
    )


def conv_sq_norms(
    x: Tensor,  # [B, K, C, *spatial]
    g: Tensor,  # [B, K, O, *spatial']
    weight: Tensor,  # [O, C / groups, *kernel]
    geometry: ConvGeometry,
) -> Tensor:  # [B]
    """Return the squared norm [B] of each sample's convolution weight gradient, in float64.

    The arguments are as in `conv_grads`.
    """
    return conv_grads(x.double(), g.double(), weight, geometry).flatten(1).square().sum(1)


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
    """
    norms = []
    for i, gb in zip(ids, g, strict=True):
        unique, place = i.unique(return_inverse=True)
        table = torch.zeros(len(unique), g.shape[-1], dtype=torch.float64, device=g.device)
        norms.append(table.index_add_(0, place, gb.double()).square().sum())
    return torch.stack(norms)


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
        mean: of the channels, [1, C] or [B, C]; None: zero.

    Returns:
        (sum of g (x - mean), sum of g), both [B, C], float64.
    """
    x, g = x.double(), g.double()
    axes = [1, *range(3, x.ndim)]
    if mean is not None:
        x = x - mean.double().view(len(mean), 1, -1, *[1] * (x.ndim - 3))
    return (g * x).sum(axes), g.sum(axes)


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
    """
    x, g = x.double(), g.double()
    return (g * (x - mean.double()) * rstd.double()).sum(1), g.sum(1)


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
    return (g.double() * x.double() * rrms.double()).sum(1)


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
    value = g.double() if other is None else g.double() * other.double()
    return value.sum(list(axes)) if axes else value
