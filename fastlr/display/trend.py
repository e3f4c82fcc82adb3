"""Trend of local redundancy over a training: its last three readings over its first three.

The rule works on the logarithms y of the n readings after training began. Up to 15 readings are
taken as they are; more are averaged in 15 consecutive groups. Call these K numbers z.

- D is the mean of the last three z minus the mean of the first three.
- s^2 = sum over k of (z[k+1] - z[k])^2 / (2 (K - 1)) estimates the variance of z. A trend hardly
  affects successive differences. s^2 has nu = 2 (K - 1)^2 / (3 K - 4) degrees of freedom.
- h = t(0.995, nu) s sqrt(2/3) is half the 99 % confidence interval of D.

A change must exceed the 99 % error by the choice of synthetic images. It must also exceed h, or
Kendall's tau of z with its order must have p < 0.01 and the sign of D.

Neighbouring readings are assumed independent. A fall within the first fifteenth of a long run is
missed, and below eight readings a step is not distinguished from noise.

Source of the variance: von Neumann et al. 1941, "The mean square successive difference".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist, fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

FEWEST, GROUPS, ENDS = 6, 15, 3  # readings of a trend; groups of many readings; z at each end
_QUANTILE = 0.995  # of two-sided confidence intervals at 99 %
_SIGNIFICANT = 0.01  # p-value


class Measurement(NamedTuple):
    """One reading of local redundancy.

    Attributes:
        value: Estimate.
        stderr: Standard error of the estimate; NaN if there is none.
        per_image: Value of each synthetic image, float32; None if these were not kept.
        step: Optimizer steps done.
        epoch: Epochs done.
    """

    value: float
    stderr: float
    per_image: Tensor | None = None
    step: int = 0
    epoch: int = 0

    @classmethod
    def of(cls, record: Mapping[str, Any], per_image: Tensor | None = None) -> Measurement:
        """Return the measurement of a record with "value" and "stderr"."""
        kept = None if per_image is None else per_image.to(torch.float32)
        return cls(_number(record.get("value")), _number(record.get("stderr")), kept)


class Trend(NamedTuple):
    """Change of local redundancy over a training.

    Attributes:
        ratio: Geometric mean of the last three readings (or groups), divided by the geometric mean
            of the first three.
        low: Lower limit of the 99 % confidence interval of the ratio.
        high: Upper limit.
        direction: 1 if local redundancy rose significantly, -1 if it fell, else 0.
        steady: p-value of Kendall's tau if that alone shows the change, else None.
        readings: Number of readings.
    """

    ratio: float
    low: float
    high: float
    direction: int
    steady: float | None
    readings: int

    def __str__(self) -> str:
        """Return the trend as a sentence."""
        ends = "first three and last three of "
        if self.readings > GROUPS:
            ends += f"{GROUPS} groups, {self.readings} readings in all"
        else:
            ends += f"{self.readings} readings"
        limits = f"(99 % interval {_short(self.low)} to {_short(self.high)}; {ends})"
        times = " times" if self.ratio >= 1 else " of"
        share = f"{_short(self.ratio)}{times} its first value"
        if not self.direction:
            return f"Local redundancy did not change significantly: {share} {limits}."
        verb = "rose" if self.direction > 0 else "fell"
        steadily = "" if self.steady is None else f" steadily (Kendall p = {self.steady:.1g})"
        return f"Local redundancy {verb}{steadily} to {share} {limits}."


def trend(readings: Sequence[Measurement]) -> Trend | None:
    """Return the trend of readings after training began, by the rule of this module.

    Args:
        readings: Readings in order.

    Returns:
        The trend; None for fewer than six readings, or if one is not a positive number or has no
        standard error.
    """
    if len(readings) < FEWEST or any(not 0 < reading.value < math.inf for reading in readings):
        return None
    y = np.log([reading.value for reading in readings])
    groups = _groups(len(y))
    z = np.array([y[group].mean() for group in groups])
    change = float(z[-ENDS:].mean() - z[:ENDS].mean())
    of_readings = _error_of_readings(z)
    first, last = np.concatenate(groups[:ENDS]), np.concatenate(groups[-ENDS:])
    of_images = _error_of_images([readings[i] for i in first], [readings[i] for i in last])
    if not math.isfinite(of_images):
        return None
    steady = None if abs(change) > of_readings else _steady(z, change)
    significant = abs(change) > of_images and (abs(change) > of_readings or steady is not None)
    direction = int(math.copysign(1, change)) if significant else 0
    half = max(of_readings, of_images)
    with np.errstate(over="ignore"):  # readings may differ by hundreds of decades
        low, ratio, high = (float(np.exp(change + shift)) for shift in (-half, 0.0, half))
    return Trend(ratio, low, high, direction, steady if direction else None, len(y))


def describe(readings: Sequence[Measurement]) -> str:
    """Return the trend of readings after training began as a sentence.

    Example:
        >>> print(describe([Measurement(8.0 / 2**k, 0.01) for k in range(6)]))
        Local redundancy fell to 0.13 of its first value (99 % interval 0.017 to 0.93; first three \
and last three of 6 readings).
        >>> print(describe([Measurement(8.0, 0.01)] * 4))
        Too few readings for a trend: it takes 6 after training began, and there are 4.
    """
    if len(readings) < FEWEST:
        return (
            f"Too few readings for a trend: it takes {FEWEST} after training began, and there are "
            f"{len(readings)}."
        )
    found = trend(readings)
    return (
        str(found)
        if found
        else "No trend: a reading is not a positive number or has no standard error."
    )


def _groups(count: int) -> list[np.ndarray]:
    """Return the indices of each group of readings, larger and smaller groups in turn."""
    number = min(count, GROUPS)
    edges = np.arange(number + 1) * count // number
    return [np.arange(start, stop) for start, stop in zip(edges, edges[1:])]


def _error_of_readings(z: np.ndarray) -> float:
    """Return h, half the 99 % confidence interval of D by the scatter of the readings."""
    k = len(z)
    scatter = math.sqrt(float(np.square(np.diff(z)).sum()) / (2 * (k - 1)))
    freedom = 2 * (k - 1) ** 2 / (3 * k - 4)
    return _student(freedom) * scatter * math.sqrt(2 / ENDS)


def _steady(z: np.ndarray, change: float) -> float | None:
    """Return the p-value of Kendall's tau if it is significant and agrees with the change."""
    from scipy.stats import kendalltau  # slow to import

    tau = kendalltau(np.arange(len(z)), z)
    significant = tau.pvalue < _SIGNIFICANT and tau.statistic * change > 0
    return float(tau.pvalue) if significant else None


