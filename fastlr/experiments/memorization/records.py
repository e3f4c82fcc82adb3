"""Read memorization runs: losses, bits and local redundancy over the epochs.

Source: paper, section 4.3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fastlr.experiments.runs.records import (
    Array,
    RunFolder,
    as_dict,
    check_numbers,
    finite,
    measured,
    number,
    refuse_copies,
    run_folders,
    seconds,
)

LATE = 0.1  # of the epochs: the last ones, over which late_gain counts


@dataclass
class MemorizationRun(RunFolder):
    """The records of a memorization run.

    Attributes:
        records: Epoch to its record; 0: the untrained network.
    """

    experiment, required = "a memorization run", ("start",)
    records: dict[int, dict[str, Any]] = field(default_factory=dict)

    def add(self, record: dict[str, Any]) -> None:
        """Take a line of the records; of several for one epoch the last counts."""
        if record["kind"] in ("start", "epoch"):
            with_accuracy = ["accuracy"] if record.get("accuracy") is not None else []
            check_numbers(record, "bits_per_parameter", "loss", *with_accuracy)
            self.records[int(record["epoch"])] = record

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
        return int(self.records.get(0, {}).get("parameters", 0))

    @property
    def substitutions(self) -> list[str]:
        """The ways in which the run differs from the paper's."""
        return list(self.records.get(0, {}).get("substitutions", []))

    @property
    def ceiling(self) -> float:
        """Bits a parameter that there are to memorise; NaN where there is no limit."""
        bits = number(as_dict(self.config, "data").get("ceiling_bits"))
        return bits / self.parameters if self.parameters else math.nan

    @property
    def last(self) -> dict[str, Any]:
        """The last record."""
        return self.records[max(self.records)]

    @property
    def epochs(self) -> Array:
        """Epochs that have a record."""
        return np.array(sorted(self.records), dtype=float)

    def series(self, name: str) -> Array:
        """A number at those epochs; NaN where it was not recorded."""
        return np.array([number(self.records[epoch].get(name)) for epoch in sorted(self.records)])

    def redundancy(self) -> tuple[Array, Array, Array]:
        """Epochs at which local redundancy was measured, its values and standard errors."""
        entries = {
            epoch: measured(self.records[epoch], "local_redundancy")
            for epoch in sorted(self.records)
        }
        known = [
            (epoch, number(entry["value"]), number(entry.get("stderr")))
            for epoch, entry in entries.items()
            if entry.get("value") is not None
        ]
        epochs, values, errors = np.array(known, dtype=float).reshape(-1, 3).T
        return epochs, values, errors

    def train_losses(self) -> tuple[Array, Array]:
        """Every epoch, and the mean loss of its batches as they were met."""
        losses = [
            loss
            for epoch in sorted(self.records)
            for loss in self.records[epoch].get("train_losses", [])
        ]
        return np.arange(1.0, len(losses) + 1), np.array([number(loss) for loss in losses])

    def late_gain(self) -> float:
        """Return the bits gained per parameter over the last tenth of the epochs.

        It is taken between two records, and NaN with fewer than three records.
        """
        if len(self.records) < 3:
            return math.nan
        epochs, bits = self.epochs, self.series("bits_per_parameter")
        before = int(np.searchsorted(epochs, (1 - LATE) * epochs[-1], side="right")) - 1
        return float(bits[-1] - bits[min(before, len(bits) - 2)])

    def seconds(self, name: str) -> float:
        """Seconds of all records that were spent on "train", "evaluate" or "local_redundancy"."""
        return math.fsum(finite([seconds(record, name) for record in self.records.values()]))


def read_memorization_runs(paths: Iterable[str | Path]) -> list[MemorizationRun]:
    """Read run folders, or folders of them, series before vision.

    Raises:
        InputError: No runs there, or one is there twice.
    """
    runs = sorted(
        (MemorizationRun.read(folder) for folder in run_folders(paths)), key=lambda run: run.kind
    )
    for pooled in alike(runs):
        refuse_copies(pooled, "memorize")
    return runs


def alike(runs: Sequence[MemorizationRun]) -> list[list[MemorizationRun]]:
    """Group runs that differ in nothing but their seeds, and are equally far."""
    groups: dict[str, list[MemorizationRun]] = {}
    for run in runs:
        options = {
            key: value
            for key, value in run.options.items()
            if key not in ("seed", "device", "threads")
        }
        groups.setdefault(repr((sorted(options.items(), key=str), max(run.records))), []).append(
            run
        )
    return list(groups.values())
