"""What every intervention that acts during training looks like to the trainer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fastlr.data import Task

if TYPE_CHECKING:
    from fastlr.drivers.training import Trainer


class Intervention:
    """Something that acts on a model while it learns; each method here does nothing.

    The trainer calls `before_task`, then trains within `watching`, then calls `after_task`. In each step it calls
    `add_gradients` between the backward pass and the optimiser, and `after_step` after the optimiser. `add_gradients`, and
    what `watching` adds to the forward pass, only read and write tensors that stay where they are and decide nothing by
    their values, so that both may be part of a captured CUDA graph; all else runs outside of it.

    Attributes:
        name: Its key in checkpoints and records.
        trainer: Whose model and optimiser it acts on.
    """

    name = ""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def before_task(self, task: Task, number: int) -> None:
        """Act before the first step of task ``number``."""

    def watching(self) -> AbstractContextManager[None]:
        """Return the context in which the model is trained on a task."""
        return nullcontext()

    def written(self) -> Iterable[Tensor]:
        """Return the tensors that `add_gradients` and what `watching` adds write to, the gradients apart."""
        return ()

    def add_gradients(self) -> None:
        """Add to ``.grad``."""

    def after_step(self) -> None:
        """Act after a step of the optimiser."""

    def after_task(self, task: Task, number: int) -> None:
        """Act after the last step of a task; not after one that was skipped."""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs between two tasks: tensors and numbers, by reference."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Put it into a state that `state` returned."""

    def about(self) -> dict[str, Any]:
        """Return what the record of the run's start says of it."""
        return {}

    def record(self) -> dict[str, Any]:
        """Return what the record of the task just learned says of it."""
        return {}
