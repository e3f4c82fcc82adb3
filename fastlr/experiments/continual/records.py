"""Read continual runs: the "start", "task" and "resume" lines of their records as series."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fastlr.errors import InputError, few
from fastlr.experiments.continual.options import MEMORISED
from fastlr.experiments.runs.records import (
    Array,
    RunFolder,
    as_dict,
    finite,
    measured,
    number,
    refuse_copies,
    run_folders,
    seconds,
)

_SHOWN = 4  # configurations in a message
_MAY_DIFFER = (
    "seed",
    "device",
    "threads",
    "tasks",
    "layout",
    "fused",
    "step",
    "data",
)  # between pooled runs; the data's digest may not
HORIZON = 10  # tasks whose mean accuracy a measure is set against (paper, Table 1)


@dataclass
class ContinualRun(RunFolder):
    """The records of a continual run as series over tasks.

    All series have one entry a task, 0 to the last, NaN where nothing was recorded.

    Attributes:
        tasks: Task number to its record.
        start: Measures of the untrained network.
        resumed: Task numbers at which the run was resumed.
    """

    experiment, required = "a continual run", ("start", "task")
    tasks: dict[int, dict[str, Any]] = field(default_factory=dict)
    start: dict[str, Any] = field(default_factory=dict)
    resumed: list[int] = field(default_factory=list)

    def add(self, record: dict[str, Any]) -> None:
        """Take a line of the records; of several lines for one task the last counts.

        A run that was killed and resumed has several.
        """
        kind = record["kind"]
        if kind == "task":
            self.tasks[_task(record)] = record
        elif kind == "start":
            self.start = as_dict(record, "measures")
        elif kind == "resume":
            self.resumed.append(_task(record))

    def odd(self) -> list[str]:
        """Say which tasks have no record though later ones have, and which accuracies are none."""
        texts = [f"no record of task {t}" for t in range(len(self)) if t not in self.tasks]
        for t, record in sorted(self.tasks.items()):
            for key in ("accuracy", "previous_accuracy"):
                value = record.get(key)
                if value is not None and not 0 <= number(value) <= 1:
                    texts.append(
                        f"{key.replace('_', ' ')} of task {t} is {value!r}, which is left out"
                    )
        return texts

    @property
    def tested_on(self) -> str:
        """What a task's accuracy is of."""
        return "the task's images" if self.options.get("data") in MEMORISED else "held-out images"

    def __len__(self) -> int:
        return max(self.tasks, default=-1) + 1

    @property
    def skipped(self) -> list[int]:
        """Tasks that were given up (their ``skipped`` says why)."""
        return [t for t, record in sorted(self.tasks.items()) if record.get("skipped")]

    @property
    def measures(self) -> list[str]:
        """The names of the measures recorded at any boundary, by their first appearance."""
        return list(
            dict.fromkeys(
                name for record in self.tasks.values() for name in as_dict(record, "measures")
            )
        )

    def _series(self, value_of: Callable[[dict[str, Any]], Any]) -> Array:
        values = np.full(len(self), np.nan)
        for t, record in self.tasks.items():
            values[t] = number(value_of(record))
        return values

    def _accuracies(self, key: str) -> Array:
        values = self._series(lambda record: None if record.get("skipped") else record.get(key))
        return np.where((values >= 0) & (values <= 1), values, np.nan)

    @property
    def accuracy(self) -> Array:
        """The accuracy (0 to 1) on each task right after training on it.

        It is NaN for skipped tasks; `tested_on` says on which images it is taken.
        """
        return self._accuracies("accuracy")

    @property
    def accuracy_stderr(self) -> Array:
        """The standard error of `accuracy`, that of a share of so many held-out images.

        It is NaN where the accuracy is of all the task's images.
        """
        if self.options.get("data") in MEMORISED:
            return np.full(len(self), np.nan)
        images = np.where(self.test_images > 0, self.test_images, np.nan)
        return np.sqrt(self.accuracy * (1 - self.accuracy) / images)

    @property
    def test_images(self) -> Array:
        """The number of images that `accuracy` is of."""
        return self._series(lambda record: record.get("test_images"))

    @property
    def chance(self) -> float:
        """The accuracy of guessing, 1 over the number of classes; NaN if it is not known."""
        told = (record.get("classes") for record in self.tasks.values())
        classes = next((len(names) for names in told if isinstance(names, list) and names), 0)
        if self.options.get("data") in MEMORISED:
            classes = as_dict(self.config, "data").get("classes", 0)
        return 1 / classes if classes else math.nan

    @property
    def forgetting(self) -> Array:
        """What task t's accuracy loses by training on task t + 1.

        This is ``accuracy[t] - previous_accuracy[t + 1]``.
        """
        previous = self._accuracies("previous_accuracy")
        return self.accuracy - np.append(previous[1:], np.nan)[: len(self)]

    def future_accuracy(self, horizon: int = HORIZON) -> Array:
        """Return the mean accuracy of tasks t + 1 .. t + horizon, for each t.

        It is NaN where fewer than ``horizon`` tasks follow.

        Skipped or missing tasks among them are left out of the mean; with less than half of them
        there it is NaN.
        """
        accuracy, result = self.accuracy, np.full(len(self), np.nan)
        for t in range(len(self) - horizon):
            known = finite(accuracy[t + 1 : t + 1 + horizon])
            if 2 * len(known) >= horizon:
                result[t] = known.mean()
        return result

    def measure(self, name: str, key: str = "value") -> Array:
        """Return the series of a measure at the boundaries after each task.

        ``key`` names the number of its record: "value", or another ("stderr").
        """
        return self._series(lambda record: measured(record, name).get(key))

    def definition(self, name: str) -> str:
        """The definition of a measure, in the words of the record; empty if they are missing."""
        texts = (measured(record, name).get("definition") for record in self.tasks.values())
        return next((str(text) for text in texts if text), "")

    def seconds(self, name: str) -> Array:
        """Seconds that "train", "evaluate" or a measure took at each task."""
        return self._series(lambda record: seconds(record, name))

    @property
    def timed(self) -> list[str]:
        """Names that have seconds, in the order of their first appearance."""
        return list(
            dict.fromkeys(
                name for record in self.tasks.values() for name in as_dict(record, "seconds")
            )
        )

    def per_parameter(self, name: str = "local_redundancy") -> dict[int, dict[str, float]]:
        """Task number to the measure's mean for each parameter, where it was recorded."""
        means = {
            t: as_dict(measured(record, name), "per_parameter")
            for t, record in sorted(self.tasks.items())
        }
        return {
            t: {key: number(value) for key, value in values.items()}
            for t, values in means.items()
            if values
        }


