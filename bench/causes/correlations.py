"""Correlations of late measures with late accuracy, with intervals by bootstrap."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri, stdtrit

from bench.causes.comparison import Comparison
from fastlr.experiments.runs.records import Array, finite
from fastlr.experiments.statistics.bootstrap import LEVEL

FEWEST = 4  # interventions or seeds behind an interval


@dataclass(frozen=True)
class Together:
    """Pearson's correlation of a late measure with late accuracy, three ways, with 95 % intervals.

    The intervals are percentiles of a bootstrap, widened for few units.

    between: over interventions, of means over seeds (interventions and seeds are resampled);
    within: over the seeds of each intervention, of deviations from its means (seeds are); change:
    of differences to the control of the same seed, not centred: 1 where every intervention changes
    accuracy in proportion to the measure (both are). The control counts in every change: one that
    is out of the ordinary in both makes them alike.

    Attributes:
        measure: Its name.
        values: The correlation of each kind.
        intervals: Of each kind.
    """

    measure: str
    values: dict[str, float]
    intervals: dict[str, tuple[float, float]]


def together(found: Comparison, *, resamples: int = 1000, seed: int = 0) -> list[Together]:
    """Correlate measures with accuracy: between and within interventions, and by their effects.

    All measures are resampled alike.
    """
    if len(found.accuracy) < 2:
        return []
    drawn = _draw(found.accuracy.shape, resamples, np.random.default_rng(seed))
    return [_of_measure(found, name, drawn) for name in found.measures]


def _draw(
    shape: tuple[int, ...], resamples: int, rng: np.random.Generator
) -> dict[str, list[tuple[Array, ...]]]:
    """Draw interventions (rows) and seeds (columns) with replacement, for each kind.

    ``within`` keeps all interventions, ``change`` the control.

    Returns:
        For each kind the indices of ``resamples`` tables.
    """
    rows, columns = shape
    of_interventions: dict[str, list[Array]] = {kind: [] for kind in KINDS}
    for _ in range(resamples):
        of_interventions["between"].append(rng.integers(0, rows, rows))
        of_interventions["within"].append(np.arange(rows))
        changed = rng.integers(1, rows, rows - 1)
        of_interventions["change"].append(np.append(0, changed))
    of_seeds = rng.integers(0, columns, (resamples, columns))
    return {
        kind: [np.ix_(picked, seeds) for picked, seeds in zip(of_kind, of_seeds)]
        for kind, of_kind in of_interventions.items()
    }


def _of_measure(
    found: Comparison, measure: str, drawn: dict[str, list[tuple[Array, ...]]]
) -> Together:
    """Correlate one measure with accuracy in every way, where both are known."""
    known = np.isfinite(found.measures[measure] + found.accuracy)
    x = np.where(known, found.measures[measure], np.nan)
    y = np.where(known, found.accuracy, np.nan)
    interventions, seeds = found.accuracy.shape
    units = {
        "between": interventions,
        "within": seeds,
        "change": min(interventions - 1, seeds),
    }
    pair = Together(measure, {}, {})
    for kind, correlate in KINDS.items():
        value = correlate(x, y)
        replicates = np.array([correlate(x[place], y[place]) for place in drawn[kind]])
        pair.values[kind] = value
        pair.intervals[kind] = _interval(value, replicates, units[kind])
    return pair


def _interval(value: float, replicates: Array, units: int) -> tuple[float, float]:
    """Return the 95 % interval of a correlation from its bootstrap replicates.

    The percentiles are widened on Fisher's scale, as Student's quantile is for so few units.
    """
    known = finite(replicates)
    if units < FEWEST or not math.isfinite(value) or not len(known):
        return math.nan, math.nan
    percentiles = np.quantile(known, (LEVEL / 2, 1 - LEVEL / 2))
    middle, *ends = np.arctanh(np.clip([value, *percentiles], -1 + 1e-12, 1 - 1e-12))
    student_to_normal = stdtrit(units - 1, 1 - LEVEL / 2) / ndtri(1 - LEVEL / 2)
    wider = student_to_normal * math.sqrt(units / (units - 1))
    low, high = np.tanh(middle + wider * (np.array(ends) - middle))
    return float(low), float(high)


def _between(x: Array, y: Array) -> float:
    """Correlate means over seeds, centred over interventions."""
    x, y = _known_pairs(_means_over_seeds(x), _means_over_seeds(y))
    if len(x) < 3:
        return math.nan
    return _cosine(x - x.mean(), y - y.mean())


def _within(x: Array, y: Array) -> float:
    """Correlate deviations from the mean over seeds of each intervention."""
    x = x - _means_over_seeds(x)[:, None]
    y = y - _means_over_seeds(y)[:, None]
    return _cosine(*_known_pairs(x, y))


def _change(x: Array, y: Array) -> float:
    """Correlate differences to the control (the first row) of the same seed, not centred."""
    return _cosine(*_known_pairs(x[1:] - x[0], y[1:] - y[0]))


KINDS: dict[str, Callable[[Array, Array], float]] = {
    "between": _between,
    "within": _within,
    "change": _change,
}


def _means_over_seeds(values: Array) -> Array:
    """Return ``[interventions]`` means of those that are known, NaN where none is."""
    count = np.isfinite(values).sum(1)
    with np.errstate(invalid="ignore"):
        return np.nansum(values, 1) / count


def _known_pairs(x: Array, y: Array) -> tuple[Array, Array]:
    known = np.isfinite(x) & np.isfinite(y)
    return x[known], y[known]


def _cosine(x: Array, y: Array) -> float:
    """Return the correlation of two series around zero; NaN for fewer than three or constants."""
    size = math.sqrt((x @ x) * (y @ y))
    return float(x @ y) / size if len(x) >= 3 and size > 1e-12 else math.nan
