"""The data of the experiments.

Images for continual learning: prepare a store once, then load tasks of two classes to the device.
See :func:`prepare` (``fastlr data prepare``), :class:`ImageStore`, and :mod:`.tasks`. Time series:
:mod:`.series`.
"""

from __future__ import annotations

from fastlr.experiments.data.prepare import prepare
from fastlr.experiments.data.random_labels import FreshDigits, PermutedDigits, RandomLabels
from fastlr.experiments.data.series import SplitSeries, Windows, open_series, split_series
from fastlr.experiments.data.store import ImageStore
from fastlr.experiments.data.synthetic import synthetic_store
from fastlr.experiments.data.tasks import (
    ClassPairs,
    Pair,
    Prefetcher,
    Task,
    TaskSequence,
    load_task,
    normalise,
    pairs,
    take,
)

__all__ = [
    "ClassPairs",
    "FreshDigits",
    "ImageStore",
    "Pair",
    "PermutedDigits",
    "Prefetcher",
    "SplitSeries",
    "RandomLabels",
    "Task",
    "TaskSequence",
    "Windows",
    "load_task",
    "normalise",
    "open_series",
    "pairs",
    "prepare",
    "split_series",
    "synthetic_store",
    "take",
]
