"""Means over seeds: runs that are independent of each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from fastlr.experiments.statistics.bootstrap import LEVEL


@dataclass(frozen=True)
class Mean:
    """A mean over seeds.

    Attributes:
        value: The mean.
        stderr: Its standard error: standard deviation over sqrt(n); NaN for one seed.
        low: 95 % interval by Student's distribution with n - 1 degrees of freedom; NaN for one
            seed.
        high: Likewise.
        n: Seeds.
    """

    value: float
    stderr: float
    low: float
    high: float
    n: int


def mean_over_seeds(values: Sequence[float]) -> Mean:
    """Return mean, standard error and 95 % interval of independent values.

    Example:
        >>> mean = mean_over_seeds([1.0, 2.0, 3.0])
        >>> round(mean.value, 3), round(mean.stderr, 3), round(mean.high - mean.value, 2), mean.n
        (2.0, 0.577, 2.48, 3)
    """
    n, value = len(values), float(np.mean(values))
    if n < 2:
        return Mean(value, math.nan, math.nan, math.nan, n)
    stderr = float(np.std(values, ddof=1)) / math.sqrt(n)
    half = float(stdtrit(n - 1, 1 - LEVEL / 2)) * stderr
    return Mean(value, stderr, value - half, value + half, n)
