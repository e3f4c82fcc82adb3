"""An optimiser's tensors and state, and how samples are put into batches and batches into parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that require grad."""
    return [p for p in model.parameters() if p.requires_grad]


def optimiser_tensors(optimiser: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the tensors that an optimiser keeps, such as the moments of AdamW."""
    for state in optimiser.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def load_optimiser(optimiser: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Load an optimiser's state dict, but for the way in which it takes its steps.

    That way (fused, foreach, capturable) depends on the device, and stays this optimiser's.
    """
    groups = [dict(group) for group in saved["param_groups"]]
    for group, current in zip(groups, optimiser.param_groups, strict=True):
        group.update(
            {key: current[key] for key in ("fused", "foreach", "capturable") if key in current}
        )
    optimiser.load_state_dict({**saved, "param_groups": groups})


def part_sizes(size: int, most: int) -> list[int]:
    """Split a batch as evenly as can be into parts of at most ``most`` samples; 0: into one.

    Example:
        >>> part_sizes(10, 4), part_sizes(10, 0)
        ([3, 3, 4], [10])
    """
    return split(size, -(-size // most) if most else 1)


def split(size: int, parts: int) -> list[int]:
    """Split a batch as evenly as can be into so many parts.

    Example:
        >>> split(10, 3)
        [3, 3, 4]
    """
    bounds = [size * i // parts for i in range(parts + 1)]
    return [stop - start for start, stop in zip(bounds, bounds[1:])]


def spans(n: int, size: int) -> Iterator[tuple[int, int]]:
    """Split ``range(n)`` into batches of ``size``, and yield their bounds.

    The last may be smaller, but a single sample joins the batch before it.

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
        generator: Generator of the random order.

    Returns:
        Indices of all batches, one after another, and where each begins and ends.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> index, bounds = mixed_order([(0, 2), (2, 4), (4, 6)], 4, 1.0, generator)
        >>> bounds, sorted(index[:8].tolist())[4:]
        ([(0, 4), (4, 8), (8, 12)], [6, 7, 8, 9])
    """
    n = batches[-1][1]
    new = torch.randperm(n, generator=generator)
    counts = [round((stop - start) * ratio) for start, stop in batches]
    passes = [torch.randperm(memory, generator=generator) for _ in range(-(-sum(counts) // memory))]
    remembered = torch.cat([new[:0], *passes]) + n
    order: list[Tensor] = []
    bounds, taken, position = [], 0, 0
    for (start, stop), count in zip(batches, counts, strict=True):
        batch = torch.cat([new[start:stop], remembered[taken : taken + count]])
        order.append(batch[torch.randperm(len(batch), generator=generator)])
        bounds.append((position, position + len(batch)))
        taken, position = taken + count, position + len(batch)
    return torch.cat(order), bounds
