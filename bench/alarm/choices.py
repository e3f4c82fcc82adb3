"""How thresholds are chosen, what was found by them, and whether a measure warns earlier.

A rule is chosen on all problems but one and judged on that one. Problems weigh alike. Resamples
draw seeds within problems, a seed with all its variants; thresholds are chosen anew in each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bench.alarm.losses import Array
from bench.alarm.rings import Judged, judge
from bench.alarm.signals import PROBE, Course, signal
from fastlr.display.alarm import Rules, holds, rings

LEAD = 5  # tasks ahead of the onset that a ring must be to count as a warning
MOST_FALSE = 1.0  # false alarms in 100 tasks that a chosen rule may have
SAYS_SO = Rules(np.ones(1), np.full(1, 0.5))  # the rule of a signal that is 0 or 1
QUANTILES = 60  # thresholds that are tried in each direction


@dataclass(frozen=True, eq=False)
class Candidates:
    """Rules of one measure, or of several, and what each does in every run that counts.

    Attributes:
        names: of the measure of each rule [rules].
        rules: the rules.
        problems: of the runs [runs], as numbers.
        seeds: of the runs [runs].
        judged: of the runs.
    """

    names: tuple[str, ...]
    rules: Rules
    problems: np.ndarray
    seeds: np.ndarray
    judged: Sequence[Judged]

    def table(self, what: str) -> Array:
        """Return an attribute of `Judged` for all runs and rules [runs, rules]."""
        return np.stack([np.asarray(getattr(one, what), float) for one in self.judged])

    @property
    def lost(self) -> Array:
        """Return 1 for each run that lost plasticity, else 0 [runs]."""
        return np.array([float(one.lost) for one in self.judged])

    @property
    def quiet_tasks(self) -> Array:
        """Return the tasks of each run at which a ring would have been false [runs]."""
        return np.array([float(one.quiet_tasks) for one in self.judged])

    def found(self, lead: float) -> Array:
        """Return 1 where a rule found a run's loss with at least this lead [runs, rules]."""
        with np.errstate(invalid="ignore"):
            return (self.table("lead") >= lead).astype(float)


def readings_of(name: str) -> int:
    """Return how many readings in a row make an alarm ring; the probe says so by itself."""
    return 1 if name in PROBE else 2


def thresholds(signals: Sequence[Array]) -> Rules:
    """Return rules in both directions at the quantiles of all readings of some runs."""
    values = np.concatenate([np.empty(0), *signals])
    values = values[np.isfinite(values)]
    if not len(values):
        return Rules(np.empty(0), np.empty(0))
    levels = np.unique(np.quantile(values, np.linspace(0, 1, QUANTILES)))
    signs = np.repeat([1.0, -1.0], len(levels))
    return Rules(signs, np.concatenate([levels, -levels]))


def candidates(
    courses: Sequence[Course], names: Sequence[str], judged_on: str, problems: Sequence[str]
) -> Candidates:
    """Return the rules of some measures, tried in every run that counts.

    Args:
        courses: all runs.
        names: of the measures; several for the trailing means of accuracy, of which one is chosen.
        judged_on: the problem that thresholds must see nothing of.
        problems: all of them, whose places are their numbers.
    """
    groups: list[Rules] = []
    rule_names: list[str] = []
    for name in names:
        others = [signal(c, name) for c in courses if c.problem != judged_on]
        groups.append(SAYS_SO if name in PROBE else thresholds(others))
        rule_names += [name] * len(groups[-1].signs)
    counted: list[Course] = []
    judged: list[Judged] = []
    for course in courses:
        rung = [
            rings(holds(signal(course, name), group, readings_of(name)), course.read_at)
            for name, group in zip(names, groups, strict=True)
        ]
        one = judge(course, np.concatenate(rung))
        if one is not None:
            counted.append(course)
            judged.append(one)
    numbers = np.array([problems.index(course.problem) for course in counted])
    seeds = np.array([course.seed for course in counted])
    signs = np.concatenate([group.signs for group in groups])
    levels = np.concatenate([group.thresholds for group in groups])
    return Candidates(
        tuple(rule_names),
        Rules(signs, levels),
        numbers,
        seeds,
        judged,
    )


@dataclass(frozen=True, eq=False)
class Rates:
    """Shares and rates of rules on one problem, in each resample [resamples, rules].

    Attributes:
        found: share of the losses found with a lead of at least `LEAD`; NaN without losses.
        false: false alarms in 100 tasks; NaN without quiet tasks.
    """

    found: Array
    false: Array


def rates(made: Candidates, problem: int, weights: Array, lead: float = LEAD) -> Rates:
    """Return the rates of all rules on a problem.

    Args:
        made: the rules and what they did.
        problem: its number.
        weights: how often each run occurs in each resample [resamples, runs].
        lead: tasks ahead of the onset.
    """
    of_it = weights * (made.problems == problem)
    losses = of_it * made.lost
    with np.errstate(invalid="ignore", divide="ignore"):
        found = (losses @ made.found(lead)) / losses.sum(1, keepdims=True)
        quiet = (of_it @ made.quiet_tasks)[:, None]
        false = 100 * (of_it @ made.table("false")) / quiet
    return Rates(found, false)


