"""Share estimates between the ranks of a group.

Each rank measures some of the inputs, and all of them get the same result.
"""

from __future__ import annotations

import io
import os
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fastlr.distributed.messaging import Board, check_timeout
from fastlr.errors import DistributedError, FastlrError, FastlrWarning, InputError, one_line
from fastlr.ops.torch_private import group_store

ESTIMATE_TIMEOUT, RUN_TIMEOUT = 600.0, 1800.0
_PIECE = 4 << 20  # bytes of a message; the store takes 8 MiB
_ONE_LAUNCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class Team:
    """The ranks that measure together; one process alone is a team of one.

    Attributes:
        board: their messages; None for one process alone.
        group: their process group; None where they have only a store, and for one process alone.
    """

    board: Board | None = None
    group: Any = None
    parted: int = 0  # how often `apart` was entered
    rank: int = field(init=False)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.rank, self.size = (0, 1) if self.board is None else (self.board.rank, self.board.size)

    def share(self, message: Any) -> list[Any]:
        """Messages of all ranks, in their order; what JSON can hold."""
        return [message] if self.board is None else self.board.share(message)

    def broadcast(self, content: Any) -> Any:
        """Return on every rank what rank 0 gives, with its tensors on the CPU.

        It may be what `torch.load` reads with ``weights_only``.
        """
        if self.board is None:
            return content
        buffer = io.BytesIO()
        if self.rank == 0:
            torch.save(content, buffer)
        written = buffer.getvalue()
        starts = range(0, self.share(len(written))[0], _PIECE)
        pieces = [self.board.share_bytes(written[at : at + _PIECE])[0] for at in starts]
        return torch.load(io.BytesIO(b"".join(pieces)), weights_only=True, map_location="cpu")

    def agree(
        self, what: str, message: dict[str, Any], remedy: str, digests: Mapping[str, Any] = {}
    ) -> None:
        """Raise InputError, the same on all ranks, unless they all give the same.

        The error names the first difference, and shows values of the message but no digests.
        """
        first, *others = self.share({**message, **digests})
        for rank, other in enumerate(others, 1):
            for name in {**first, **other}:
                here, there = first.get(name), other.get(name)
                if here != there:
                    values = "" if name in digests else f" is {here!r} and {there!r}"
                    text = f"ranks 0 and {rank} differ in {what}: {name}{values}; {remedy}"
                    raise self.everybodys(InputError(text))

    def everybodys(self, error: FastlrError) -> FastlrError:
        """Return an error that all ranks find by themselves, from what they share."""
        if self.board is not None:
            self.board.failure, error.told_by = error, 0
        return error

    def least(self, number: int) -> int:
        """The least of the numbers of all ranks."""
        return min(self.share(number))

    def notes(self, of_this_rank: list[str]) -> tuple[str, ...]:
        """Notes of all ranks, with the number of the rank where there are several."""
        if self.board is None:
            return tuple(of_this_rank)
        notes = [
            f"rank {rank}: {note}"
            for rank, given in enumerate(self.share(of_this_rank))
            for note in given
        ]
        return (f"the inputs were shared by {self.size} ranks", *notes)

    def span(self, done: int, step: int, total: int) -> tuple[int, int, int]:
        """Return the span of the next inputs.

        It is (where this rank's begin, where they end, where those of all ranks end).
        """
        stop = min(done + step * self.size, total)
        start = min(done + step * self.rank, stop)
        return start, min(start + step, stop), stop

    def join(
        self, values: Tensor, chunk: int
    ) -> tuple[Tensor, int, int]:  # [k] -> [sum of k over ranks]
        """Return the values [k] of all ranks in their order, by one message of each rank.

        With them come the position where this rank's begin, and the least of the ranks' chunks.

        The values are float64 on the CPU where there are several ranks.
        """
        if self.board is None:
            return values, 0, chunk
        message = np.append(values.detach().to("cpu", torch.float64).numpy(), float(chunk))
        parts = [
            np.frombuffer(part, dtype=np.float64)
            for part in self.board.share_bytes(message.tobytes())
        ]
        everyone = torch.from_numpy(np.concatenate([part[:-1] for part in parts]))
        before = sum(len(part) - 1 for part in parts[: self.rank])
        smallest = min(part[-1] for part in parts)
        return everyone, before, int(smallest)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Tell the others of an error inside; all ranks then raise that of the first to fail."""
        try:
            yield
        except BaseException as error:
            shared = error if self.board is None else self.board.fail(error)
            if shared is error or not isinstance(error, Exception):
                raise
            raise shared from error


ALONE = Team()
_current: ContextVar[Team] = ContextVar("fastlr_team", default=ALONE)
# group -> what boards are for -> how many it has had
_boards: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()


def team() -> Team:
    """The team that estimates are shared by here: that of `sharded`, or this process alone."""
    return _current.get()


@contextmanager
def sharded(
    group: dist.ProcessGroup | None = None, *, timeout: float = ESTIMATE_TIMEOUT
) -> Iterator[Team]:
    """Let the ranks of a group share the estimates inside this context.

    Every rank enters and calls ``fastlr.estimate`` or ``LocalRedundancy.measure`` with the same
    weights, inputs and arguments (checked). Each measures a share of the inputs, with the buffers
    of rank 0, and all return the same `Estimate` but for ``seconds`` and ``device``. Its values are
    those of rank 0 alone, bit for bit with the same ``batch_size``, otherwise up to rounding.
    ``progress`` is reported on rank 0. Outside, a process measures alone, also where
    torch.distributed is in use: measuring on rank 0 only is safe.

    An error on one rank is raised on all of them. A rank that ends, leaves or does not come is an
    error on the others.

    Args:
        group: Process group of the ranks; by default all. Threads that measure at the same time
            need a group and a model each.
        timeout: Seconds for which a rank waits for the others: longer than a chunk of inputs and
            the first call's checks take.

    Raises:
        InputError: torch.distributed is not initialised, the group is not this rank's, it is
            entered twice, or the ranks' arguments or weights differ.
        DistributedError: A rank failed, ended, left, or did not come in time.

    Example::

        with fastlr.distributed.sharded():
            lr = fastlr.estimate(model, images)
    """
    check_timeout(timeout)
    group = checked_group(group)
    if _current.get() is not ALONE:
        raise InputError("sharded() is entered twice: estimates inside are shared already")
    what = (
        "every rank of the group must enter fastlr.distributed.sharded() and measure the same; "
        "raise timeout= if a chunk of inputs takes longer"
    )
    board = board_of(group, "estimate", timeout, what)
    with _shared(board, group) as members:
        yield members


@contextmanager
def apart() -> Iterator[Team]:
    """Within `sharded`, set apart work that may fail; all ranks enter it.

    All ranks raise its error, and can catch it and go on.

    It has messages of its own, as those of a team end with an error.
    """
    outer = team()
    if outer.board is None:
        yield outer
        return
    outer.parted += 1
    board = outer.board
    inner = Board(
        board.store, f"apart/{outer.parted}", board.rank, board.size, board.timeout, board.what
    )
    with _shared(inner, outer.group) as members:
        yield members


def board_of(group: dist.ProcessGroup, purpose: str, timeout: float, what: str) -> Board:
    """Return a new board of a group's ranks, which all ask for their boards in the same order."""
    numbers = _boards.setdefault(group, Counter())
    numbers[purpose] += 1
    prefix = f"{purpose}/{numbers[purpose]}"
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    return Board(group_store(group), prefix, rank, size, timeout, what)


