"""A nameless file that the ranks of a host share.

Its tensors are written once, and read by each rank when it likes.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from fastlr.distributed.sharding import Team
from fastlr.errors import DistributedError, one_line

SUPPORTED = hasattr(os, "posix_fallocate") and hasattr(mmap, "MADV_DONTNEED")  # Linux


class SharedFile:
    """Tensors in a file of the folder for temporary files, shared by the ranks of a host.

    What a rank writes into tensors that it has read stays with that rank.

    Args:
        members: the ranks, which all make one.
        shapes: of the tensors, with their dtypes.

    Raises:
        DistributedError: on all ranks, where a rank has no room for the file or cannot open it.
    """

    def __init__(self, members: Team, shapes: Sequence[tuple[torch.Size, torch.dtype]]) -> None:
        self._members, self._shapes, self._file = members, shapes, -1
        self._failure: str | None = None
        self._spans: list[tuple[int, int]] = []  # where each tensor begins, and its bytes
        self._end = 0
        for shape, dtype in shapes:
            self._spans.append((self._end, prod(shape) * dtype.itemsize))
            self._end += max(1, -(-self._spans[-1][1] // mmap.PAGESIZE)) * mmap.PAGESIZE
        hosts = members.share(host("mnt", f"rank {members.rank}"))
        writer = hosts.index(hosts[members.rank])
        self._writes = writer == members.rank
        path = ""
        try:
            with self._failing():
                if self._writes:
                    self._file, path = tempfile.mkstemp(prefix="fastlr-")
                    os.posix_fallocate(self._file, 0, self._end)
            paths = members.share(path)
            with self._failing():
                if not self._writes:
                    self._file = os.open(paths[writer], os.O_RDONLY)
            self._agree()
        finally:
            if path:
                Path(path).unlink()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Keep what fails for `_agree`: the other ranks must not wait."""
        try:
            yield
        except OSError as error:
            self._failure = self._failure or one_line(error)

    def _agree(self) -> None:
        """Meet the other ranks, and raise what has failed on any of them."""
        failures = self._members.share(self._failure)
        if any(failures):
            self.close()
            rank = next(rank for rank, text in enumerate(failures) if text)
            size, folder = f"{self._end / 1e9:.2f} GB", tempfile.gettempdir()
            raise self._members.everybodys(
                DistributedError(
                    f"rank {rank} cannot keep {size} of whole parameters in {folder} "
                    f"({failures[rank]}): let the environment variable TMPDIR name a folder with "
                    "room that the ranks of a host share"
                )
            )

    def write(self, number: int, values: Tensor) -> None:
        """Write a tensor, on one rank of each host; what fails is raised by `done`."""
        if not self._writes or self._failure is not None:
            return
        as_bytes = values.cpu().contiguous().flatten().view(torch.uint8).numpy()
        rest = memoryview(as_bytes)  # type: ignore[arg-type]
        at, _ = self._spans[number]
        with self._failing():
            while rest:
                written = os.pwrite(self._file, rest, at)
                rest, at = rest[written:], at + written

    def done(self) -> None:
        """Let the tensors be read, once all ranks have written."""
        self._agree()
        access = mmap.PROT_READ | mmap.PROT_WRITE
        self._map = mmap.mmap(self._file, self._end, flags=mmap.MAP_PRIVATE, prot=access)

    def close(self) -> None:
        """Close the file; what is mapped of it stays."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def read(self, number: int) -> Tensor:
        """A tensor, on the CPU: memory of the file, read where it is used."""
        (start, _), (shape, dtype), memory = self._spans[number], self._shapes[number], self._map
        return torch.frombuffer(memory, dtype=dtype, count=prod(shape), offset=start).view(shape)

    def forget(self, number: int) -> None:
        """Release this process's memory of a tensor.

        What reads the tensor again finds it in the file, as it was written.
        """
        self._map.madvise(mmap.MADV_DONTNEED, *self._spans[number])


def host(namespace: str, otherwise: str) -> str:
    """Return the names of the running kernel (its boot) and of a namespace of this process.

    They are the same for processes that see the same files ("mnt"), or that can map each other's
    memory ("pid"); ``otherwise`` is returned where they are not known.
    """
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink(f'/proc/self/ns/{namespace}')}"
    return otherwise
