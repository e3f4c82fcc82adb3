"""What the rings of an alarm are worth, for many rules at once; `fastlr.display.alarm` rings.

A ring in the forty tasks before the onset, or in the ten after it, finds the loss; its *lead* is
the number of tasks from the first such ring to the onset. Earlier rings are false, in runs that
lose something, too; in runs that lost nothing all are. A run that lost plasticity ends ten tasks
after its onset.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bench.alarm.losses import LOST, NOT_LOST, Array
from bench.alarm.signals import Course
from fastlr.display.alarm import FIRST, Flags

BEFORE, AFTER = 40, 10  # tasks around an onset in which a ring finds it


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
