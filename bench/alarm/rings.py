"""When an alarm rings, and what its rings are worth, for many rules at once.

A rule is a direction and a threshold. It holds at a reading where that reading and the one before
are beyond the threshold; it rings when it begins to hold, and again every ten tasks while it goes
on. Nothing rings before task 16, and a run that lost plasticity ends ten tasks after its onset.

A ring in the forty tasks before the onset, or in the ten after it, finds the loss; its *lead* is
the number of tasks from the first such ring to the onset. Earlier rings are false, in runs that
lose something, too; in runs that lost nothing all are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bench.alarm.losses import LOST, NOT_LOST, Array
from bench.alarm.signals import Course

FIRST = 16  # task before which nothing rings
AGAIN = 10  # tasks after which a rule that goes on to hold rings again
BEFORE, AFTER = 40, 10  # tasks around an onset in which a ring finds it

Flags = np.ndarray  # of bool


class Rules(NamedTuple):
    """Rules of one measure: ring where ``signs * signal`` is above ``thresholds``, each [rules]."""

    signs: Array
    thresholds: Array


@dataclass(frozen=True, eq=False)
class Judged:
    """The rings of rules in one run.

    Attributes:
        lost: whether the run lost plasticity.
        lead: of the first ring that finds the loss [rules]; NaN where none does.
        false: number of rings that announce nothing [rules].
        followed: number of rings with an onset in the forty tasks after them [rules].
        rings: number of all that count [rules].
        quiet_tasks: number of tasks at which a ring would have been false.
    """

    lost: bool
    lead: Array
    false: Array
    followed: Array
    rings: Array
    quiet_tasks: int


def holds(signal: Array, rules: Rules) -> Flags:
    """Return where each rule holds [rules, readings]; never where the signal is NaN."""
    with np.errstate(invalid="ignore"):
        beyond = rules.signs[:, None] * signal > rules.thresholds[:, None]
    twice = np.zeros_like(beyond)
    twice[:, 1:] = beyond[:, 1:] & beyond[:, :-1]
    return twice


def rings(held: Flags, read_at: np.ndarray) -> Flags:
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


def judge(course: Course, rung: Flags) -> Judged | None:
    """Judge the rings of a run; None for a run in which they count neither way."""
    none = np.full(len(rung), np.nan)
    outcome = course.outcome
    if outcome == NOT_LOST:
        count = rung.sum(1)
        tasks = len(course.accuracy)
        return Judged(False, none, count, np.zeros_like(count), count, max(0, tasks - FIRST))
    if outcome != LOST:
        return None
    loss = course.loss
    assert loss is not None
    ahead = loss.onset - course.read_at  # tasks from each reading to the onset
    finds = rung & (ahead <= BEFORE) & (ahead >= -AFTER)
    false = rung & (ahead > BEFORE)
    first = np.argmax(finds, axis=1)
    lead = np.where(finds.any(1), ahead[first], none)
    followed = (finds & (ahead >= 0)).sum(1)
    quiet_tasks = max(0, loss.onset - BEFORE - FIRST)
    return Judged(True, lead, false.sum(1), followed, (finds | false).sum(1), quiet_tasks)
