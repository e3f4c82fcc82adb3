"""The estimator of the local redundancy of a model on synthetic inputs.

The estimate has its standard error (paper, Theorem 3.4).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fastlr.distributed.fully_sharded import full_params
from fastlr.distributed.sharding import Team
from fastlr.errors import InputError, ModelError, NonFiniteError, warn
from fastlr.estimator.chunks import Chunks
from fastlr.estimator.eval_mode import eval_mode
from fastlr.estimator.identity import describe, inputs_hash, of_inputs, tells_all
from fastlr.estimator.options import EstimateOptions
from fastlr.estimator.passes import Passes
from fastlr.estimator.predictive import Predictive
from fastlr.estimator.progress import OnProgress, reporter
from fastlr.estimator.ranks import agree, buffers_of_rank_0, holds_on_all, merged
from fastlr.estimator.result import Estimate, paired_difference, versions
from fastlr.estimator.statistics import (
    Moments,
    Stopping,
    memorization_gain,
    regression_memorization_bound,
)
from fastlr.ghost.model.view import ModelView, OutputSelector
from fastlr.inputs.base import SupportsBatch
from fastlr.ops.compiled_parts import uncompiled
from fastlr.ops.model_lock import locked

__all__ = [
    "Estimate",
    "LocalRedundancy",
    "estimate",
    "memorization_gain",
    "paired_difference",
    "regression_memorization_bound",
]

ROUNDS = 3  # times that a measurement is made where the one before turned out not to hold


class _Run(NamedTuple):
    """What a run over the inputs has given.

    Attributes:
        values: that are kept, of all ranks.
        sums: Sums of each parameter over this rank's inputs; None if it has none.
        routes: Routes of each parameter on this rank.
    """

    values: Tensor
    sums: Tensor | None
    routes: dict[str, str]

    def sums_by(self, names: Iterable[str]) -> dict[str, float]:
        """Return the sums of parameters by these names."""
        return {} if self.sums is None else dict(zip(names, self.sums.tolist(), strict=True))


class LocalRedundancy:
    """An estimator of the local redundancy that is kept between measurements.

    The plan is kept, and the weights may change in between. Every measurement runs some samples
    alone, by plain autograd, and compares.

    Takes the arguments of :func:`estimate`, and raises its errors.

    Attributes:
        options: the arguments.
        progress: that of the options, or another from the next measurement on.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: SupportsBatch,
        n: int | None = None,
        *,
        predictive: Predictive | None = None,
        probe: str = "rademacher",
        batch_size: int | None = None,
        seed: int = 0,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        output: OutputSelector = None,
        in_dim: int = 0,
        out_dim: int = 0,
        target_rel_stderr: float | None = None,
        min_n: int = 512,
        max_n: int | None = None,
        progress: bool | OnProgress | None = None,
    ) -> None:
        given = dict(locals())
        del given["self"]
        self.options = options = EstimateOptions(**given)
        self.progress = options.progress
        self.model = options.model
        self.view = ModelView.of(options.model, options.output, options.in_dim, options.out_dim)
        with locked(self.model):
            self.passes = self._passes()
        self.engine = self.passes.engine
        self.chunks = Chunks(self.passes)
        self._digests: dict[tuple[int, str], str] = {}

    def _passes(self) -> Passes:
        """Return the passes over the inputs.

        Refuses a model that is not on the device asked for, or that is on the meta device.
        """
        wanted, on = self.options.device, self.view.device
        if on.type == "meta":
            raise ModelError(
                "the model's parameters are on the meta device, without values: load its weights "
                "first"
            )
        if wanted is not None and not _same_device(torch.device(wanted), on):
            raise InputError(
                f"device={wanted} but the model is on {on}: move the model, or leave device out"
            )
        return Passes(self.options, self.view)

    def release(self) -> None:
        """Give back the GPU memory that is held between measurements: captured chunks.

        The next measurement captures them again. On a CPU nothing is held.
        """
        self.chunks.replays.release()

    def measure(self) -> Estimate:
        """Measure the model as it is now.

        Returns an :class:`Estimate`; raises the errors of :func:`estimate`.
        """
        start = time.perf_counter()
        options, chunks, audits = self.options, self.chunks, self.engine.audits
        with (
            locked(self.model),
            full_params(self.model) as members,
            members.guard(),
            buffers_of_rank_0(members, self.view.module),
            eval_mode(self.model, self.view.device),
            uncompiled(),
        ):
            self.passes.renew()
            if members.size > 1:
                identity = of_inputs(options.inputs, options.total, options.seed)
                agree(members, options, self._digest(options.total, identity))
            chunks.begin()
            audited = audits.passed
            run = self._run_that_holds(members)
            values = run.values
            sums, routes = merged(members, run.sums_by(self.engine.parameters), run.routes)
            passed = sum(members.share(audits.passed - audited))
            if not values.isfinite().all():
                sample = int((~values.isfinite()).nonzero()[0])
                text = (
                    f"the squared gradient norm of sample {sample} is not finite: lower the "
                    "model's scale"
                )
                raise members.everybodys(NonFiniteError(text))
            used = (
                len(values)
                if options.probe != "batch"
                else min(len(values) * chunks.size, options.total)
            )
            inputs_identity = of_inputs(options.inputs, used, options.seed)
            inputs_digest = self._digest(used, inputs_identity)
            notes = members.notes([*chunks.notes, *filter(None, [chunks.replays.note])])
            described = self.passes.description(), self.passes.identity(), inputs_identity
            # a rank without inputs has no predictive, and each has objects of its own
            predictive, predictive_identity, inputs_identity = members.share(described)[0]
        moments = Moments()
        moments.add(values)
        return Estimate(
            value=moments.mean,
            stderr=moments.stderr,
            n=len(values),
            per_parameter={name: part / len(values) for name, part in sums.items()},
            per_sample=values,
            routes=routes,
            seconds=time.perf_counter() - start,
            probe=options.probe,
            seed=options.seed,
            predictive=predictive,
            inputs=describe(options.inputs),
            inputs_used=used,
            inputs_digest=inputs_digest,
            inputs_identity=inputs_identity,
            predictive_identity=predictive_identity,
            batch_size=chunks.size,
            dtype=None if options.dtype is None else str(options.dtype).removeprefix("torch."),
            device=str(self.view.device),
            notes=notes,
            versions=versions(),
            audits=passed,
        )

    def _run_that_holds(self, members: Team) -> _Run:
        """Run over the inputs, again where the measurement does not hold."""
        for _ in range(ROUNDS):
            failed = self.engine.audits.failed
            run = self._run(members)
            holds = holds_on_all(members, self.engine, self.chunks, failed)
            # The device is waited for once all is launched.
            sums = None if run.sums is None else run.sums.cpu()
            run = run._replace(values=run.values.detach().cpu().double(), sums=sums)
            if holds:
                return run
        text = (
            f"audits or replays failed in each of {ROUNDS} measurements: values of the last one "
            "may be wrong"
        )
        self.chunks.note(text)
        warn(text)
        return run

    def _run(self, members: Team) -> _Run:
        """Run over the inputs."""
        options, chunks, total = self.options, self.chunks, self.options.total
        progress = self.progress if members.rank == 0 else False
        kept: list[Tensor] = []
        sums: Tensor | None = None
        routes: dict[str, str] = {}
        done, reached = 0, False
        with reporter(progress, total) as report:
            chunks.replays.begin()
            chunks.size = chunks.first_size(members)
            stopping = Stopping(
                options.target_rel_stderr,
                options.min_n,
                chunks.size if options.probe == "batch" else None,
            )
            while done < total and not reached:
                start, end, stop = members.span(done, chunks.size, total)
                may_be_last = stop == total or stopping.may_end(done, stop)
                values, norms = chunks.norms(start, end, first=done == 0, last=may_be_last)
                all_values, before, least = members.join(values, chunks.size)
                if least < chunks.size:  # memory ran out on another rank: all go on with its chunk
                    chunks.limit(least)
                keep = len(all_values)
                if options.target_rel_stderr is not None or report is not None:
                    keep, reached = stopping.look(
                        all_values.detach().to("cpu", torch.float64), done, stop
                    )
                if norms is not None:
                    part = norms.table[:, : max(0, keep - before)].double().sum(1)
                    sums = part if sums is None else part + sums
                    is_one_sample = norms.table.shape[1] == 1  # which goes by plain autograd
                    routes = norms.routes | routes if is_one_sample else routes | norms.routes
                kept.append(all_values[:keep])
                done = stop
                if report is not None:
                    moments = stopping.moments
                    report(
                        moments.n if options.probe != "batch" else done,
                        total,
                        moments.mean,
                        moments.stderr,
                    )
        return _Run(torch.cat(kept), sums, routes)

    def _digest(self, used: int, identity: str) -> str:
        """Return a hash of the first two inputs and the last, made on the CPU in float32.

        It is computed at each measurement if nothing says whether the inputs have changed.
        """
        if not tells_all(identity):
            return inputs_hash(self.options.inputs, used, self.options.seed)
        key = used, identity
        if key not in self._digests:
            self._digests[key] = inputs_hash(self.options.inputs, used, self.options.seed)
        return self._digests[key]


