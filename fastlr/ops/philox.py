"""Counter-based random words in plain integer torch, by Philox4x32-10.

The generator is that of Salmon et al., SC 2011, "as easy as 1, 2, 3".

A word is a pure function of (seed, stream, index, draw): the seed is the 64-bit key, and the
128-bit counter holds ``[draw // 4, stream, index % 2**32, index // 2**32]``. Nothing depends on
chunks, order, rank or device. Words are int64 tensors with values in ``[0, 2**32)``, as torch has
little arithmetic on unsigned 32-bit integers.

Everything here is integer arithmetic and table look-ups, so the CPU, a GPU and Triton's interpreter
agree bit for bit.
"""

from __future__ import annotations

import math
from functools import cache
from statistics import NormalDist

import torch
from torch import Tensor

from fastlr.errors import InputError

MASK = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85

# One stream for each use, so that the same seed and index never give two uses the same words.
STREAMS = {
    "shapes": 1,
    "noise": 2,
    "series": 3,
    "tokens": 4,
    "labels": 5,
    "cotangent": 6,
    "split": 7,
    "pairs": 8,
    "textures": 9,
    "generated series": 10,
    "targets": 11,
    "pixels": 12,
    "fitted": 13,
}

NORMAL_BITS = 16
BLOCK = 1 << 20  # words are drawn in blocks of about this many where that bounds the memory
_NORMAL_FRACTION = 20


