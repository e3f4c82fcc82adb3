"""One chunk of an estimate as a CUDA graph: captured once for a shape, replayed for every other chunk.

A chunk is generation of the inputs, forward pass, cotangent, backward pass and norms, hundreds of kernels of a few
microseconds each; replayed, they follow each other without the host. The graph reads the weights where they are, so
training may go on in between. What it cannot see is a change of the *program*: storage that moved, a module or a hook
that came or went, a number that a forward pass reads. `fingerprint` and a comparison with the model's own output after
every measurement find those; then the graph is dropped and the measurement is made anew, without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from fastlr.checks import gathered
from fastlr.ghost import adapt, program
from fastlr.ghost.agreement import same_output
from fastlr.ghost.engine import Engine
from fastlr.ghost.execute import Rerouted
from fastlr.ghost.plan import Plan

WARM_UP = 2  # runs before the capture: kernels are compiled, libraries choose algorithms and take workspaces
COMPARED = 4  # samples whose outputs are held to the model's own


class Recorder(Protocol):
    """Captures a function that works on fixed memory, and repeats it."""

    def capture(self, function: Callable[[], Any]) -> Any:
        """Run the function to warm up, then keep it; return its result, whose tensors every replay fills anew."""

    def replay(self) -> None:
        """Repeat what was captured."""


class CudaRecorder:
    """A CUDA graph.

    Args:
        device: Where its work is done.
        pool: Of `torch.cuda.graph_pool_handle`, for graphs that may share memory: the results of one are used before
            another is replayed.
    """

    def __init__(self, device: torch.device, pool: Any = None) -> None:
        self.device, self.graph = device, torch.cuda.CUDAGraph()
        self.pool = torch.cuda.graph_pool_handle() if pool is None else pool

    def capture(self, function: Callable[[], Any]) -> Any:
        """Warm up on a side stream, then capture."""
        with torch.cuda.device(self.device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM_UP):
                    function()
            torch.cuda.current_stream().wait_stream(side)
            before = torch.cuda.current_stream()
            try:
                # thread_local: a thread that loads the next task may allocate meanwhile
                with torch.cuda.graph(self.graph, pool=self.pool, capture_error_mode="thread_local"):
                    return function()
            except BaseException:  # torch 2.11 may stay on the capture's stream, and allocate from its pool, after an error
                torch.cuda.set_stream(before)
                with suppress(RuntimeError):
                    torch._C._cuda_endAllocateToPool(before.device_index, self.pool)
                raise

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        self.graph.replay()


def fingerprint(model: nn.Module) -> tuple:
    """Everything about a model that a captured graph has taken for granted, but for the values of its tensors.

    A graph reads tensors where they are, so their values may change.
    """
    tensors = [*model.parameters(), *model.buffers()]
    modules = tuple(map(id, program.all_modules(model)))
    where = tuple((t.data_ptr(), t.dtype, t.requires_grad) for t in tensors)
    return modules, where, program.fingerprint(model, free=[id(t) for t in tensors], versions=False)


class Replay:
    """A captured chunk of one size.

    Args:
        engine: has run on a chunk of this shape (`Engine.plan`).
        inputs: what the estimate measures on.
        batch: (start, stop) -> inputs on the device.
        cotangent: (index [B] int64, inputs) -> the function of the output that gives the cotangent.
        size: samples in a chunk.
        seed: of inputs and probe.
        context: makes the autocast context.
        recorder: captures; `CudaRecorder` on a GPU.
    """

    def __init__(
        self,
        engine: Engine,
        inputs: Any,
        batch: Callable[[int, int], Any],
        cotangent: Callable[[Tensor, Any], Callable[[Tensor], Any]],
        size: int,
        seed: int,
        context: Callable[[], AbstractContextManager],
        recorder: Recorder,
        device: torch.device,
        dtype: torch.dtype | None,
    ) -> None:
        self.engine, self.batch, self.size, self.context, self.recorder = engine, batch, size, context, recorder
        self.first = torch.zeros(1, dtype=torch.int64, device=device)
        offsets = torch.arange(size, dtype=torch.int64, device=device)
        make = getattr(inputs, "from_device", lambda **_: None)(seed=seed, device=device, dtype=dtype)
        self.fixed = None if make is not None else tree_map(_own, batch(0, size))
        self.fingerprint = fingerprint(engine.model)
        plan = engine.plan(size)
        assert plan is not None

        def chunk() -> tuple[Tensor, Tensor, Any, Tensor]:
            with gathered() as flags, self.context():
                x = self.fixed if make is None else adapt.as_inputs(make(self.first, size))
                table, output = engine.run_planned(plan, x, cotangent(offsets + self.first, x))
                bad = torch.stack(flags).any()
            return table, output, x, bad

        self.table, self.output, self.x, self.bad = recorder.capture(chunk)
        self.cotangent = lambda: cotangent(offsets + self.first, self.x)
        self.seen_bad = torch.zeros((), dtype=torch.bool, device=device)

    def current(self) -> bool:
        """Whether the model is still the program that was captured."""
        return self.fingerprint == fingerprint(self.engine.model)

    def run(self, start: int) -> Tensor:
        """Squared norms [parameters, B] of samples start .. start + size - 1; `clean` must be asked afterwards."""
        self.first.fill_(start)
        if self.fixed is not None:
            new = self.batch(start, start + self.size)
            for mine, given in zip(tree_flatten(self.fixed)[0], tree_flatten(new)[0], strict=True):
                if isinstance(mine, Tensor):
                    if given.shape != mine.shape:
                        raise ShapeChanged
                    mine.copy_(given)
        self.recorder.replay()
        self.seen_bad |= self.bad
        return self.table.clone()

    def clean(self) -> bool:
        """Whether every value since the last question was finite, and the last outputs are the model's own."""
        samples = list(range(min(COMPARED, self.size)))
        few = adapt.Batch(self.x, self.size, self.engine.in_dim).pick(samples)
        captured = self.output.narrow(self.engine.out_dim, 0, len(samples))
        with self.context():
            same = same_output(self.engine.model, few, captured, self.engine.output, self.engine.out_dim)
            if same and self.engine.audits.due(fresh=False):
                same = self.engine.audit(self.x, self.output, self.table, self.cotangent())
        bad = bool(self.seen_bad)
        self.seen_bad.zero_()
        return same and not bad


