"""Images for the continual-learning driver: prepare a store once, then load tasks of two classes to the device.

See :func:`prepare` (``fastlr data prepare``), :class:`ImageStore`, and :mod:`fastlr.data.tasks`.
"""

from __future__ import annotations

from fastlr.data.prepare import prepare
from fastlr.data.store import ImageStore
from fastlr.data.synthetic import synthetic_store
from fastlr.data.tasks import Pair, Prefetcher, Task, load_task, normalise, pairs, take

__all__ = [
    "ImageStore",
    "Pair",
    "Prefetcher",
    "Task",
    "load_task",
    "normalise",
    "pairs",
    "prepare",
    "synthetic_store",
    "take",
]
