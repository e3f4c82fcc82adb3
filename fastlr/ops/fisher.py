"""Cotangents of a softmax in plain torch, and draws for all predictives.

Softmax cotangents are made in blocks that stay in the cache: with large vocabularies nothing as
large as the logits is held but the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor

from fastlr.ops.philox import STREAMS, half_words, normal_quantiles, random_words

BLOCK = {"cpu": 1 << 17}  # elements of a block, which stay in the cache
_BLOCK = 1 << 24  # elsewhere, where every block costs launches

# Signs (from word 0), normals and labels take disjoint ranges of one stream's words: the probes are
# independent.
_STREAM = STREAMS["cotangent"]
_NORMALS, _LABELS = 1 << 32, 1 << 33


@cache
def _byte_signs(device: torch.device) -> Tensor:
    """[256, 8] float64: the signs that the bits of a byte stand for, the lowest first."""
    bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)
    return (bits & 1).double() * 2 - 1


def signs(index: Tensor, count: int, seed: int) -> Tensor:
    """Return independent signs [B, count] in float64, 32 of them from a word."""
    return signs_of(sign_words(index, count, seed), count)


def sign_words(index: Tensor, count: int, seed: int) -> Tensor:
    """The words that hold ``count`` signs of each sample: [B, count / 32, rounded up]."""
    return random_words(seed, index, _STREAM, -(-count // 32))


def signs_of(words: Tensor, count: int, first: int = 0) -> Tensor:
    """The signs ``first .. first+count-1`` that words hold: [B, count] in float64."""
    skipped = first % 32
    words = words[:, first // 32 : -(-(first + count) // 32)]
    octets = (words[..., None] >> torch.arange(0, 32, 8, device=words.device)) & 0xFF
    drawn = _byte_signs(words.device).index_select(0, octets.flatten()).view(len(words), -1)
    return drawn[:, skipped : skipped + count]


def normals(index: Tensor, count: int, seed: int) -> Tensor:
    """Return standard normal draws [B, count] in float64.

    16 random bits choose each from a table of quantiles, so that every device gives the same
    values.
    """
    return (
        normal_quantiles()
        .to(index.device)[half_words(seed, index, _STREAM, count, _NORMALS)]
        .double()
    )


def uniforms(index: Tensor, count: int, seed: int) -> Tensor:
    """Return uniforms [B, count] in [0, 1), float64, each from 128 random bits.

    So many bits make them fine near zero, for rare labels.
    """
    words = random_words(seed, index, _STREAM, 4 * count, _LABELS).double().unflatten(1, (count, 4))
    a, b, c, d = words.unbind(-1)
    uniform = (a + (b + (c + d * 2.0**-32) * 2.0**-32) * 2.0**-32) * 2.0**-32
    return uniform.clamp_(max=1 - 2.0**-53)  # a run of ones rounds to 1


def categorical_root(root: Tensor, best: Tensor, xi: Tensor) -> Tensor:
    """Apply the Householder root of diag(p) - p p^T to xi [..., C].

    xi is 0 at ``best``; root = sqrt(p).
    """
    top = root.gather(-1, best)
    v = xi * root
    t = v.sum(-1, keepdim=True)
    return v.sub_(root.square().mul_(t / (1 + top))).scatter_(-1, best, -top * t)


def categorical_root_cotangent(
    z: Tensor,  # [B, P, C]
    index: Tensor,  # [B]
    seed: int,
) -> Tensor:  # [B, P, C]
    """Rademacher cotangents: `householder_root` of each position's softmax, times random signs.

    The sign of element e = position * C + class is bit e % 32 of word e // 32 of the sample's words
    in the stream "cotangent".

    Args:
        z: logits [B, P, C] of any floating dtype; -inf is a class of probability zero. Where NaN,
            +inf or only -inf leave no distribution, all of the position is NaN.
        index: global numbers of the samples [B], int64.
        seed: Seed of the signs, from 0 to 2^64 - 1.

    Returns:
        [B, P, C], float64.
    """
    v = torch.empty(z.shape, dtype=torch.float64, device=z.device)
    values = categorical_values(z, "rademacher", index, seed)
    for samples, positions in blocks(z.shape, z.device):
        v[samples, positions] = values(samples, positions)
    return v


def categorical_values(
    z: Tensor, probe: str, index: Tensor, seed: int
) -> Callable[[slice, slice], Tensor]:
    """Return a function (samples, positions) -> that part of the cotangents, float64.

    They are the cotangents of the logits z [B, P, C].

    NaN where NaN, +inf or only -inf leave no distribution. ``probe``: "rademacher" or "sampled".
    """
    count, positions, classes = z.shape
    if probe == "sampled":
        draws = uniforms(index, positions, seed)
    else:
        # Drawn together, a sixteenth of the memory of float32 logits: in small pieces this takes
        # longer than the rest.
        draws = sign_words(index, positions * classes, seed)

    def part(samples: slice, where: slice) -> Tensor:
        root = (
            z[samples, where].double().log_softmax(-1) / 2
        ).exp_()  # sqrt(p), without cancellation
        best = root.argmax(-1, keepdim=True)
        if probe == "sampled":
            return _sampled(root.square_(), best, draws[samples, where])
        drawn = signs_of(draws[samples], root.shape[1] * classes, where.start * classes)
        return categorical_root(root, best, drawn.view(root.shape).scatter_(-1, best, 0.0))

    return part


def _sampled(p: Tensor, best: Tensor, uniform: Tensor) -> Tensor:
    """Return e_y - p for y drawn from p [B, P, C] by uniforms [B, P].

    The most likely class comes last on the unit interval, so that the rare ones are drawn where
    uniforms are finest.
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
    block: Callable[[slice, slice], Tensor],
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    *,
    refuse: Callable[[Tensor], None],
) -> tuple[Tensor, Tensor]:
    """Assemble a tensor [B, P, C] from float64 blocks, each sample scaled to unit size.

    The scales are powers of two.

    Args:
        block: (samples, positions) -> that part of the tensor, float64.
        shape: Shape of the whole.
        dtype: Dtype of the result.
        device: Device of the result.
        refuse: called with where there is NaN.

    Returns:
        (v, exponent): ``2^exponent v`` is the tensor, exponent [B] int64 (0 for a sample of zeros).
    """
    v = torch.empty(shape, dtype=dtype, device=device)
    parts = list(blocks(shape, device))
    exponents = []
    for samples, positions in parts:
        values = block(samples, positions)
        low, high = values.flatten(1).aminmax(dim=1)
        largest = torch.maximum(-low, high)
        refuse(largest.isnan())
        # The power of its inverse is finite.
        exponent = torch.frexp(largest).exponent.long().clamp_min(-1000)
        v[samples, positions] = values.mul_(power_of_two(-exponent).view(-1, 1, 1))
        exponents.append(torch.where(largest > 0, exponent, -(1 << 20)))
    highest = torch.full(shape[:1], -(1 << 20), dtype=torch.int64, device=device)
    for (samples, _), exponent in zip(parts, exponents, strict=True):
        highest[samples] = torch.maximum(highest[samples], exponent)
    highest = torch.where(highest > -(1 << 20), highest, 0)
    for (samples, positions), exponent in zip(parts, exponents, strict=True):
        if positions.stop - positions.start < shape[1]:
            # A part of a sample: to the size of the whole.
            lower = (exponent - highest[samples]).clamp(-1000, 0)
            v[samples, positions] *= power_of_two(lower).view(-1, 1, 1)
    return v, highest


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent, exact, float64."""
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent)