def chosen(
    made: Candidates, judged_on: int, count: int, weights: Array, most_false: float = MOST_FALSE
) -> np.ndarray:
    """Return the rule that the other problems choose, in each resample [resamples].

    Of those with few enough false alarms there, the one that finds most losses
    with a lead of `LEAD`, of these the one with the fewest false alarms, and of those that are
    alike in both the middle one: thresholds at the edge of what serves are the first to fail.

    Args:
        made: the rules and what they did.
        judged_on: number of the problem that is left out.
        count: number of problems.
        weights: how often each run occurs in each resample [resamples, runs].
        most_false: false alarms in 100 tasks that a rule may have on the others.
    """
    others = [rates(made, p, weights) for p in range(count) if p != judged_on]
    found = mean_known([one.found for one in others])
    false = mean_known([one.false for one in others])
    allowed = false <= most_false
    # One number to sort by: found first, then few false alarms; a rule not allowed comes last.
    worth = np.where(allowed, np.nan_to_num(found) - 1e-6 * np.nan_to_num(false), -np.inf)
    alike = worth == worth.max(1, keepdims=True)
    middle = (alike.sum(1, keepdims=True) + 1) // 2
    return np.argmax(alike.cumsum(1) >= middle, axis=1)


def mean_known(tables: Sequence[Array]) -> Array:
    """Return the mean over tables of what is not NaN; NaN where nothing is known."""
    stacked = np.stack(tables)
    known = np.isfinite(stacked)
    with np.errstate(invalid="ignore"):
        return np.where(known, stacked, 0).sum(0) / known.sum(0)


def seed_weights(made: Candidates, resamples: int, rng: np.random.Generator) -> Array:
    """Draw how often each run occurs, seeds within problems [resamples, runs].

    A seed that is drawn twice brings all its variants twice.
    """
    weights = np.empty((resamples, len(made.problems)))
    for problem in np.unique(made.problems):
        at = np.flatnonzero(made.problems == problem)
        seeds, of_run = np.unique(made.seeds[at], return_inverse=True)
        drawn = rng.multinomial(len(seeds), np.full(len(seeds), 1 / len(seeds)), size=resamples)
        weights[:, at] = drawn[:, of_run]
    return weights


@dataclass(frozen=True, eq=False)
class Difference:
    """How much more of the losses a measure finds in time than the accuracy baseline.

    Attributes:
        by_problem: share found by the measure less that by the baseline, by problem.
        intervals: of these, 95 %, by problem.
        mean: over the problems.
        low: of the mean, 95 %.
        high: of the mean, 95 %.
        p: two-sided, of a mean of zero.
    """

    by_problem: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]]
    mean: float
    low: float
    high: float
    p: float

    @property
    def half_width(self) -> float:
        """Half the width of the interval of the mean."""
        return (self.high - self.low) / 2

    @property
    def worse_somewhere(self) -> bool:
        """True if it finds less on a problem, beyond that problem's interval."""
        return any(high < 0 for _, high in self.intervals.values())


def compare(
    found: Mapping[str, Array],
    baseline: Mapping[str, Array],
    losing: Sequence[str],
) -> Difference:
    """Compare a measure with the baseline, by the shares that each finds.

    Args:
        found: by problem, the share found in the sample (first) and in each resample [1 + R].
        baseline: likewise; the same resamples.
        losing: the problems that count.
    """
    differences = {name: found[name] - baseline[name] for name in losing}
    mean = np.mean(list(differences.values()), axis=0)
    low, high = percentile_interval(mean[1:])
    below = (1 + np.sum(mean[1:] <= 0)) / len(mean)
    above = (1 + np.sum(mean[1:] >= 0)) / len(mean)
    by_problem = {name: float(values[0]) for name, values in differences.items()}
    intervals = {name: percentile_interval(values[1:]) for name, values in differences.items()}
    return Difference(
        by_problem,
        intervals,
        float(mean[0]),
        low,
        high,
        min(1.0, 2 * float(min(below, above))),
    )


def percentile_interval(replicates: Array) -> tuple[float, float]:
    """Return the 2.5 and 97.5 % points of what is known of some replicates."""
    known = replicates[np.isfinite(replicates)]
    if not len(known):
        return np.nan, np.nan
    low, high = np.quantile(known, [0.025, 0.975])
    return float(low), float(high)


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """Return p values that allow for having tested all of them, by Holm's method (1979)."""
    adjusted: dict[str, float] = {}
    least = 0.0
    for rank, name in enumerate(sorted(p, key=lambda name: p[name])):
        least = max(least, min(1.0, (len(p) - rank) * p[name]))
        adjusted[name] = least
    return adjusted


def warns_earlier(difference: Difference, adjusted_p: float) -> bool:
    """Return True if a measure warns earlier than accuracy does, by the rule fixed beforehand."""
    better = difference.mean > 0 and adjusted_p <= 0.05
    return better and not difference.worse_somewhere
