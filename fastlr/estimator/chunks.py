"""The inputs of an estimate in chunks that fit the memory.

Chunks are run, replayed as CUDA graphs, and halved where memory runs out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastlr import ops
from fastlr.distributed.sharding import ALONE, Team
from fastlr.errors import ModelError, first_line, warn
from fastlr.estimator.capture import CudaRecorder
from fastlr.estimator.compilation import compile_kernels, hash_triton_in_background
from fastlr.estimator.cuda_graph import Replays
from fastlr.estimator.memory import chunk_for_memory
from fastlr.estimator.passes import Passes
from fastlr.estimator.statistics import CHECK_EVERY
from fastlr.ghost.engine import ChunkNorms
from fastlr.ghost.trust.audits import Draw
from fastlr.ops.deferred_checks import out_of_memory

BATCH_PROBE_SIZE = (
    250  # default batch of probe="batch"; never chosen by memory, as it is part of the estimator
)


class Chunks:
    """Measures the inputs of an estimate chunk by chunk.

    Args:
        passes: over one chunk.

    Attributes:
        size: inputs in a chunk of the measurement under way.
        replays: the chunks that are CUDA graphs.
        notes: for the user.
    """

    def __init__(self, passes: Passes) -> None:
        self.passes, self.options = passes, passes.options
        self.on_gpu = passes.view.device.type == "cuda"
        if self.on_gpu and ops.has_triton():
            hash_triton_in_background()
        graphs = self.on_gpu and self.options.probe == "rademacher"
        self.replays = Replays(passes, CudaRecorder if graphs else None)
        self.size = 0
        self.notes: list[str] = []
        self._warned = False  # that memory ran out
        self._most: int | None = None  # inputs that fit, once known
        self._dtype = passes.dtype  # for which they are known
        self._routes: dict[str, str] = {}  # of the last chunk that was not replayed

    def begin(self) -> None:
        """Begin a measurement: the model may have another precision since the one before."""
        if self.passes.dtype != self._dtype:
            self._most, self._dtype = None, self.passes.dtype

    def note(self, text: str) -> None:
        """Add a note for the user, once."""
        if text not in self.notes:
            self.notes.append(text)

    def first_size(self, members: Team = ALONE) -> int:
        """Return how many inputs each rank takes at a time, the same on all."""
        options = self.options
        if self._most is None:
            default = BATCH_PROBE_SIZE if options.probe == "batch" else None
            self._most = (
                options.batch_size
                or default
                or self._size_for_memory(-(-options.total // members.size))
            )
        most = min(members.least(self._most), options.total)
        if options.batch_size is not None or options.probe == "batch":
            return most
        if options.target_rel_stderr is not None and members.size > 1:
            # All of them together do not go far beyond min_n.
            most = min(most, max(CHECK_EVERY, -(-options.min_n // members.size)))
        return _of_one_size(options.total, most, members.size)

    def limit(self, size: int) -> None:
        """Take at most so many inputs at a time from now on."""
        self.size = self._most = size

    def norms(
        self, start: int, stop: int, *, first: bool, last: bool
    ) -> tuple[Tensor, ChunkNorms | None]:
        """Measure inputs start .. stop - 1, by chunks that are halved where memory runs out.

        Args:
            start: Number of the first input.
            stop: Number after the last input.
            first: Whether the measurement begins with them: three are audited.
            last: Whether it may end with them: the last one is audited, and one at random.

        Returns:
            (values [B], or one for a batch of ``probe="batch"``; the norms, or None where there are
            no inputs).
        """
        chunks: list[ChunkNorms] = []
        while start < stop:
            end, failure = min(start + self.size, stop), None
            draw = Draw.of_chunk(first and not chunks, last and end == stop)
            try:
                chunks.append(self._norms(start, end, draw))
            except Exception as error:
                if not out_of_memory(error):
                    raise
                failure = first_line(error)
            if failure is not None:
                # Outside the handler, so that its traceback frees the chunk's memory.
                self._halve(end - start, failure)
                continue
            start = end
        if not chunks:
            return torch.empty(0, dtype=torch.float64, device="cpu"), None
        table = torch.cat([chunk.table for chunk in chunks], 1)
        routes = {name: route for chunk in chunks for name, route in chunk.routes.items()}
        norms = ChunkNorms(table, routes)
        return norms.total, norms

    def _norms(self, start: int, stop: int, draw: Draw) -> ChunkNorms:
        if self.options.probe == "batch":
            return self.passes.batch_gradient(start, stop)
        table = self.replays.run(start, stop, self.size, draw)
        if table is not None:
            return ChunkNorms(table, self._routes)
        if self.on_gpu:
            compile_kernels(self.passes, start, stop)
        norms = self.passes.norms(start, stop, draw)
        self.replays.ran(stop - start)
        self._routes = norms.routes
        return norms

    def _size_for_memory(self, share: int) -> int:
        """Return how many inputs fit, of ``share`` that this rank takes.

        It follows from the bytes that a small forward pass saves, so that it is the same in every
        run unless little memory is free.
        """
        passes = self.passes

        def forward(count: int) -> Tensor:
            return passes.forward(passes.view.inputs(passes.inputs(0, count)))

        fitting = chunk_for_memory(passes.view, min(2, self.options.total), forward)
        size = min(fitting)
        if size < min(fitting.device, share):
            self.note(
                f"at most {size} inputs at a time, as little memory is free: values may differ "
                "from those of another run by rounding, unless both are given the batch_size"
            )
        return size

    def _halve(self, size: int, failure: str) -> None:
        """Halve the chunk after memory ran out at ``size`` inputs, warning once.

        Raises ModelError where the chunk cannot be halved.
        """
        device = self.passes.view.device
        if size == 1 or self.options.probe == "batch":
            what = "one input does" if size == 1 else f"probe='batch' with batch_size={size} does"
            raise ModelError(
                f"out of memory on {device}: {what} not fit ({failure}); free memory, use a "
                "smaller batch_size, a machine with more memory, or dtype=torch.bfloat16"
            )
        self.limit(size // 2)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if not self._warned:
            self._warned = True
            warn(
                f"out of memory with {size} inputs in a chunk ({failure}): going on with "
                f"{self.size}; pass batch_size={self.size} to start there"
            )
        self.notes.append(f"out of memory with {size} inputs in a chunk: went on with {self.size}")


def _of_one_size(total: int, most: int, ranks: int) -> int:
    """Return how many of ``total`` inputs to take at a time, at most ``most``.

    Up to a third more chunks are taken than must be, if all then have one size. One plan and one
    CUDA graph then serve them, and all ranks have as many.
    """
    fewest = -(-total // (most * ranks))
    tried = range(fewest, fewest + fewest // 3 + 1)
    rounds = min(tried, key=lambda rounds: total % (rounds * ranks) > 0)
    return -(-total // (rounds * ranks))
