"""One chunk of an estimate as a CUDA graph.

It is captured once for a size and replayed for every other chunk.

A chunk is generation of the inputs, forward pass, cotangent, backward pass and norms, hundreds of
kernels of a few microseconds each; replayed, they follow each other without the host. The graph
reads the weights where they are, so training may go on in between. Before a measurement, the
model's memory, attributes and hooks are compared with those that were captured (`graph_key`). What
that misses, the audits of the measurement find: samples of the first and the last chunk are
copied, and run by the model itself after all replays, so that nothing waits for the device. If one
is wrong, the measurement is repeated without graphs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastlr.errors import NonFiniteError, first_line
from fastlr.estimator.capture import Captured, Recorder, ShapeChanged, graph_key
from fastlr.estimator.passes import Passes
from fastlr.ghost.engine import Engine, as_table
from fastlr.ghost.fusion.forward import require_finite
from fastlr.ghost.graph.plan import Plan
from fastlr.ghost.graph.walk import walk
from fastlr.ghost.model.batch import Batch, as_inputs
from fastlr.ghost.model.writes import put_back_writes
from fastlr.ghost.norms.cotangents import passes as engine_passes
from fastlr.ghost.norms.sq_norms import MeasureAgain, sq_norms
from fastlr.ghost.trust.audits import Draw, SampleAudit
from fastlr.ops.cudnn import cudnn_as_user_set, without_cudnn
from fastlr.ops.deferred_checks import gathered, out_of_memory, refuse_beyond
from fastlr.ops.torch_private import tree_flatten, tree_unflatten


class Replay:
    """A captured chunk of one size.

    Args:
        passes: Passes over chunks, of which their engine has run one of this size.
        plan: Plan of that run.
        recorder: Recorder of the chunk; a `CudaRecorder` on a GPU.
    """

    def __init__(self, passes: Passes, plan: Plan, recorder: Recorder) -> None:
        self.passes, self.view, self.engine = passes, passes.view, passes.engine
        self.plan, self.size, self.recorder = plan, plan.count, recorder
        size, device = plan.count, self.view.device
        self.first = torch.zeros(1, dtype=torch.int64, device=device)
        offsets = torch.arange(size, dtype=torch.int64, device=device)
        make = self._make = passes.inputs_on_device(size)
        leaves, form = self._inputs(0)
        self._form = form

        def chunk(*given: Any) -> tuple[Tensor, Tensor, Any, Tensor]:
            with gathered() as flags, passes.autocast():
                if make is None:
                    x = tree_unflatten(given, form)
                else:
                    x = as_inputs(make(self.first))
                table, output = norms_of_planned_batch(
                    self.engine, plan, x, passes.cotangent(offsets + self.first, x)
                )
                bad = torch.stack(flags).any()
            return table, output, x, bad

        self.captured = Captured(recorder, chunk, leaves, self.view.module)
        self.table, self.output, self.x, self.bad = self.captured.result
        self.cotangent = lambda: passes.cotangent(offsets + self.first, self.x)

    def _inputs(self, start: int) -> tuple[list[Any], Any]:
        """Return the inputs that are copied into the graph, and their structure."""
        return tree_flatten(
            self.passes.inputs(start, start + self.size) if self._make is None else []
        )

    def run(self, start: int) -> tuple[Tensor, Tensor]:
        """Replay samples start .. start + size - 1.

        Returns:
            (squared norms [parameters, B]; True on the device if something is not finite).
        """
        self.first.fill_(start)
        leaves, form = self._inputs(start)
        if form != self._form:
            raise ShapeChanged
        self.table.fill_(math.nan)  # a replay that writes nothing leaves it so
        put_back_writes(self.view.module)
        self.captured.replay(leaves)
        return self.table.clone(), self.bad | self.table.isnan().any()

    def audits(self, start: int, draw: Draw) -> list[SampleAudit]:
        """Return audits of samples of the chunk that was replayed last, from ``start`` on.

        They hold no memory of the graph.
        """
        passes, engine, stop = self.passes, self.engine, start + self.size
        samples = engine.audits.samples(self.size, draw)
        if not samples:
            return []

        view, plan = engine.view, self.plan

        def batch(x: Any) -> Batch:
            return view.batch(x, plan.count, plan.carriers)

        def inputs() -> Any:
            return view.inputs(passes.inputs(start, stop))

        with gathered(), passes.autocast():
            (one,) = engine_passes(self.cotangent(), self.output, view.out_dim)
            norms = self.table / one.unscaling
            again = lambda: batch(inputs()), lambda: engine.run_forward(inputs())
            return [
                SampleAudit(view, plan, batch(self.x), sample, self.output, one, norms, *again)
                for sample in samples
            ]


def norms_of_planned_batch(
    engine: Engine, plan: Plan, x: Any, cotangent: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Measure a batch by the plan of an earlier one. No check waits for the device.

    Returns:
        (squared norms [parameters, B], float64; the output).

    Raises:
        MeasureAgain: The graph is not the planned one.
    """
    view = engine.view
    with torch.inference_mode(False):
        z = engine.run_forward(x)
        require_finite(z)
        graph = walk(z, view.parameters)
        if graph.signature() != plan.key.structure:
            raise MeasureAgain
        plan.classify(graph)
        (one,) = engine_passes(cotangent, z.detach(), view.out_dim)
        with cudnn_as_user_set(view.device):
            norms = sq_norms(graph, z, one.v, plan)
        table = as_table(norms, view.parameters, one) * one.unscaling
    refuse_beyond(table, lambda: NonFiniteError("the gradient of a parameter is not finite"))
    return table, z.detach()


