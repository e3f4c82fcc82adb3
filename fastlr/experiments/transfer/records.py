"""Read and compare transfer runs: each strategy's loss after fine-tuning, paired by seed.

Source: paper, section 4.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from fastlr.experiments.runs.records import (
    ON_A_MACHINE,
    Array,
    Record,
    RunFolder,
    check_numbers,
    measured,
    number,
    refuse_copies,
    refuse_mixtures,
    run_folders,
    without,
)
from fastlr.experiments.statistics.seeds import Mean, mean_over_seeds

# Of the options of runs that are pooled.
_MAY_DIFFER = ("seed", "source", "target", *ON_A_MACHINE)


def with_the_files(record: Record) -> Record:
    """Return an epoch's record with the checkpoint's own local redundancy among its measures.

    It is the last measurement within the epoch, of which local redundancy is the mean.
    """
    points = measured(record, "local_redundancy").get("points")
    if not points:
        return record
    return {**record, "local_redundancy_at_end": points[-1].get("value")}


@dataclass
class TransferRun(RunFolder):
    """The records of a transfer run, whose steps are the epochs of pretraining, from 1.

    Attributes:
        picks: Strategy to what it picked.
        tunings: (epoch of the checkpoint, number of the run) to its record.
    """

    picks: dict[str, dict[str, Any]] = field(default_factory=dict)
    tunings: dict[tuple[int, int], Record] = field(default_factory=dict)

    experiment, driver = "a transfer run", "transfer"
    row, step = "pretrain", "epoch"

    def add(self, record: Record) -> None:
        """Take a line of the records; of several for one step the last counts."""
        kind = record["kind"]
        if kind == "selection":
            self.picks = {
                name: {"epoch": int(pick["epoch"]), **pick}
                for name, pick in record["picks"].items()
            }
        elif kind == "finetune":
            check_numbers(record, ("validation_loss",))
            if not record["validation"] or not record["steps"]:
                raise ValueError("no validation")
            self.tunings[int(record["epoch"]), int(record["run"])] = record
        else:
            super().add(with_the_files(record))

    @property
    def records(self) -> list[Record]:
        """All records with seconds: those of pretraining and of fine-tuning."""
        return [*self.rows.values(), *self.tunings.values()]

    @property
    def epochs(self) -> int:
        """The last epoch of pretraining; 0 before the first."""
        return len(self) - 1

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
        epochs = self.options.get("finetune_epochs", 0)
        steps = epochs * self.untrained.get("finetune_steps_per_epoch", 0)
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
        losses = np.empty((len(records), len(steps)))
        for row, record in zip(losses, records):
            known = record["validation"]
            row[: len(known)] = known
            row[len(known) :] = known[-1]
        return np.array(steps, dtype=float), losses.mean(0)

    def redundancy_points(self) -> tuple[Array, Array]:
        """Every measurement of local redundancy: epochs passed (a fraction), and value or NaN."""
        steps = self.untrained.get("steps_per_epoch", 1)
        points = [
            point
            for record in self.rows.values()
            for point in measured(record, "local_redundancy").get("points", [])
        ]
        epochs = np.array([point["step"] / steps for point in points])
        return epochs, np.array([number(point["value"]) for point in points])


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
    means = {}
    for name in strategies(runs):
        means[name] = mean_over_seeds([run.loss(name) for run in runs])
    return means


def differences(runs: Sequence[TransferRun]) -> list[Difference]:
    """Return the paired differences of every two strategies over the seeds of complete runs."""
    return [difference(runs, *pair) for pair in combinations(strategies(runs), 2)]


def difference(runs: Sequence[TransferRun], first: str, second: str) -> Difference:
    """Return the paired difference of two strategies."""
    by_seed = [run.loss(first) - run.loss(second) for run in runs]
    same = sum(run.picks[first]["epoch"] == run.picks[second]["epoch"] for run in runs)
    lower = sum(value < 0 for value in by_seed)
    return Difference(first, second, mean_over_seeds(by_seed), lower, same)


def read_transfer_runs(paths: Iterable[str | Path]) -> list[TransferRun]:
    """Read run folders, or folders of them, that differ in nothing but their seeds.

    Raises:
        InputError: No runs there; two of one seed; runs with different options, data or versions of
            the network.
    """
    runs = [TransferRun.read(folder) for folder in run_folders(paths)]
    refuse_copies(runs)
    refuse_mixtures(runs, list(map(_settings, runs)))
    return runs


def _settings(run: TransferRun) -> dict[str, Any]:
    """Return what pooled runs have in common."""
    return {**without(run.full_options, _MAY_DIFFER), "data": run.digest}