def _error_of_images(first: Sequence[Measurement], last: Sequence[Measurement]) -> float:
    """Return the 99 % error of D by the choice of images: paired where their values were kept."""
    paired = _paired_error(first, last)
    if paired is not None:
        return paired
    errors = [fmean(reading.stderr / reading.value for reading in part) for part in (first, last)]
    return math.hypot(*errors) * NormalDist().inv_cdf(_QUANTILE)


def _paired_error(first: Sequence[Measurement], last: Sequence[Measurement]) -> float | None:
    """Return the error by images, paired by image; None if their values were not kept.

    An image's value over the reading's mean, less 1, is what this image moves the logarithm of the
    reading by, to first order.
    """
    kept = [reading.per_image for reading in (*first, *last)]
    rows = [row for row in kept if row is not None]
    if len(rows) < len(kept) or len({len(row) for row in rows}) > 1:
        return None
    shares = torch.stack(rows).to(torch.float64)
    shares /= shares.mean(1, keepdim=True)
    differences = shares[len(first) :].mean(0) - shares[: len(first)].mean(0)
    n = len(differences)
    return float(differences.std()) / math.sqrt(n) * _student(n - 1) if n > 1 else math.nan


def _student(freedom: float) -> float:
    """Return the quantile of Student's distribution for half a confidence interval."""
    from scipy.special import stdtrit  # slow to import

    return float(stdtrit(freedom, _QUANTILE))


def _short(ratio: float) -> str:
    """Return a ratio with two digits or more; near 1, with two digits of its difference from 1."""
    if ratio >= 9.995:
        return f"{ratio:,.0f}"
    if ratio < 0.1:
        return f"{ratio:.2g}"
    difference = abs(ratio - 1)
    close = 1e-6 < difference < 0.02
    return f"{ratio:.{1 - math.floor(math.log10(difference)) if close else 2}f}"


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan
