"""Statistics of estimates and the memorisation bounds of the paper.

Among them are streaming moments, early stopping and units.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastlr.errors import InputError

CHECK_EVERY = 128  # samples between two looks at target_rel_stderr, whatever the chunk
_NATS = {"nats": 1.0, "bits": math.log(2.0)}


def in_unit(nats: float, unit: str) -> float:
    """Convert nats to ``unit``, "nats" or "bits"; InputError for any other unit."""
    if unit not in _NATS:
        raise InputError(f"unknown unit {unit!r}: choose 'nats' or 'bits'")
    return nats / _NATS[unit]


@dataclass
class Moments:
    """Count, mean and sum of squared deviations of a stream of numbers.

    The update is Chan, Golub and LeVeque's pairwise one.
    """

    n: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, values: Tensor) -> None:
        """Take in a 1-D tensor of values."""
        count = values.numel()
        if not count:
            return
        values = values.detach().to("cpu", torch.float64)
        mean = float(values.mean())
        squares = float((values - mean).square().sum())
        total = self.n + count
        shift = mean - self.mean
        self.squares += squares + shift * shift * (self.n * count / total)
        self.mean += shift * (count / total)
        self.n = total

    @property
    def variance(self) -> float:
        """Unbiased variance of one value; NaN for fewer than two."""
        return self.squares / (self.n - 1) if self.n > 1 else math.nan

    @property
    def stderr(self) -> float:
        """Standard error of the mean; NaN for fewer than two values."""
        return math.sqrt(self.variance / self.n) if self.n > 1 else math.nan


class Stopping:
    """Takes in values in the order of the inputs, and finds where the target is reached.

    Args:
        target: relative standard error to stop at, or None.
        min_n: fewest inputs.
        batch: inputs in a value where values are those of whole batches, else None.
    """

    def __init__(self, target: float | None, min_n: int, batch: int | None = None) -> None:
        self.target, self.min_n, self.batch, self.moments = target, min_n, batch, Moments()

    def look(self, values: Tensor, done: int, stop: int) -> tuple[int, bool]:
        """Add the values of inputs done .. stop - 1, up to where the target is reached.

        Returns (the number of values to keep, whether the target is reached).
        """
        moments = self.moments
        if self.target is None:
            moments.add(values)
            return len(values), False
        if self.batch is not None:
            for k in range(len(values)):
                moments.add(values[k : k + 1])
                if min(done + (k + 1) * self.batch, stop) >= self.min_n and self._reached():
                    return k + 1, True
            return len(values), False
        at = done
        for point in range(self._next_look(done), stop + 1, CHECK_EVERY):
            moments.add(values[at - done : point - done])
            at = point
            if self._reached():
                return at - done, True
        moments.add(values[at - done :])
        return len(values), False

    def may_end(self, done: int, stop: int) -> bool:
        """Return True if the measurement may end with inputs done .. stop - 1."""
        return self.target is not None and self._next_look(done) <= stop

    def _next_look(self, done: int) -> int:
        return self.min_n + max(0, -(-(done + 1 - self.min_n) // CHECK_EVERY)) * CHECK_EVERY

    def _reached(self) -> bool:
        return (
            self.target is not None and ratio(self.moments.stderr, self.moments.mean) <= self.target
        )


def ratio(stderr: float, value: float) -> float:
    """Return the relative standard error.

    It is 0 where the standard error is 0, infinite where only the value is 0.
    """
    if stderr == 0:
        return 0.0
    return stderr / abs(value) if value else math.inf


def count(name: str, value: Any) -> int:
    """Return ``value`` as an int, or raise InputError naming it.

    It must be an integer of at least 1.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__") or value.__index__() < 1:
        raise InputError(f"{name} must be an integer of at least 1, not {value!r}")
    return value.__index__()