def by_torchrun() -> bool:
    """Return True if torchrun has started this process together with others."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and all(
        os.environ.get(name) for name in _ONE_LAUNCH
    )


@contextmanager
def torchrun_board(prefix: str, verb: str, timeout: float) -> Iterator[Board]:
    """Meet the processes that torchrun has started, at their store.

    Raises:
        DistributedError: it cannot be reached, or torch.distributed fails inside the block.
    """
    alone = f"start this one without RANK and WORLD_SIZE in its environment to {verb} alone"
    try:
        store, rank, size = next(
            iter(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
        )
        what = f"all processes that torchrun starts {verb} together ({alone})"
        yield Board(store, prefix, rank, size, timeout, what)
    except (RuntimeError, ValueError) as error:
        raise DistributedError(
            f"cannot join the processes of torchrun ({one_line(error)}); {alone}"
        ) from error


@contextmanager
def launched() -> Iterator[Team]:
    """Share estimates, as `sharded` does, between the ranks that torchrun has started.

    For a command; a process that torchrun has not started works alone.
    """
    if not by_torchrun():
        yield ALONE
        return
    with torchrun_board("launched", "measure", ESTIMATE_TIMEOUT) as board:
        pass
    with _shared(board) as members:
        yield members


@contextmanager
def joined() -> Iterator[Team]:
    """Join the processes of torchrun in a process group, for work that exchanges tensors.

    A process that torchrun did not start works alone.

    Inside, `team` is all of them. Each has a GPU of its own where there are enough: NCCL then
    exchanges what lies there, and gloo the rest. Rank 0 prints the warnings of fastlr. An error on
    one rank is raised on all that wait for it; torchrun ends the others.

    Raises:
        DistributedError: The processes cannot be joined, or one of them failed.
    """
    if team() is not ALONE or not by_torchrun():
        yield team()
        return
    with torchrun_board("join", "work", RUN_TIMEOUT) as board:
        gpus = board.share(_take_gpu())
        backend = (
            "cpu:gloo,cuda:nccl" if None not in gpus and len(set(gpus)) == board.size else "gloo"
        )
        store, limit = dist.PrefixStore("group", board.store), timedelta(seconds=RUN_TIMEOUT)
        dist.init_process_group(
            backend, store=store, rank=board.rank, world_size=board.size, timeout=limit
        )
    with warnings.catch_warnings():
        if dist.get_rank() > 0:
            warnings.simplefilter("ignore", FastlrWarning)
        with sharded(timeout=RUN_TIMEOUT) as members:
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


def local_device(name: str | None) -> str | None:
    """Return the name of the device of a process that torchrun has started.

    Where GPUs are meant but none is named, each process has one.
    """
    local = os.environ.get("LOCAL_RANK")
    if local is None or name not in (None, "cuda") or not torch.cuda.is_available():
        return name
    return f"cuda:{int(local) % torch.cuda.device_count()}"


@contextmanager
def _shared(board: Board, group: Any = None) -> Iterator[Team]:
    members = Team(board, group) if board.size > 1 else ALONE
    token = _current.set(members)
    try:
        with members.guard():
            yield members
        board.leave()
    finally:
        _current.reset(token)


def checked_group(group: Any) -> Any:
    """Return the group itself, or the default one for None.

    Raises:
        InputError: There is none, or this rank is not in it.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise InputError(
            "torch.distributed is not initialised: start with torchrun and call "
            "torch.distributed.init_process_group()"
        )
    if group is None:
        return dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise InputError("this rank is not in the group: only its members call this")
    return group


def digests_of(named: Iterable[tuple[str, Tensor]]) -> dict[str, list[int]]:
    """Return two sums over the bits of each tensor, by "values of" its name."""
    by_name = {f"values of {name}": bit_sums(t.detach()) for name, t in named}
    sums = list(by_name.values())
    together = [pair.to(sums[0].device) for pair in sums]  # one wait for the device
    return dict(zip(by_name, torch.stack(together).tolist() if sums else []))


def bit_sums(t: Tensor) -> Tensor:
    """Return two sums [2] over the bits of a tensor as integers.

    The first is over all elements, the second over every third. They wrap around, so any order of
    adding gives the same.
    """
    if t.is_complex():
        t = torch.view_as_real(t.resolve_conj())
    flat = t.contiguous().flatten()
    bits = flat.view(getattr(torch, f"int{8 * flat.element_size()}"))
    return torch.stack([bits.sum(dtype=torch.int64), bits[::3].sum(dtype=torch.int64)])