class ShapeChanged(Exception):
    """A batch has other shapes than the captured one."""


def _own(t: Any) -> Any:
    return t.clone() if isinstance(t, Tensor) else t


class Replays:
    """Decides when a chunk is captured and replayed, for one estimator.

    Args:
        make: size -> `Replay`; None where there are no graphs (no GPU, a probe of several passes).
        engine: the engine whose runs are replayed.
    """

    def __init__(self, make: Callable[[int], Replay] | None, engine: Engine) -> None:
        self.make, self.engine = make, engine
        self.held: dict[int, Replay] = {}
        self.planned: dict[int, tuple[Plan, tuple | None, tuple]] = {}  # by size, with the flags and the program of that run
        self.used: set[int] = set()
        self.failures = 0
        self.note: str | None = None
        self.paused = False

    def begin(self) -> None:
        """Begin a measurement: the model may be another program since the one before."""
        self.used.clear()

    def ran(self, size: int) -> None:
        """A chunk of this size has been run as it is: what the engine knows of it serves a capture."""
        self.planned.pop(size, None)
        plan = None if self.make is None or self.paused else self.engine.plan(size)
        if plan is not None:
            self.planned[size] = plan, self.engine._last, fingerprint(self.engine.model)

    def _capture(self, size: int) -> Replay | None:
        """Capture a chunk; None where none of this size has been run, or the model is another program since."""
        if self.make is None or size not in self.planned:
            return None
        plan, flags, before = self.planned.pop(size)
        if fingerprint(self.engine.model) != before:
            return None
        self.engine._plan, self.engine._last = plan, flags  # others use the engine too
        return None if self.engine.plan(size) is None else self.make(size)

    def run(self, start: int, stop: int) -> Tensor | None:
        """Squared norms [parameters, B] of a chunk by replay, or None where it must be run as it is."""
        size = stop - start
        if self.make is None or self.paused or self.failures > 1:
            return None
        replay = self.held.get(size)
        if replay is not None and size not in self.used and not replay.current():  # once a measurement: it takes the host long
            self.drop("the model's modules or memory changed")
            return None
        try:
            if replay is None:
                replay = self._capture(size)
                if replay is None:
                    return None
                self.held[size] = replay
            table = replay.run(start)
        except (RuntimeError, Rerouted, ShapeChanged) as error:  # a capture that fails leaves the model as it was
            self.drop(f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else 'other shapes'}")
            self.failures += 1
            return None
        self.used.add(size)
        return table

    def clean(self) -> bool:
        """Whether what was replayed since the last question holds; otherwise the graphs are dropped."""
        used, self.used = self.used, set()
        if all([self.held[size].clean() for size in used]):
            return True
        self.drop("replayed values were not finite, or not those of the model as it is now")
        self.failures += 1
        return False

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Run every chunk as it is."""
        self.paused = True
        try:
            yield
        finally:
            self.paused = False

    def drop(self, reason: str) -> None:
        """Release the graphs and their memory."""
        self.held.clear()
        self.used.clear()
        self.note = f"CUDA graph dropped: {reason}"
