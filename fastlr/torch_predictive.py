"""Fast plain torch for the ops of fastlr.reference.predictive, same names and signatures, and draws for all predictives.

Softmax cotangents are made in blocks that stay in the cache: with large vocabularies nothing as large as the logits is held
but the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor

from fastlr.reference.counter import STREAMS, normal_quantiles, random_words

BLOCK = {"cpu": 1 << 17}  # elements of a block, which stay in the cache
_BLOCK = 1 << 24  # elsewhere, where every block costs launches

# Signs (from word 0), normals and labels take disjoint ranges of one stream's words: the probes are independent.
_STREAM = STREAMS["cotangent"]
_NORMALS, _LABELS = 1 << 32, 1 << 33


@cache
def _byte_signs() -> Tensor:
    """[256, 8] float64: the signs that the bits of a byte stand for, the lowest first."""
    return ((torch.arange(256)[:, None] >> torch.arange(8)) & 1).double() * 2 - 1


def signs(index: Tensor, count: int, seed: int, first: int = 0) -> Tensor:
    """Return the independent signs ``first .. first+count-1`` of each sample, [B, count] in float64, 32 from a word."""
    skipped = first % 32
    words = random_words(seed, index, _STREAM, -(-(skipped + count) // 32), first // 32)
    octets = (words[..., None] >> torch.arange(0, 32, 8, device=index.device)) & 0xFF
    drawn = _byte_signs().to(index.device).index_select(0, octets.flatten()).view(len(index), -1)
    return drawn[:, skipped : skipped + count]


def normals(index: Tensor, count: int, seed: int) -> Tensor:
    """Return normal draws [B, count] in float64: 16 bits choose a quantile from a table, so every device agrees."""
    words = random_words(seed, index, _STREAM, -(-count // 2), _NORMALS)
    halves = torch.stack([words & 0xFFFF, words >> 16], dim=-1).flatten(1)[:, :count]
    return normal_quantiles().to(index.device)[halves].double()


def uniforms(index: Tensor, count: int, seed: int, first: int = 0) -> Tensor:
    """Return uniforms [B, count] in [0, 1), float64, from 128 bits each: fine near zero, for rare labels."""
    words = random_words(seed, index, _STREAM, 4 * count, _LABELS + 4 * first).double().unflatten(1, (count, 4))
    a, b, c, d = words.unbind(-1)
    uniform = (a + (b + (c + d * 2.0**-32) * 2.0**-32) * 2.0**-32) * 2.0**-32
    return uniform.clamp_(max=1 - 2.0**-53)  # a run of ones rounds to 1


def categorical_root(root: Tensor, best: Tensor, xi: Tensor) -> Tensor:
    """Apply the Householder root of diag(p) - p p^T to xi [..., C] with xi = 0 at ``best``; root = sqrt(p)."""
    top = root.gather(-1, best)
    v = xi * root
    t = v.sum(-1, keepdim=True)
    return v.sub_(root.square().mul_(t / (1 + top))).scatter_(-1, best, -top * t)


def categorical_root_cotangent(z: Tensor, index: Tensor, seed: int) -> Tensor:
    """See fastlr.reference.predictive.categorical_root_cotangent."""
    v = torch.empty(z.shape, dtype=torch.float64, device=z.device)
    for samples, positions in blocks(z.shape, z.device):
        part = categorical_values(z[samples, positions], "rademacher", index[samples], seed, positions.start)
        v[samples, positions] = part
    return v


def categorical_values(z: Tensor, probe: str, index: Tensor, seed: int, first: int = 0) -> Tensor:
    """Cotangents of the positions ``first ..`` of samples, whose logits are z [B, P, C]: [B, P, C] in float64.

    NaN where NaN, +inf or only -inf leave no distribution. ``probe``: "rademacher" or "sampled".
    """
    count, positions, classes = z.shape
    root = (z.double().log_softmax(-1) / 2).exp_()  # sqrt(p), without cancellation
    best = root.argmax(-1, keepdim=True)
    if probe == "sampled":
        return _sampled(root.square_(), best, uniforms(index, positions, seed, first))
    xi = signs(index, positions * classes, seed, first * classes).view(root.shape).scatter_(-1, best, 0.0)
    return categorical_root(root, best, xi)


def _sampled(p: Tensor, best: Tensor, uniform: Tensor) -> Tensor:
    """Return e_y - p for y drawn from p [B, P, C] by uniforms [B, P].

    The most likely class comes last on the unit interval, so that the rare ones are drawn where uniforms are finest.
    """
    ends = p.scatter(-1, best, 0.0).cumsum_(-1)
    label = torch.searchsorted(ends, uniform[..., None], right=True)
    label = torch.where(label == p.shape[-1], best, label)
    v = p.scatter(-1, label, 0.0).neg_()
    return v.scatter_(-1, label, -v.sum(-1, keepdim=True))


def blocks(shape: torch.Size, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Cut [B, P, C] into ranges of samples with all positions, or of one sample's positions."""
    count, positions, classes = shape
    most = BLOCK.get(device.type, _BLOCK)
    samples = max(1, most // max(1, positions * classes))
    step = positions if positions * classes <= most else max(1, most // classes)
    for lo in range(0, count, samples):
        for start in range(0, positions, max(1, step)):
            yield slice(lo, min(lo + samples, count)), slice(start, min(start + step, positions))


def scaled_blocks(
    block: Callable[[slice, slice], Tensor], shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Put together a tensor [B, P, C] from blocks in float64, each sample scaled by a power of two to unit size.

    Args:
        block: (samples, positions) -> that part of the tensor, float64.
        shape: of the whole.
        dtype: of the result.
        device: of the result.

    Returns:
        (v, exponent): ``2^exponent v`` is the tensor, exponent [B] int64 (0 for a sample of zeros).
    """
    v = torch.empty(shape, dtype=dtype, device=device)
    parts = list(blocks(shape, device))
    own = []
    for samples, positions in parts:
        values = block(samples, positions)
        largest = torch.linalg.vector_norm(values.flatten(1), math.inf, 1)
        exponent = torch.frexp(largest).exponent.long().clamp_min(-1000)  # the power of its inverse is finite
        v[samples, positions] = values.mul_(_power(-exponent).view(-1, 1, 1))
        own.append(torch.where(largest > 0, exponent, -(1 << 20)))
    highest = torch.full(shape[:1], -(1 << 20), dtype=torch.int64, device=device)
    for (samples, _), exponent in zip(parts, own, strict=True):
        highest[samples] = torch.maximum(highest[samples], exponent)
    highest = torch.where(highest > -(1 << 20), highest, 0)
    for (samples, positions), exponent in zip(parts, own, strict=True):
        if positions.stop - positions.start < shape[1]:  # a part of a sample: to the size of the whole
            lower = (exponent - highest[samples]).clamp(-1000, 0)
            v[samples, positions] *= _power(lower).view(-1, 1, 1)
    return v, highest


def _power(exponent: Tensor) -> Tensor:
    """2^exponent, exact, float64."""
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent)
