"""The verdict on continual runs: whether local redundancy and accuracy have moved, in words.

The rule is that of `fastlr.display.verdict`; each reading of a run is one after a task.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from fastlr.display.alarm import (
    BY_ACCURACY,
    EVERY,
    FIRST,
    ring_flags,
    tasks_of_trailing_mean,
    trailing_mean,
)
from fastlr.display.record import counted
from fastlr.display.verdict import (
    PARTS,
    Change,
    Measurement,
    brief,
    change,
    difference,
    first_and_last,
    verdict,
)
from fastlr.experiments.continual.experiment import PER_IMAGE
from fastlr.experiments.continual.records import ContinualRun
from fastlr.experiments.runs.folder import CHECKPOINTS
from fastlr.experiments.runs.records import Array, as_dict, finite, measured, number

_LEADER, _OWN = "local_redundancy", "local_redundancy_next_task"
_TOLD = 4  # runs of which each has a verdict
_NEVER = 0.1  # of the way from a guess to 1: a network that never got further never learned
_COMPARED = (
    "Below, the last fifth of each run is held to the first after training began, on logarithms, "
    "beyond the errors at 99 %, neighbouring readings taken for independent."
)
_CLOSE = 1e-3  # relative difference of a reading and the mean of its images' values in float32


class Changes(NamedTuple):
    """What became of a run; None where it is not known.

    Attributes:
        value: Of local redundancy.
        own: Of local redundancy on the next task's images.
        accuracy: Of the accuracy on each task.
    """

    value: Change | None
    own: Change | None
    accuracy: Change | None


def verdicts(runs: Sequence[ContinualRun]) -> list[str]:
    """Return the verdict of each run, of more than four a line on how many have fallen."""
    known = [run for run in runs if np.isfinite(run.measure(_LEADER)).any()]
    if len(known) > _TOLD:
        return [_COMPARED, in_a_line("All", known)]
    told = [verdict_of(run) for run in known]
    return told if len(runs) == 1 else [f"{run.name}: {text}" for run, text in zip(known, told)]


def verdicts_by_group(groups: Mapping[str, Sequence[ContinualRun]]) -> list[str]:
    """Return what is compared, and a line on each group of runs, such as an intervention's."""
    return [_COMPARED, *(in_a_line(name, runs) for name, runs in groups.items())]


def verdict_of(run: ContinualRun) -> str:
    """Return the verdict of one run."""
    values = readings(run)
    found = outcome(run)
    dormant = [measured(record, "dormant_ratio") for _, record in sorted(run.tasks.items())]
    known = [entry for entry in dormant if entry.get("value") is not None]
    return verdict(
        first_and_last(values),
        len(values),
        dormant=known[-1] if known else None,
        accuracy=found.accuracy,
        own=found.own,
        guess=guess(run) if never_learned(run) else None,
    )


def in_a_line(name: str, runs: Sequence[ContinualRun]) -> str:
    """Say in how many runs local redundancy and accuracy have fallen and risen.

    Example: "none (10 runs): local redundancy has fallen in 9, risen in 0; accuracy has fallen in
    10, risen in 0."
    """
    outcomes = [outcome(run) for run in runs]
    told = [
        _moves(text, [getattr(found, key) for found in outcomes])
        for key, text in (
            ("value", "local redundancy"),
            ("own", "that on the next task's images"),
            ("accuracy", "accuracy"),
        )
    ]
    never = sum(never_learned(run) for run in runs)
    told += [f"{never} never learned"] if never else []
    text = "; ".join(filter(None, told)) or "too few readings to tell"
    return f"{name} ({counted(len(runs), 'run')}): {text}."


def _moves(name: str, changes: Sequence[Change | None]) -> str:
    """Say in how many of these changes something has fallen and risen; empty if none is known."""
    known = [found for found in changes if found is not None]
    if not known:
        return ""
    if len(changes) == 1:
        ends = f"from {brief(known[0].first)} to {brief(known[0].last)}"
        word = {-1: "has fallen", 0: "cannot be told to have moved", 1: "has risen"}[known[0].moved]
        return f"{name} {word} {ends}"
    moved = [found.moved for found in known]
    return f"{name} has fallen in {moved.count(-1)}, risen in {moved.count(1)} of {len(known)}"