def estimate(
    model: nn.Module,
    inputs: SupportsBatch,
    n: int | None = None,
    *,
    predictive: Predictive | None = None,
    probe: str = "rademacher",
    batch_size: int | None = None,
    seed: int = 0,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    output: OutputSelector = None,
    in_dim: int = 0,
    out_dim: int = 0,
    target_rel_stderr: float | None = None,
    min_n: int = 512,
    max_n: int | None = None,
    progress: bool | OnProgress | None = None,
) -> Estimate:
    """Estimate the local redundancy of a model.

    That is ``LR = mean over x of E_{y ~ P(.|x)} ||grad_theta log P(y|x)||^2``.

    theta are the parameters that require grad, P the model's predictive distribution in eval mode,
    x ``n`` synthetic inputs. The model is left as it was: flags, buffers, ``.grad``, hooks, random
    states. One under ``fully_shard`` is measured by all its ranks together, each a share of the
    inputs, with whole parameters meanwhile: see `fastlr.distributed.full_params`.

    Args:
        model: Module whose samples do not interact in eval mode.
        inputs: Inputs: ShapeImages, NoiseImages, GaussianSeries, GaussianInputs, TokenInputs,
            TensorInputs, or an object of your own whose ``batch(start, stop, *, seed, device,
            dtype)`` returns inputs start..stop-1, samples along axis 0.
        n: Number of inputs. The default is 5000, or all of them if there are fewer. With
            ``target_rel_stderr`` it is the most that are used (see ``max_n``).
        predictive: Distribution of the labels: Categorical, Bernoulli, Gaussian or
            DiagonalGaussian. The default is Categorical for outputs [B, C] with C of at least 2,
            and for the logits of a language model [B, T, C]. Probabilities are an error.
        probe: Probe: "rademacher" (one backward pass, lowest variance), "sampled" (labels drawn, as
            in the paper) or "exact" (the label expectation, many passes), all of per-sample norms.
            "batch" is ``B ||gradient of a batch's mean||^2`` with sampled labels: the same
            expectation, far noisier, for comparison. Its samples are batches.
        batch_size: Number of inputs in a chunk. The default (250 for "batch") follows from the
            device's memory and what a small forward pass saves, and is at most 512. It is smaller,
            with a note, where little memory is free. It changes the results only by rounding,
            except for "batch".
        seed: Seed of inputs and probe, from 0 to 2^64 - 1. The same seed gives the same inputs
            whatever n and the chunks.
        dtype: Autocast dtype, "bfloat16" or "float16" (also "bf16", "fp16", or a torch.dtype).
            None or "float32": no autocast, the model's own precision.
        device: Device of the model. It is only checked.
        output: Key, attribute, index or function that picks the output tensor from what the model
            returns.
        in_dim: Sample axis of the model's inputs. Samples are moved there from axis 0.
        out_dim: Sample axis of the output.
        target_rel_stderr: Fraction (0.05 for 5 %) of stderr / value at which to stop. It is checked
            every 128 inputs from ``min_n`` on, so that the n at the end does not depend on the
            chunks. A small min_n biases heavy tails low.
        min_n: Fewest inputs with ``target_rel_stderr``.
        max_n: Most inputs with ``target_rel_stderr``. The default is n, or the length of the inputs
            if that is less.
        progress: True for a progress bar, False for none, or a function that is called as (done,
            total, value, stderr) after each chunk. None shows a bar on stderr after three seconds
            in a terminal or notebook.

    Returns:
        An :class:`Estimate`, in nats per input per unit step size.

    Raises:
        InputError: An argument or input is wrong.
        ModelError: The model cannot be measured as it is, or one input does not fit in memory.
        NonFiniteError: An output, gradient or norm is not finite.

    Source: paper, Theorem 3.4, Corollary 3.6 and section 3.6.
    """
    given = dict(locals())
    return LocalRedundancy(**given).measure()


def _same_device(asked: torch.device, actual: torch.device) -> bool:
    """Return True if a device that the user named is the one the model is on.

    "cuda" means the current one.
    """
    if asked.type == "cuda" and asked.index is None and actual.type == "cuda":
        return actual.index == torch.cuda.current_device()
    return asked.type == actual.type and (asked.index or 0) == (actual.index or 0)
