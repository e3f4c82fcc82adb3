"""Transfer runs read back and compared (paper, section 4.2): each strategy's loss after fine-tuning, paired by seed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastlr.analysis.bootstrap import LEVEL, student_quantile
from fastlr.analysis.folders import RunFolder, as_dict, number, read_config, read_records, run_folders
from fastlr.errors import InputError

Array = NDArray[np.float64]
_MAY_DIFFER = ("seed", "device", "threads", "source", "target")  # of the options of runs that are pooled


@dataclass
class TransferRun(RunFolder):
    """The records of one run.

    Attributes:
        start: Of the network before training.
        epochs: Epoch, from 1, to its record.
        picks: Strategy to what it picked.
        tunings: (epoch of the checkpoint, number of the run) to its record.
    """

    start: dict[str, Any] = field(default_factory=dict)
    epochs: dict[int, dict[str, Any]] = field(default_factory=dict)
    picks: dict[str, dict[str, Any]] = field(default_factory=dict)
    tunings: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)

    @property
    def seed(self) -> int:
        """Of the run; 0 where the configuration does not say."""
        return int(self.options.get("seed", 0))

    def of_pick(self, strategy: str) -> list[dict[str, Any]]:
        """The fine-tuning runs from the checkpoint that a strategy picked, in their order."""
        epoch = self.picks[strategy]["epoch"]
        return [record for (e, _), record in sorted(self.tunings.items()) if e == epoch]

    @property
    def complete(self) -> bool:
        """Whether every pick has been fine-tuned as often as the options say."""
        wanted = self.options.get("finetune_runs", 1)
        return bool(self.picks) and all(len(self.of_pick(name)) >= wanted for name in self.picks)

    def loss(self, strategy: str) -> float:
        """Mean over the fine-tuning runs of the last validation loss."""
        return float(np.mean([record["validation_loss"] for record in self.of_pick(strategy)]))

    def curve(self, strategy: str) -> tuple[Array, Array]:
        """Steps, and validation loss averaged over the fine-tuning runs; one that ended early goes on at its last."""
        records = self.of_pick(strategy)
        steps = max((record["steps"] for record in records), key=len)
        rows = [record["validation"] + [record["validation"][-1]] * len(steps) for record in records]
        return np.array(steps, dtype=float), np.array([row[: len(steps)] for row in rows]).mean(0)

    def numbers(self, name: str) -> Array:
        """A loss or measure by epoch, 0 (before training) to the last; NaN where it was not recorded."""
        values = np.full(max(self.epochs, default=0) + 1, np.nan)
        for epoch, record in {0: self.start, **self.epochs}.items():
            values[epoch] = number(record.get(name, as_dict(as_dict(record, "measures"), name).get("value")))
        return values

    def redundancy_points(self) -> tuple[Array, Array]:
        """Every measurement of local redundancy: epochs passed (a fraction), and value."""
        steps = self.start.get("steps_per_epoch", 1)
        records = [record for record in (self.start, *self.epochs.values()) if record]
        found = [as_dict(as_dict(record, "measures"), "local_redundancy").get("points", []) for record in records]
        points = [point for each in found for point in each]
        return np.array([p["step"] / steps for p in points]), np.array([p["value"] for p in points])

    def seconds(self, name: str = "") -> float:
        """Of all steps together, or what they spent on one thing, such as "train" (pretraining, without measuring)."""
        records = (self.start, *self.epochs.values(), *self.tunings.values())
        spent = [(key, number(value)) for record in records for key, value in as_dict(record, "seconds").items()]
        return sum(value for key, value in spent if name in ("", key))


@dataclass(frozen=True)
class Mean:
    """A mean over seeds.

    Attributes:
        value: The mean.
        stderr: Its standard error: standard deviation over sqrt(n); NaN for one seed.
        low: 95 % interval by Student's distribution with n - 1 degrees of freedom; NaN for one seed.
        high: Likewise.
        n: Seeds.
    """

    value: float
    stderr: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Difference:
    """The loss of one strategy minus that of another, paired by seed.

    Attributes:
        first: Strategy.
        second: The one that is subtracted.
        mean: Over seeds of the difference within a seed.
        lower: Seeds in which the first has the lower loss.
        same: Seeds in which both picked the same checkpoint: the difference is 0 there.
    """

    first: str
    second: str
    mean: Mean
    lower: int
    same: int


def mean_over_seeds(values: Sequence[float]) -> Mean:
    """Return mean, standard error and 95 % interval of independent values.

    Example:
        >>> found = mean_over_seeds([1.0, 2.0, 3.0])
        >>> round(found.value, 3), round(found.stderr, 3), round(found.high - found.value, 2), found.n
        (2.0, 0.577, 2.48, 3)
    """
    n, value = len(values), float(np.mean(values))
    if n < 2:
        return Mean(value, math.nan, math.nan, math.nan, n)
    stderr = float(np.std(values, ddof=1)) / math.sqrt(n)
    half = student_quantile(1 - LEVEL / 2, n - 1) * stderr
    return Mean(value, stderr, value - half, value + half, n)


def strategies(runs: Sequence[TransferRun]) -> list[str]:
    """Return the strategies of runs that are pooled, in their order."""
    return list(runs[0].picks) if runs else []


def losses(runs: Sequence[TransferRun]) -> dict[str, Mean]:
    """Return each strategy's loss after fine-tuning, over the seeds of complete runs."""
    return {name: mean_over_seeds([run.loss(name) for run in runs]) for name in strategies(runs)}