class Replays:
    """Decides when a chunk is captured and replayed, for one estimator.

    Args:
        passes: Passes over the chunks.
        recorder: Function that makes the recorder of a chunk; None where there are no graphs (no
            GPU, a probe of several passes).

    Attributes:
        held: Captured chunks by their size.
        planned: Plans of chunks that the engine has run, by their size.
        note: Why graphs were dropped, or None.
    """

    def __init__(self, passes: Passes, recorder: Callable[[torch.device], Recorder] | None) -> None:
        self.passes, self.engine, self.recorder = passes, passes.engine, recorder
        self.held: dict[int, Replay] = {}
        self.planned: dict[int, Plan] = {}
        self.note: str | None = None
        self._key: tuple = ()  # of the model when the run under way began
        self._bad: list[Tensor] = []  # flags of the run under way
        self._audits: list[SampleAudit] = []  # to be run after all replays

    def begin(self) -> None:
        """Begin a run over the inputs."""
        self._bad, self._audits = [], []
        key: tuple = ()
        if self.recorder is not None:
            key = self.engine.ladder.rung, graph_key(self.engine.view.module)
        if key != self._key:
            if self.held:
                self.note = (
                    "CUDA graph captured again: the model's memory, attributes or hooks changed"
                )
            self.release()
            self.planned.clear()
            self._key = key

    def ran(self, size: int) -> None:
        """Keep the plan of a chunk of this size, which the engine has run, for a capture."""
        plan = self.engine.plan if self._wanted() else None
        if plan is not None and plan.count == size and plan.is_by_rules:
            self.planned[size] = plan

    def _wanted(self) -> bool:
        """Return True unless chunks are to run without graphs.

        Once an audit has failed, every batch is compared and audited.
        """
        engine = self.engine
        is_doubted = engine.audits.failed or engine.independence.suspicion
        return not (self.recorder is None or is_doubted or engine.view.has_hooked_parameters)

    def run(self, start: int, stop: int, whole: int, draw: Draw) -> Tensor | None:
        """Return the squared norms [parameters, B] of a chunk by replay.

        None where the chunk must run without a graph. Where memory runs out at a capture, graphs
        are released and the error is raised, for a smaller chunk.

        A chunk shorter than a ``whole`` one is the end of one of those: what that has more are the
        inputs before it, real ones, so that audits may draw them; their norms are left out.
        """
        count = size = stop - start
        if not self._wanted():
            return None
        if size < whole <= stop and (whole in self.held or whole in self.planned):
            size = whole
        try:
            replay = self.held.get(size) or self._capture(size)
            if replay is None:
                return None
            table, bad = replay.run(stop - size)
            self._bad.append(bad)
            self._audits += replay.audits(stop - size, draw)
        except Exception as error:
            # A capture that fails leaves the model as it was; the chunk itself says what is wrong.
            if out_of_memory(error):
                self.release()
                raise
            self.give_up(f"{type(error).__name__}: {first_line(error)[:200]}")
            return None
        return table[:, size - count :]

    def _capture(self, size: int) -> Replay | None:
        """Capture a chunk and return it; None where none of this size has been run."""
        plan = self.planned.pop(size, None)
        if plan is None or self.recorder is None:
            return None
        replay = self.held[size] = Replay(self.passes, plan, self.recorder(self.passes.view.device))
        return replay

    def hold(self) -> bool:
        """Run the audits, and return True if what was replayed holds; give up graphs otherwise.

        The device is waited for after all that was to be launched.
        """
        view = self.passes.view
        if not self._bad:
            return True
        with self.passes.autocast(), without_cudnn(view.device, view.parameters.values()):
            flags = torch.cat([torch.stack(self._bad), *(audit.run() for audit in self._audits)])
            bad, of_audits = flags.cpu().split([len(self._bad), 2 * len(self._audits)])
            audited = zip(self._audits, of_audits.view(-1, 2).tolist(), strict=True)
            if not bad.any() and not any(audit.problem(*flag)[0] for audit, flag in audited):
                self.engine.audits.passed += len(self._audits)
                return True
        self.give_up("replayed values were not finite, or not those of the model as it is now")
        return False

    def give_up(self, reason: str) -> None:
        """Run chunks without graphs from now on, and say why."""
        self.release()
        self.recorder = None
        self.note = f"CUDA graph dropped: {reason}"

    def release(self) -> None:
        """Give back the graphs' memory; a later measurement captures them again."""
        self.held.clear()
