"""Gradients of DistributedDataParallel, averaged in a fixed order."""

# No "from __future__ import annotations": DistributedDataParallel compares the hook's annotations
# with the types.
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastlr.distributed.reductions import all_reduce


def ddp_comm_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients over ranks by `all_reduce`, for DistributedDataParallel.

    ``model.register_comm_hook(None, fastlr.distributed.ddp_comm_hook)``. Gradients are reduced in
    their own dtype: those of a bfloat16 model are added in float32, divided, and rounded once. To
    send those of a float32 model as bfloat16, wrap it:
    ``default_hooks.bf16_compress_wrapper(ddp_comm_hook)`` of
    ``torch.distributed.algorithms.ddp_comm_hooks``.

    Args:
        state: the process group; None for all ranks.
        bucket: the gradients.

    Returns:
        The averaged bucket. On a GPU the reduction runs beside the backward pass, on a stream of
        its own.
    """
    buffer = bucket.buffer()
    if not buffer.is_cuda:
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(all_reduce(buffer, state, average=True))
        return done
    side = _side_stream(buffer.device)
    side.wait_stream(torch.cuda.current_stream(buffer.device))
    later: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device])
    with torch.cuda.stream(side):
        all_reduce(buffer, state, average=True)
        buffer.record_stream(side)
        later.set_result(buffer)
    return later


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
