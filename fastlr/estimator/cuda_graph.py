"""One chunk of an estimate as a CUDA graph.

It is captured once for a shape and replayed for every other chunk.

A chunk is generation of the inputs, forward pass, cotangent, backward pass and norms, hundreds of
kernels of a few microseconds each; replayed, they follow each other without the host. The graph
reads the weights where they are, so training may go on in between. What it cannot see is a change
of the *program*: storage that moved, a module or a hook that came or went, a number that a forward
pass reads. Where the weights are is looked at before a measurement's first replay; `relied_on`
and a comparison with the model's own output find the rest while the GPU works and after: then the
graph is dropped and the measurement is made anew, without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from fastlr.estimator.capture import Captured, Recorder, ReliedOn, ShapeChanged, places, relied_on
from fastlr.estimator.passes import Passes
from fastlr.ghost.backward import Rerouted
from fastlr.ghost.batch import as_inputs
from fastlr.ghost.known import Plan
from fastlr.ghost.verification.agreement import agree, model_noise, output_differs, unexplained
from fastlr.ghost.verification.noise import Noise
from fastlr.ghost.writes import begin_pass
from fastlr.ops.cudnn import without_cudnn
from fastlr.ops.deferred_checks import gathered, out_of_memory
from fastlr.ops.torch_private import tree_flatten, tree_unflatten

CHANGED = "the model's modules or memory changed"
COMPARED = 4  # samples whose outputs are held to the model's own
AUDITED = 8  # samples of a chunk that are audited at once, at most


class Replay:
    """A captured chunk of one size.

    Args:
        passes: over chunks, of which their engine has run one of this size.
        plan: of that run (`Engine.plan`).
        recorder: captures; `CudaRecorder` on a GPU.
        relied_on: of the model as it is.
    """

    def __init__(self, passes: Passes, plan: Plan, recorder: Recorder, relied_on: ReliedOn) -> None:
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
        self.seen_bad = torch.zeros((), dtype=torch.bool, device=device)
        self.noise: NoiseShare | None = None  # of the outputs, as last measured

    def in_place(self) -> bool:
        """Return True if the model's parameters and buffers are where they were.

        Then replaying reads no memory of others.
        """
        return self.relied_on.places == places(self.view.module)

    def current(self) -> bool:
        """Return True if the model is still the program that was captured."""
        return self.relied_on == relied_on(self.view.module)

    def _without_cudnn(self) -> AbstractContextManager[None]:
        return without_cudnn(self.view.device, self.view.parameters.values())

    def run(self, start: int) -> Tensor:
        """Squared norms [parameters, B] of samples start .. start + size - 1; see `doubts`."""
        self.first.fill_(start)
        leaves: list[Any] = []
        if self._make is None:
            leaves, _ = tree_flatten(self.passes.inputs(start, start + self.size))
        self.table.fill_(math.nan)  # a replay that writes nothing leaves it so
        begin_pass(self.view.module)
        self.captured.replay(leaves)
        self.seen_bad |= self.bad | self.table.isnan().any()
        return self.table.clone()

    def doubts(self) -> Tensor:
        """Ask whether the replays hold, without waiting for the answers, which `clean` takes.

        Returns flags on the device: [a value was not finite, outputs differ].
        """
        with self.passes.autocast(), self._without_cudnn():
            differs = output_differs(self.view, *self._few())
        asked = torch.stack([self.seen_bad, differs])
        self.seen_bad.zero_()
        return asked

    def clean(self, bad: bool, differs: bool) -> bool:
        """Return True if all that was replayed since the last question holds.

        All values were finite, the last outputs are the model's, and audits pass.
        """
        with self.passes.autocast(), self._without_cudnn():
            if bad or (differs and not self._explained()):
                return False
            return self._audited()

    def _explained(self) -> bool:
        """Return True if the last outputs are the model's own but for what its precision explains.

        How much that is takes a run in float64: it is measured once and holds until the next audit,
        and anew where it does not explain the difference. Its time counts as that of audits.
        """
        few, captured = self._few()
        own, out_dim = self.view.forward(few).detach(), self.view.out_dim
        relative = unexplained(own, self.view.named.values())
        known = self.noise
        if known is not None and agree(
            captured, own, relative, lambda: known.of(captured, out_dim), out_dim
        ):
            return True
        with self.engine.audits.timed():
            now = NoiseShare(model_noise(self.view, few), captured, out_dim)
            self.noise = now
        return agree(captured, own, relative, lambda: now.of(captured, out_dim), out_dim)

    def _audited(self) -> bool:
        """Audit samples of the last chunk as long as they are due; True if all are right."""
        audits = self.engine.audits
        for _ in range(AUDITED):
            if not audits.due():
                break
            self.noise = None
            if not self.engine.audit_planned(
                self.plan, self.x, self.output, self.table, self.cotangent()
            ):
                audits.owe()
                return False
        return True

    def _few(self) -> tuple[Any, Tensor]:
        """A few samples of the last chunk, and the captured outputs for them."""
        samples = range(min(COMPARED, self.size))
        few = self.view.batch(self.x, self.size).pick(samples)
        return few, self.output.narrow(self.view.out_dim, 0, len(samples))


class NoiseShare:
    """How far outputs are off by rounding, as a share of the size of each of their columns.

    Args:
        measured: for some samples, along ``out_dim``; None if nobody can tell.
        outputs: for these.
        out_dim: the samples' axis.
    """

    def __init__(self, measured: Noise | None, outputs: Tensor, out_dim: int) -> None:
        self.measured = measured
        self.share: Tensor | None = None
        if measured is not None:
            sizes = _largest(outputs, out_dim)
            self.share = torch.where(sizes > 0, _largest(measured.allowed, out_dim) / sizes, 0.0)

    def of(self, outputs: Tensor, out_dim: int) -> Noise | None:
        """Return how far these outputs may be off by rounding, the same for all samples.

        None if nobody can tell.
        """
        if self.measured is None or self.share is None:
            return None
        allowed = (self.share * _largest(outputs, out_dim)).expand(outputs.shape)
        return Noise(allowed, own=self.measured.own)


def _largest(t: Tensor, dim: int) -> Tensor:
    """The largest size along an axis, of what is finite."""
    return torch.where(t.isfinite(), t.double().abs(), 0.0).amax(dim, keepdim=True)


class Replays:
    """Decides when a chunk is captured and replayed, for one estimator.

    Args:
        passes: over the chunks.
        recorder: makes the recorder of a chunk; None where there are no graphs (no GPU, a probe of
            several passes).

    Attributes:
        held: the captured chunks by their size.
        note: why graphs were dropped; None if they were not.
        failures: captures that failed and replays that did not hold; after two there are no more.
    """

    def __init__(self, passes: Passes, recorder: Callable[[torch.device], Recorder] | None) -> None:
        self.passes, self.engine, self.recorder = passes, passes.engine, recorder
        self.held: dict[int, Replay] = {}
        # by size, with the program of that run
        self.planned: dict[int, tuple[Plan, ReliedOn]] = {}
        self.used: set[int] = set()
        self.asked: list[Replay] = []  # what `doubts` was last asked of
        self.failures = 0
        self.note: str | None = None
        self.paused = False
        self.clock: tuple[float, float] | None = None  # of the first replay since `clean`
        self.released_unasked = False  # graphs that served since then, and answer no `doubts`

    def begin(self) -> None:
        """Begin a measurement: the model may be another program since the one before."""
        self.used.clear()
        self.clock = None
        self.released_unasked = False

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
        return self.recorder is not None and not (self.paused or self.engine.audits.failed)

    def _capture(self, size: int) -> Replay | None:
        """Capture a chunk and return it.

        None where none of this size has been run, or the model is another program since.
        """
        if self.recorder is None or size not in self.planned:
            return None
        plan, before = self.planned.pop(size)
        if relied_on(self.engine.model) != before or not self.engine.replayable(plan):
            return None
        return Replay(self.passes, plan, self.recorder(self.passes.view.device), before)

    def run(self, start: int, stop: int, whole: int) -> Tensor | None:
        """Return the squared norms [parameters, B] of a chunk by replay.

        None where the chunk must be run as it is. Where memory runs out at a capture, graphs are
        released and the error is raised, for a smaller chunk.

        A chunk shorter than a ``whole`` one is the end of one of those: what that has more are the
        inputs before it, real ones, so that checks and audits may look at them; their norms are
        left out.
        """
        count = size = stop - start
        if not self._wanted() or self.failures > 1:
            return None
        if size < whole <= stop and (whole in self.held or whole in self.planned):
            size = whole
        replay = self.held.get(size)
        if replay is not None and size not in self.used and not replay.in_place():
            # Once a measurement.
            self.drop(CHANGED)
            return None
        try:
            if replay is None:
                replay = self._capture(size)
                if replay is None:
                    return None
                self.held[size] = replay
            if self.clock is None:
                self.clock = self.engine.audits.clock()
            table = replay.run(stop - size)[:, size - count :]
        except (
            RuntimeError,
            Rerouted,
            ShapeChanged,
        ) as error:  # a capture that fails leaves the model as it was
            if out_of_memory(error):
                self.release()
                raise
            self.drop(
                f"{type(error).__name__}: "
                f"{str(error).splitlines()[0][:200] if str(error) else 'other shapes'}"
            )
            self.failures += 1
            return None
        self.used.add(size)
        return table

    def doubts(self) -> Tensor | None:
        """Ask whether what was replayed since the last call holds, without waiting.

        Returns flags on the device, for `clean`.

        None where nothing was replayed, or where the model is another program since: then the
        graphs are dropped.
        """
        self.asked = [self.held[size] for size in self.used]
        self.used.clear()
        if not all(replay.current() for replay in self.asked):
            # Takes the host long: while the GPU works.
            self.drop(CHANGED)
            return None
        if not self.asked:
            return None
        return torch.cat([replay.doubts() for replay in self.asked])

    def clean(self, doubts: Tensor | None) -> bool:
        """Return True if what `doubts` asked of holds, given its answers on the host.

        Otherwise the graphs are dropped.
        """
        if self.clock is not None:  # the device has done all that was replayed
            self.engine.audits.measured_since(self.clock)
            self.clock = None
        asked, self.asked = self.asked, []
        if self.released_unasked:
            self.released_unasked = False
            return False
        if doubts is None:
            return not asked
        if all(
            replay.clean(*flags)
            for replay, flags in zip(asked, doubts.bool().view(-1, 2).tolist(), strict=True)
        ):
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
        """Release the graphs, and say why."""
        self.release()
        self.note = f"CUDA graph dropped: {reason}"

    def release(self) -> None:
        """Give back the graphs' memory; a later measurement captures them anew.

        What they have served since the last `doubts` can no longer be held to the model.
        """
        self.released_unasked |= bool(self.used)
        self.held.clear()
        self.used.clear()
