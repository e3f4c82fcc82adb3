"""What an alarm reads: every measure as its change since tasks 5 to 15 of the same run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from bench.alarm.losses import Array, Loss, find_loss, outcome

REFERENCE = range(5, 16)  # tasks of a run with which its later ones are compared
ABOVE_A_GUESS = ("accuracy", "learning_speed")  # as shares of their distance to a guess
SHARES = ("dormant_ratio", "dormant_ratio_tau", "trainability")  # as differences
TRAILING = (3, 5, 10)  # tasks of the trailing means of accuracy
TASK_NUMBER, AT_RANDOM = "task_number", "at_random"  # the two nulls


@dataclass(frozen=True, eq=False)
class Course:
    """A run as alarms see it.

    Attributes:
        problem: its name.
        variant: the intervention, ``none`` without.
        seed: of the run.
        guess: accuracy of a guess.
        accuracy: of each task [tasks].
        read_at: numbers of the tasks after which measures were taken, rising [readings].
        measures: by name [readings].
    """

    problem: str
    variant: str
    seed: int
    guess: float
    accuracy: Array
    read_at: np.ndarray
    measures: Mapping[str, Array] = field(default_factory=dict)

    @cached_property
    def loss(self) -> Loss | None:
        """The loss of plasticity, if one is declared."""
        return find_loss(self.accuracy, self.guess)

    @cached_property
    def outcome(self) -> str:
        """The group of the run; see `bench.alarm.losses.outcome`."""
        return outcome(self.accuracy, self.guess)


def signal(course: Course, name: str) -> Array:
    """Return a measure at each reading as its change since the reference tasks [readings].

    A logarithm of a ratio for what is positive, a share of the distance to a guess for accuracy and
    learning speed, a difference for other shares. NaN where nothing was read, or where the
    reference is missing or not above zero: such a signal never rings.
    """
    if name == TASK_NUMBER:
        return course.read_at.astype(float)
    if name == AT_RANDOM:
        return np.random.default_rng(course.seed).random(len(course.read_at))
    if name.startswith("accuracy_"):
        width = int(name.removeprefix("accuracy_"))
        values = trailing_mean(course.accuracy, width)[course.read_at]
        return above_a_guess(values, course.read_at, course.guess)
    values = course.measures[name]
    if name in ABOVE_A_GUESS:
        return above_a_guess(values, course.read_at, course.guess)
    if name in SHARES:
        return values - reference(values, course.read_at)
    return log_ratio(values, reference(values, course.read_at))


def reference(values: Array, read_at: np.ndarray) -> float:
    """Return the median of a measure's readings in the reference tasks; NaN if there is none."""
    within = (read_at >= REFERENCE.start) & (read_at < REFERENCE.stop)
    known = values[within & np.isfinite(values)]
    return float(np.median(known)) if len(known) else np.nan


def log_ratio(values: Array, to: float) -> Array:
    """Return log(values / to): minus infinity of zero, NaN where ``to`` is not above zero."""
    if not to > 0:
        return np.full(len(values), np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log(values / to)


def above_a_guess(values: Array, read_at: np.ndarray, guess: float) -> Array:
    """Return (value - guess) / (reference - guess); NaN where the reference is no better."""
    distance = reference(values, read_at) - guess
    if not distance > 0:
        return np.full(len(values), np.nan)
    return (values - guess) / distance


def trailing_mean(values: Array, width: int) -> Array:
    """Return the mean of the last ``width`` values at each place, of fewer at the start."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    stop = np.arange(1, len(values) + 1)
    start = np.maximum(0, stop - width)
    return (sums[stop] - sums[start]) / (stop - start)
