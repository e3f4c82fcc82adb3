"""How an epoch's images are cut into batches, and remembered images mixed into them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def spans(n: int, size: int) -> Iterator[tuple[int, int]]:
    """Split ``range(n)`` into batches; the last may be smaller, but a single image joins the batch before it.

    (BatchNorm has no statistics of one value.)

    Example:
        >>> list(spans(7, 3)), list(spans(8, 3))
        ([(0, 3), (3, 7)], [(0, 3), (3, 6), (6, 8)])
    """
    starts = list(range(0, n, size))
    if len(starts) > 1 and n - starts[-1] == 1 and size > 1:
        starts.pop()
    yield from zip(starts, [*starts[1:], n])


def mixed_order(
    batches: Sequence[tuple[int, int]], memory: int, ratio: float, generator: torch.Generator
) -> tuple[Tensor, list[tuple[int, int]]]:
    """Draw an epoch's batches from new images and remembered ones.

    Args:
        batches: Where each batch's new images begin and end; all of them together are n.
        memory: Remembered images, at the indices that follow the n new ones; at least one.
        ratio: Remembered images for each new one of a batch; their number is rounded.
        generator: Of the random order.

    Returns:
        Indices of all batches, one after another, and where each begins and ends.

    Example:
        >>> index, bounds = mixed_order([(0, 2), (2, 4), (4, 6)], 4, 1.0, torch.Generator().manual_seed(0))
        >>> bounds, sorted(index[:8].tolist())[4:]
        ([(0, 4), (4, 8), (8, 12)], [6, 7, 8, 9])
    """
    n = batches[-1][1]
    new = torch.randperm(n, generator=generator)
    counts = [round((stop - start) * ratio) for start, stop in batches]
    rounds = [torch.randperm(memory, generator=generator) for _ in range(-(-sum(counts) // memory))]
    old = torch.cat([new[:0], *rounds]) + n
    parts: list[Tensor] = []
    bounds, taken, begun = [], 0, 0
    for (start, stop), count in zip(batches, counts, strict=True):
        batch = torch.cat([new[start:stop], old[taken : taken + count]])
        parts.append(batch[torch.randperm(len(batch), generator=generator)])
        bounds.append((begun, begun + len(batch)))
        taken, begun = taken + count, begun + len(batch)
    return torch.cat(parts), bounds
