"""What each measure's alarm is worth on each problem, by rules that the other problems chose.

The runs are resampled 1,000 times, seeds within problems; the first entry of every array is the
sample itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.alarm.choices import (
    LEAD,
    MOST_FALSE,
    Candidates,
    Difference,
    candidates,
    chosen,
    compare,
    holm,
    rates,
    seed_weights,
)
from bench.alarm.losses import LOST, Array
from bench.alarm.problems import PROBLEMS
from bench.alarm.signals import AT_RANDOM, PROBE, TASK_NUMBER, TRAILING, Course

ACCURACY = "mean accuracy of recent tasks"  # the baseline: one of three trailing means
MEASURES: dict[str, tuple[str, ...]] = {
    "local redundancy on shapes": ("local_redundancy",),
    "local redundancy on this task": ("local_redundancy_this_task",),
    "local redundancy on the next task": ("local_redundancy_next_task",),
    "trainability": ("trainability",),
    "learning speed": ("learning_speed",),
    "dormant ratio": ("dormant_ratio",),
    "effective rank": ("effective_rank",),
    "weight norm": ("weight_norm",),
    "training gradient norm": ("train_grad_norm",),
}
BASELINE = {ACCURACY: tuple(f"accuracy_{width}" for width in TRAILING)}
NULLS = {"number of the task": (TASK_NUMBER,), "at random": (AT_RANDOM,)}
INSTEAD = {  # what a user would pick instead: traintools' PlasticityProbe at its defaults
    "PlasticityProbe critical": PROBE[:1],
    "PlasticityProbe degrading": PROBE[1:],
}
ALL = {**MEASURES, **BASELINE, **NULLS, **INSTEAD}
LEADS = (10, LEAD, 0)
RARE = 0.1  # share of runs that lose plasticity, for the share of rings that are followed by a loss
RESAMPLES = 1000
NOT_SET_TO_LOSE = [name for name, problem in PROBLEMS.items() if not problem.loses]
NO_PROBLEM = ""  # left out where rules are chosen on all


@dataclass(frozen=True, eq=False)
class Alarm:
    """What the alarm of a measure did on a problem, in the sample and in each resample [1 + R].

    Attributes:
        rule: measure, direction and threshold that the other problems chose, in words.
        found: share of the losses found with at least a lead of so many tasks; NaN without losses.
        false: false alarms in 100 tasks.
        followed: share of the rings with an onset in the forty tasks after them.
        followed_if_rare: this share where one run in ten loses plasticity.
        fitted: share found with a lead of `LEAD` by the best rule whose rate of false alarms on
            this very problem is no higher than the baseline's: fitted there.
        rings: number of rings, in the sample.
        losses: number of runs that lost plasticity, in the sample.
        runs: number of runs that count, in the sample.
        quiet_tasks: number of tasks at which a ring would have been false, in the sample.
    """

    rule: str
    found: Mapping[int, Array]
    false: Array
    followed: Array
    followed_if_rare: Array
    fitted: Array
    rings: int
    losses: int
    runs: int
    quiet_tasks: int


@dataclass(frozen=True, eq=False)
class Analysis:
    """The alarms of all measures on all problems, and their comparison with the baseline.

    Attributes:
        problems: their names.
        losing: those that were set to lose plasticity, and in which a run of the sample did.
        alarms: by measure and problem.
        differences: in the share found with a lead of `LEAD`, by measure.
        adjusted_p: of these differences, by Holm's method.
    """

    problems: Sequence[str]
    losing: Sequence[str]
    alarms: Mapping[str, Mapping[str, Alarm]]
    differences: Mapping[str, Difference]
    adjusted_p: Mapping[str, float]


def analyse(courses: Sequence[Course], resamples: int = RESAMPLES) -> Analysis:
    """Judge the alarms of all measures on all problems of some runs."""
    problems = list(dict.fromkeys(course.problem for course in courses))
    losing = losing_problems(courses)
    alarms: dict[str, dict[str, Alarm]] = {name: {} for name in ALL}
    for problem in problems:
        baseline: Array | None = None
        for name in (ACCURACY, *(name for name in ALL if name != ACCURACY)):
            made = candidates(courses, ALL[name], problem, problems)
            alarms[name][problem] = judge_rule(made, problem, problems, baseline, resamples)
            if name == ACCURACY:
                baseline = alarms[name][problem].false
    found = {
        name: {problem: alarm.found[LEAD] for problem, alarm in by_problem.items()}
        for name, by_problem in alarms.items()
    }
    differences = {name: compare(found[name], found[ACCURACY], losing) for name in MEASURES}
    adjusted = holm({name: found.p for name, found in differences.items()})
    return Analysis(problems, losing, alarms, differences, adjusted)


def losing_problems(courses: Sequence[Course]) -> list[str]:
    """Return the problems that were set to lose plasticity, and in which a run did."""
    lost = dict.fromkeys(course.problem for course in courses if course.outcome == LOST)
    return [problem for problem in lost if problem not in NOT_SET_TO_LOSE]


def rule_of_all(courses: Sequence[Course], names: Sequence[str]) -> dict[str, Any]:
    """Return the rule that all problems choose together: signal, direction and threshold."""
    problems = list(dict.fromkeys(course.problem for course in courses))
    made = candidates(courses, names, NO_PROBLEM, problems)
    ones = np.ones((1, len(made.problems)))
    picked = int(chosen(made, -1, len(problems), ones)[0])
    sign = float(made.rules.signs[picked])
    return {
        "signal": made.names[picked],
        "above": sign > 0,
        "threshold": sign * float(made.rules.thresholds[picked]),
    }


def judge_rule(
    made: Candidates,
    problem: str,
    problems: Sequence[str],
    baseline: Array | None,
    resamples: int,
) -> Alarm:
    """Judge on a problem the rule that the other problems choose.

    Args:
        made: rules, and what they did in all runs.
        problem: the one that is judged on.
        problems: all of them.
        baseline: the baseline's false alarms in 100 tasks on this problem [1 + R]; None for the
            baseline itself.
        resamples: R.
    """
    number = problems.index(problem)
    drawn = seed_weights(made, resamples, np.random.default_rng(0))
    weights = np.concatenate([np.ones((1, len(made.problems))), drawn])
    picked = chosen(made, number, len(problems), weights)
    each = np.arange(len(picked))
    found = {lead: rates(made, number, weights, lead).found for lead in LEADS}
    false = rates(made, number, weights).false
    allowed = false <= (MOST_FALSE if baseline is None else baseline[:, None])
    best = np.where(allowed, found[LEAD], -np.inf).max(1)
    of_it = weights * (made.problems == number)
    counts = RingCounts.of(made, of_it, picked)
    here = made.problems == number
    sign = "above" if made.rules.signs[picked[0]] > 0 else "below"
    level = made.rules.signs[picked[0]] * made.rules.thresholds[picked[0]]
    return Alarm(
        f"{made.names[picked[0]]} {sign} {level:.3g}",
        {lead: values[each, picked] for lead, values in found.items()},
        false[each, picked],
        counts.share_followed(),
        counts.share_followed(RARE),
        np.where(np.isfinite(best), best, np.nan),
        int(made.table("rings")[here, picked[0]].sum()),
        int(made.lost[here].sum()),
        int(here.sum()),
        int(made.quiet_tasks[here].sum()),
    )


@dataclass(frozen=True, eq=False)
class RingCounts:
    """Rings of the chosen rule on a problem, by what became of the run, each [1 + R].

    Attributes:
        losses: runs that lost plasticity.
        others: runs that lost nothing.
        followed: rings followed by an onset.
        in_losses: rings in runs that lost plasticity.
        in_others: rings in runs that lost nothing.
    """

    losses: Array
    others: Array
    followed: Array
    in_losses: Array
    in_others: Array

    @classmethod
    def of(cls, made: Candidates, weights: Array, picked: np.ndarray) -> RingCounts:
        """Count the rings of the picked rule in each resample."""
        each = np.arange(len(picked))

        def sums(of_run: Array, table: str) -> Array:
            return ((weights * of_run) @ made.table(table))[each, picked]

        lost = made.lost
        return cls(
            (weights * lost).sum(1),
            (weights * (1 - lost)).sum(1),
            sums(lost, "followed"),
            sums(lost, "rings"),
            sums(1 - lost, "rings"),
        )

    def share_followed(self, losing: float | None = None) -> Array:
        """Return the share of rings that an onset follows.

        Args:
            losing: share of the runs that lose plasticity; None: as it is.
        """
        with np.errstate(invalid="ignore", divide="ignore"):
            if losing is None:
                return self.followed / (self.in_losses + self.in_others)
            others = np.where(self.others > 0, self.in_others / self.others, 0)
            false = (1 - losing) * others
            return (
                losing
                * self.followed
                / self.losses
                / (losing * self.in_losses / self.losses + false)
            )
