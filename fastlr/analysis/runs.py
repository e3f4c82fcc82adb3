"""Run folders read back: the records of a continual run as series over tasks.

A folder holds ``config.json`` and ``records.jsonl``, one JSON object a line: "start", "task" and "resume" lines. Readers
take what is there: measures may be missing, further keys are ignored, and a last line that a crash cut short is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastlr.analysis.folders import RunFolder, as_dict, number, read_config, read_records, run_folders
from fastlr.errors import InputError

Series = NDArray[np.float64]
_SHOWN = 4  # configurations in a message
_OF_NO_RESULT = ("seed", "device", "threads", "tasks", "step", "data")  # the data's digest counts, not its place
HORIZON = 10  # tasks whose mean accuracy a measure is set against (paper, Table 1)


@dataclass
class Run(RunFolder):
    """The records of one run. All series have one entry a task, 0 to the last, NaN where nothing was recorded.

    Attributes:
        tasks: Task number to its record.
        start: Measures of the untrained network.
        resumed: Task numbers at which the run was resumed.
    """

    tasks: dict[int, dict[str, Any]] = field(default_factory=dict)
    start: dict[str, Any] = field(default_factory=dict)
    resumed: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return max(self.tasks, default=-1) + 1

    @property
    def skipped(self) -> list[int]:
        """Tasks that were given up (their ``skipped`` says why)."""
        return [t for t, record in sorted(self.tasks.items()) if record.get("skipped")]

    @property
    def measures(self) -> list[str]:
        """Names of the measures that were recorded at any boundary, in the order of their first appearance."""
        return list(dict.fromkeys(name for record in self.tasks.values() for name in as_dict(record, "measures")))

    def _series(self, pick: Any) -> Series:
        values = np.full(len(self), np.nan)
        for t, record in self.tasks.items():
            values[t] = number(pick(record))
        return values

    @property
    def accuracy(self) -> Series:
        """Accuracy on held-out images of task t right after training on it, 0 to 1; NaN for skipped tasks."""
        return self._series(lambda record: None if record.get("skipped") else record.get("accuracy"))

    @property
    def forgetting(self) -> Series:
        """``accuracy[t] - previous_accuracy[t + 1]``: what task t's accuracy loses by training on task t + 1."""
        previous = self._series(lambda record: None if record.get("skipped") else record.get("previous_accuracy"))
        return self.accuracy - np.append(previous[1:], np.nan)[: len(self)]

    def future_accuracy(self, horizon: int = HORIZON) -> Series:
        """Mean accuracy of tasks t + 1 .. t + horizon; NaN where fewer than ``horizon`` tasks follow.

        Skipped or missing tasks among them are left out of the mean; with less than half of them there it is NaN.
        """
        accuracy, result = self.accuracy, np.full(len(self), np.nan)
        for t in range(len(self) - horizon):
            known = accuracy[t + 1 : t + 1 + horizon]
            known = known[~np.isnan(known)]
            if 2 * len(known) >= horizon:
                result[t] = known.mean()
        return result

    def measure(self, name: str, key: str = "value") -> Series:
        """A measure at the boundary after each task: its "value", or another number of its record ("stderr")."""
        return self._series(lambda record: _entry(record, name).get(key))

    def definition(self, name: str) -> str:
        """What was measured under this name, in the words of the record; empty if they are missing."""
        found = (_entry(record, name).get("definition") for record in self.tasks.values())
        return next((str(text) for text in found if text), "")

    def seconds(self, name: str) -> Series:
        """Seconds that "train", "evaluate" or a measure took at each task."""
        return self._series(lambda record: as_dict(record, "seconds").get(name))

    @property
    def timed(self) -> list[str]:
        """Names that have seconds, in the order of their first appearance."""
        return list(dict.fromkeys(name for record in self.tasks.values() for name in as_dict(record, "seconds")))

    def per_parameter(self, name: str = "local_redundancy") -> dict[int, dict[str, float]]:
        """Task number to the measure's mean for each parameter, where it was recorded."""
        found = {t: as_dict(_entry(record, name), "per_parameter") for t, record in sorted(self.tasks.items())}
        return {t: {key: number(value) for key, value in values.items()} for t, values in found.items() if values}


def read_run(path: str | Path) -> Run:
    """Read one run folder.

    Of several lines for one task (a run that was killed and resumed) the last counts. A damaged line is left out with a
    warning.

    Raises:
        InputError: No such folder, no records.jsonl in it, or no line of it is a record.
    """
    run = Run(Path(path))
    run.config = read_config(run.path)

    def take(record: dict[str, Any]) -> None:
        kind = record["kind"]
        if kind == "task":
            run.tasks[_task(record)] = record
        elif kind == "start":
            run.start = as_dict(record, "measures")
        elif kind == "resume":
            run.resumed.append(_task(record))

    read_records(run.path, take)
    if not run.tasks and not run.start:
        raise InputError(f"{run.path / 'records.jsonl'} holds no records of a continual run: nothing to report yet")
    return run


def read_runs(paths: Iterable[str | Path], *, pool: bool = True) -> list[Run]:
    """Read run folders; a folder of several runs (``seed-0``, ``seed-1``, ...) stands for all of them, in order.

    Args:
        paths: Run folders, or folders of them.
        pool: Whether the runs may be of different configurations. Otherwise their options and data must be the same, but
            for seed, machine and number of tasks. What a run does not tell, such as an option that its version of fastlr
            did not have, is not compared.

    Raises:
        InputError: A path is no run folder and holds none; one run is named twice; or without ``pool``, they differ: the
            message says in what, and which belong together.
    """
    runs = [read_run(folder) for folder in run_folders(paths)]
    if not pool:
        _check_same(runs)
    return runs


def _check_same(runs: list[Run]) -> None:
    told = [_told(run) for run in runs]
    common = [key for key in told[0] if all(key in each for each in told)]
    differ = [key for key in common if any(each[key] != told[0][key] for each in told)]
    if not differ:
        return
    groups: dict[str, list[str]] = {}
    for run, each in zip(runs, told):
        groups.setdefault(", ".join(f"{key}={_short(each[key])}" for key in differ), []).append(str(run.path))
    shown = [f"{what}: {' '.join(paths)}" for what, paths in list(groups.items())[:_SHOWN]]
    more = [f"and {len(groups) - _SHOWN} more"] * (len(groups) > _SHOWN)
    raise InputError(
        f"these are runs of {len(groups)} configurations, which are not pooled: give the run folders of one "
        f"({'; '.join(shown + more)}), or say --pool"
    )


def _told(run: Run) -> dict[str, Any]:
    """What a run says of its configuration."""
    told = {key: value for key, value in run.options.items() if key not in _OF_NO_RESULT}
    digest = as_dict(run.config, "data").get("digest")
    return told if digest is None else {**told, "data": digest}


def _short(value: Any) -> str:
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _task(record: dict[str, Any]) -> int:
    task = record["task"]
    if isinstance(task, bool) or not isinstance(task, int) or not 0 <= task < 10_000_000:
        raise ValueError(f"task {task!r}")
    return task


def _entry(record: dict[str, Any], name: str) -> dict[str, Any]:
    entry = as_dict(record, "measures").get(name)
    return entry if isinstance(entry, dict) else {"value": entry}
