"""What training loops share: how a model runs, the gradients of a batch in parts, an optimiser's tensors and state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Return the context in which a model runs in bfloat16; with another ``dtype`` it runs as it is."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that require grad."""
    return [p for p in model.parameters() if p.requires_grad]


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


def add_gradients(loss: Callable[..., Tensor], batch: Sequence[Tensor], sizes: Sequence[int], size: int) -> Tensor:
    """Add what some samples contribute to the gradient of a batch's mean loss to ``.grad``, pass by pass.

    Args:
        loss: Takes a part of each tensor of the batch, and returns the sum of the losses of its samples.
        batch: Tensors with a sample axis 0, on which the samples are: all of a batch, or a rank's share.
        sizes: Samples of each pass, which is what batch norm takes its statistics of.
        size: Samples of the whole batch.

    Returns:
        The sum of these samples' losses, float64, on the device.
    """
    total = torch.zeros((), dtype=torch.float64, device=batch[0].device)
    for part in zip(*(t.split(list(sizes)) for t in batch)):
        found = loss(*part)
        (found / size).backward()
        total += found.detach()
    return total


def optimiser_state(optimiser: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the tensors that an optimiser keeps, such as the moments of AdamW."""
    for state in optimiser.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def load_optimiser(optimiser: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Load a state dict, keeping how this optimiser takes its steps, which depends on the device."""
    groups = [dict(group) for group in saved["param_groups"]]
    for group, mine in zip(groups, optimiser.param_groups, strict=True):
        group.update({key: mine[key] for key in ("fused", "foreach", "capturable") if key in mine})
    optimiser.load_state_dict({**saved, "param_groups": groups})
