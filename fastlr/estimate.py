"""The estimator: the local redundancy of a model on synthetic inputs, with its standard error (paper, Theorem 3.4)."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fastlr import ops
from fastlr.checks import out_of_memory
from fastlr.chunking import chunk_for_memory
from fastlr.distributed.sharding import ALONE, Team, fingerprint, team
from fastlr.errors import FastlrWarning, InputError, ModelError, NonFiniteError
from fastlr.ghost.adapt import OutputSelector, call, select_output, trainable, unwrap
from fastlr.ghost.api import engine_for
from fastlr.ghost.cotangents import Scaled, batch_sq_norms
from fastlr.padding import padding_mask
from fastlr.predictive import PROBES, Predictive, default_predictive
from fastlr.reference.counter import check_seed
from fastlr.replay import CudaRecorder, Recorder, Replay, Replays
from fastlr.result import Estimate, count, paired_difference
from fastlr.runtime import (
    Report,
    as_it_was,
    describe,
    digest,
    move_samples,
    reporter,
    same_device,
    versions,
)
from fastlr.stats import Moments, memorization_gain, regression_memorization_bound
from fastlr.stopping import CHECK_EVERY, Stopping, total_inputs

__all__ = [
    "Estimate",
    "LocalRedundancy",
    "estimate",
    "memorization_gain",
    "paired_difference",
    "regression_memorization_bound",
]

ROUNDS = 3  # times that a measurement is made where the one before turned out not to hold
BATCH_PROBE_SIZE = 250  # default batch of probe="batch"; never chosen by memory, as it is part of the estimator

Progress = bool | Report


def estimate(
    model: nn.Module,
    inputs: Any,
    n: int = 5000,
    *,
    predictive: Predictive | None = None,
    probe: str = "rademacher",
    batch_size: int | None = None,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    output: OutputSelector = None,
    in_dim: int = 0,
    out_dim: int = 0,
    target_rel_stderr: float | None = None,
    min_n: int = 512,
    max_n: int | None = None,
    progress: Progress = False,
) -> Estimate:
    """Estimate the local redundancy ``LR = mean over x of E_{y ~ P(.|x)} ||grad_theta log P(y|x)||^2`` of a model.

    theta are the parameters that require grad, P the model's predictive distribution in eval mode, x ``n`` synthetic
    inputs. The model is left as it was: flags, buffers, ``.grad``, hooks, random states.

    Args:
        model: any module whose samples do not interact in eval mode.
        inputs: ShapeImages, NoiseImages, GaussianSeries, TokenInputs, TensorInputs, or an object of your own whose
            ``batch(start, stop, *, seed, device, dtype)`` returns inputs start..stop-1, samples along axis 0.
        n: number of inputs. With ``target_rel_stderr``, the most that are used (see ``max_n``).
        predictive: Categorical, Bernoulli or Gaussian. Default: Categorical for outputs [B, C] with C of at least 2.
        probe: "rademacher" (one backward pass, lowest variance), "sampled" (labels drawn, as in the paper) or "exact"
            (the label expectation, many passes), all of per-sample norms; or "batch", ``B ||gradient of a batch's
            mean||^2`` with sampled labels: the same expectation, far noisier, for comparison; its samples are batches.
        batch_size: inputs in a chunk; by default from the memory available (250 for "batch"). It changes the results
            only by rounding, except for "batch".
        seed: of inputs and probe, from 0 to 2^64 - 1. The same seed gives the same inputs whatever n and the chunks.
        dtype: autocast dtype, torch.bfloat16 or torch.float16; None: the model's own precision.
        device: only checked: an error unless it is the model's.
        output: picks the output tensor from what the model returns: key, attribute, index or function.
        in_dim: sample axis of the model's inputs; samples are moved there from axis 0.
        out_dim: sample axis of the output.
        target_rel_stderr: stop once stderr / value is at most this, looked at every 128 inputs from ``min_n`` on, so
            that the n where it stops does not depend on the chunks. (A small min_n biases heavy tails low.)
        min_n: fewest inputs with ``target_rel_stderr``.
        max_n: most inputs with ``target_rel_stderr``; default: n, or the length of the inputs where that is less.
        progress: True for a progress bar, or a function called as (done, total, value, stderr) after each chunk.

    Returns:
        An :class:`Estimate`, in nats for each input and unit step.

    Raises:
        InputError: arguments or inputs that are wrong, named.
        ModelError: the model cannot be measured as it is (see the engine), or one input does not fit in memory.
        NonFiniteError: an output, gradient or norm is not finite.

    Source: paper, Theorem 3.4, Corollary 3.6 and section 3.6.
    """
    arguments = dict(locals())
    return LocalRedundancy(**arguments).measure()


class _Parts(NamedTuple):
    """Squared norms [parameters, B] of each parameter's gradients, and the parameters' names."""

    names: list[str]
    table: Tensor

    @classmethod
    def of(cls, parts: Mapping[str, Tensor]) -> _Parts:
        return cls(list(parts), torch.stack(list(parts.values())))


class LocalRedundancy:
    """An estimator kept between measurements: its plan is made and proven once; the weights may change in between.

    Takes the arguments of :func:`estimate`, and raises its errors.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        n: int = 5000,
        *,
        predictive: Predictive | None = None,
        probe: str = "rademacher",
        batch_size: int | None = None,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        output: OutputSelector = None,
        in_dim: int = 0,
        out_dim: int = 0,
        target_rel_stderr: float | None = None,
        min_n: int = 512,
        max_n: int | None = None,
        progress: Progress = False,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InputError(f"model must be a torch.nn.Module, not {type(model).__name__}")
        if not callable(getattr(inputs, "batch", None)):
            raise InputError(
                f"inputs of type {type(inputs).__name__} have no batch(start, stop, *, seed, device, dtype): pass "
                "fastlr.ShapeImages() or another of fastlr's inputs; wrap a tensor in fastlr.TensorInputs"
            )
        if predictive is not None and not callable(getattr(predictive, "cotangent", None)):
            raise InputError(
                "predictive must be fastlr.Categorical(), Bernoulli() or Gaussian(), or have a cotangent()"
            )
        if getattr(inputs, "in_dim", 0) not in (0, in_dim):
            raise InputError(f"the inputs' samples are on axis {inputs.in_dim}, but in_dim={in_dim}: pass the same")
        if probe not in (*PROBES, "batch"):
            raise InputError(f"unknown probe {probe!r}: choose 'rademacher', 'sampled', 'exact' or 'batch'")
        if dtype is not None and dtype not in (torch.bfloat16, torch.float16):
            raise InputError(
                f"dtype is the autocast dtype, torch.bfloat16 or torch.float16 (None: the model's); not {dtype}"
            )
        if not (progress is True or progress is False or callable(progress)):
            raise InputError("progress must be True, False or a function of (done, total, value, stderr)")
        self.model, self.inputs, self.predictive, self.probe, self.dtype = model, inputs, predictive, probe, dtype
        self.output, self.in_dim, self.out_dim, self.progress = output, in_dim, out_dim, progress
        self.seed = check_seed(seed)
        self.total = total_inputs(count("n", n), inputs, target_rel_stderr, count("min_n", min_n), max_n)
        self.target, self.min_n = target_rel_stderr, min(min_n, self.total)
        self.batch_size = None if batch_size is None else count("batch_size", batch_size)
        parameters = trainable(unwrap(model))
        first = next(iter(parameters.values()))
        self.device = first.device
        self.input_dtype = next((p.dtype for p in parameters.values() if p.is_floating_point()), torch.float32)
        if self.device.type == "meta":
            raise ModelError("the model's parameters are on the meta device, without values: load its weights first")
        if device is not None and not same_device(torch.device(device), self.device):
            raise InputError(f"device={device} but the model is on {self.device}: move the model, or leave device out")
        self.engine = engine_for(model, output, in_dim, out_dim)  # shared: a model is proven once
        self._most: int | None = None  # inputs in a chunk, once known
        self._notes: list[str] = []
        self._digests: dict[int, str] = {}
        self._batch_proven = False
        self._used_predictive: Any = predictive
        self._routes: dict[str, str] = {}
        self._padding_left_out = False
        self._recorder: Callable[[torch.device], Recorder] = CudaRecorder
        graphs = self.device.type == "cuda" and probe == "rademacher"
        self._replays = Replays(self._replay if graphs else None, self.engine)

    def measure(self) -> Estimate:
        """Measure the model as it is now. Returns an :class:`Estimate`; raises the errors of :func:`estimate`."""
        start = time.perf_counter()
        members = team()
        with members.guard(), as_it_was(self.model, self.device):
            if members.size > 1:
                self._agree(members)
            self._replays.begin()
            self._batch_proven = False
            audited = self.engine.audits.passed
            for _ in range(ROUNDS):
                failed = self.engine.audits.failed
                values, sums, routes = self._values(members)
                if self._settled(members, failed):
                    break
            else:
                self._unsettled()
            audits = sum(members.share(self.engine.audits.passed - audited))
            total = values.detach().to("cpu", torch.float64)
            if not total.isfinite().all():
                bad = int((~total.isfinite()).nonzero()[0])
                text = f"the squared gradient norm of sample {bad} is not finite: lower the model's scale"
                raise members.everybodys(NonFiniteError(text))
            used = len(total) if self.probe != "batch" else min(len(total) * self._chunk, self.total)
            digest = self._digest(used)
            notes = members.notes([*self._notes, *filter(None, [self._replays.note])])
            predictive = repr(self._used_predictive) + " without padding" * self._padding_left_out
            predictive = members.share(predictive)[0]  # a rank without inputs has none
        moments = Moments()
        moments.add(total)
        return Estimate(
            value=moments.mean,
            stderr=moments.stderr,
            n=len(total),
            per_parameter={name: part / len(total) for name, part in sums.items()},
            per_sample=total,
            routes=routes,
            seconds=time.perf_counter() - start,
            probe=self.probe,
            seed=self.seed,
            predictive=predictive,
            inputs=describe(self.inputs),
            inputs_used=used,
            inputs_digest=digest,
            batch_size=self._chunk,
            dtype=None if self.dtype is None else str(self.dtype).removeprefix("torch."),
            device=str(self.device),
            notes=notes,
            versions=versions(),
            audits=audits,
        )

    def _unsettled(self) -> None:
        """Say, in a warning and in the notes, that the last of several measurements did not hold either."""
        text = f"audits or replays failed in each of {ROUNDS} measurements: values of the last one may be wrong"
        self._notes = list(dict.fromkeys([*self._notes, text]))
        warnings.warn(text, FastlrWarning, stacklevel=4)

    def _settled(self, members: Team, failed: int) -> bool:
        """Whether what was measured holds; else all ranks change together what runs, and measure anew.

        Args:
            members: the ranks.
            failed: how many audits had failed before.
        """
        engine = self.engine
        own = [self._replays.clean(), ops.switched_off(), sorted(engine.ledger.loop), engine.audits.failed > failed]
        told = members.share(own)
        if all(mine == [True, *own[1:3], False] for mine in told):
            return True
        clean, off, loop, disproved = zip(*told, strict=True)
        if any(disproved):  # of one rank's sample: what is known of the model is no longer true on any
            note = "an audit found that the model had changed unseen: it was proven anew and measured again"
            self._notes = list(dict.fromkeys([*self._notes, note]))
            engine.distrust()
        else:
            engine.by_loop_from_now_on({name for names in loop for name in names})
        ops.switch_off([kernel for kernels in off for kernel in kernels])  # a kernel that one rank does not trust, none does
        if not all(clean) or any(kernels != off[0] for kernels in off):
            self._replays.drop(self._replays.note or "ranks differed in the kernels that they trust")
            self._replays.failures += all(clean)
        return False

    def _agree(self, members: Team) -> None:
        """Raise InputError unless all ranks measure the same."""
        names = ("total", "target", "min_n", "probe", "seed", "batch_size", "in_dim", "out_dim")
        arguments = {name: getattr(self, name) for name in names}
        arguments |= {"dtype": str(self.dtype), "inputs": self._digest(self.total)}
        arguments["predictive"] = None if self.predictive is None else describe(self.predictive)
        members.agree("what they measure", arguments, "pass the same arguments on every rank")
        values = fingerprint(unwrap(self.model))
        members.agree("the model", values, "load the same weights and buffers on every rank, or broadcast them")

    def _values(self, members: Team) -> tuple[Tensor, dict[str, float], dict[str, str]]:
        """Run over the inputs: the values kept, each parameter's sum over them, and the routes."""
        self._chunk = step = self._first_chunk(members)
        kept: list[Tensor] = []
        sums: dict[str, float] | Tensor = {}
        names: list[str] = []
        routes: dict[str, str] = {}
        stopping, done = Stopping(self.target, self.min_n, step if self.probe == "batch" else None), 0
        with reporter(self.progress if members.rank == 0 else False, self.total) as report:
            while done < self.total:
                step = self._chunk if members.size == 1 else step
                start, end, stop = members.span(done, step, self.total)
                values, parts = self._measure_span(start, end, routes)
                everyone, before = members.join(values)
                keep, reached = len(everyone), False
                if self.target is not None or report is not None:
                    keep, reached = stopping.look(everyone.detach().to("cpu", torch.float64), done, stop)
                if parts is not None:
                    names = parts.names
                    part = parts.table[:, : max(0, keep - before)].double().sum(1)
                    sums = part + sums if isinstance(sums, Tensor) else part
                kept.append(everyone[:keep])
                done = stop
                if report is not None:
                    moments = stopping.moments
                    report(moments.n if self.probe != "batch" else done, self.total, moments.mean, moments.stderr)
                if reached:
                    break
        found = dict(zip(names, sums.tolist(), strict=True)) if isinstance(sums, Tensor) else {}
        everything = members.share([found, routes])
        for more, others in everything[1:]:
            everything[0][1].update(others)
            for name, value in more.items():
                everything[0][0][name] += value
        return torch.cat(kept), everything[0][0], everything[0][1]

    def _measure_span(self, start: int, stop: int, routes: dict[str, str]) -> tuple[Tensor, _Parts | None]:
        """Values of inputs start .. stop - 1 and each parameter's, by chunks that are halved where memory runs out."""
        values: list[Tensor] = []
        parts: list[_Parts] = []
        while start < stop:
            end, failure = min(start + self._chunk, stop), None
            try:
                value, part, chunk_routes = self._measure_chunk(start, end)
            except Exception as error:
                if not out_of_memory(error):
                    raise
                failure = str(error).splitlines()[0]
            if failure is not None:  # outside the handler, so that its traceback frees the chunk's memory
                self._halve(end - start, failure)
                continue
            values.append(value)
            parts.append(part)
            routes.update(chunk_routes)
            start = end
        if len(values) == 1:
            return values[0], parts[0]
        if not values:
            return torch.empty(0, dtype=torch.float64), None
        return torch.cat(values), _Parts(parts[0].names, torch.cat([part.table for part in parts], dim=1))

    def _measure_chunk(self, start: int, stop: int) -> tuple[Tensor, _Parts, dict[str, str]]:
        if self.probe == "batch":
            return self._batch_gradient(self._batch(start, stop), start, stop)
        table = self._replays.run(start, stop)
        if table is not None:
            return table.sum(0), _Parts(list(self.engine.names), table), self._routes
        x = self._batch(start, stop)
        with self._autocast():  # one context for each chunk: its cache of cast weights must not outlive the chunk
            result = self.engine.run(x, self._cotangent_at(range(start, stop), x))
        self._replays.ran(stop - start)
        if len(result.total) != stop - start:
            raise InputError(
                f"inputs {start}..{stop - 1} gave {len(result.total)} samples at out_dim={self.out_dim}: the sample "
                "axes are in_dim= and out_dim=, and batch(start, stop) must return stop - start samples"
            )
        self._routes = result.routes
        return result.total, _Parts.of(result.per_parameter), result.routes

    def _replay(self, size: int) -> Replay:
        made = self.inputs if self.in_dim == getattr(self.inputs, "in_dim", 0) else None
        where, dtype = self.device, self.input_dtype
        recorder = self._recorder(where)
        return Replay(
            self.engine, made, self._batch, self._cotangent_at, size, self.seed, self._autocast, recorder, where, dtype
        )

    def _batch_gradient(self, x: Any, start: int, stop: int) -> tuple[Tensor, _Parts, dict[str, str]]:
        """B ||gradient of the batch's mean log-likelihood of sampled labels||^2, as one value."""
        if not self._batch_proven:  # refuse what the per-sample probes refuse
            few = min(stop, start + 2)
            with self._autocast():
                two = self._batch(start, few)
                self.engine.run(two, self._cotangent_at(range(start, few), two, "sampled"))
            self._batch_proven = True
        with self._autocast(), self.engine.without_caches(x):
            z = select_output(call(unwrap(self.model), x), self.output)
        v = self._cotangent_at(range(start, stop), x, "sampled", scaled=False)(z.detach()) / (stop - start)
        parts = batch_sq_norms(trainable(unwrap(self.model)), z, v, stop - start)
        together = _Parts.of(parts)
        return together.table.sum(0), together, dict.fromkeys(parts, "batch gradient")

    def _batch(self, start: int, stop: int, device: torch.device | None = None) -> Any:
        x = self.inputs.batch(start, stop, seed=self.seed, device=device or self.device, dtype=self.input_dtype)
        if self.in_dim == getattr(self.inputs, "in_dim", 0):
            return x
        return tree_map(lambda t: move_samples(t, self.in_dim, stop - start), x)

    def _cotangent_at(
        self, index: range | Tensor, x: Any, probe: str | None = None, *, scaled: bool = True
    ) -> Callable[[Tensor], Any]:
        """The function of the output that gives the cotangents of the inputs x, with these global numbers."""

        def at(output: Tensor) -> Any:
            if self._used_predictive is None:
                self._used_predictive = default_predictive(output, self.out_dim)
            predictive, how = self._used_predictive, probe or self.probe
            where: dict[str, Any] = {} if self.out_dim == 0 else {"sample_dim": self.out_dim}
            if isinstance(predictive, Predictive):
                counted = padding_mask(x, output, self.out_dim)
                if counted is not None:
                    where["counted"] = counted
                self._padding_left_out = counted is not None
                small = predictive.scaled_cotangent(output, how, index, self.seed, **where) if scaled else None
                if small is not None:
                    return Scaled(*small)
            return predictive.cotangent(output, how, index, self.seed, **where)

        return at

    def _autocast(self) -> Any:
        """The precision asked for, whatever autocast region the caller is in; its cache of cast weights may be stale."""
        ambient = torch.is_autocast_enabled(self.device.type)
        if self.dtype is None:
            return torch.autocast(self.device.type, enabled=False) if ambient else nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype, cache_enabled=not ambient)

    def _first_chunk(self, members: Team = ALONE) -> int:
        if self._most is None:
            default = BATCH_PROBE_SIZE if self.probe == "batch" else None
            self._most = self.batch_size or default or self._chunk_for_memory()
        most = min(members.least(self._most), self.total)
        if self.batch_size is not None or self.probe == "batch":
            return most
        if self.target is not None and members.size > 1:  # all of them together do not go far beyond min_n
            most = min(most, max(CHECK_EVERY, -(-self.min_n // members.size)))
        # Chunks of one size, as far as it goes: one CUDA graph serves them all, and all ranks have as many.
        rounds = -(-self.total // (most * members.size))
        return -(-self.total // (rounds * members.size))

    def _chunk_for_memory(self) -> int:
        few = min(2, self.total)
        x = self._batch(0, few)

        def forward() -> Tensor:
            with self._autocast():
                return select_output(call(unwrap(self.model), x), self.output)

        return chunk_for_memory(self.model, self.device, few, forward)

    def _halve(self, size: int, failure: str) -> None:
        """Halve the chunk after memory ran out at ``size`` inputs, warning once; ModelError where that cannot be."""
        if size == 1 or self.probe == "batch":
            what = "one input does" if size == 1 else f"probe='batch' with batch_size={size} does"
            raise ModelError(
                f"out of memory on {self.device}: {what} not fit ({failure}); free memory, use a smaller batch_size, "
                "a machine with more memory, or dtype=torch.bfloat16"
            )
        self._chunk = self._most = size // 2
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        if not self._notes:
            warnings.warn(
                f"out of memory with {size} inputs in a chunk ({failure}): going on with {self._chunk}; pass "
                f"batch_size={self._chunk} to start there",
                FastlrWarning,
                stacklevel=4,
            )
        self._notes.append(f"out of memory with {size} inputs in a chunk: went on with {self._chunk}")

    def _digest(self, used: int) -> str:
        """Return a hash of the first two inputs and the last, made on the CPU in float32 whatever the model."""
        if used not in self._digests:
            self._digests[used] = digest(self.inputs, used, self.seed)
        return self._digests[used]
