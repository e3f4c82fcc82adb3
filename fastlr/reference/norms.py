"""Per-sample squared gradient norms, one sample at a time in plain torch: the definitions that fast twins are tested against.

Throughout, ``B`` is the number of samples; a sample may own several rows. Results are float64, whatever the inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def linear_sq_norms(a: Tensor, g: Tensor) -> Tensor:
    """Squared Frobenius norm of each sample's weight gradient sum_t g_t a_t^T of a matrix product.

    Args:
        a: inputs [B, N, T, I]; N independent products (groups, heads), T rows.
        g: output gradients [B, N, T, O].

    Returns:
        [B], float64: sum over n of ||G_n^T A_n||_F^2.
    """
    return torch.stack([(gb.mT.double() @ ab.double()).square().sum() for ab, gb in zip(a, g, strict=True)])


def conv_grads(
    x: Tensor,
    g: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """Weight gradient of each sample of a convolution.

    Args:
        x: inputs ``[B, K, C, *spatial]``; each sample owns K images.
        g: output gradients ``[B, K, O, *spatial']``.
        weight: the weight, for its shape ``[O, C/groups, *kernel]`` (``[C, O/groups, *kernel]`` if transposed).
        stride: one number for each spatial axis, as in torch.nn.functional.conv2d.
        padding: as in conv2d.
        dilation: as in conv2d.
        transposed: whether it is a transposed convolution.
        output_padding: as in conv_transpose2d.
        groups: as in conv2d.

    Returns:
        ``[B, *weight.shape]`` in the dtype of ``g``.
    """
    return torch.stack(
        [
            torch.ops.aten.convolution_backward(
                gb,
                xb,
                weight.to(gb.dtype),
                None,
                stride,
                padding,
                dilation,
                transposed,
                output_padding,
                groups,
                [False, True, False],
            )[1]
            for xb, gb in zip(x, g, strict=True)
        ]
    )


def conv_sq_norms(
    x: Tensor,
    g: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """Squared norm of each sample's convolution weight gradient; arguments as in `conv_grads`. Returns [B], float64."""
    grads = conv_grads(x.double(), g.double(), weight, stride, padding, dilation, transposed, output_padding, groups)
    return grads.flatten(1).square().sum(1)


def embedding_sq_norms(ids: Tensor, g: Tensor) -> Tensor:
    """Squared norm of each sample's gradient of a table of rows: rows with the same id add up first.

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


def channel_sums(x: Tensor, g: Tensor, mean: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Sums over rows and positions of g (x - mean) and of g, for each sample and channel (affine parameters of batch norm).

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


def layer_norm_sums(x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Each sample's gradients of the weight and bias of a layer norm: sums over rows of g x-hat and of g.

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


def rms_norm_sums(x: Tensor, g: Tensor, rrms: Tensor) -> Tensor:
    """Each sample's gradient of the weight of an RMS norm: sum over rows of g x / rms.

    Args:
        x: inputs [B, T, D].
        g: output gradients [B, T, D].
        rrms: reciprocal root mean squares [B, T, 1].

    Returns:
        [B, D], float64.
    """
    return (g.double() * x.double() * rrms.double()).sum(1)


def broadcast_sums(g: Tensor, other: Tensor | None, axes: Sequence[int]) -> Tensor:
    """Each sample's gradient of a parameter that was broadcast: sum of g, or of g times the other factor.

    Args:
        g: output gradients [B, ...].
        other: what the parameter was multiplied with, broadcastable to the shape of ``g``; None: it was added.
        axes: the axes of ``g`` (not 0) along which the parameter was broadcast.

    Returns:
        ``[B, *axes of g that are left, in order]``, float64.
    """
    value = g.double() if other is None else g.double() * other.double()
    return value.sum(list(axes)) if axes else value
