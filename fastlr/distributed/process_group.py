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

from fastlr.distributed.board import Board
from fastlr.distributed.sharding import ALONE, Team, by_torchrun, local_device, sharded, team
from fastlr.errors import DistributedError, FastlrWarning, one_line

RUN_TIMEOUT = 1800.0
_PIECE = 64 << 20  # bytes of a broadcast


@contextmanager
def joined(timeout: float = RUN_TIMEOUT) -> Iterator[Team]:
    """Let the processes of torchrun work together, in a process group; this process alone where torchrun did not start it.

    Inside, `fastlr.distributed.team` is all of them. Each has a GPU of its own where there are enough: NCCL then exchanges
    what lies there, and gloo the rest. What fastlr warns of is printed by rank 0. An error on one rank is raised on all
    that wait for it; torchrun ends the others.

    Args:
        timeout: seconds for which a rank waits for the others.

    Raises:
        DistributedError: the processes cannot be joined, or one of them failed.
    """
    if team() is not ALONE or not by_torchrun():
        yield team()
        return
    alone = "start this one without RANK and WORLD_SIZE in its environment to work alone"
    try:
        store, rank, size = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=timeout))))
        board = Board(store, "join", rank, size, timeout, f"all processes that torchrun starts work together ({alone})")
        gpus = board.share(_own_gpu())
        backend = "cpu:gloo,cuda:nccl" if None not in gpus and len(set(gpus)) == size else "gloo"
        group_store = dist.PrefixStore("fastlr/group", store)
        limit = timedelta(seconds=timeout)
        dist.init_process_group(backend, store=group_store, rank=rank, world_size=size, timeout=limit)
    except (RuntimeError, ValueError) as error:
        raise DistributedError(f"cannot join the processes of torchrun ({one_line(error)}); {alone}") from error
    with warnings.catch_warnings():
        if dist.get_rank() > 0:
            warnings.simplefilter("ignore", FastlrWarning)
        with sharded(timeout=timeout) as members:
            yield members
    dist.destroy_process_group()  # not after an error: it would wait for exchanges that do not come; the process ends


def _own_gpu() -> str | None:
    """The GPU that this process takes, made current; None if it sees none."""
    if not torch.cuda.is_available():
        return None
    device = torch.device(local_device("cuda") or "cuda")
    if device.index is not None:
        torch.cuda.set_device(device)
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def broadcast(members: Team, content: Any) -> Any:
    """Return what rank 0 gives, on every rank, tensors on the CPU: what `torch.load` reads with ``weights_only``."""
    if members.size == 1:
        return content
    buffer = io.BytesIO()
    if members.rank == 0:
        torch.save(content, buffer)
    size = members.share(buffer.getbuffer().nbytes)[0]
    device = torch.device("cpu" if "cpu:" in dist.get_backend_config(members.group) else "cuda")
    data = bytearray(buffer.getbuffer()) if members.rank == 0 else bytearray(size)
    whole = torch.frombuffer(data, dtype=torch.uint8)
    source = dist.get_global_rank(members.group, 0)
    for piece in whole.split(_PIECE):
        sent = piece.to(device)
        dist.broadcast(sent, source, group=members.group)
        piece.copy_(sent)
    return content if members.rank == 0 else torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
