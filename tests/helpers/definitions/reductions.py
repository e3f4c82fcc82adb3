"""Reductions over the ranks of a group in plain torch: the definitions.

Every rank gathers everything.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastlr.distributed.backends import fixed_order_sum


def gathered(tensor: Tensor, group: Any = None) -> list[Tensor]:
    """The tensors of all ranks, in the order of the ranks."""
    local = tensor.detach().contiguous()
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, local, group=group)
    return parts


def all_reduce(tensor: Tensor, group: Any = None, *, average: bool = False) -> Tensor:
    """Replace a tensor by its sum over the ranks of a group; see `fastlr.distributed.all_reduce`.

    Each element is ``round(((x_0 + x_1) + x_2) + ...)`` with x_r that of rank r: float32 additions
    in the order of the ranks (float64 for float64), divided by their number for ``average``, then
    rounded once to the tensor's dtype.
    """
    total = fixed_order_sum(gathered(tensor, group))
    if average:
        total = total / dist.get_world_size(group)
    with torch.no_grad():
        return tensor.copy_(total)


def reduce_sq_norm(tensors: Tensor | Iterable[Tensor], group: Any = None) -> Tensor:
    """Return ``sum over tensors of || sum over ranks of t_r ||^2``.

    See `fastlr.distributed.reduce_sq_norm`.

    The sums over ranks are those of :func:`all_reduce` before the last rounding; squares and their
    sum are in float64.
    """
    tensors = [tensors] if isinstance(tensors, Tensor) else tensors
    norms = [fixed_order_sum(gathered(t, group)).double().square().sum() for t in tensors]
    return torch.stack(norms).sum() if norms else torch.zeros((), dtype=torch.float64)
