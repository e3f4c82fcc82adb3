"""Read continual runs: what follows from their tasks' records, and which of them are pooled."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fastlr.experiments.continual.options import MEMORISED, RANDOM_LABELS
from fastlr.experiments.runs.records import (
    Array,
    Record,
    RunFolder,
    as_dict,
    finite,
    measured,
    number,
    refuse_copies,
    refuse_mixtures,
    run_folders,
    without,
)

# Between pooled runs; the data's digest may not differ where it does not hang on the seed.
_MAY_DIFFER = ("seed", "device", "threads", "tasks", "layout", "fused", "step", "data")
HORIZON = 10  # tasks whose mean accuracy a measure is set against (paper, Table 1)


@dataclass
class ContinualRun(RunFolder):
    """The records of a continual run, whose steps are tasks, 0 to the last.

    All series have one entry a task, NaN where nothing was recorded.

    Attributes:
        resumed: Task numbers at which the run was resumed.
    """

    resumed: list[int] = field(default_factory=list)

    experiment, driver, required = "a continual run", "continual", ("start", "task")
    row = step = "task"
    untrained_is_row = False  # it comes before task 0

    @property
    def tasks(self) -> dict[int, Record]:
        """Task number to its record."""
        return self.rows

    def add(self, record: Record) -> None:
        """Take a line of the records."""
        super().add(record)
        if record["kind"] == "resume":
            self.resumed.append(self.step_of(record))

    def odd(self) -> list[str]:
        """Say which tasks have no record though later ones have, and which accuracies are none."""
        texts = super().odd()
        for task, record in sorted(self.tasks.items()):
            for key in ("accuracy", "previous_accuracy"):
                value = record.get(key)
                if value is not None and not 0 <= number(value) <= 1:
                    what = key.replace("_", " ")
                    texts.append(f"{what} of task {task} is {value!r}, which is left out")
        return texts

    @property
    def has_memorised(self) -> bool:
        """True if the labels are random, so that accuracy is of the images trained on."""
        return self.options.get("data") in MEMORISED

    @property
    def tested_on(self) -> str:
        """What a task's accuracy is of."""
        return "the task's images" if self.has_memorised else "held-out images"

    @property
    def skipped(self) -> list[int]:
        """Tasks that were given up (their ``skipped`` says why)."""
        return [task for task, record in sorted(self.tasks.items()) if record.get("skipped")]

    @property
    def timed(self) -> list[str]:
        """Names that have seconds, in the order of their first appearance."""
        return self.names("seconds")

    def _accuracies(self, key: str) -> Array:
        values = self.measure(key)
        values[self.skipped] = np.nan
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
        if self.has_memorised:
            return np.full(len(self), np.nan)
        images = np.where(self.test_images > 0, self.test_images, np.nan)
        return np.sqrt(self.accuracy * (1 - self.accuracy) / images)

    @property
    def test_images(self) -> Array:
        """The number of images that `accuracy` is of."""
        return self.measure("test_images")

    @property
    def chance(self) -> float:
        """The accuracy of guessing, 1 over the number of classes; NaN if it is not known."""
        if self.has_memorised:
            classes = as_dict(self.config, "data").get("classes", 0)
        else:
            named = (record.get("classes") for record in self.tasks.values())
            classes = next((len(names) for names in named if isinstance(names, list) and names), 0)
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

    def per_parameter(self, name: str = "local_redundancy") -> dict[int, dict[str, float]]:
        """Task number to the measure's mean for each parameter, where it was recorded."""
        means = {}
        for task, record in sorted(self.tasks.items()):
            values = as_dict(measured(record, name), "per_parameter")
            if values:
                means[task] = {key: number(value) for key, value in values.items()}
        return means


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
    refuse_copies(runs)
    if not pool:
        settings = [_settings(run, (*_MAY_DIFFER, *apart)) for run in runs]
        refuse_mixtures(runs, settings, ", or say --pool")
    return runs


def _settings(run: ContinualRun, left_out: Collection[str]) -> dict[str, Any]:
    """Return what pooled runs have in common, as far as the run tells it.

    The pixels of random labels are drawn from the seed: their kind and number are told in place of
    their digest.
    """
    settings = without(run.options, left_out)
    if run.options.get("data") == RANDOM_LABELS:
        settings["data"] = RANDOM_LABELS
    elif run.digest is not None:
        settings["data"] = run.digest
    return settings
