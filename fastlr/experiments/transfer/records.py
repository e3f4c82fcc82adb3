"""Read and compare transfer runs: each strategy's loss after fine-tuning, paired by seed.

Source: paper, section 4.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from fastlr.errors import InputError
from fastlr.experiments.runs.records import (
    Array,
    RunFolder,
    as_dict,
    check_numbers,
    measured,
    number,
    run_folders,
)
from fastlr.experiments.statistics.seeds import Mean, mean_over_seeds

_MAY_DIFFER = (
    "seed",
    "device",
    "threads",
    "source",
    "target",
)  # of the options of runs that are pooled


def value_of(record: Mapping[str, Any], name: str) -> Any:
    """Return a loss or measure of the record of an epoch.

    ``local_redundancy_at_end`` is that of the checkpoint: the last measurement within the epoch.
    """
    if name == "local_redundancy_at_end":
        return (measured(record, "local_redundancy").get("points") or [{}])[-1].get("value")
    return record.get(name, measured(record, name).get("value"))


@dataclass
class TransferRun(RunFolder):
    """The records of a transfer run.

    Attributes:
        start: Of the network before training.
        epochs: Epoch, from 1, to its record.
        picks: Strategy to what it picked.
        tunings: (epoch of the checkpoint, number of the run) to its record.
    """

    experiment, required = "a transfer run", ("start",)
    start: dict[str, Any] = field(default_factory=dict)
    epochs: dict[int, dict[str, Any]] = field(default_factory=dict)
    picks: dict[str, dict[str, Any]] = field(default_factory=dict)
    tunings: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)

    def add(self, record: dict[str, Any]) -> None:
        """Take a line of the records; of several for one step the last counts."""
        kind = record["kind"]
        if kind == "start":
            self.start = record
        elif kind == "pretrain":
            self.epochs[int(record["epoch"])] = record
        elif kind == "selection":
            self.picks = {
                name: {"epoch": int(pick["epoch"]), **pick}
                for name, pick in record["picks"].items()
            }
        elif kind == "finetune":
            check_numbers(record, "validation_loss")
            record["validation"][0], record["steps"][0]
            self.tunings[int(record["epoch"]), int(record["run"])] = record

    def odd(self) -> list[str]:
        """Say which epochs have no record though later ones have."""
        return [
            f"no record of epoch {e}"
            for e in range(1, max(self.epochs, default=0))
            if e not in self.epochs
        ]

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
        """True if every pick has been fine-tuned as often as the options say."""
        tunings = self.options.get("finetune_runs", 1)
        return bool(self.picks) and all(len(self.of_pick(name)) >= tunings for name in self.picks)

    @property
    def saturated(self) -> int:
        """The number of fine-tuning runs that were stopped early.

        They ended before their epochs, as their validation loss had saturated.
        """
        steps = self.options.get("finetune_epochs", 0) * self.start.get(
            "finetune_steps_per_epoch", 0
        )
        return sum(record["steps"][-1] < steps for record in self.tunings.values())

    def loss(self, strategy: str) -> float:
        """Mean over the fine-tuning runs of the last validation loss."""
        return float(np.mean([record["validation_loss"] for record in self.of_pick(strategy)]))

    def curve(self, strategy: str) -> tuple[Array, Array]:
        """Return a strategy's steps and its validation loss, averaged over the fine-tuning runs.

        A run that ended early goes on at its last loss.
        """
        records = self.of_pick(strategy)
        steps = max((record["steps"] for record in records), key=len)
        rows = [
            record["validation"] + [record["validation"][-1]] * len(steps) for record in records
        ]
        return np.array(steps, dtype=float), np.array([row[: len(steps)] for row in rows]).mean(0)

    def numbers(self, name: str) -> Array:
        """Return a loss or measure by epoch, 0 (before training) to the last.

        It is NaN where it was not recorded.
        """
        values = np.full(max(self.epochs, default=0) + 1, np.nan)
        for epoch, record in {0: self.start, **self.epochs}.items():
            values[epoch] = number(value_of(record, name))
        return values

    def redundancy_points(self) -> tuple[Array, Array]:
        """Every measurement of local redundancy: epochs passed (a fraction), and value."""
        steps = self.start.get("steps_per_epoch", 1)
        records = (self.start, *self.epochs.values())
        points = [
            point
            for record in records
            for point in measured(record, "local_redundancy").get("points", [])
        ]
        return np.array([point["step"] / steps for point in points]), np.array(
            [point["value"] for point in points]
        )

    def seconds(self, name: str = "") -> float:
        """Return the seconds of all steps, or those spent on one thing.

        An example is "train" (pretraining, without measuring).
        """
        records = (self.start, *self.epochs.values(), *self.tunings.values())
        entries = [entry for record in records for entry in as_dict(record, "seconds").items()]
        return sum(number(value) for key, value in entries if name in ("", key))


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


def strategies(runs: Sequence[TransferRun]) -> list[str]:
    """Return the strategies of runs that are pooled, in their order."""
    return list(runs[0].picks) if runs else []


def losses(runs: Sequence[TransferRun]) -> dict[str, Mean]:
    """Return each strategy's loss after fine-tuning, over the seeds of complete runs."""
    return {name: mean_over_seeds([run.loss(name) for run in runs]) for name in strategies(runs)}


def differences(runs: Sequence[TransferRun]) -> list[Difference]:
    """Return the paired differences of every two strategies over the seeds of complete runs."""
    pairs = []
    for first, second in combinations(strategies(runs), 2):
        by_seed = [run.loss(first) - run.loss(second) for run in runs]
        same = sum(run.picks[first]["epoch"] == run.picks[second]["epoch"] for run in runs)
        lower = sum(value < 0 for value in by_seed)
        pairs.append(Difference(first, second, mean_over_seeds(by_seed), lower, same))
    return pairs


def read_transfer_runs(paths: Iterable[str | Path]) -> list[TransferRun]:
    """Read run folders, or folders of them, that differ in nothing but their seeds.

    Raises:
        InputError: No runs there; two of one seed; runs with different options, data or versions of
            the network.
    """
    runs = [TransferRun.read(folder) for folder in run_folders(paths)]
    reference = runs[0]
    for index, run in enumerate(runs[1:], 1):
        for key in sorted(reference.options.keys() | run.options.keys()):
            expected, value = reference.options.get(key), run.options.get(key)
            if key not in _MAY_DIFFER and expected != value:
                raise InputError(
                    f"{reference.name} has {key}={expected}, {run.name} {value}: report on them "
                    "apart"
                )
        if as_dict(run.config, "data").get("digest") != as_dict(reference.config, "data").get(
            "digest"
        ):
            raise InputError(
                f"{reference.name} and {run.name} have different data: report on them apart"
            )
        for earlier in runs[:index]:
            if earlier.seed == run.seed:
                raise InputError(
                    f"{earlier.path} and {run.path} have the same seed {run.seed}: a seed counts "
                    "once"
                )
    return runs
