"""Read memorization runs: losses, bits and local redundancy over the epochs.

Source: paper, section 4.3.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastlr.experiments.runs.records import (
    ON_A_MACHINE,
    Array,
    Record,
    RunFolder,
    as_dict,
    check_numbers,
    grouped,
    number,
    refuse_copies,
    run_folders,
    without,
)

LATE = 0.1  # of the epochs: the last ones, over which late_gain counts


@dataclass
class MemorizationRun(RunFolder):
    """The records of a memorization run, whose steps are those epochs that have a record."""

    experiment, driver = "a memorization run", "memorize"
    row, step = "epoch", "epoch"
    numbers = ("bits_per_parameter", "loss")

    def add(self, record: Record) -> None:
        """Take a line of the records; of several for one epoch the last counts."""
        is_step = record["kind"] in ("start", self.row)
        if is_step and record.get("accuracy") is not None:
            check_numbers(record, ("accuracy",))
        super().add(record)

    def odd(self) -> list[str]:
        """Return nothing: most epochs have no record."""
        return []

    @property
    def kind(self) -> str:
        """``vision`` or ``series``; ``vision`` where the configuration does not say."""
        return str(self.options.get("kind", "vision"))

    @property
    def samples(self) -> int:
        """The number of samples to memorise; 0 where the configuration does not say."""
        return int(self.options.get("n", 0))

    @property
    def parameters(self) -> int:
        """The number of parameters of the network."""
        return int(self.untrained.get("parameters", 0))

    @property
    def substitutions(self) -> list[str]:
        """The ways in which the run differs from the paper's."""
        return list(self.untrained.get("substitutions", []))

    @property
    def ceiling(self) -> float:
        """Bits a parameter that there are to memorise; NaN where there is no limit."""
        bits = number(as_dict(self.config, "data").get("ceiling_bits"))
        return bits / self.parameters if self.parameters else math.nan

    @property
    def epochs(self) -> list[int]:
        """The epochs that have a record, from 0."""
        return sorted(self.rows)

    @property
    def last(self) -> Record:
        """The last record."""
        return self.rows[self.epochs[-1]]

    def series(self, name: str) -> Array:
        """A number at those epochs; NaN where it was not recorded."""
        return self.measure(name)[self.epochs]

    def redundancy(self) -> tuple[NDArray[np.int_], Array, Array]:
        """Epochs at which local redundancy was measured, its values and standard errors."""
        values = self.measure("local_redundancy")
        known = np.flatnonzero(np.isfinite(values))
        return known, values[known], self.measure("local_redundancy", "stderr")[known]

    def train_losses(self) -> tuple[Array, Array]:
        """Every epoch, and the mean loss of its batches as they were met."""
        losses = [loss for record in self.records for loss in record.get("train_losses", [])]
        return np.arange(1.0, len(losses) + 1), np.array([number(loss) for loss in losses])

    def late_gain(self) -> float:
        """Return the bits gained per parameter over the `late_epochs`.

        It is NaN with fewer than three records.
        """
        if len(self.records) < 3:
            return math.nan
        bits = self.series("bits_per_parameter")
        return float(bits[-1] - bits[self._late_from()])

    @property
    def late_epochs(self) -> int:
        """The last epochs, of which `late_gain` is.

        They are the last tenth, or, where no record is at its start, those since the record before.
        """
        return self.epochs[-1] - self.epochs[self._late_from()]

    @property
    def late_is_a_tenth(self) -> bool:
        """True if the `late_epochs` are the last tenth of all epochs."""
        return math.isclose(self.late_epochs, LATE * self.epochs[-1])

    def _late_from(self) -> int:
        """Return the place of the record with which the `late_epochs` begin."""
        before = int(np.searchsorted(self.epochs, (1 - LATE) * self.epochs[-1], side="right")) - 1
        return max(0, min(before, len(self.epochs) - 2))


def read_memorization_runs(paths: Iterable[str | Path]) -> list[MemorizationRun]:
    """Read run folders, or folders of them, series before vision.

    Raises:
        InputError: No runs there, or one is there twice.
    """
    runs = [MemorizationRun.read(folder) for folder in run_folders(paths)]
    runs.sort(key=lambda run: run.kind)
    for pooled in alike(runs):
        refuse_copies(pooled)
    return runs


def alike(runs: Sequence[MemorizationRun]) -> list[list[MemorizationRun]]:
    """Group runs that differ in nothing but their seeds, and are equally far."""
    keys = []
    for run in runs:
        options = without(run.options, ("seed", *ON_A_MACHINE))
        keys.append((json.dumps(options, sort_keys=True), len(run)))
    return [group for _, group in grouped(runs, keys)]
