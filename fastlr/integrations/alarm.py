"""The alarm of a monitor: it counts tasks or readings, and says when plasticity is being lost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fastlr.display.alarm import (
    BY_ACCURACY,
    BY_REDUNDANCY,
    EVERY,
    Alarm,
    tasks_of_trailing_mean,
    trailing_mean,
)
from fastlr.errors import InputError, warn
from fastlr.estimator.statistics import real

_OF_READINGS = "Its rates were measured by tasks, not by readings as here: end tasks by task()."


class TaskAlarm:
    """Rings where accuracy on new tasks falls, or, where it is not known, local redundancy.

    Args:
        guess: accuracy of the best answer that does not look at the input, such as 0.1 of ten
            classes.

    Attributes:
        tasks: ended so far.
        by_accuracy: the alarm by accuracy.
        by_value: the alarm by local redundancy, which counts tasks from where its values began.

    Raises:
        InputError: ``guess`` is no share.
    """

    def __init__(self, guess: float) -> None:
        guess = real("guess", guess)
        if not 0 <= guess < 1:
            raise InputError(f"guess={guess}: give the accuracy of a guess, such as 0.1, below 1")
        self.tasks = 0
        self.by_accuracy, self.by_value = Alarm(BY_ACCURACY, guess), Alarm(BY_REDUNDANCY)
        self._accuracies: list[float] = []
        self._readings = 0
        self._tasks_before_values = 0

    def end_task(self, accuracy: float | None, value: Callable[[], float | None]) -> str | None:
        """Count a task, and ring if it is time to.

        Args:
            accuracy: on the task, between 0 and 1; None: not known.
            value: measures local redundancy; called after every second task without accuracy.

        Returns:
            What the alarm says, which is a warning as well; None where it does not ring.

        Raises:
            InputError: the accuracy is no share, and the task does not count.
        """
        if accuracy is not None:
            self._accuracies.append(_share(accuracy))
        task = self.tasks
        self.tasks += 1
        if self.tasks % EVERY:
            return None
        if accuracy is not None:
            width = tasks_of_trailing_mean(BY_ACCURACY.signal)
            recent = float(trailing_mean(np.array(self._accuracies), width)[-1])
            return self._ring(self.by_accuracy, task, recent, f"after task {task + 1}")
        since = task - self._tasks_before_values
        return self._ring(self.by_value, since, value(), f"after task {task + 1}")

    def take_reading(self, value: float) -> str | None:
        """Take a reading of a training that has no tasks, whose unit is the reading."""
        if self.tasks:
            return None
        reading = self._readings
        self._readings += 1
        where = f"at reading {reading + 1}"
        return self._ring(self.by_value, reading, value, where, _OF_READINGS)

    def begin_values_anew(self) -> None:
        """Forget local redundancy so far; the next tasks or readings are those to compare with."""
        self.by_value = Alarm(BY_REDUNDANCY)
        self._readings, self._tasks_before_values = 0, self.tasks

    def _ring(
        self, alarm: Alarm, at: int, value: float | None, where: str, besides: str = ""
    ) -> str | None:
        """Give an alarm a value; say so, and warn, if it rings."""
        if not alarm.read(at, math.nan if value is None else value):
            return None
        rule = alarm.rule
        moved = "risen" if rule.above else "fallen"
        text = (
            f"alarm {where}: {rule.words} has {moved} since the first tasks, as before a loss of "
            f"plasticity. {rule.rates()}"
        )
        text = f"{text} {besides}".strip()
        warn(text)
        return text

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed training needs to ring at the same tasks."""
        return {
            "tasks": self.tasks,
            "readings": self._readings,
            "tasks_before_values": self._tasks_before_values,
            "accuracies": self._accuracies,
            "by_accuracy": self.by_accuracy.state_dict(),
            "by_value": self.by_value.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self.tasks, self._readings = state["tasks"], state["readings"]
        self._tasks_before_values = state.get("tasks_before_values", 0)  # older states have none
        self._accuracies = list(state["accuracies"])
        self.by_accuracy.load_state_dict(state["by_accuracy"])
        self.by_value.load_state_dict(state["by_value"])


def _share(accuracy: Any) -> float:
    """Return an accuracy as a float; InputError where it is no share."""
    share = real("accuracy", accuracy)
    if not 0 <= share <= 1:
        raise InputError(f"accuracy={accuracy!r}: give a share between 0 and 1")
    return share
