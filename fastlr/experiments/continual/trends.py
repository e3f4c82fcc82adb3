"""Trends of local redundancy over continual runs, by the rule of `fastlr.display.trend`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from fastlr.display.record import counted
from fastlr.display.trend import Measurement, describe, trend
from fastlr.experiments.continual.experiment import PER_IMAGE
from fastlr.experiments.continual.records import ContinualRun
from fastlr.experiments.runs.folder import CHECKPOINTS
from fastlr.experiments.runs.records import Array, measured, number

_NAME = "local_redundancy"
_SEPARATE = 4  # most runs that get a sentence each
_CLOSE = 1e-3  # relative difference of a reading and the mean of its images' values in float32


def trends(runs: Sequence[ContinualRun]) -> list[str]:
    """Return a sentence per run, or one line for more than four runs."""
    known = [run for run in runs if np.isfinite(run.measure(_NAME)).any()]
    if len(known) > _SEPARATE:
        return [in_a_line("All", known)]
    sentences = [describe(readings(run)) for run in known]
    if len(runs) == 1:
        return sentences
    return [f"{run.name}: {sentence}" for run, sentence in zip(known, sentences)]


def trends_by_group(groups: Mapping[str, Sequence[ContinualRun]]) -> list[str]:
    """Return a line per group of runs, such as those of one intervention."""
    return [in_a_line(name, runs) for name, runs in groups.items()]


def in_a_line(name: str, runs: Sequence[ContinualRun]) -> str:
    """Count the runs in which local redundancy fell and rose significantly.

    Example: "none (10 runs): local redundancy fell significantly in 9 and rose in 0."
    """
    found = [trend(readings(run)) for run in runs]
    directions = [one.direction for one in found if one is not None]
    text = (
        f"local redundancy fell significantly in {directions.count(-1)} and rose in "
        f"{directions.count(1)}"
    )
    if len(directions) < len(runs):
        text += (
            f"; {len(runs) - len(directions)} without a trend: too few readings, or not all usable"
        )
    return f"{name} ({counted(len(runs), 'run')}): {text}."


def readings(run: ContinualRun) -> list[Measurement]:
    """Return the measurements of local redundancy after a run's tasks, in order."""
    every = run.options.get("measure_every", 1)
    found = []
    for task, record in sorted(run.tasks.items()):
        entry = measured(record, _NAME)
        if not math.isnan(number(entry.get("value"))):
            found.append(Measurement.of(entry, _per_image(run, (task + 1) // every, entry)))
    return found


def _per_image(run: ContinualRun, row: int, entry: Mapping[str, object]) -> torch.Tensor | None:
    """Return the value of each image at a reading, from the file of the run; None if not kept."""
    n = entry.get("n")
    if not isinstance(n, int):
        return None
    try:
        with open(run.path / CHECKPOINTS / PER_IMAGE, "rb") as file:
            file.seek(4 * n * row)
            data = file.read(4 * n)
    except OSError:
        return None
    if len(data) < 4 * n:
        return None
    values: Array = np.frombuffer(data, "<f4").astype(np.float64)
    value = number(entry["value"])
    is_of_this_reading = abs(values.mean() - value) <= _CLOSE * value
    return torch.from_numpy(values) if is_of_this_reading else None
