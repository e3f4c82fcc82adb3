"""Rank checkpoints by local redundancy, with a test of whether the largest differs from the others.

All estimates are on the same inputs, so two checkpoints are compared by the differences input by
input, in which what inputs have in common cancels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from statistics import NormalDist

import torch

from fastlr.errors import InputError
from fastlr.estimator.result import Estimate, paired_difference

LEVEL = 0.05


@dataclass(frozen=True)
class PairedTest:
    """Two checkpoints compared on the same inputs.

    Attributes:
        first: The one with the larger local redundancy.
        second: The other.
        difference: Mean over inputs of first minus second, at least 0.
        stderr: Its standard error.
        z: difference / stderr; infinite where every input has the same difference, 0 where that is
            0.
        p: Two-sided, by the normal distribution.
        adjusted: p after Holm's correction for the number of all pairs.
        equal: True if both have the same value on every input, not zero, as equal weights have.
    """

    first: str
    second: str
    difference: float
    stderr: float
    z: float
    p: float
    adjusted: float
    equal: bool


@dataclass(frozen=True)
class Ranking:
    """Checkpoints in order of their local redundancy.

    Attributes:
        estimates: Name to estimate, the largest first.
        pairs: Every two of them, in their order: those of the largest come first.
        level: Level of significance.
    """

    estimates: dict[str, Estimate]
    pairs: tuple[PairedTest, ...]
    level: float = LEVEL

    @property
    def largest(self) -> str:
        """The checkpoint with the largest local redundancy."""
        return next(iter(self.estimates))

    def against_largest(self, name: str) -> PairedTest | None:
        """The pair of the largest and another checkpoint; None for the largest itself."""
        return next((pair for pair in self._pairs_of_largest() if pair.second == name), None)

    @property
    def equal(self) -> list[str]:
        """The checkpoints that are equal to the largest."""
        return [pair.second for pair in self._pairs_of_largest() if pair.equal]

    @property
    def others(self) -> list[PairedTest]:
        """The pairs of the largest and those that are not equal to it, in their order."""
        return [pair for pair in self._pairs_of_largest() if not pair.equal]

    @property
    def ties(self) -> list[str]:
        """The checkpoints that tie with the largest: the adjusted p is at least ``level``."""
        return [pair.second for pair in self.others if pair.adjusted >= self.level]

    @property
    def distinguishable(self) -> bool:
        """True if the largest can be told from the next that is not equal to it."""
        return bool(self.others) and self.others[0].adjusted < self.level

    def _pairs_of_largest(self) -> list[PairedTest]:
        return [pair for pair in self.pairs if pair.first == self.largest]


def ranking(estimates: Mapping[str, Estimate], level: float = LEVEL) -> Ranking:
    """Rank checkpoints by their estimates on the same inputs.

    For every two, a paired z test: z is the mean over the n inputs of the difference of the two
    squared gradient norms over its standard error, p two-sided by the normal distribution. The
    largest is found on the same inputs, so p is corrected for all k (k - 1) / 2 pairs (Holm 1979),
    not only for its own: the chance that any two equal checkpoints are told apart is at most
    ``level``.

    Args:
        estimates: Name to estimate, all with the same seed, inputs, n and probe, and with
            per-sample values.
        level: Level of significance.

    Raises:
        InputError: Fewer than two, estimates that are not paired, or of one input (batch) alone.

    Example:
        >>> import torch, fastlr
        >>> x = fastlr.TensorInputs(torch.randn(64, 3, generator=torch.Generator().manual_seed(0)))
        >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
        <torch._C.Generator object at ...>
        >>> a = torch.nn.Linear(3, 2)
        >>> b = torch.nn.Linear(3, 2)
        >>> b.weight.data, b.bias.data = a.weight.data * 5, a.bias.data * 5
        >>> ranked = ranking({"b": fastlr.estimate(b, x, 64), "a": fastlr.estimate(a, x, 64)})
        >>> ranked.largest, ranked.distinguishable, ranked.ties
        ('a', True, [])
    """
    if len(estimates) < 2:
        raise InputError(f"{len(estimates)} checkpoints: a ranking needs at least two")
    order = sorted(estimates, key=lambda name: -estimates[name].value)
    tests = []
    for first, second in combinations(order, 2):
        difference, stderr = paired_difference(estimates[first], estimates[second])
        if math.isnan(stderr):
            raise InputError(
                "a ranking needs at least two inputs (of probe batch, two batches): one difference "
                "has no standard error, and nothing can be told from it"
            )
        z = math.inf if difference else 0.0
        if stderr > 0:
            z = difference / stderr
        tests.append((first, second, difference, stderr, z, 2 * NormalDist().cdf(-abs(z))))
    adjusted = _holm([test[-1] for test in tests])
    pairs = tuple(
        PairedTest(*test, p, equal=_equal(estimates[test[0]], estimates[test[1]]))
        for test, p in zip(tests, adjusted)
    )
    return Ranking({name: estimates[name] for name in order}, pairs, level)


def _equal(a: Estimate, b: Estimate) -> bool:
    assert a.per_sample is not None and b.per_sample is not None
    return (
        a.value > 0
        and torch.equal(a.per_sample, b.per_sample)
        and a.per_parameter == b.per_parameter
    )


def _holm(p: list[float]) -> list[float]:
    """Holm's adjusted p values.

    >>> _holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted, least = [1.0] * len(p), 0.0
    for rank, i in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        least = max(least, min(1.0, (len(p) - rank) * p[i]))
        adjusted[i] = least
    return adjusted