def philox4x32(
    c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: int, k1: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four random 32-bit words for each counter by Philox4x32-10.

    The counters are (c0, c1, c2, c3), the key is (k0, k1).

    Args:
        c0: counter words, int64 in ``[0, 2**32)``; the four broadcast against each other.
        c1: see ``c0``.
        c2: see ``c0``.
        c3: see ``c0``.
        k0: low 32 bits of the key.
        k1: high 32 bits of the key.

    Returns:
        Four int64 tensors of the broadcast shape, in ``[0, 2**32)``; equal to Random123's
        known-answer vectors.
    """
    for _ in range(10):
        # int64 products wrap modulo 2**64; bits 32..63 of the wrapped product are still those of
        # the true one.
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (
            (p1 >> 32 ^ c1 ^ k0) & MASK,
            p1 & MASK,
            (p0 >> 32 ^ c3 ^ k1) & MASK,
            p0 & MASK,
        )
        k0, k1 = (k0 + _W0) & MASK, (k1 + _W1) & MASK
    return tuple(c.contiguous() for c in torch.broadcast_tensors(c0, c1, c2, c3))


def _integer(name: str, value: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InputError(f"{name} must be an integer, got {type(value).__name__}")
    return value.__index__()


def check_seed(seed: int) -> int:
    """Return ``seed`` as an int, or raise InputError unless it is an integer in ``[0, 2**64)``."""
    seed = _integer("seed", seed)
    if not 0 <= seed < 1 << 64:
        raise InputError(f"seed must lie in [0, 2**64), got {seed}: use seed % 2**64")
    return seed


def check_range(start: int, stop: int) -> tuple[int, int]:
    """Return (start, stop) as ints, or raise InputError unless ``0 <= start < stop <= 2**64``."""
    start, stop = _integer("start", start), _integer("stop", stop)
    if stop <= start:
        raise InputError(f"the range [{start}, {stop}) is empty: stop must be larger than start")
    if start < 0 or stop > 1 << 64:
        raise InputError(
            f"the range [{start}, {stop}) leaves [0, 2**64): indices of samples are unsigned "
            "64-bit integers"
        )
    return start, stop


def signed64(value: int) -> int:
    """The int64 with the same 64 bits as ``value`` in ``[0, 2**64)``."""
    return value - (1 << 64) if value >> 63 else value


def indices(start: int, stop: int, device: torch.device | str | None = None) -> Tensor:
    """Return the sample indices start..stop-1 as int64.

    Indices from 2**63 on wrap to the int64 with the same bits.
    """
    start, stop = check_range(start, stop)
    first = torch.tensor(signed64(start), dtype=torch.int64, device=device)
    return torch.arange(stop - start, dtype=torch.int64, device=device) + first


def check_index(index: Tensor) -> Tensor:
    """Return ``index``, contiguous, or raise InputError unless it is valid.

    It must be ``[n]`` int64 with n of at least 1.
    """
    if (
        not isinstance(index, Tensor)
        or index.dtype != torch.int64
        or index.ndim != 1
        or not len(index)
    ):
        got = (
            f"{index.dtype} {list(index.shape)}"
            if isinstance(index, Tensor)
            else type(index).__name__
        )
        raise InputError(f"index must be an int64 tensor [n] with n of at least 1, got {got}")
    return index.contiguous()


def random_words(seed: int, index: Tensor, stream: int, count: int, first: int = 0) -> Tensor:
    """Uniform 32-bit words ``first .. first+count-1`` of each sample.

    Args:
        seed: integer in ``[0, 2**64)``.
        index: ``[n]`` int64, the samples' indices (see :func:`indices`).
        stream: which use of randomness, one of ``STREAMS``.
        count: how many words a sample.
        first: the first word; word k of a sample is the same whatever ``first`` and ``count``. A
            sample has 2**34 words a stream.

    Returns:
        ``[n, count]`` int64 in ``[0, 2**32)``.
    """
    seed = check_seed(seed)
    blocks = torch.arange(
        first // 4, -(-(first + count) // 4), dtype=torch.int64, device=index.device
    )
    index = index[:, None]
    # A GPU need not wait for it.
    uses = torch.full((), stream, dtype=torch.int64, device=index.device)
    words = philox4x32(blocks, uses, index & MASK, index >> 32 & MASK, seed & MASK, seed >> 32)
    offset = first % 4
    return torch.stack(words, dim=-1).flatten(1)[:, offset : offset + count]


def uniform_integers(words: Tensor, bound: int | Tensor) -> Tensor:
    """Map 32-bit words to integers in ``[0, bound)``, for ``1 <= bound < 2**31``.

    A word becomes ``word * bound // 2**32``.

    The probabilities of two values differ by at most ``2**-32``.
    """
    return words * bound >> 32


@cache
def normal_quantiles() -> Tensor:
    """Return the ``2**16`` standard normal values that a 16-bit uniform draw picks from.

    They are float32, ascending.

    Entry k is the normal quantile at ``(k + 1/2) / 2**16``, multiplied by 1.0000101 so that the
    mean of the squares is 1, and rounded to a multiple of ``2**-20`` (exact in float32, hence the
    same on every machine). As a discrete distribution it has mean 0, variance 1 within 1e-8,
    kurtosis 2.9992 (a normal has 3) and no value beyond 4.325, which a normal exceeds in size with
    probability 1.5e-5.
    """
    levels = 1 << NORMAL_BITS
    upper = torch.tensor(
        [NormalDist().inv_cdf((k + 0.5) / levels) for k in range(levels // 2, levels)],
        dtype=torch.float64,
        device="cpu",
    )
    upper = (
        torch.round(upper / upper.square().mean().sqrt() * 2**_NORMAL_FRACTION)
        / 2**_NORMAL_FRACTION
    )
    return torch.cat([-upper.flip(0), upper]).float()


def half_words(seed: int, index: Tensor, stream: int, count: int, first: int = 0) -> Tensor:
    """Return uniform 16-bit draws: ``[n, count]`` int64 in ``[0, 2**16)``.

    Each random word gives two, the low half first.
    """
    words = random_words(seed, index, stream, (count + 1) // 2, first)
    return torch.stack([words & 0xFFFF, words >> 16], dim=-1).flatten(1)[:, :count]


def normals(
    start: int,
    stop: int,
    shape: tuple[int, ...],
    *,
    stream: int,
    seed: int = 0,
    tables: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return independent N(0, 1) values for the samples ``start .. stop-1``.

    They are drawn from :func:`normal_quantiles`.

    Args:
        start: index of the first sample.
        stop: one past the last.
        shape: Shape of one sample.
        stream: which use of randomness, one of ``STREAMS``.
        seed: integer in ``[0, 2**64)``.
        tables: float32 ``[G, 2**16]``, what each 16-bit draw becomes, in place of the normal
            quantiles; a sample's values form G equal runs (channels, say), one table each.
        dtype: Dtype of the output; table entries are rounded to it.
        device: where to draw.

    Returns:
        ``[stop - start, *shape]``, the same bits on every device and in every chunk.

    Raises:
        InputError: seed or range out of bounds.
    """
    start, stop = check_range(start, stop)
    tables = normal_quantiles()[None] if tables is None else tables
    count, groups = math.prod(shape), len(tables)
    tables = tables.to(device=device, dtype=dtype).flatten()
    offset = torch.arange(groups, device=device)[:, None] << NORMAL_BITS
    out = torch.empty(stop - start, count, dtype=dtype, device=device)
    block = max(1, BLOCK // count)
    for first in range(start, stop, block):
        index = indices(first, min(first + block, stop), device)
        draws = half_words(seed, index, stream, count).unflatten(1, (groups, -1)) + offset
        torch.index_select(
            tables, 0, draws.flatten(), out=out[first - start : first - start + len(index)].view(-1)
        )
    return out.view(stop - start, *shape)
