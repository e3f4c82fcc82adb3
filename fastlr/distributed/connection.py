"""Choose the route of a group's reductions.

It is the extension where all peers are reachable, else torch.distributed.
"""

from __future__ import annotations

import base64
import importlib
import logging
import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from fastlr.distributed.backends import (
    EXTENSION_DTYPES,
    DeviceRoute,
    HostRoute,
    Route,
    TorchRoute,
    fixed_order_sum,
)
from fastlr.distributed.messaging import Board, check_timeout
from fastlr.distributed.sharding import board_of, checked_group
from fastlr.errors import DistributedError, InputError, one_line, warn

REDUCTION_TIMEOUT = 600.0
# Of each rank: two halves, that calls alternate between.
BUFFER_BYTES = {
    "cpu": 4 << 20,
    "cuda": 128 << 20,
}
TRIAL_TIMEOUT = (
    60.0  # of the trial sum: all ranks are there, so only memory that does not work takes long
)
_TRIAL = 5000  # elements of it
BUILD = "pip install --no-build-isolation -e . in a clone of fastlr"  # makes the extension
_CHOSEN: WeakKeyDictionary[Any, dict[str, Route]] = WeakKeyDictionary()  # group -> device -> route
# Group -> how often a connection was tried.
log = logging.getLogger("fastlr")


