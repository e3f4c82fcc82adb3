"""Sums over ranks: float32 additions in the order of the ranks, rounded once.

They give the same bits on every rank and in every run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastlr.distributed.connection import route_for
from fastlr.distributed.sharding import checked_group
from fastlr.errors import InputError

# Tensors are joined up to this size: one rendezvous of the ranks for each bucket.
BUCKET_BYTES = 8 << 20


def all_reduce(
    tensor: Tensor, group: dist.ProcessGroup | None = None, *, average: bool = False
) -> Tensor:  # [*shape]
    """Replace a tensor by its sum over the ranks of a group, and return it.

    Each element is ``round(((x_0 + x_1) + x_2) + ...)`` with x_r that of rank r: additions in
    float32 in the order of the ranks (float64 for float64 tensors), rounded once to the tensor's
    dtype. So the result is the same on every rank, in every run and on every route, and a bfloat16
    sum has the error of one rounding whatever the number of ranks; adding in bfloat16 rounds at
    every step.

    bfloat16 and float32 go through fastlr's extension where it can reach all ranks (see `connect`),
    other floating dtypes and other places through torch.distributed. On a GPU the work is queued on
    the current stream; if a rank does not come, the result becomes NaN and the next reduction (or
    `Route.check`) raises. CUDA graphs are refused.

    Args:
        tensor: floating point, of the same shape and dtype on all ranks; changed in place, also if
            it requires grad.
        group: default: all ranks. Every rank of it must call the same reductions in the same order.
        average: divide the float32 sum by the number of ranks before it is rounded.

    Raises:
        InputError: not a dense floating-point tensor, torch.distributed is not initialised, or this
            rank is not in the group.
        DistributedError: a rank failed, ended, did not come in time or called something else.
    """
    group = checked_group(group)
    _check(tensor)
    if dist.get_world_size(group) == 1 or not tensor.numel():
        return tensor
    with torch.no_grad():
        flat = _flat(tensor)
        route_for(flat, group).all_reduce(flat, average)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))
    if not tensor.is_inference():
        # So that autograd knows that a tensor it saved has changed.
        torch.autograd.graph.increment_version(tensor)
    return tensor


def reduce_sq_norm(
    tensors: Tensor | Iterable[Tensor], group: dist.ProcessGroup | None = None
) -> Tensor:  # []
    """Return ``sum over tensors of || sum over ranks of t_r ||^2`` without writing the sums.

    That is the squared norm of a gradient that was accumulated on several ranks, for half of an
    all-reduce's traffic. The sums over ranks are float32 in the order of the ranks, not rounded;
    squares and their sum are float64. The result is the same on every rank and in every run; routes
    differ by float64 rounding. Tensors are joined to buckets.

    Args:
        tensors: one tensor, or several on one device, such as the gradients of a model; the same on
            all ranks.
        group: default: all ranks.

    Returns:
        float64, no axes, on the tensors' device.

    Raises:
        InputError, DistributedError: as :func:`all_reduce`; tensors on several devices.
    """
    group = checked_group(group)
    summands = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    for t in summands:
        _check(t)
    devices = {t.device for t in summands}
    if len(devices) > 1:
        raise InputError(
            f"the tensors are on several devices, {sorted(map(str, devices))}: reduce those of "
            "each alone"
        )
    total = torch.zeros((), dtype=torch.float64, device=devices.pop() if devices else None)
    is_alone = dist.get_world_size(group) == 1
    with torch.no_grad():
        for flat in _buckets(summands):
            wide = torch.promote_types(flat.dtype, torch.float32)
            total += (
                flat.to(wide).double().square().sum()
                if is_alone
                else route_for(flat, group).sq_norm(flat)
            )
    return total


def _check(tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        raise InputError(f"a tensor is reduced, not {type(tensor).__name__}")
    if not tensor.is_floating_point() or tensor.layout != torch.strided:
        raise InputError(
            f"a dense floating-point tensor is reduced, not {tensor.dtype} of layout "
            f"{tensor.layout}"
        )
    if tensor.element_size() < 2:
        raise InputError(
            f"{tensor.dtype} cannot hold sums: convert it to torch.bfloat16 or a wider dtype"
        )


def _flat(tensor: Tensor) -> Tensor:  # [*shape] -> [n]
    """The elements in row-major order, whatever the strides: those may differ between ranks."""
    return tensor.detach().resolve_neg().contiguous().view(-1)


def _buckets(tensors: list[Tensor]) -> Iterator[Tensor]:
    """Flat tensors of one dtype: neighbours joined up to BUCKET_BYTES, larger ones as they are."""
    waiting: list[Tensor] = []
    held = 0
    for flat in (_flat(t) for t in tensors if t.numel()):
        size = flat.numel() * flat.element_size()
        if waiting and (held + size > BUCKET_BYTES or flat.dtype != waiting[0].dtype):
            yield torch.cat(waiting) if len(waiting) > 1 else waiting[0]
            waiting, held = [], 0
        waiting.append(flat)
        held += size
    if waiting:
        yield torch.cat(waiting) if len(waiting) > 1 else waiting[0]
