"""The two routes of a reduction: fastlr's extension over peer buffers, and torch.distributed.

They give the same bits.

A route works on one flat, contiguous tensor at a time; `fastlr.distributed.reductions` brings
tensors into that form.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastlr.errors import DistributedError

EXTENSION_DTYPES = (torch.bfloat16, torch.float32)
# Elements that the torch.distributed route works on at a time: it needs copies of them.
_CHUNK = {"cpu": 1 << 20}
_DEVICE_CHUNK = 1 << 25
_GATHER = 1 << 14  # elements up to which everyone gathers everything: one exchange instead of two


def fixed_order_sum(parts: Sequence[Tensor]) -> Tensor:
    """Sum tensors in their order, ``((p_0 + p_1) + p_2) + ...``, without rounding the result.

    The sum is in float32 (in float64 for float64), not rounded afterwards.

    Args:
        parts: tensors of one shape and dtype, one for each rank.

    Returns:
        The sum, float32 or float64.
    """
    wide = torch.float64 if parts[0].dtype == torch.float64 else torch.float32
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part  # converted exactly
    return total


class Route:
    """One way to reduce.

    Attributes:
        name: "extension" or "torch.distributed".
        why: in words.
        group: what exchanges the data.
    """

    name = "extension"

    def __init__(self, group: Any, why: str) -> None:
        self.group, self.why = group, why

    def all_reduce(self, flat: Tensor, average: bool) -> None:  # [n]
        """Replace a flat tensor by its sum over ranks, or their mean."""
        raise NotImplementedError

    def sq_norm(self, flat: Tensor) -> Tensor:  # [n] -> []
        """Squared norm of the sum over ranks: float64, no axes, on the tensor's device."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise the error of a reduction that runs beside the program, if there is one."""

    def set_timeout(self, seconds: float) -> None:
        """Set how long a rank waits for the others."""
        self.group.set_timeout(seconds)


class HostRoute(Route):
    """Processes of one machine over shared memory."""

    def all_reduce(self, flat: Tensor, average: bool) -> None:  # noqa: D102
        self.group.all_reduce(flat, average)

    def sq_norm(self, flat: Tensor) -> Tensor:  # noqa: D102
        return flat.new_tensor(self.group.squared_norm(flat), dtype=torch.float64)


class DeviceRoute(Route):
    """GPUs (or processes sharing one) over CUDA IPC, on the current stream."""

    def all_reduce(self, flat: Tensor, average: bool) -> None:  # noqa: D102
        self.group.all_reduce(flat, torch.cuda.current_stream(flat.device).cuda_stream, average)

    def sq_norm(self, flat: Tensor) -> Tensor:  # noqa: D102
        result = torch.zeros((), dtype=torch.float64, device=flat.device)
        self.group.squared_norm(flat, result, torch.cuda.current_stream(flat.device).cuda_stream)
        return result

    def check(self) -> None:  # noqa: D102
        self.group.check()


class TorchRoute(Route):
    """Exchanges by torch.distributed (NCCL, gloo), sums by torch in the order of the ranks.

    A sum is scattered, added up and gathered, so each rank sends and receives ``2 (W - 1) / W`` of
    the tensor, as the best all-reduce does; what NCCL's own all-reduce does not give is the order
    of additions and the single rounding.
    """

    name = "torch.distributed"

    def __init__(self, group: Any, why: str) -> None:
        self.why, self.size = why, dist.get_world_size(group)
        self._group = weakref.ref(group)  # routes are kept for as long as their group lives

    @property
    def group(self) -> Any:
        """The process group."""
        return self._group()

    def all_reduce(self, flat: Tensor, average: bool) -> None:  # noqa: D102
        for part in flat.split(_CHUNK.get(flat.device.type, _DEVICE_CHUNK)):
            place = self._exchange(part.device)
            if part.numel() <= _GATHER:
                sums = self._rounded(self._gathered(part.to(place)), average)
            else:
                shard = self._rounded(self._scattered(part.to(place)), average)
                sums = torch.cat(self._gathered(shard))[: part.numel()]
            part.copy_(sums)

    def sq_norm(self, flat: Tensor) -> Tensor:  # noqa: D102
        total = torch.zeros((), dtype=torch.float64, device=self._exchange(flat.device))
        for part in flat.split(_CHUNK.get(flat.device.type, _DEVICE_CHUNK)):
            total += fixed_order_sum(self._scattered(part.to(total.device))).double().square().sum()
        return fixed_order_sum(self._gathered(total)).to(flat.device)

    def _exchange(self, device: torch.device) -> torch.device:
        """Return the device on which tensors of ``device`` are exchanged.

        Gloo exchanges most things on the CPU only.
        """
        backend = dist.get_backend_config(self.group)
        return device if device.type == "cpu" or "cuda:nccl" in backend else torch.device("cpu")

    def _rounded(self, parts: list[Tensor], average: bool) -> Tensor:
        total = fixed_order_sum(parts)
        return (total / self.size if average else total).to(parts[0].dtype)

    def _gathered(self, t: Tensor) -> list[Tensor]:  # [*shape] -> ranks x [*shape]
        parts = t.new_empty(self.size * t.numel())
        with _exchanging():
            dist.all_gather_into_tensor(parts, t.flatten(), group=self.group)
        return list(parts.view(self.size, *t.shape))

    def _scattered(self, flat: Tensor) -> list[Tensor]:  # [n] -> ranks x [ceil(n / ranks)]
        """This rank's shard of every rank's tensor; zeros beyond the end."""
        length = -(-flat.numel() // self.size)
        padded = torch.nn.functional.pad(flat, (0, length * self.size - flat.numel()))
        parts = torch.empty_like(padded)
        with _exchanging():
            dist.all_to_all_single(parts, padded, group=self.group)
        return list(parts.view(self.size, length))

    def set_timeout(self, seconds: float) -> None:
        """Do nothing: the time limit is that of the process group."""


@contextmanager
def _exchanging() -> Iterator[None]:
    """Turn what torch.distributed raises when a rank is gone into a DistributedError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise DistributedError(
            f"torch.distributed could not exchange data: {' '.join(str(error).split())}"
        ) from error
