"""How right the estimate is on this machine: its per-sample norms against float64, and its bits against themselves.

The truth is `fastlr.per_sample_grad_sq_norms` on a float64 copy of the model, unfolded and in plain torch, which the proof
on samples has held to exact gradients; a few samples are held to a loop of one backward pass each besides. Weights and
images are rounded to the low precision first, so that what is compared is the same function of the same numbers.

Low precision has an error of its own, whoever computes: activations are rounded at every layer, and an activation near a
kink flips. So the same samples also go through torch's own backward pass, one by one, in the same precision. fastlr is
wrong if its error (root mean square over those samples) is above the target and above twice torch's own; the targets
themselves are shown as met or missed.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import fastlr
from fastlr import ops
from fastlr.estimate import LocalRedundancy
from fastlr.ghost.fuse import unfolded
from fastlr.inputs import ShapeImages
from fastlr.speed.clock import quantile, release
from fastlr.speed.networks import Network, exact_float32, image_batch, largest_divisor
from fastlr.speed.record import Record, Say

NORMS_LOW, MEAN_LOW, FULL, LOOP = 2e-2, 5e-3, 1e-4, 1e-9  # limits of relative deviations
PARAMETER_LOW, PARAMETER_FULL = (
    0.5,
    1e-3,
)  # of a parameter's mean over samples, relative to itself; wrong rules are off by more
VISIBLE = 1e-7  # share of the total from which a parameter counts there
AS_TORCH = 2.0  # times the error of torch's own backward pass


@dataclass(frozen=True)
class Rounded:
    """Images rounded to ``low`` and given in whatever dtype is asked for."""

    images: ShapeImages
    low: torch.dtype

    def batch(self, start: int, stop: int, *, seed: int, device: Any, dtype: torch.dtype) -> Tensor:
        """See fastlr.inputs.Inputs.batch."""
        return image_batch(self.images, start, stop, seed=seed, device=device, dtype=self.low).to(dtype)


def rounded(model: nn.Module, low: torch.dtype) -> nn.Module:
    """A float32 copy whose parameters and buffers are numbers of the dtype ``low``."""
    made = copy.deepcopy(model)
    with torch.no_grad():
        for t in (*made.parameters(), *made.buffers()):
            if t.is_floating_point():
                t.copy_(t.to(low))
    return made


def loop_sq_norms(model: nn.Module, x: Tensor, v: Tensor) -> Tensor:
    """Squared norm of each sample's gradient by one forward and backward pass for each: [B], float64."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    norms = []
    for j in range(len(x)):
        z = model(x[j : j + 1])
        grads = torch.autograd.grad(z, parameters, v[j : j + 1].to(z.dtype), allow_unused=True)
        norms.append(torch.stack([g.double().square().sum() for g in grads if g is not None]).sum())
    return torch.stack(norms)


def _table(model: nn.Module, x: Tensor, v: Tensor) -> Tensor:
    found = fastlr.per_sample_grad_sq_norms(model, x, v, per_parameter=True)
    assert isinstance(found, dict)
    return torch.stack(list(found.values()))


def true_norms(model: nn.Module, source: Any, v: Tensor, chunk: int) -> Tensor:
    """Squared norms of the gradient of <v, output> in float64: [parameters, n]."""
    wide = copy.deepcopy(model).double()
    device = v.device
    found = []
    with unfolded(), ops.using("torch"):
        for lo in range(0, len(v), chunk):
            hi = min(len(v), lo + chunk)
            x = image_batch(source, lo, hi, device=device, dtype=torch.float64)
            found.append(_table(wide, x, v[lo:hi].double()))
    return torch.cat(found, 1)


def deviations(found: Tensor, truth: Tensor) -> dict[str, float]:
    """Largest and 99 % quantile of the relative deviations of the samples, and the deviation of the mean."""
    relative = ((found.double() - truth).abs() / truth).nan_to_num(nan=torch.inf).tolist()
    mean = abs(float(found.double().mean() / truth.mean()) - 1)
    found_at = {"largest": max(relative), "p99": quantile(relative, 0.99), "median": quantile(relative, 0.5)}
    return {**found_at, "mean": mean}


def root_mean_square(found: Tensor, truth: Tensor) -> float:
    """Of the relative deviations of the samples."""
    return float((found.double() / truth - 1).square().mean().sqrt().nan_to_num(nan=torch.inf))


def norms_given(network: Network, source: Any, v: Tensor, chunk: int) -> Tensor:
    """Squared norms of the gradient of <v, output> as the estimate computes them: [parameters, n]."""
    found = []
    for lo in range(0, len(v), chunk):
        hi = min(len(v), lo + chunk)
        x = image_batch(source, lo, hi, device=v.device, dtype=network.weights)
        with network.autocast():
            found.append(_table(network.model, x, v[lo:hi]))
    return torch.cat(found, 1)


def worst_parameter(found: Tensor, truth: Tensor, names: Sequence[str]) -> tuple[str, float]:
    """The parameter whose mean over samples deviates most, relative to itself, of those with a visible share."""
    means, exact = found.double().mean(1), truth.mean(1)
    off = torch.where(exact >= VISIBLE * exact.sum(), (means / exact - 1).abs(), 0.0).nan_to_num(nan=torch.inf)
    worst = int(off.argmax())
    return names[worst], float(off[worst])