def differences(runs: Sequence[TransferRun]) -> list[Difference]:
    """Return the paired differences of every two strategies over the seeds of complete runs."""
    found = []
    for first, second in combinations(strategies(runs), 2):
        each = [run.loss(first) - run.loss(second) for run in runs]
        same = sum(run.picks[first]["epoch"] == run.picks[second]["epoch"] for run in runs)
        lower = sum(value < 0 for value in each)
        found.append(Difference(first, second, mean_over_seeds(each), lower, same))
    return found


def read_transfer_run(path: str | Path) -> TransferRun:
    """Read one run folder; of several lines for one step the last counts, and damaged lines are left out with a warning.

    Raises:
        InputError: No such folder, or it holds no record of a transfer run.
    """
    run = TransferRun(Path(path))
    run.config = read_config(run.path)

    def take(record: dict[str, Any]) -> None:
        kind = record["kind"]
        if kind == "start":
            run.start = record
        elif kind == "pretrain":
            run.epochs[int(record["epoch"])] = record
        elif kind == "selection":
            run.picks = {name: {"epoch": int(pick["epoch"]), **pick} for name, pick in record["picks"].items()}
        elif kind == "finetune":
            float(record["validation_loss"]), record["validation"][0], record["steps"][0]
            run.tunings[int(record["epoch"]), int(record["run"])] = record

    read_records(run.path, take)
    if not run.start:
        raise InputError(f"{run.path / 'records.jsonl'} holds no records of a transfer run: nothing to report yet")
    return run


def read_transfer_runs(paths: Iterable[str | Path]) -> list[TransferRun]:
    """Read run folders, or folders of them, that differ in nothing but their seeds.

    Raises:
        InputError: No runs there; two of one seed; runs with different options, data or versions of the network.
    """
    runs = [read_transfer_run(folder) for folder in run_folders(paths)]
    first = runs[0]
    for run in runs[1:]:
        for key in sorted(first.options.keys() | run.options.keys()):
            one, other = first.options.get(key), run.options.get(key)
            if key not in _MAY_DIFFER and one != other:
                raise InputError(f"{first.name} has {key}={one}, {run.name} {other}: report on them apart")
        if as_dict(run.config, "data").get("digest") != as_dict(first.config, "data").get("digest"):
            raise InputError(f"{first.name} and {run.name} have different data: report on them apart")
        same = next((each for each in runs if each is not run and each.seed == run.seed), None)
        if same is not None:
            raise InputError(f"{same.path} and {run.path} have the same seed {run.seed}: a seed counts once")
    return runs
