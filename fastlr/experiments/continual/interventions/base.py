"""The interfaces of interventions that act during training and of the trainer that they use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fastlr.experiments.continual.options import ContinualOptions
from fastlr.experiments.data import Task
from fastlr.experiments.training.data_parallel import Parallel


class Learner(Protocol):
    """The part of `fastlr.experiments.continual.trainer.Trainer` that interventions use."""

    model: nn.Module
    options: ContinualOptions
    device: torch.device
    parallel: Parallel

    @property
    def optimiser(self) -> torch.optim.Optimizer: ...  # noqa: D102
    @property
    def step_mode(self) -> str: ...  # noqa: D102
    def autocast(self) -> torch.autocast: ...  # noqa: D102
    def as_input(self, x: Any) -> Any: ...  # noqa: D102
    def normalised(self, images: Tensor, dtype: torch.dtype = ...) -> Tensor: ...  # noqa: D102
    def head(self) -> nn.Linear: ...  # noqa: D102


class Intervention:
    """Acts on a model while it learns; each method here does nothing.

    The trainer calls `before_task`, then trains within `watching`, then calls `after_task`. In each
    step it calls `add_gradients` between the backward pass and the optimiser, and `after_step`
    after the optimiser. `add_gradients` and the hooks of `watching` only read and write tensors
    that stay where they are and decide nothing by their values, so that both may be part of a
    captured CUDA graph; all else runs outside of it.

    Attributes:
        name: Its key in checkpoints and records.
        trainer: The owner of the model and optimiser.
    """

    name = ""

    def __init__(self, trainer: Learner) -> None:
        self.trainer = trainer

    def before_task(self, task: Task, number: int) -> None:
        """Act before the first step of task ``number``."""

    def watching(self) -> AbstractContextManager[None]:
        """Return the context in which the model is trained on a task."""
        return nullcontext()

    def written(self) -> Iterable[Tensor]:
        """Return the tensors other than gradients to which this intervention writes.

        It writes to them in `add_gradients` and in the hooks of `watching`.
        """
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
        """Return its entry in the record of the run's start."""
        return {}

    def record(self) -> dict[str, Any]:
        """Return its entry in the record of the task just learned."""
        return {}
