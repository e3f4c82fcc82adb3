"""Correlations after a linear trend is removed.

They are of one series, or of many weighted copies of it at once.

Semi-partial: only the target's trend is removed; the measure is taken as it is. Partial: both
trends are removed. The paper (section 4.1) regresses out task number and measures "correlation with
the residuals", its Table 1 "correlations with the residual accuracy": the semi-partial one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
_ROUNDING = 1e-13  # of numbers whose standard deviation is one


def residuals(values: ArrayLike, task: ArrayLike | None = None) -> Array:
    """Return the residuals of ``values`` [n] after least squares on 1 and ``task`` [n].

    ``task`` is 0, 1, ... by default.

    >>> residuals([1.0, 3.0, 5.0, 8.0]).round(2).tolist()
    [0.2, -0.1, -0.4, 0.3]
    """
    y = np.asarray(values, dtype=np.float64)
    t = np.arange(len(y), dtype=np.float64) if task is None else np.asarray(task, dtype=np.float64)
    t, y = t - t.mean(), y - y.mean()
    return y - t * ((t @ y) / (t @ t))


def correlation(method: str, x: ArrayLike, y: ArrayLike) -> float:
    """Return Pearson's or Spearman's correlation of two series [n]; NaN if one of them is constant.

    Args:
        method: "pearson" or "spearman".
        x: One series.
        y: The other.

    Example:
        >>> round(correlation("pearson", [1.0, 2.0, 3.0], [1.0, 3.0, 2.0]), 12)
        0.5
    """
    by_rank = {"pearson": False, "spearman": True}[method]
    pair = [np.asarray(each, dtype=np.float64) for each in (x, y)]
    if any(map(constant, pair)):
        return float("nan")
    if by_rank:
        pair = [_fixed_ranks(np.ones((1, len(each))), each)[0] for each in pair]
    a, b = map(_standard, pair)
    return float(np.clip((a * b).mean(), -1.0, 1.0))


@dataclass
class Resampled:
    """A target and its task numbers under resampling, to correlate measures with.

    A resample is a row of multiplicities: ``weights[b, t]`` says how often task t occurs in
    resample b. Everything that an ordinary computation on the resample gives (trend, residuals,
    midranks, correlation) is computed from them, the trend anew in each resample. A correlation is
    NaN in a resample in which the measure or the target is constant but for its trend.
    """

    weights: Array
    task: Array
    target: Array

    def __post_init__(self) -> None:
        self.task, self.target = _standard(self.task), _standard(self.target)
        self.residuals = self._deviations(self.target, detrended=True)
        self.target_ranks = _row_ranks(self.weights, self.residuals)

    def _deviations(self, y: Array, *, detrended: bool) -> Array:
        """Return y [n] less its mean, and less its trend, in each resample [b, n]."""
        rows = _centred(self.weights, y)
        if detrended:
            task = _centred(self.weights, self.task)
            weighted = self.weights * task
            slope = (weighted * rows).sum(1) / (weighted * task).sum(1)
            rows = rows - slope[:, None] * task
        return _without_rounding(self.weights, rows)

    def pearson(self, x: Array, *, partial: bool) -> Array:
        """Return Pearson's correlation, in each resample, of a measure with the residuals.

        Shapes: the measure ``x`` [n], the result [b]. The residuals are the target's.
        """
        rows = self._deviations(_standard(x), detrended=partial)
        return _of_rows(self.weights, rows, self.residuals)

    def spearman(self, x: Array, *, partial: bool) -> Array:
        """Return Spearman's correlation, in each resample, of a measure with the residuals.

        Shapes: the measure ``x`` [n], the result [b]. The residuals are the target's.
        """
        x, w = _standard(x), self.weights
        ranks = (
            _row_ranks(w, self._deviations(x, detrended=True)) if partial else _fixed_ranks(w, x)
        )
        return _of_ranks(w, ranks, self.target_ranks)


def resampled_spearman(
    weights: Array,  # [b, n]
    x: Array,  # [n]
    y: Array,  # [n]
) -> Array:  # [b]
    """Return Spearman's correlation of two series in each resample, no trend removed.

    The weights are as in `Resampled`.
    """
    return _of_ranks(weights, _fixed_ranks(weights, x), _fixed_ranks(weights, y))


def resampled_pearson(weights: Array, x: Array, y: Array) -> Array:
    """Return Pearson's correlation of two series in each resample, as `resampled_spearman` does."""
    x, y = (_without_rounding(weights, _centred(weights, _standard(each))) for each in (x, y))
    return _of_rows(weights, x, y)


def _centred(weights: Array, y: Array) -> Array:
    """Return a series [n] less its mean in each resample [b, n]."""
    return y - (weights @ y / weights.sum(1))[:, None]


def _without_rounding(weights: Array, rows: Array) -> Array:
    """Return deviations [b, n] with zeros in the resamples where they are rounding alone."""
    spread = np.sqrt((weights * rows**2).sum(1) / weights.sum(1))
    return np.where((spread < _ROUNDING)[:, None], 0.0, rows)


def _of_ranks(weights: Array, a: Array, b: Array) -> Array:
    """Return Pearson's correlation [b] of ranks [b, n] under each row of multiplicities.

    It is NaN where the ranks are constant.
    """
    middle = (weights.sum(1)[:, None] + 1) / 2
    return _of_rows(weights, a - middle, b - middle)


def _of_rows(weights: Array, a: Array, b: Array) -> Array:
    """Return Pearson's correlation [b] of deviations from the mean [b, n] under each row's weights.

    It is NaN where they are zero.
    """
    weighted = weights * a
    with np.errstate(invalid="ignore", divide="ignore"):
        r = (weighted * b).sum(1) / np.sqrt((weighted * a).sum(1) * (weights * b * b).sum(1))
    return np.clip(r, -1.0, 1.0)


def constant(x: Array) -> bool:
    """Return True if ``x`` is constant but for rounding: it then has no correlation."""
    return len(x) < 2 or bool(np.std(x) <= 1e-13 * np.max(np.abs(x)))


def straight(x: Array, task: Array) -> bool:
    """Return True if ``x`` is a straight line in ``task`` but for rounding.

    It then has no partial correlation.
    """
    return constant(x) or bool(np.std(residuals(x, task)) <= 1e-10 * np.std(x))


def _standard(x: Array) -> Array:
    return (x - x.mean()) / (x.std() or 1.0)


def _fixed_ranks(weights: Array, x: Array) -> Array:
    """Midranks of the same values [n] under each row of multiplicities [b, n]."""
    order = np.argsort(x, kind="stable")
    _, starts, group = np.unique(x[order], return_index=True, return_inverse=True)
    sums = np.add.reduceat(weights[:, order], starts, axis=1)
    middle = np.cumsum(sums, axis=1) - (sums - 1) / 2
    result = np.empty_like(weights)
    result[:, order] = middle[:, group]
    return result


def _row_ranks(weights: Array, values: Array) -> Array:
    """Return the ranks of each row of values [b, n] under the row's multiplicities.

    Equal values at different tasks are not joined, but a row of zeros has one rank.
    """
    result = np.tile((weights.sum(1)[:, None] + 1) / 2, weights.shape[1])
    for w, row, out in zip(weights, values, result):
        if not row.any():
            continue
        order = np.argsort(row)
        sums = w[order]
        out[order] = np.cumsum(sums) - (sums - 1) / 2
    return result
