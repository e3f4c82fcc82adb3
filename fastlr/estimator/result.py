"""The result of a measurement, and differences of paired results."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastlr.errors import InputError, warn
from fastlr.estimator.identity import same
from fastlr.estimator.statistics import Moments, count, in_unit, ratio, real

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False, repr=False)
class Estimate:
    """An estimate of local redundancy.

    ``LR = mean over x of E_{y ~ P(.|x)} ||grad log P(y|x)||^2``.

    Attributes:
        value: the estimate; times epsilon and the number of inputs it bounds the redundancy in nats
            (:meth:`bound`).
        stderr: standard error of ``value`` from the per-sample values, std / sqrt(n); NaN for n =
            1.
        n: number of values averaged: inputs, or batches for ``probe="batch"``.
        per_parameter: name of each trainable parameter -> its part of ``value``.
        per_sample: the n values, float64 on the CPU; None if it was loaded from a record without
            them.
        routes: parameter -> how its norms were computed (a rule of the engine, or the exact
            fallback).
        seconds: wall time of the measurement.
        probe: the probe of the measurement.
        seed: Seed of inputs and probe.
        predictive: what the outputs were taken for, as text.
        inputs: what was measured on, as text.
        inputs_used: number of inputs; the same as n except for ``probe="batch"``.
        inputs_digest: hash of the first and last inputs; estimates pair only where it agrees.
        inputs_identity: what tells all inputs from others: a hash of the values of TensorInputs,
            class, arguments and seed of generated ones. Those of other classes and data sets are
            known as one object of this process. Empty if nothing tells.
        predictive_identity: what tells the predictive from others, its mask by a hash.
        batch_size: inputs in a chunk (after halving, if memory ran out).
        dtype: autocast dtype (None: the model's own), as text.
        device: where the model was, as text.
        notes: what the user should know, such as chunks halved for lack of memory.
        versions: Versions of fastlr, torch and Python.
        audits: Number of inputs that were run alone by plain autograd in this measurement, and had
            the same output and gradient norms.
    """

    value: float
    stderr: float
    n: int
    per_parameter: dict[str, float]
    per_sample: Tensor | None
    routes: dict[str, str]
    seconds: float
    probe: str = "rademacher"
    seed: int = 0
    predictive: str = ""
    inputs: str = ""
    inputs_used: int = 0
    inputs_digest: str = ""
    batch_size: int = 0
    dtype: str | None = None
    device: str = "cpu"
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    audits: int = 0
    inputs_identity: str = ""
    predictive_identity: str = ""

    @property
    def rel_stderr(self) -> float:
        """Standard error over value (0 where the standard error is 0)."""
        return ratio(self.stderr, self.value)

    def bound(self, epsilon: float, n: int | None = None, unit: str = "nats") -> float:
        """Return ``epsilon * n * LR``, a lower bound of the redundancy of n inputs.

        The redundancy is at least this, up to O(epsilon^2) (Theorem 3.4).

        Args:
            epsilon: step size on the loss summed over the n inputs, in nats; at least 0.
            n: number of inputs; default: as many as were measured.
            unit: "nats" or "bits".

        Raises:
            InputError: epsilon negative or not finite, n < 1, unknown unit.
        """
        epsilon = real("epsilon", epsilon)
        if not (math.isfinite(epsilon) and epsilon >= 0):
            raise InputError(f"epsilon must be a finite number of at least 0, not {epsilon!r}")
        number = (self.inputs_used or self.n) if n is None else count("n", n)
        return in_unit(epsilon * number * self.value, unit)

    def to_dict(self, *, per_sample: bool = False) -> dict[str, Any]:
        """Return a dict for strict JSON (NaN as None), with the per-sample values if asked for."""
        record = asdict(replace(self, per_sample=None))
        del record["per_sample"]
        if per_sample and self.per_sample is not None:
            record["per_sample"] = self.per_sample.tolist()
        record["stderr"] = None if math.isnan(self.stderr) else self.stderr
        record["notes"] = list(self.notes)
        return record

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Estimate:
        """Return the estimate that :meth:`to_dict` recorded; keys it does not know are ignored.

        Raises:
            InputError: it is no such record.
        """
        if not isinstance(record, Mapping):
            raise InputError(
                f"not a record of an estimate but of type {type(record).__name__}: give what "
                "to_dict() returned"
            )
        known = {f.name: record[f.name] for f in fields(cls) if f.name in record}
        values = known.get("per_sample")
        known["stderr"] = math.nan if known.get("stderr") is None else known["stderr"]
        try:
            if values is not None:
                values = torch.tensor(values, dtype=torch.float64, device="cpu")
            known["per_sample"], known["notes"] = values, tuple(known.get("notes", ()))
            result = cls(**known)
        except (TypeError, ValueError) as error:
            raise InputError(f"not a record of an estimate: {error}") from None
        for name in ("value", "stderr"):
            real(f"not a record of an estimate: {name}", known[name])
        count("not a record of an estimate: n", result.n)
        return result

    def __float__(self) -> float:
        return self.value

    def __repr__(self) -> str:
        """Return the value, its standard error and n, in one line."""
        return f"Estimate(value={self.value:.6g}, stderr={self.stderr:.2g}, n={self.n})"

    def __str__(self) -> str:
        """Return the value, what was measured, and the largest parameters, in a few lines."""
        what = "batches" if self.probe == "batch" else "inputs"
        error = f"+- {self.stderr:.2g} ({100 * self.rel_stderr:.2g} %)"
        if self.n == 1:
            error = f"(one {what.removesuffix('es').removesuffix('s')} gives no standard error)"
        precision = f", autocast {self.dtype}" if self.dtype else ""
        lines = [
            f"local redundancy {self.value:.6g} {error}, nats per input per unit step size",
            f"  n = {self.n} {what}, probe {self.probe}, seed {self.seed}, {self.seconds:.1f} s on "
            f"{self.device}{precision}",
            f"  inputs {self.inputs}, predictive {self.predictive}",
        ]
        if self.audits:  # not in old records
            samples = f"{self.audits} sample{'s' * (self.audits != 1)}"
            lines.append(f"  checked: {samples} against plain autograd")
        top = sorted(self.per_parameter.items(), key=lambda item: -item[1])[:3]
        if self.value > 0:
            parts = ", ".join(f"{name} {100 * part / self.value:.0f} %" for name, part in top)
            of_all = len(self.per_parameter)
            lines.append(f"  largest of {of_all} parameter{'s' * (of_all != 1)}: {parts}")
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])

    def _repr_html_(self) -> str:
        """The same for a notebook, with the largest modules."""
        from fastlr.display.notebook import estimate_html

        return estimate_html(self)

    def plot(self, path: str | os.PathLike[str] | None = None, **options: Any) -> Figure:
        """Draw each module's share of the value, in network order.

        Args:
            path: where to write it as well, ``.png``, ``.pdf`` or ``.svg``.
            options: title and most (the largest number of bars), as for
                `fastlr.display.plots.per_layer_figure`.

        Returns:
            A matplotlib figure, which notebooks show.

        Raises:
            InputError: the value is zero, or an unwritable path.
        """
        from fastlr.display.figures import save_figure
        from fastlr.display.plots import per_layer_figure

        figure = per_layer_figure(self, **options)
        if path is not None:
            save_figure(figure, path)
        return figure


def paired_difference(a: Estimate, b: Estimate) -> tuple[float, float]:
    """Return (a - b, its standard error) of two estimates on the same inputs.

    The standard error is that of the differences per sample.

    The variance between inputs that both estimates share cancels, so this is sharper than adding
    their standard errors.

    A FastlrWarning names what cannot be told: whether inputs of the user's own classes and data
    sets, measured as two objects, are the same between the first two and the last; whether
    predictives of such classes are.

    Raises:
        InputError: seeds, inputs, predictives, n or probes differ (for ``probe="batch"`` also the
            batches' sizes), or the per-sample values are missing.
    """
    if not (isinstance(a, Estimate) and isinstance(b, Estimate)):
        raise InputError(
            "paired_difference takes two results of fastlr.estimate, whose samples it pairs, not "
            f"{type(a).__name__} and {type(b).__name__}"
        )
    batches = ("batch_size",) if a.probe == "batch" else ()
    for name in ("probe", "seed", "n", "inputs_used", "inputs_digest", *batches):
        left, right = getattr(a, name), getattr(b, name)
        if left != right:
            raise InputError(
                f"the estimates are not paired: {name} is {left!r} and {right!r}; measure both "
                "alike"
            )
    _require_same(a, b)
    if a.per_sample is None or b.per_sample is None:
        raise InputError(
            "an estimate has no per-sample values: record it with to_dict(per_sample=True)"
        )
    moments = Moments()
    moments.add(a.per_sample - b.per_sample)
    return moments.mean, moments.stderr


def _require_same(a: Estimate, b: Estimate) -> None:
    """Raise InputError where inputs or predictives differ, and warn of what cannot be told."""
    doubts = []
    for what, beyond in (
        ("inputs", "their first two and the last"),
        ("predictive", "their text"),
    ):
        are_same = same(getattr(a, f"{what}_identity"), getattr(b, f"{what}_identity"))
        left, right = getattr(a, what), getattr(b, what)
        both = f"{left} and {right}" if left != right else f"{left}, twice, with other values"
        if are_same is False:
            raise InputError(f"the estimates are not paired: {what} is {both}; measure both alike")
        if are_same is None:
            doubts.append(f"{what} ({left}; {right}), known by {beyond} alone")
    if doubts:
        warn(
            f"that both estimates have the same of these cannot be told: {'; '.join(doubts)}. "
            "The difference is paired only if they are; measure both with the same objects, or "
            "give the inputs as fastlr.TensorInputs of tensors"
        )


def versions() -> dict[str, str]:
    """Return the versions of fastlr, torch and Python."""
    return {
        "fastlr": _version_of_fastlr(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


@cache  # it is read from a file
def _version_of_fastlr() -> str:
    try:
        return version("fastlr")
    except PackageNotFoundError:
        return "not installed"