def alarms(groups: Mapping[str, Sequence[ContinualRun]]) -> list[str]:
    """Say when the alarm rang, by the accuracy on new tasks, and what such rings are worth.

    Args:
        groups: Name -> runs, such as those of an intervention; one run is told by its tasks,
            several are counted.
    """
    told = {name: when_it_rang(runs) for name, runs in groups.items()}
    if len(told) == 1:
        text = next(iter(told.values()))
    else:
        text = "; ".join(f"{name}: {when}" for name, when in told.items())
    return [f"When the alarm rang, by {BY_ACCURACY.words}: {text}. {BY_ACCURACY.rates()}"]


def when_it_rang(runs: Sequence[ContinualRun]) -> str:
    """Say after which tasks of one run the alarm rang, or in how many of several."""
    heard = [run for run in runs if not why_it_cannot_ring(run)]
    if not heard:
        return f"never, as {why_it_cannot_ring(runs[0])}"
    rung = [rings_in(run) for run in heard]
    if len(runs) > 1:
        deaf = dict.fromkeys(filter(None, map(why_it_cannot_ring, runs)))
        others = f" (in {len(runs) - len(heard)} more it cannot: {', '.join(deaf)})" if deaf else ""
        return f"in {sum(map(bool, rung))} of {counted(len(heard), 'run')}{others}"
    after = ", ".join(str(task + 1) for task in rung[0])
    return f"after {after} tasks" if after else "not at all"


def why_it_cannot_ring(run: ContinualRun) -> str:
    """Return why the alarm cannot ring in a run, whatever happens there; "" where it can."""
    if len(run.accuracy) <= FIRST:
        return f"it needs more than {FIRST} tasks"
    if math.isnan(guess(run)):
        return "it is not known what a guess gives"
    if not np.isfinite(run.accuracy).all():
        return "a task was skipped"
    return ""


def rings_in(run: ContinualRun) -> list[int]:
    """Return the numbers of the tasks after which the alarm by accuracy rings in a run."""
    accuracy = run.accuracy
    width = tasks_of_trailing_mean(BY_ACCURACY.signal)
    read_at = np.arange(EVERY - 1, len(accuracy), EVERY)
    recent = trailing_mean(accuracy, width)[read_at]
    return read_at[ring_flags(BY_ACCURACY, recent, read_at, guess(run))].tolist()


def outcome(run: ContinualRun) -> Changes:
    """Compare the first and the last fifth of a run."""
    value = first_and_last(readings(run))
    own = first_and_last(readings(run, _OWN))
    accuracy = first_and_last(finite(run.accuracy).tolist())
    return Changes(
        change(*value) if value else None,
        change(*own) if own else None,
        difference(*accuracy) if accuracy else None,
    )


def readings(run: ContinualRun, name: str = _LEADER) -> list[Measurement]:
    """Return a run's measurements of local redundancy after its tasks, in order."""
    every = run.options.get("measure_every", 1)
    found = []
    for task, record in sorted(run.tasks.items()):
        entry = measured(record, name)
        if math.isnan(number(entry.get("value"))):
            continue
        row = _row(run, (task + 1) // every, entry) if name == _LEADER else None
        found.append(Measurement.of(entry, row))
    return found


def _row(run: ContinualRun, row: int, entry: Mapping[str, object]) -> torch.Tensor | None:
    """Return the images' values of a reading from the run's file of them; None if it has none."""
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


def never_learned(run: ContinualRun) -> bool:
    """Return True if accuracy was at a guess in every fifth of a run."""
    of_guess, accuracy = guess(run), finite(run.accuracy)
    if len(accuracy) < PARTS or math.isnan(of_guess):
        return False
    best = max(float(part.mean()) for part in np.array_split(accuracy, PARTS))
    return best - of_guess < _NEVER * (1 - of_guess)


def guess(run: ContinualRun) -> float:
    """Return the accuracy of the best constant answer; NaN if it is not known.

    With random labels that is the share of the most frequent one, here its expectation.
    """
    data = as_dict(run.config, "data")
    images, classes = data.get("images"), data.get("classes")
    if not (run.has_memorised and isinstance(images, int) and isinstance(classes, int)):
        return run.chance
    draws = np.random.default_rng(0).multinomial(images, [1 / classes] * classes, 1000)
    return float(draws.max(1).mean()) / images
