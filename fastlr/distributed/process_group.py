"""The processes that torchrun has started, joined for work that exchanges tensors."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fastlr.distributed.sharding import (
    ALONE,
    Team,
    by_torchrun,
    local_device,
    sharded,
    team,
    torchrun_board,
)
from fastlr.errors import FastlrWarning

RUN_TIMEOUT = 1800.0


@contextmanager
def joined(timeout: float = RUN_TIMEOUT) -> Iterator[Team]:
    """Join the processes of torchrun in a process group.

    A process that torchrun did not start works alone.

    Inside, `fastlr.distributed.team` is all of them. Each has a GPU of its own where there are
    enough: NCCL then exchanges what lies there, and gloo the rest. What fastlr warns of is printed
    by rank 0. An error on one rank is raised on all that wait for it; torchrun ends the others.

    Args:
        timeout: seconds for which a rank waits for the others.

    Raises:
        DistributedError: the processes cannot be joined, or one of them failed.
    """
    if team() is not ALONE or not by_torchrun():
        yield team()
        return
    with torchrun_board("join", "work", timeout) as board:
        gpus = board.share(_take_gpu())
        backend = (
            "cpu:gloo,cuda:nccl" if None not in gpus and len(set(gpus)) == board.size else "gloo"
        )
        store, limit = dist.PrefixStore("group", board.store), timedelta(seconds=timeout)
        dist.init_process_group(
            backend, store=store, rank=board.rank, world_size=board.size, timeout=limit
        )
    with warnings.catch_warnings():
        if dist.get_rank() > 0:
            warnings.simplefilter("ignore", FastlrWarning)
        with sharded(timeout=timeout) as members:
            yield members
    # Not after an error: it would wait for exchanges that do not come; the process ends.
    dist.destroy_process_group()


def _take_gpu() -> str | None:
    """Make the GPU of this process current and return its name; None if it sees none."""
    if not torch.cuda.is_available():
        return None
    device = torch.device(local_device("cuda") or "cuda")
    if device.index is not None:
        torch.cuda.set_device(device)
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def broadcast(members: Team, content: Any) -> Any:
    """Return on every rank what rank 0 gives, with its tensors on the CPU.

    It may be what `torch.load` reads with ``weights_only``.
    """
    if members.size == 1:
        return content
    buffer = io.BytesIO()
    if members.rank == 0:
        torch.save(content, buffer)
    members.share(None)  # an error of rank 0 is raised here on all of them
    box = [buffer.getvalue()]
    dist.broadcast_object_list(box, dist.get_global_rank(members.group, 0), group=members.group)
    return (
        content
        if members.rank == 0
        else torch.load(io.BytesIO(box[0]), weights_only=True, map_location="cpu")
    )