def read_run(path: str | Path) -> ContinualRun:
    """Read one run folder; damaged lines are left out with a warning.

    Raises:
        InputError: No such folder, no records.jsonl in it, or no line of it is a record.
    """
    return ContinualRun.read(path)


def read_runs(
    paths: Iterable[str | Path], *, pool: bool = True, apart: Collection[str] = ()
) -> list[ContinualRun]:
    """Read run folders; a folder of several runs stands for all of them, in order.

    Its runs are in folders ``seed-0``, ``seed-1``, and so on.

    Args:
        paths: Run folders, or folders of them.
        pool: Take runs of different configurations too. Otherwise their options and data must be
            the same, but for seed, machine and number of tasks. What a run does not tell, such as
            an option that its version of fastlr did not have, is not compared.
        apart: Options that may differ without ``pool`` too.

    Raises:
        InputError: A path is no run folder and holds none; one run is there twice, by its path or
            as `fastlr.experiments.runs.records.refuse_copies` says; or without ``pool``, they
            differ: the message says in what, and which belong together.
    """
    runs = [read_run(folder) for folder in run_folders(paths)]
    refuse_copies(runs, "continual")
    if not pool:
        _check_same(runs, apart)
    return runs


def _check_same(runs: list[ContinualRun], apart: Collection[str]) -> None:
    settings = [{k: v for k, v in _settings(run).items() if k not in apart} for run in runs]
    common = [key for key in settings[0] if all(key in setting for setting in settings)]
    different = [
        key for key in common if any(setting[key] != settings[0][key] for setting in settings)
    ]
    if not different:
        return
    groups: dict[str, list[str]] = {}
    for run, setting in zip(runs, settings):
        groups.setdefault(
            ", ".join(f"{key}={_short(setting[key])}" for key in different), []
        ).append(str(run.path))
    listed = [f"{values}: {' '.join(paths)}" for values, paths in groups.items()]
    raise InputError(
        f"these are runs of {len(groups)} configurations, which are not pooled: give the run "
        f"folders of one ({few(listed, _SHOWN, '; ')}), or say --pool"
    )


def _settings(run: ContinualRun) -> dict[str, Any]:
    """The configuration that pooled runs have in common, as far as the run tells it."""
    settings = {key: value for key, value in run.options.items() if key not in _MAY_DIFFER}
    digest = as_dict(run.config, "data").get("digest")
    return settings if digest is None else {**settings, "data": digest}


def _short(value: Any) -> str:
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _task(record: dict[str, Any]) -> int:
    task = record["task"]
    if isinstance(task, bool) or not isinstance(task, int) or not 0 <= task < 10_000_000:
        raise ValueError(f"task {task!r}")
    return task
