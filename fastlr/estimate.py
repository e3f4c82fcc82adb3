"""The estimator: the local redundancy of a model on synthetic inputs, with its standard error (paper, Theorem 3.4)."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fastlr.errors import FastlrWarning, InputError, ModelError, NonFiniteError
from fastlr.ghost.adapt import OutputSelector, call, select_output, trainable, unwrap
from fastlr.ghost.engine import Engine
from fastlr.predictive import PROBES, Predictive, default_predictive
from fastlr.reference.counter import check_seed
from fastlr.replay import CudaRecorder, Recorder, Replay, Replays
from fastlr.result import Estimate, count, paired_difference, ratio
from fastlr.runtime import (
    Report,
    as_it_was,
    describe,
    digest,
    free_bytes,
    move_samples,
    out_of_memory,
    reporter,
    same_device,
    versions,
)
from fastlr.stats import Moments, memorization_gain, regression_memorization_bound

__all__ = [
    "Estimate",
    "LocalRedundancy",
    "estimate",
    "memorization_gain",
    "paired_difference",
    "regression_memorization_bound",
]

CHECK_EVERY = 128  # samples between two looks at target_rel_stderr, whatever the chunk
BATCH_PROBE_SIZE = 250  # default batch of probe="batch"; never chosen by memory, as it is part of the estimator
_CPU_BYTES, _GPU_BYTES, _LARGEST_CHUNK = 3 << 30, 16 << 30, 1024
_WORK = 3  # a chunk's peak memory over the activations that its graph saves

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
        self.total = _total(count("n", n), inputs, target_rel_stderr, count("min_n", min_n), max_n)
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
        self.engine = Engine(model, output=output, in_dim=in_dim, out_dim=out_dim)
        self._notes: list[str] = []
        self._digests: dict[int, str] = {}
        self._batch_proven = False
        self._used_predictive: Any = predictive
        self._routes: dict[str, str] = {}
        self._recorder: Callable[[torch.device], Recorder] = CudaRecorder
        graphs = self.device.type == "cuda" and probe == "rademacher"
        self._replays = Replays(self._replay if graphs else None, self.engine)

    def measure(self) -> Estimate:
        """Measure the model as it is now. Returns an :class:`Estimate`; raises the errors of :func:`estimate`."""
        start = time.perf_counter()
        with as_it_was(self.model, self.device):
            values, sums, routes = self._values()
            if not self._replays.clean():
                with self._replays.pause():
                    values, sums, routes = self._values()
            total = values.detach().to("cpu", torch.float64)
            if not total.isfinite().all():
                bad = int((~total.isfinite()).nonzero()[0])
                raise NonFiniteError(
                    f"the squared gradient norm of sample {bad} is not finite: lower the model's scale"
                )
            used = len(total) if self.probe != "batch" else min(len(total) * self._chunk, self.total)
            digest = self._digest(used)
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
            predictive=repr(self._used_predictive),
            inputs=describe(self.inputs),
            inputs_used=used,
            inputs_digest=digest,
            batch_size=self._chunk,
            dtype=None if self.dtype is None else str(self.dtype).removeprefix("torch."),
            device=str(self.device),
            notes=(*self._notes, *([self._replays.note] if self._replays.note else [])),
            versions=versions(),
        )

    def _values(self) -> tuple[Tensor, dict[str, float], dict[str, str]]:
        """Run over the inputs: the values kept, each parameter's sum over them, and the routes."""
        self._chunk = self._first_chunk()
        kept: list[Tensor] = []
        sums: Tensor | None = None
        names: list[str] = []
        routes: dict[str, str] = {}
        moments, done = Moments(), 0
        with reporter(self.progress, self.total) as report:
            while done < self.total:
                stop = min(done + self._chunk, self.total)
                failure = None
                try:
                    values, parts, chunk_routes = self._measure_chunk(done, stop)
                except Exception as error:
                    if not out_of_memory(error):
                        raise
                    failure = str(error).splitlines()[0]
                if failure is not None:  # outside the handler, so that its traceback frees the chunk's memory
                    self._halve(stop - done, failure)
                    continue
                keep = len(values)
                finished = stop == self.total
                if self.target is not None or report is not None:
                    keep, reached = self._look(moments, values.detach().to("cpu", torch.float64), done, stop)
                    finished |= reached
                names = list(parts)
                part = torch.stack([parts[name][:keep] for name in names]).double().sum(1)
                sums = part if sums is None else sums + part
                kept.append(values[:keep])
                routes.update(chunk_routes)
                done = stop
                if report is not None:
                    report(moments.n if self.probe != "batch" else done, self.total, moments.mean, moments.stderr)
                if finished:
                    break
        assert sums is not None  # the first chunk that ends without an error sets it
        return torch.cat(kept), dict(zip(names, sums.tolist(), strict=True)), routes

    def _look(self, moments: Moments, values: Tensor, done: int, stop: int) -> tuple[int, bool]:
        """Add a chunk's values up to where the target is reached: (values to keep, whether it is)."""
        if self.target is None:
            moments.add(values)
            return len(values), False
        if self.probe == "batch":  # its samples are whole batches
            moments.add(values)
            return len(values), stop >= self.min_n and ratio(moments.stderr, moments.mean) <= self.target
        at = done
        first = self.min_n + max(0, -(-(done + 1 - self.min_n) // CHECK_EVERY)) * CHECK_EVERY
        for point in range(first, stop + 1, CHECK_EVERY):
            moments.add(values[at - done : point - done])
            at = point
            if ratio(moments.stderr, moments.mean) <= self.target:
                return at - done, True
        moments.add(values[at - done :])
        return len(values), False

    def _measure_chunk(self, start: int, stop: int) -> tuple[Tensor, dict[str, Tensor], dict[str, str]]:
        if self.probe == "batch":
            return self._batch_gradient(self._batch(start, stop), start, stop)
        table = self._replays.run(start, stop)
        if table is not None:
            return table.sum(0), dict(zip(self.engine.names, table, strict=True)), self._routes
        x = self._batch(start, stop)
        with self._autocast():  # one context for each chunk: its cache of cast weights must not outlive the chunk
            result = self.engine.run(x, self._cotangent(start, stop, self.probe))
        if len(result.total) != stop - start:
            raise InputError(
                f"inputs {start}..{stop - 1} gave {len(result.total)} samples at out_dim={self.out_dim}: the sample "
                "axes are in_dim= and out_dim=, and batch(start, stop) must return stop - start samples"
            )
        self._routes = result.routes
        return result.total, result.per_parameter, result.routes

    def _replay(self, size: int) -> Replay:
        def cotangent(index: Tensor) -> Callable[[Tensor], Any]:
            return self._cotangent_at(index, self.probe)

        made = self.inputs if self.in_dim == getattr(self.inputs, "in_dim", 0) else None
        where, dtype = self.device, self.input_dtype
        recorder = self._recorder(where)
        return Replay(
            self.engine, made, self._batch, cotangent, size, self.seed, self._autocast, recorder, where, dtype
        )

    def _batch_gradient(self, x: Any, start: int, stop: int) -> tuple[Tensor, dict[str, Tensor], dict[str, str]]:
        """B ||gradient of the batch's mean log-likelihood of sampled labels||^2, as one value."""
        if not self._batch_proven:  # refuse what the per-sample probes refuse
            few = min(stop, start + 2)
            with self._autocast():
                self.engine.run(self._batch(start, few), self._cotangent(start, few, "sampled"))
            self._batch_proven = True
        model = unwrap(self.model)
        parameters = trainable(model)
        with self._autocast():
            z = select_output(call(model, x), self.output)
        v = self._cotangent(start, stop, "sampled")(z.detach()) / (stop - start)
        # Unit size, as in the engine: small cotangents keep their bits.
        exponent = max(math.frexp(float(v.abs().max()))[1], -1000)
        unit = (v * 2.0**-exponent).to(z.dtype)
        grads = torch.autograd.grad(z, list(parameters.values()), unit, materialize_grads=True)
        scale = 4.0**exponent * (stop - start)
        parts = {name: g.double().square().sum().mul(scale)[None] for name, g in zip(parameters, grads, strict=True)}
        return torch.stack(list(parts.values())).sum(0), parts, dict.fromkeys(parts, "batch gradient")

    def _batch(self, start: int, stop: int, device: torch.device | None = None) -> Any:
        x = self.inputs.batch(start, stop, seed=self.seed, device=device or self.device, dtype=self.input_dtype)
        if self.in_dim == getattr(self.inputs, "in_dim", 0):
            return x
        return tree_map(lambda t: move_samples(t, self.in_dim, stop - start), x)

    def _cotangent(self, start: int, stop: int, probe: str) -> Callable[[Tensor], Any]:
        return self._cotangent_at(range(start, stop), probe)

    def _cotangent_at(self, index: range | Tensor, probe: str) -> Callable[[Tensor], Any]:
        def at(output: Tensor) -> Any:
            if self._used_predictive is None:
                self._used_predictive = default_predictive(output, self.out_dim)
            where = {} if self.out_dim == 0 else {"sample_dim": self.out_dim}
            return self._used_predictive.cotangent(output, probe, index, self.seed, **where)

        return at

    def _autocast(self) -> Any:
        """The precision asked for, whatever autocast region the caller is in; its cache of cast weights may be stale."""
        ambient = torch.is_autocast_enabled(self.device.type)
        if self.dtype is None:
            return torch.autocast(self.device.type, enabled=False) if ambient else nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype, cache_enabled=not ambient)

    def _first_chunk(self) -> int:
        if self.batch_size is None:
            self.batch_size = BATCH_PROBE_SIZE if self.probe == "batch" else self._chunk_for_memory()
            if self.probe != "batch":  # chunks of one size, as far as it goes: one CUDA graph serves them all
                self.batch_size = -(-self.total // -(-self.total // self.batch_size))
        return min(self.batch_size, self.total)

    def _chunk_for_memory(self) -> int:
        """As many inputs as fit a quarter of the free memory, from the bytes that a small forward pass saves."""
        few = min(2, self.total)
        storages: dict[int, int] = {}

        def saved(t: Tensor) -> Tensor:
            storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        x = self._batch(0, few)
        try:
            with torch.autograd.graph.saved_tensors_hooks(saved, lambda t: t), self._autocast():
                call(unwrap(self.model), x)
        except Exception as error:
            if not out_of_memory(error):
                raise
            return 1
        own = {t.untyped_storage().data_ptr() for t in (*self.model.parameters(), *self.model.buffers())}
        activations = sum(size for pointer, size in storages.items() if pointer not in own) / few
        weights = max(p.numel() * p.element_size() for p in trainable(unwrap(self.model)).values())
        budget = min(free_bytes(self.device) / 4, _CPU_BYTES if self.device.type == "cpu" else _GPU_BYTES)
        return int(max(1, min(_LARGEST_CHUNK, budget // (_WORK * activations + weights + 1))))

    def _halve(self, size: int, failure: str) -> None:
        """Halve the chunk after memory ran out at ``size`` inputs, warning once; ModelError where that cannot be."""
        if size == 1 or self.probe == "batch":
            what = "one input does" if size == 1 else f"probe='batch' with batch_size={size} does"
            raise ModelError(
                f"out of memory on {self.device}: {what} not fit ({failure}); free memory, use a smaller batch_size, "
                "a machine with more memory, or dtype=torch.bfloat16"
            )
        self._chunk = self.batch_size = size // 2
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


def _total(n: int, inputs: Any, target: float | None, min_n: int, max_n: int | None) -> int:
    """Return the most inputs to use, from n, the length of the inputs and the options of early stopping."""
    length = len(inputs) if hasattr(inputs, "__len__") else None
    if target is None:
        if max_n is not None:
            raise InputError("max_n goes with target_rel_stderr: pass n for a fixed number of inputs")
        total = n
    else:
        if isinstance(target, bool) or not isinstance(target, (int, float)) or not 0 < target < math.inf:
            raise InputError(f"target_rel_stderr must be positive and finite, such as 0.05, not {target!r}")
        if max_n is None:
            total = n if length is None else min(n, length)
        elif count("max_n", max_n) < min_n:
            raise InputError(f"max_n = {max_n} is less than min_n = {min_n}: raise max_n or lower min_n")
        else:
            total = count("max_n", max_n)
    if length is not None and total > length:
        raise InputError(f"{total} inputs are asked for but there are {length}: lower n (or max_n)")
    return count("the number of inputs", total)
