"""When an alarm for lost plasticity rings, by one rule for monitors, runs and the study behind it.

A rule compares a signal with a threshold: what is measured after tasks, as its change since tasks 5
to 15 of the same training. It holds at a reading where that reading and the one before are beyond
the threshold; it rings when it begins to hold, and again every ten tasks while it goes on. Nothing
rings before task 16. Tasks are counted from 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]

REFERENCE = range(5, 16)  # tasks with which later ones are compared
FIRST = 16  # task before which nothing rings
TRAILING_MEAN = "accuracy_"  # and a number of tasks: the mean accuracy of the last so many
EVERY = 2  # tasks between two readings, as in the study
AGAIN = 10  # tasks after which a rule that goes on to hold rings again
ABOVE_A_GUESS = ("accuracy", "learning_speed")  # as shares of their distance to a guess
SHARES = ("dormant_ratio", "dormant_ratio_tau", "trainability")  # as differences


class Rule(NamedTuple):
    """A rule with what its rings were worth in the study of alarms (bench/results/cpu/alarm).

    Attributes:
        signal: name of what it compares, as for `change`.
        words: the same in words.
        above: ring where the change is above the threshold; else where it is below.
        threshold: of the change.
        found: share of the losses found at least five tasks ahead, lowest and highest over the
            problems that lose plasticity.
        false: false alarms in 100 tasks, lowest and highest over the problems.
    """

    signal: str
    words: str
    above: bool
    threshold: float
    found: tuple[float, float]
    false: tuple[float, float]

    def rates(self) -> str:
        """Say what rings by this rule were worth."""
        (few, many), (seldom, often) = self.found, self.false
        return (
            f"In a study of seven problems such rings found {100 * few:.0f} to {100 * many:.0f} % "
            f"of the losses of plasticity at least five tasks ahead, with {seldom:.1f} to "
            f"{often:.1f} false alarms in 100 tasks, by problem (docs/interpreting.md)."
        )


# Where accuracy on new tasks is known it rings by that, for no measure was shown to warn earlier;
# else by local redundancy. The rules that all problems of the study choose together, and their
# rates on each by the rule that the others chose (bench/results/cpu/alarm/report.json).
BY_ACCURACY = Rule(
    "accuracy_3",
    "the mean accuracy of the last 3 tasks",
    above=False,
    threshold=0.8586,
    found=(0.667, 1.0),
    false=(0.0, 3.51),
)
BY_REDUNDANCY = Rule(
    "local_redundancy",
    "local redundancy",
    above=False,
    threshold=-0.4024,
    found=(0.0, 0.6),
    false=(0.0, 4.77),
)


class Alarm:
    """Rings as a training goes on.

    Args:
        rule: by which it rings.
        guess: accuracy of the best answer that does not look at the input.

    Attributes:
        rung: numbers of the tasks after which it rang.
    """

    def __init__(self, rule: Rule, guess: float = 0.0) -> None:
        self.rule, self.guess = rule, guess
        self.rung: list[int] = []
        self._tasks: list[int] = []
        self._values: list[float] = []

    def read(self, task: int, value: float) -> bool:
        """Take a reading after a task, and return True if the alarm rings by it."""
        self._tasks.append(task)
        self._values.append(value)
        rings_now = bool(ring_flags(self.rule, self._values, self._tasks, self.guess)[-1])
        if rings_now:
            self.rung.append(task)
        return rings_now

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed training needs to ring at the same tasks."""
        return {"tasks": self._tasks, "values": self._values, "rung": self.rung}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self._tasks, self._values = list(state["tasks"]), list(state["values"])
        self.rung = list(state["rung"])


def ring_flags(rule: Rule, values: Any, tasks: Any, guess: float) -> Flags:
    """Return at which readings a rule rings [readings].

    Args:
        rule: the rule.
        values: of its signal [readings].
        tasks: numbers of the tasks after which they were taken, rising [readings].
        guess: as for `change`.
    """
    read_at = np.asarray(tasks, np.int64)
    moved = change(rule.signal, np.asarray(values, float), read_at, guess)
    sign = 1.0 if rule.above else -1.0
    rules = Rules(np.array([sign]), np.array([sign * rule.threshold]))
    return rings(holds(moved, rules), read_at)[0]


class Rules(NamedTuple):
    """Rules of one signal: ring where ``signs * signal`` is above ``thresholds``, each [rules]."""

    signs: Array
    thresholds: Array


def change(name: str, values: Array, read_at: NDArray[np.int64], guess: float) -> Array:
    """Return a measure at each reading as its change since the reference tasks [readings].

    A logarithm of a ratio for what is positive, a share of the distance to a guess for accuracy and
    learning speed, a difference for other shares. NaN where nothing was read, or where the
    reference is missing or not above zero: such a signal never rings.

    Args:
        name: of the measure; one of `TRAILING_MEAN`, or of a field of records.
        values: of the measure [readings].
        read_at: numbers of the tasks after which they were taken, rising [readings].
        guess: accuracy of the best answer that does not look at the input.
    """
    before = reference(values, read_at)
    if name.startswith(ABOVE_A_GUESS):
        return (values - guess) / positive(before - guess)
    if name in SHARES:
        return values - before
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log(values / positive(before))


def positive(value: float) -> float:
    """Return a value that is above zero, NaN for any other."""
    return value if value > 0 else np.nan


def reference(values: Array, read_at: NDArray[np.int64]) -> float:
    """Return the median of a measure's readings in the reference tasks; NaN if there is none."""
    within = (read_at >= REFERENCE.start) & (read_at < REFERENCE.stop)
    known = values[within & np.isfinite(values)]
    return float(np.median(known)) if len(known) else np.nan


def tasks_of_trailing_mean(name: str) -> int:
    """Return how many tasks a signal by the name of `TRAILING_MEAN` and a number is the mean of."""
    return int(name.removeprefix(TRAILING_MEAN))


def trailing_mean(values: Array, width: int) -> Array:
    """Return the mean of the last ``width`` values at each place, of fewer at the start."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    stop = np.arange(1, len(values) + 1)
    start = np.maximum(0, stop - width)
    return (sums[stop] - sums[start]) / (stop - start)


def holds(signal: Array, rules: Rules, readings: int = 2) -> Flags:
    """Return where each rule holds [rules, readings]; never where the signal is NaN.

    Args:
        signal: of a measure [readings].
        rules: of that measure.
        readings: in a row that must be beyond the threshold, 1 or 2.
    """
    with np.errstate(invalid="ignore"):
        beyond = rules.signs[:, None] * signal > rules.thresholds[:, None]
    if readings == 1:
        return beyond
    twice = np.zeros_like(beyond)
    twice[:, 1:] = beyond[:, 1:] & beyond[:, :-1]
    return twice


def rings(held: Flags, read_at: NDArray[np.int64]) -> Flags:
    """Return where alarms ring [rules, readings], from where their rules hold."""
    rung = np.zeros_like(held)
    last = np.full(len(held), -np.inf)  # task of the last ring of each rule
    for k, task in enumerate(read_at.tolist()):
        if task < FIRST:
            continue
        goes_on = held[:, k - 1] if k and read_at[k - 1] >= FIRST else np.zeros(len(held), bool)
        rung[:, k] = held[:, k] & (~goes_on | (task - last >= AGAIN))
        last[rung[:, k]] = task
    return rung