def section(
    record: Record,
    name: str,
    network: Network,
    *,
    n: int,
    loops: int = 4,
    chunk: int = 64,
    precisions: Sequence[torch.dtype | None] = (torch.bfloat16, None),
    say: Say = lambda text: None,
) -> None:
    """Measure deviations into rows and checks of section ``name``.

    Args:
        record: where they go.
        name: of the section.
        network: what is measured; its own dtype does not count.
        n: images; the issue's figure is 512.
        loops: of them, held to a loop of single backward passes in float64; eight times as many to torch's own error.
        chunk: images at once in float64 (the estimate takes its own).
        precisions: autocast dtypes to test; None is float32 without TF32.
        say: told what is being done.
    """
    for precision in precisions:
        label = "float32, no TF32" if precision is None else f"{str(precision).removeprefix('torch.')} autocast"
        say(f"{name}: {label}")
        with record.attempt(name, label), exact_float32():
            _one(record, name, label, network, precision, n, loops, largest_divisor(n, chunk))
        release(network.device)
    with record.attempt(name, "same bits"):
        low = next((p for p in precisions if p is not None), None)
        estimator = LocalRedundancy(network.model, network.images, n, dtype=low, batch_size=largest_divisor(n, chunk))
        results = [estimator.measure().per_sample for _ in range(3)]
        fresh = LocalRedundancy(network.model, network.images, n, dtype=low, batch_size=estimator.batch_size)
        results.append(fresh.measure().per_sample)
        differ = sum(not torch.equal(results[0], other) for other in results[1:])  # type: ignore[arg-type]
        record.check(name, "measurements of four that differ from the first in any bit", float(differ), 0.0)
    release(network.device)


def _one(
    record: Record, name: str, label: str, network: Network, precision: torch.dtype | None, n: int, loops: int, chunk: int
) -> None:  # fmt: skip
    """One precision: truth, norms of given cotangents (with and without folding), the estimate as a whole."""
    model, source = network.model, network.images
    if precision is not None:
        model, source = rounded(model, precision), Rounded(source, precision)  # type: ignore[assignment]
    tested = replace(network, model=model, dtype=precision)
    classes = len(model(image_batch(source, 0, 1, device=network.device))[0])
    generator = torch.Generator().manual_seed(5)
    v = torch.randn(n, classes, generator=generator).to(network.device)
    if precision is not None:
        v = v.to(precision).float()
    table = true_norms(model, source, v, chunk)
    truth, names = table.sum(0), [name for name, p in model.named_parameters() if p.requires_grad]
    few = image_batch(source, 0, loops, device=network.device, dtype=torch.float64)
    exact = loop_sq_norms(copy.deepcopy(model).double(), few, v[:loops].double())
    off = float((truth[:loops] / exact - 1).abs().max())
    record.check(name, f"{label}: float64 truth against a loop over {loops} samples", off, LOOP)

    several = min(n, 8 * loops)
    singles = image_batch(source, 0, several, device=network.device)
    with tested.autocast():
        own = root_mean_square(loop_sq_norms(model, singles, v[:several]), truth[:several])
    record.add(name, f"{label}: torch's own backward pass", n=several, deviation_rms=own)

    norms_limit, mean_limit = (FULL, FULL) if precision is None else (NORMS_LOW, MEAN_LOW)
    tables = {"per-sample norms": norms_given(tested, source, v, chunk)}
    with unfolded():
        tables["per-sample norms, unfolded"] = norms_given(tested, source, v, chunk)
    for title, norms in tables.items():  # a layer of a small share may be off by a lot and hardly move the total
        worst, off = worst_parameter(norms, table, names)
        limit = PARAMETER_FULL if precision is None else PARAMETER_LOW
        record.check(name, f"{label}: {title}, worst parameter's mean ({worst})", off, limit)
    found = {title: norms.sum(0) for title, norms in tables.items()}
    results = {title: deviations(norms, truth) for title, norms in found.items()}
    for title, norms in found.items():
        off = root_mean_square(norms[:several], truth[:several])
        results[title]["rms"] = off
        record.check(name, f"{label}: {title}, rms of {several}", off, max(norms_limit, AS_TORCH * own))

    wide = LocalRedundancy(copy.deepcopy(model).double(), source, n, batch_size=chunk)
    with unfolded(), ops.using("torch"), wide._replays.pause():
        reference = wide.measure().per_sample
    measured = LocalRedundancy(model, source, n, dtype=precision).measure()
    assert reference is not None and measured.per_sample is not None
    results["whole estimate, cotangents of its own outputs"] = deviations(measured.per_sample, reference)

    for title, deviation in results.items():
        numbers: dict[str, Any] = {f"deviation_{key}": value for key, value in deviation.items()}
        record.add(name, f"{label}: {title}", n=n, **numbers)
        record.check(name, f"{label}: {title}, largest of {n}", deviation["largest"], norms_limit, target=True)
        record.check(name, f"{label}: {title}, their mean", deviation["mean"], mean_limit, target=True)
