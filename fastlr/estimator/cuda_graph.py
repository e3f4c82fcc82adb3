"""One chunk of an estimate as a CUDA graph.

It is captured once for a shape and replayed for every other chunk.

A chunk is generation of the inputs, forward pass, cotangent, backward pass and norms, hundreds of
kernels of a few microseconds each; replayed, they follow each other without the host. The graph
reads the weights where they are, so training may go on in between. Before the first replay of a
measurement, the model's memory, attributes and hooks are compared with those that were captured
(`relied_on`). What that misses, the audits of the measurement find: samples of the first and the
last chunk are copied, and run by the model itself after all replays, so that nothing waits for the
device. If one is wrong, the graph is dropped and the measurement is repeated without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fastlr.errors import first_line
from fastlr.estimator.capture import Captured, Recorder, ShapeChanged, relied_on
from fastlr.estimator.passes import Passes
from fastlr.ghost.auditor import SampleAudit
from fastlr.ghost.backward import Rerouted
from fastlr.ghost.batch import as_inputs
from fastlr.ghost.known import Plan
from fastlr.ghost.verification.audit import Draw
from fastlr.ghost.writes import begin_pass
from fastlr.ops.cudnn import without_cudnn
from fastlr.ops.deferred_checks import gathered, out_of_memory
from fastlr.ops.torch_private import tree_flatten, tree_unflatten

CHANGED = "the model's modules or memory changed"


class Replay:
    """A captured chunk of one size.

    Args:
        passes: over chunks, of which their engine has run one of this size.
        plan: of that run (`Engine.plan`).
        recorder: captures; `CudaRecorder` on a GPU.
        relied_on: of the model as it is.
    """

    def __init__(self, passes: Passes, plan: Plan, recorder: Recorder, relied_on: tuple) -> None:
        self.passes, self.view, self.engine = passes, passes.view, passes.engine
        self.plan, self.size = plan, plan.count
        self.recorder, self.relied_on = recorder, relied_on
        size = plan.count
        device = self.view.device
        self.first = torch.zeros(1, dtype=torch.int64, device=device)
        offsets = torch.arange(size, dtype=torch.int64, device=device)
        make = self._make = passes.inputs_on_device()
        leaves, structure = ([], None) if make is not None else tree_flatten(passes.inputs(0, size))

        def chunk(*given: Any) -> tuple[Tensor, Tensor, Any, Tensor]:
            with gathered() as flags, passes.autocast():
                if make is None:
                    x = tree_unflatten(given, structure)
                else:
                    x = as_inputs(make(self.first, size))
                table, output = self.engine.run_without_waiting_for_device(
                    plan, x, passes.cotangent(offsets + self.first, x)
                )
                bad = torch.stack(flags).any()
            return table, output, x, bad

        self.captured = Captured(recorder, chunk, leaves, self.view.module)
        self.table, self.output, self.x, self.bad = self.captured.result
        self.cotangent = lambda: passes.cotangent(offsets + self.first, self.x)
        self.seen_bad = torch.zeros(1, dtype=torch.bool, device=device)
        self.compared = False  # with the model, in the run under way

    def current(self) -> bool:
        """Return True if the model is what it was when it was captured (see `relied_on`)."""
        return self.relied_on == relied_on(self.view.module)

    def run(self, start: int) -> Tensor:
        """Return the squared norms [parameters, B] of samples start .. start + size - 1."""
        self.first.fill_(start)
        leaves: list[Any] = []
        if self._make is None:
            leaves, _ = tree_flatten(self.passes.inputs(start, start + self.size))
        self.table.fill_(math.nan)  # a replay that writes nothing leaves it so
        begin_pass(self.view.module)
        self.captured.replay(leaves)
        self.seen_bad |= self.bad | self.table.isnan().any()
        return self.table.clone()

    def audits(self, start: int, draw: Draw) -> list[SampleAudit]:
        """Return audits of samples of the chunk that was replayed last, from ``start`` on.

        They hold no memory of the graph.
        """
        passes, engine, stop = self.passes, self.engine, start + self.size
        samples = engine.audits.samples(self.size, draw)
        if not samples:
            return []

        def again() -> Any:
            return passes.view.inputs(passes.inputs(start, stop))

        measured = self.plan, self.x, self.output, self.table
        with gathered(), passes.autocast():
            cotangent = self.cotangent()
            return [engine.audit_of(*measured, cotangent, sample, again) for sample in samples]


class Replays:
    """Decides when a chunk is captured and replayed, for one estimator.

    Args:
        passes: over the chunks.
        recorder: makes the recorder of a chunk; None where there are no graphs (no GPU, a probe of
            several passes).

    Attributes:
        held: the captured chunks by their size.
        audits: Audits of the run under way, to be run after all replays.
        note: why graphs were dropped; None if they were not.
        failures: captures that failed and replays that did not hold; after two there are no more.
    """

    def __init__(self, passes: Passes, recorder: Callable[[torch.device], Recorder] | None) -> None:
        self.passes, self.engine, self.recorder = passes, passes.engine, recorder
        self.held: dict[int, Replay] = {}
        # by size, with what a graph relies on
        self.planned: dict[int, tuple[Plan, tuple]] = {}
        self.bad: list[Tensor] = []  # flags of the graphs used in the run under way
        self.audits: list[SampleAudit] = []
        self.failures = 0
        self.note: str | None = None

    def begin(self) -> None:
        """Begin a run over the inputs."""
        self.bad.clear()
        self.audits.clear()
        for replay in self.held.values():
            replay.compared = False

    def ran(self, size: int) -> None:
        """Keep what the engine knows of a chunk of this size, which has been run as it is.

        It serves a capture.
        """
        self.planned.pop(size, None)
        plan = self.engine.plan() if self._wanted() else None
        if plan is not None and plan.count == size:
            self.planned[size] = plan, relied_on(self.engine.model)

    def _wanted(self) -> bool:
        """Return True unless chunks are to run as they are.

        Once an audit has failed, every batch is looked at and audited.
        """
        return self.recorder is not None and not self.engine.audits.failed

    def _capture(self, size: int) -> Replay | None:
        """Capture a chunk and return it.

        None where none of this size has been run, or the model has changed since.
        """
        if self.recorder is None or size not in self.planned:
            return None
        plan, before = self.planned.pop(size)
        if relied_on(self.engine.model) != before or not self.engine.replayable(plan):
            return None
        return Replay(self.passes, plan, self.recorder(self.passes.view.device), before)

    def run(self, start: int, stop: int, whole: int, draw: Draw) -> Tensor | None:
        """Return the squared norms [parameters, B] of a chunk by replay.

        None where the chunk must be run as it is. Where memory runs out at a capture, graphs are
        released and the error is raised, for a smaller chunk.

        A chunk shorter than a ``whole`` one is the end of one of those: what that has more are the
        inputs before it, real ones, so that audits may draw them; their norms are left out.
        """
        count = size = stop - start
        if not self._wanted() or self.failures > 1:
            return None
        if size < whole <= stop and (whole in self.held or whole in self.planned):
            size = whole
        replay = self.held.get(size)
        if replay is not None and not replay.compared and not replay.current():
            self.drop(CHANGED)
            return None
        try:
            if replay is None:
                replay = self._capture(size)
                if replay is None:
                    return None
                self.held[size] = replay
            if not replay.compared:
                replay.compared = True
                self.bad.append(replay.seen_bad.zero_())
            table = replay.run(stop - size)[:, size - count :]
            self.audits += replay.audits(stop - size, draw)
        except (
            RuntimeError,
            Rerouted,
            ShapeChanged,
        ) as error:  # a capture that fails leaves the model as it was
            if out_of_memory(error):
                self.release()
                raise
            self.drop(f"{type(error).__name__}: {first_line(error)[:200]}")
            self.failures += 1
            return None
        return table

    def doubts(self) -> Tensor | None:
        """Run the audits; return flags on the device that say what may be wrong, for `clean`.

        Nothing waits for the device. None where nothing was replayed.
        """
        if not self.bad:
            return None
        with self._as_measured():
            return torch.cat([*self.bad, *(audit.run() for audit in self.audits)])

    def clean(self, doubts: Tensor | None) -> bool:
        """Return True if what was replayed holds, given the flags of `doubts` on the host.

        Otherwise the graphs are dropped.
        """
        if doubts is None:
            return True
        bad, flags = doubts.bool().split([len(self.bad), 2 * len(self.audits)])
        asked = zip(self.audits, flags.view(-1, 2).tolist(), strict=True)
        with self._as_measured():
            is_right = not bad.any() and all(audit.holds(*flag) for audit, flag in asked)
        if is_right:
            self.engine.audits.passed += len(self.audits)
            return True
        self.drop("replayed values were not finite, or not those of the model as it is now")
        self.failures += 1
        return False

    @contextmanager
    def _as_measured(self) -> Iterator[None]:
        """Run the model within this context as it was measured."""
        view = self.passes.view
        with self.passes.autocast(), without_cudnn(view.device, view.parameters.values()):
            yield

    def drop(self, reason: str) -> None:
        """Release the graphs, and say why."""
        self.release()
        self.note = f"CUDA graph dropped: {reason}"

    def release(self) -> None:
        """Give back the graphs' memory; a later measurement captures them again."""
        self.held.clear()
