"""The interfaces of interventions that act during training and of the trainer that they use."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, get_type_hints

import torch
from torch import Tensor, nn

from fastlr.errors import ModelError
from fastlr.experiments.data import Task, TaskSequence, normalise
from fastlr.experiments.runs.folder import stream_seed
from fastlr.experiments.training.loop import TrainingLoop
from fastlr.experiments.training.options import TrainingOptions

INTERVENTIONS: dict[str, type[Intervention]] = {}  # by name, in the order in which they act


class Learner(TrainingLoop):
    """A training loop that learns tasks, as far as interventions use it.

    Attributes:
        options: Options of the run: a class that is made of what is declared here.
        channels_last: Layout of images.
        initial: The model's state dict at initialisation, on the device. The model is there, or
            will be loaded with a later state.
        tasks: Those that it learns.
    """

    options: Any
    channels_last: bool
    initial: Mapping[str, Tensor]
    tasks: TaskSequence

    def normalised(self, images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return `normalise` of images in the run's layout."""
        return normalise(images, dtype, channels_last=self.channels_last)

    def head(self) -> nn.Linear:
        """Return the linear layer that makes the logits.

        Raises:
            ModelError: There is none.
        """
        heads = [
            m
            for m in self.model.modules()
            if isinstance(m, nn.Linear) and m.out_features == self.options.classes
        ]
        if not heads:
            raise ModelError(
                f"head_reset wants a model that ends in nn.Linear with {self.options.classes} "
                "outputs: use another, or head_reset=no"
            )
        return heads[-1]


class Intervention:
    """Acts on a model while it learns; each method here does nothing.

    A subclass declares its name, its source and its options, each of which becomes an option of
    ``fastlr continual`` and, on the instance, the value that the run gives it::

        class Sketch(Intervention, name="sketch", source="Author et al. 2020"):
            rate: float = option(0.0, at_least=0, about="...; 0: off.")

    The run's option is called ``sketch_rate``, or as ``named=`` says.

    The trainer calls `before_task`, then trains within `watching`, then calls `after_task`. In each
    step it calls `add_gradients` between the backward pass and the optimiser, and `after_step`
    after the optimiser. `add_gradients` and the hooks of `watching` only read and write tensors
    that stay where they are and decide nothing by their values, so that both may be part of a
    captured CUDA graph; all else runs outside of it.

    Attributes:
        name: Its key in checkpoints and records.
        source: Who proposed it.
        options: The run's options that it declares, and the attribute that each becomes.
        counts_steps_by_weight: It sets single weights back, so that Adam has to count the steps of
            each (`fastlr.experiments.continual.interventions.unit_adamw.UnitAdamW`).
        keeps_running_means: Or counters, of which bfloat16 weights would lose most.
        trainer: The owner of the model and optimiser.
    """

    name: ClassVar[str] = ""
    source: ClassVar[str] = ""
    options: ClassVar[dict[str, str]] = {}
    counts_steps_by_weight: ClassVar[bool] = False
    keeps_running_means: ClassVar[bool] = False

    def __init_subclass__(cls, name: str = "", source: str = "") -> None:
        """Enter an intervention that has a name in `INTERVENTIONS`, with its options."""
        if name:
            cls.name, cls.source = name, source
            cls.options = {
                declared.metadata.get("named", f"{name}_{attribute}"): attribute
                for attribute, declared in vars(cls).items()
                if isinstance(declared, dataclasses.Field)
            }
            INTERVENTIONS[name] = cls

    @classmethod
    def declared(cls) -> Iterator[tuple[str, Any, dataclasses.Field[Any]]]:
        """Yield the name, the type and the declaration of each option of a run."""
        types = get_type_hints(cls)
        for option, attribute in cls.options.items():
            yield option, types[attribute], vars(cls)[attribute]

    @classmethod
    def is_on(cls, options: TrainingOptions) -> bool:
        """Return True if a run's options ask for it: its first option is not at its default."""
        first = next(iter(cls.options))
        return getattr(options, first) != getattr(type(options), first)

    def __init__(self, trainer: Learner) -> None:
        self.trainer = trainer
        for option, attribute in self.options.items():
            setattr(self, attribute, getattr(trainer.options, option))

    def generator_for(self, number: int) -> torch.Generator:
        """Return a generator on the CPU for what is random in task ``number``.

        Its seed is a pure function of the run's, the intervention's name and the task.
        """
        seed = stream_seed(self.trainer.options.seed, self.name, number)
        return torch.Generator().manual_seed(seed)

    def before_task(self, task: Task, number: int) -> None:
        """Act before the first step of task ``number``."""

    def watching(self) -> AbstractContextManager[None]:
        """Return the context in which the model is trained on a task."""
        return nullcontext()

    def written(self) -> Iterable[Tensor]:
        """Return the tensors to which the hooks of `watching` write."""
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
