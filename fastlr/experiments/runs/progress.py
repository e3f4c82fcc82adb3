"""The progress of a run, which it reports after each epoch and each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Progress:
    """The progress of a run, in steps and epochs.

    A step is what its checkpoints lie between: a task, a pretraining, so many epochs.

    Attributes:
        done: Steps done.
        total: Steps in all.
        epoch: Epochs done of the step under way; 0 right after a step.
        epochs: Epochs a step.
        record: That of the last step done (or of the start); None in between, and right after
            resuming.
    """

    done: int
    total: int
    epoch: int
    epochs: int
    record: Mapping[str, Any] | None


Report = Callable[[Progress], Any]


def no_report(progress: Progress) -> None:
    """Show nothing."""