def real(name: str, value: Any) -> float:
    """Return ``value`` as a float, or raise InputError naming it: it must be one number."""
    try:
        if hasattr(value, "__float__"):
            return float(value)
    except (TypeError, ValueError, RuntimeError):  # a tensor or an array of several
        pass
    raise InputError(f"{name} must be a number, not {value!r}")


def memorization_gain(
    log_likelihoods: Tensor | Sequence[float] | float,
    entropy: Tensor | Sequence[float] | float,
    unit: str = "nats",
) -> float:
    """Return the memorisation gain, a lower bound of the redundancy.

    It is ``H(P_0(Y^n|x^n)) + E_{y^n ~ P_0} [log P_fit(y^n|x^n)]``.

    Args:
        log_likelihoods: in nats, of the labels y^n drawn from P_0 under the model fitted to them.
            One labeling: one value for each label [n], or their sum as a number. Several labelings,
            each with its own fit: [labelings, n], summed over labels and averaged over labelings.
        entropy: in nats, of the labels under P_0: one value for each label (summed), or the joint
            entropy as a number: n log C for n labels uniform over C classes.
        unit: "nats" or "bits", of the result.

    Returns:
        The gain; with few labelings an estimate of it. Negative values say nothing (the redundancy
        is at least 0).

    Raises:
        InputError: empty or non-finite values, more than two dimensions, different numbers of
            labels, unknown unit.

    Source: paper, equation 6 and Theorem 3.2.

    >>> round(memorization_gain([-0.1, -0.2], 2 * math.log(2.0), unit="bits"), 3)
    1.567
    """
    fit = _finite("log_likelihoods", log_likelihoods)
    prior = _finite("entropy", entropy)
    if fit.ndim > 2 or prior.ndim > 1:
        raise InputError(
            "log_likelihoods must be a number, [n] or [labelings, n], entropy a number or [n]; "
            f"got shapes {tuple(fit.shape)} and {tuple(prior.shape)}"
        )
    if prior.ndim == 1 and fit.ndim >= 1 and fit.shape[-1] != len(prior):
        raise InputError(
            f"{fit.shape[-1]} labels have log-likelihoods but {len(prior)} have entropies: pass n "
            "of both"
        )
    total = fit.sum(-1).mean() if fit.ndim == 2 else fit.sum()
    return in_unit(float(prior.sum() + total), unit)


def regression_memorization_bound(
    n: int, m: int, variance: float, mse: float, unit: str = "nats"
) -> float:
    """Return a lower bound of a regression model's redundancy from its fit of random targets.

    It is ``(n m / 2) log(variance / mse)``.

    Args:
        n: number of samples.
        m: target dimensions of a sample.
        variance: Variance of each target dimension, the targets being Gaussian.
        mse: mean squared error for each dimension that the fitted model reaches on those targets.
        unit: "nats" or "bits", of the result.

    Returns:
        The bound; negative (says nothing) where mse exceeds variance.

    Raises:
        InputError: n or m below 1, variance or mse not positive and finite, unknown unit.

    Source: paper, Proposition 3.5.

    >>> regression_memorization_bound(10, 2, variance=1.0, mse=0.25, unit="bits")
    20.0
    """
    n, m = count("n", n), count("m", m)
    variance, mse = real("variance", variance), real("mse", mse)
    for name, value in (("variance", variance), ("mse", mse)):
        if not (math.isfinite(value) and value > 0):
            raise InputError(f"{name} must be positive and finite, not {value}")
    return in_unit(n * m / 2 * (math.log(variance) - math.log(mse)), unit)


def _finite(name: str, values: Tensor | Sequence[float] | float) -> Tensor:
    try:
        tensor = torch.as_tensor(values, dtype=torch.float64, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{name} must be numbers, not {values!r} ({error})") from None
    if tensor.numel() == 0:
        raise InputError(f"{name} is empty")
    if not tensor.isfinite().all():
        raise InputError(f"{name} holds values that are not finite")
    return tensor
