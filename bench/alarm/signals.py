"""What an alarm reads: every measure as its change since tasks 5 to 15 of the same run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from bench.alarm.losses import Array, Loss, find_loss, outcome
from fastlr.display.alarm import (
    TRAILING_MEAN,
    change,
    tasks_of_trailing_mean,
    trailing_mean,
)

TRAILING = (3, 5, 10)  # tasks of the trailing means of accuracy
TASK_NUMBER, AT_RANDOM = "task_number", "at_random"  # the two nulls
PROBE = ("probe_critical", "probe_degrading")  # what traintools' PlasticityProbe says by itself


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
    """Return what an alarm compares with its threshold, at each reading [readings].

    A measure, or the trailing mean of accuracy, as its change since the reference tasks; the nulls
    and what the probe says as they are.
    """
    if name == TASK_NUMBER:
        return course.read_at.astype(float)
    if name == AT_RANDOM:
        return np.random.default_rng(course.seed).random(len(course.read_at))
    if name == "probe_critical":
        return (course.measures["critical"] > 0).astype(float)
    if name == "probe_degrading":
        return degrading(course.measures["score"])
    if name.startswith(TRAILING_MEAN):
        width = tasks_of_trailing_mean(name)
        values = trailing_mean(course.accuracy, width)[course.read_at]
    else:
        values = course.measures[name]
    return change(name, values, course.read_at, course.guess)


def degrading(scores: Array) -> Array:
    """Return 1 where the history of the probe's scores is degrading by its defaults, else 0."""
    from traintools.plasticity import PlasticityHistory, PlasticityResult

    history = PlasticityHistory()
    said = []
    for step, score in enumerate(scores):
        history.record(PlasticityResult(step, float(score)))
        said.append(float(history.is_degrading()))
    return np.array(said)
