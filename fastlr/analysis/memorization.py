"""Memorization runs read back (paper, section 4.3): losses, bits and local redundancy over the epochs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastlr.analysis.folders import RunFolder, as_dict, number, read_config, read_records, run_folders
from fastlr.errors import InputError

Array = NDArray[np.float64]
LATE = 0.1  # of the epochs: the last ones, over which late_gain counts


@dataclass
class MemorizationRun(RunFolder):
    """The records of one run.

    Attributes:
        records: Epoch to its record; 0: the untrained network.
    """

    records: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """``vision`` or ``series``; ``vision`` where the configuration does not say."""
        return str(self.options.get("kind", "vision"))

    @property
    def samples(self) -> int:
        """How many there are to memorise; 0 where the configuration does not say."""
        return int(self.options.get("n", 0))

    @property
    def parameters(self) -> int:
        """Of the network."""
        return int(self.records.get(0, {}).get("parameters", 0))

    @property
    def substitutions(self) -> list[str]:
        """In what the run differs from the paper's."""
        return list(self.records.get(0, {}).get("substitutions", []))

    @property
    def ceiling(self) -> float:
        """Bits a parameter that there are to memorise; NaN where there is no end to them."""
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
        found = {e: as_dict(as_dict(self.records[e], "measures"), "local_redundancy") for e in sorted(self.records)}
        known = [(e, number(each["value"]), number(each.get("stderr"))) for e, each in found.items() if "value" in each]
        epochs, values, errors = np.array(known, dtype=float).reshape(-1, 3).T
        return epochs, values, errors

    def train_losses(self) -> tuple[Array, Array]:
        """Every epoch, and the mean loss of its batches as they were met."""
        losses = [loss for epoch in sorted(self.records) for loss in self.records[epoch].get("train_losses", [])]
        return np.arange(1.0, len(losses) + 1), np.array([number(loss) for loss in losses])

    def late_gain(self) -> float:
        """Bits a parameter gained over the last tenth of the epochs (between records); NaN with fewer than three."""
        if len(self.records) < 3:
            return math.nan
        epochs, bits = self.epochs, self.series("bits_per_parameter")
        before = int(np.searchsorted(epochs, (1 - LATE) * epochs[-1], side="right")) - 1
        return float(bits[-1] - bits[min(before, len(bits) - 2)])

    def seconds(self, name: str) -> float:
        """Of all records together, of "train", "evaluate" or "local_redundancy"."""
        return math.fsum(number(as_dict(each, "seconds").get(name, 0)) for each in self.records.values())


def read_memorization_run(path: str | Path) -> MemorizationRun:
    """Read one run folder; damaged lines are left out with a warning.

    Raises:
        InputError: No such folder, or it holds no record of a memorization run.
    """
    run = MemorizationRun(Path(path))
    run.config = read_config(run.path)

    def take(record: dict[str, Any]) -> None:
        if record["kind"] in ("start", "epoch"):
            float(record["bits_per_parameter"]), float(record["loss"])
            run.records[int(record["epoch"])] = record

    read_records(run.path, take)
    if 0 not in run.records:
        raise InputError(f"{run.path / 'records.jsonl'} holds no records of a memorization run: nothing to report yet")
    return run


def read_memorization_runs(paths: Iterable[str | Path]) -> list[MemorizationRun]:
    """Read run folders, or folders of them, series before vision.

    Raises:
        InputError: No runs there.
    """
    return sorted((read_memorization_run(folder) for folder in run_folders(paths)), key=lambda run: run.kind)


def alike(runs: Sequence[MemorizationRun]) -> list[list[MemorizationRun]]:
    """Group runs that differ in nothing but their seeds, and are equally far."""
    groups: dict[str, list[MemorizationRun]] = {}
    for run in runs:
        options = {key: value for key, value in run.options.items() if key not in ("seed", "device", "threads")}
        groups.setdefault(repr((sorted(options.items(), key=str), max(run.records))), []).append(run)
    return list(groups.values())