def connect(
    device: torch.device | str,
    group: dist.ProcessGroup | None = None,
    *,
    timeout: float = REDUCTION_TIMEOUT,
    buffer_bytes: int | None = None,
    prefer: str = "extension",
) -> Route:
    """Choose how tensors on a device are reduced over a group, and return that route.

    Its ``name`` and ``why`` say which it is and for what reason.

    `all_reduce` and `reduce_sq_norm` do this by themselves at their first call; call it before them
    to set the options. Every rank of the group must call it. The extension is taken where all ranks
    have it, run on one machine, can reach each other's memory, and a trial sum comes out right;
    otherwise torch.distributed, with the same results. Rank 0 says so once: a `FastlrWarning` where
    the extension was not taken, else a line in the log "fastlr".

    Args:
        device: that of the tensors; for GPUs, this rank's.
        group: default: all ranks.
        timeout: seconds for which a rank waits for the others, now and in each reduction of the
            extension; those of torch.distributed have the process group's own limit.
        buffer_bytes: staging memory of each rank; larger tensors go through it in parts. Default: 4
            MiB of shared memory on the CPU, 128 MiB on a GPU.
        prefer: "extension", or "torch.distributed" to do without it.

    Raises:
        InputError: torch.distributed is not initialised, or arguments are wrong or differ between
            ranks.
        DistributedError: a rank failed or did not come in time.
    """
    group, device = checked_group(group), torch.device(device)
    check_timeout(timeout)
    if device.type not in BUFFER_BYTES:
        raise InputError(f"reductions work on the CPU and on CUDA devices, not on {device}")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    size = BUFFER_BYTES[device.type] if buffer_bytes is None else buffer_bytes
    if isinstance(size, bool) or not isinstance(size, int) or size < 8192:
        raise InputError(f"buffer_bytes must be at least 8192, not {buffer_bytes!r}")
    if prefer not in ("extension", "torch.distributed"):
        raise InputError(f"prefer must be 'extension' or 'torch.distributed', not {prefer!r}")
    what = "every rank of the group must call the same reductions"
    board = board_of(group, "connect", timeout, what)
    extension, why = _extension(device, board, size // 2, timeout, prefer)
    route: Route = extension if extension is not None else TorchRoute(group, why)
    _retire(_CHOSEN.get(group, {}).get(str(device)), board)
    _CHOSEN.setdefault(group, {})[str(device)] = route
    if board.rank == 0:
        text = f"reductions on {device.type} over {board.size} ranks: {route.name} ({route.why})"
        log.info(text)
        if extension is None and prefer == "extension" and board.size > 1:
            warn(text)
    return route


def route_for(tensor: Tensor, group: Any) -> Route:
    """Return the route of a tensor: that of its device, chosen at the first call.

    It is torch.distributed for dtypes that the extension does not add.
    """
    chosen = _CHOSEN.get(group, {}).get(str(tensor.device))
    if chosen is None:
        chosen = connect(tensor.device, group)
    if chosen.name == "extension" and tensor.dtype not in EXTENSION_DTYPES:
        return TorchRoute(group, f"the extension does not add {tensor.dtype}")
    return chosen


def machine() -> str:
    """Return a name that processes share if they can map each other's memory.

    It names the running kernel (its boot) and the process's namespace.
    """
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return platform.node()


def load_extension() -> Any:
    """Return fastlr._C, or raise ImportError."""
    return importlib.import_module("fastlr._C")


def _extension(
    device: torch.device, board: Board, half: int, timeout: float, prefer: str
) -> tuple[Route | None, str]:
    """Agree with the other ranks on the extension's route: (the route, or None; why)."""
    group, facts = _offer(device, board, half, timeout, prefer)
    everyone = board.share(facts)
    for name in ("prefer", "kind", "half"):
        values = [facts_of_rank[name] for facts_of_rank in everyone]
        if len(set(map(str, values))) > 1:
            raise InputError(f"ranks differ in {name}: {values}; give every rank the same")
    route: Route | None = None
    if group is not None and device.type == "cpu":
        route = HostRoute(group, f"{board.size} processes over shared memory")
    elif group is not None:
        is_shared = len({facts_of_rank.get("device") for facts_of_rank in everyone}) < board.size
        route = DeviceRoute(
            group, f"CUDA IPC over {board.size} processes{' sharing GPUs' if is_shared else ''}"
        )
    why = _common_refusal(everyone)
    if why is None:
        why = _trial(route, device, board, everyone)
    if why is not None:
        _retire(route, board)
        return None, why
    assert route is not None
    route.set_timeout(timeout)
    return route, ""


def _offer(
    device: torch.device, board: Board, half: int, timeout: float, prefer: str
) -> tuple[Any, dict[str, Any]]:
    """Make this rank's part of the extension's group, and return it with its facts.

    The part is None if there is none; the facts are what the other ranks must know.
    """
    group: Any = None
    facts: dict[str, Any] = {
        "prefer": prefer,
        "machine": machine(),
        "kind": device.type,
        "half": half,
        "reason": None,
    }
    try:
        native = load_extension()
        facts |= {"protocol": native.protocol, "reason": _refusal(native, device, board.size)}
        if facts["reason"] is None and prefer == "extension":
            group = _group(native, device, board, half, min(timeout, TRIAL_TIMEOUT))
            facts |= {
                "address": base64.b64encode(group.address()).decode(),
                "blocks": getattr(group, "blocks", 0),
            }
            facts["device"] = (
                str(torch.cuda.get_device_properties(device).uuid)
                if device.type == "cuda"
                else "cpu"
            )
    except ImportError:
        facts["reason"] = f"fastlr._C is not built: {BUILD}"
    except (DistributedError, InputError) as error:
        facts["reason"] = one_line(error)
    return group, facts


def _refusal(native: Any, device: torch.device, ranks: int) -> str | None:
    if not 2 <= ranks <= native.max_ranks:
        return f"the extension works with 2 to {native.max_ranks} ranks"
    if device.type == "cuda" and not native.cuda:
        return f"the extension was built without nvcc: {BUILD}"
    return None


def _group(native: Any, device: torch.device, board: Board, half: int, timeout: float) -> Any:
    if device.type == "cpu":
        return native.HostGroup(board.rank, board.size, half, timeout)
    return native.DeviceGroup(board.rank, board.size, device.index, half, timeout)


def _common_refusal(everyone: list[dict[str, Any]]) -> str | None:
    if everyone[0]["prefer"] != "extension":
        return "as asked for"
    for rank, facts in enumerate(everyone):
        if facts["reason"] is not None:
            return f"rank {rank}: {facts['reason']}"
    if len({facts["machine"] for facts in everyone}) > 1:
        return "the ranks are on several machines"
    if len({facts["protocol"] for facts in everyone}) > 1:
        return "the ranks have different versions of fastlr._C"
    return None


def _trial(
    route: Any, device: torch.device, board: Board, everyone: list[dict[str, Any]]
) -> str | None:
    """Open the peers' memory and add up known numbers as a trial.

    Returns None if all ranks get what they should, else why not.
    """
    reason = None
    try:
        route.group.open([base64.b64decode(facts["address"]) for facts in everyone])
        if device.type == "cuda":
            route.group.limit_blocks(min(facts["blocks"] for facts in everyone))
    except (DistributedError, InputError) as error:
        reason = one_line(error)
    reasons = board.share(reason)
    if device.type == "cpu":
        route.group.seal()
    if not any(reasons):
        reasons = board.share(_trial_sum(route, device, board))
    return next((f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason), None)


def _trial_sum(route: Route, device: torch.device, board: Board) -> str | None:
    """Add up known numbers over the ranks; return None if all is well, else what is wrong.

    This shows peer memory that can be mapped but not read properly (some virtual machines).
    """
    parts = [
        torch.randn(_TRIAL, generator=torch.Generator().manual_seed(r), device="cpu").bfloat16()
        for r in range(board.size)
    ]
    total = fixed_order_sum(parts)
    try:
        for _ in range(4):  # both halves, twice
            part = parts[board.rank].to(device, copy=True)
            norm = float(route.sq_norm(part))
            route.all_reduce(part, False)
            reduced = part.cpu()
            route.check()
            expected = total.double().square().sum().item()
            if not torch.equal(reduced, total.bfloat16()) or abs(norm - expected) > 1e-9 * expected:
                return "a trial sum came out wrong: peer memory does not work here"
    except DistributedError as error:
        return one_line(error)
    return None


def _retire(route: Route | None, board: Board) -> None:
    """Free the GPU memory of a route that is not used any more.

    It is freed when no rank reads that of another.
    """
    group = route.group if isinstance(route, DeviceRoute) else None
    if group is not None:
        group.disconnect()
    board.share(None)
    if group is not None:
        group.close()
