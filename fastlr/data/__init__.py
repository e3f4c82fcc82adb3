"""Data of the drivers.

Images for continual learning: prepare a store once, then load tasks of two classes to the device. See :func:`prepare`
(``fastlr data prepare``), :class:`ImageStore`, and :mod:`fastlr.data.tasks`. Time series: :mod:`fastlr.data.series`.
"""

from __future__ import annotations

from fastlr.data.prepare import prepare
from fastlr.data.series import SplitSeries, Windows, open_series, split_series
from fastlr.data.store import ImageStore
from fastlr.data.synthetic import synthetic_store
from fastlr.data.tasks import Pair, Prefetcher, Task, load_task, normalise, pairs, take

__all__ = [
    "ImageStore",
    "Pair",
    "Prefetcher",
    "SplitSeries",
    "Task",
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
