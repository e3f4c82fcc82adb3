"""Take the measures at a task boundary: those asked for, each with its definition and its time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import fastlr
from fastlr import metrics
from fastlr.distributed.sharding import apart
from fastlr.errors import ModelError, NonFiniteError
from fastlr.experiments.continual.fields import (
    FIELDS,
    FITTED,
    LEARNING_SPEED,
    REFERENCE,
    THIS_TASK,
)
from fastlr.experiments.continual.trainer import Trainer
from fastlr.experiments.data import Task, TaskSequence, normalise, take
from fastlr.experiments.redundancy import by_batches, or_none, redundancy_estimator
from fastlr.experiments.runs.folder import stream_seed
from fastlr.inputs import Inputs
from fastlr.metrics.weights import OF_PARAMETERS
from fastlr.ops.clock import clock

# Each takes passes of its own; other measures of images share one.
_OF_FEW = ("curvature_rank", "ntk_rank")
_OWN_PASSES = ("train_grad_norm", "gradient_noise_scale", "trainability", *_OF_FEW)
_FEW = 64  # images of these ranks, which hold a gradient of each
_FITTED_ON = 256  # images of the first task
_LR = (
    "local redundancy: mean over {n} {inputs} of E_y ||grad log P(y|x)||^2, y from the model, "
    "eval mode"
)


class CurrentImages(Inputs):
    """The first images of a task, as the inputs of an estimator that outlives the task.

    Set ``images`` to change them.
    """

    def __init__(self, channels_last: bool = True) -> None:
        self.channels_last, self.images = channels_last, torch.empty(0, 3, 1, 1, dtype=torch.uint8)

    def _make(
        self, start: int, stop: int, seed: int, device: torch.device, dtype: torch.dtype | None
    ) -> Tensor:
        images = self.images[start:stop].to(device)
        return normalise(images, dtype or torch.float32, channels_last=self.channels_last)

    def __len__(self) -> int:
        return len(self.images)


class Boundary(NamedTuple):
    """Where measures are taken: after a task, and before the following one.

    Attributes:
        task: The one just learned.
        following: The next one.
        number: Number of the task just learned; -1: before the first.
        images: () -> training images of the task and their labels, made once.
    """

    task: Task
    following: Task | None
    number: int
    images: Callable[[], tuple[Tensor, Tensor]]


class Measurer:
    """Takes the measures of a run.

    The estimators of local redundancy are kept, so that their plans are made once.

    Attributes:
        chunks: Inputs at a time of each estimator, by name: chosen by the memory when it is
            first used, and then kept in the checkpoint, as they change the last bits of a value.
        per_image: The values of local redundancy's synthetic images at the last measurement.
    """

    def __init__(
        self,
        trainer: Trainer,
        tasks: TaskSequence,
        initial: Mapping[str, Tensor],
        chunks: Mapping[str, int],
    ) -> None:
        self.trainer, self.options = trainer, trainer.options
        self.initial, self.chunks = initial, dict(chunks)
        shape = (3, tasks.size, tasks.size)
        self._tasks = tasks
        self._current = CurrentImages(trainer.channels_last)
        self._inputs: dict[str, Any] = {
            "local_redundancy": fastlr.ShapeImages(size=shape),
            "local_redundancy_noise": fastlr.NoiseImages(size=shape),
            REFERENCE: self._current,
            THIS_TASK: self._current,
        }
        self._estimators: dict[str, fastlr.LocalRedundancy] = {}
        self.per_image: Tensor | None = None

    @property
    def looks_ahead(self) -> bool:
        """True if the next task's images are needed."""
        return REFERENCE in self.options.measures

    def due(self, number: int) -> bool:
        """Return True if measures are taken after task ``number`` (-1: before the first)."""
        return (number + 1) % self.options.measure_every == 0

    def measure(
        self, task: Task, following: Task | None, number: int
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """Take the measures of the model as it is.

        Args:
            task: The one just learned: its training images serve the measures on real data.
            following: The next one, for local_redundancy_next_task.
            number: Number of the task just learned, which decides the images chosen; -1 before the
                first.

        Returns:
            Records by name, and seconds by name; measures that share a pass have one time, under
            their names joined by "+".

        Raises:
            ModelError: A measure is not defined for this model, named.
            NonFiniteError: A measure is not finite and on_nan is "stop" (else its value is None).
        """
        images = cache(partial(self._training_images, task, number))
        boundary = Boundary(task, following, number, images)
        records: dict[str, Any] = {}
        seconds: dict[str, float] = {}
        for names in self._passes():
            began = clock(self.trainer.device)
            records |= self._taken(names, boundary)
            seconds["+".join(names)] = clock(self.trainer.device) - began
        return {name: records[name] for name in self.options.measures}, seconds

    def _passes(self) -> Iterator[list[str]]:
        """Yield the names of the measures that are asked for, those that share a pass together."""
        shared = []
        last = []
        for name in self.options.measures:
            if FIELDS[name].inputs or name in OF_PARAMETERS or name == LEARNING_SPEED:
                yield [name]
            elif name in _OWN_PASSES:
                last.append(name)
            else:
                shared.append(name)
        if shared:
            yield shared
        for name in last:
            yield [name]

    def _taken(self, names: list[str], boundary: Boundary) -> dict[str, dict[str, Any]]:
        """Take the measures that share a pass; where the pass fails, take each by itself.

        So only those are missing that cannot be taken.
        """
        first = names[0]
        try:
            if FIELDS[first].inputs:
                return {first: self._redundancy(first, boundary)}
            if first == LEARNING_SPEED:
                return {first: self._learning_speed(boundary)}
            return self._metrics(names, boundary)
        except ModelError as error:
            if len(names) > 1:
                return {name: self._taken([name], boundary)[name] for name in names}
            if not isinstance(error, NonFiniteError):
                raise ModelError(
                    f"{first}: {error}; or leave it out by --set measures=..."
                ) from error
            if self.options.on_nan == "stop":
                raise NonFiniteError(f"after task {boundary.number}: {first}: {error}") from error
            return {first: {"value": None, "stderr": None, "definition": "", "error": str(error)}}

    def _metrics(self, names: list[str], boundary: Boundary) -> dict[str, dict[str, Any]]:
        """Return the records of measures of `fastlr.metrics`, which share passes."""
        known = {name: FIELDS[name].metric for name in names}
        model, metric_names = self.trainer.model, list(known.values())
        if names[0] in OF_PARAMETERS:
            found = metrics.measures(model, metric_names, init_state=self.initial)
        else:
            x, y = boundary.images()
            if names[0] in _OF_FEW:
                x, y = x[:_FEW], y[:_FEW]
            with self.trainer.autocast():
                found = metrics.measures(
                    model,
                    metric_names,
                    x=x,
                    y=y,
                    loss=F.cross_entropy,
                    tau=self.options.tau,
                    repeats=self.options.trainability_repeats,
                )
        return {name: measure_record(found[metric]) for name, metric in known.items()}

    def _learning_speed(self, boundary: Boundary) -> dict[str, Any]:
        """Return the record of the accuracy that the task had after its first epoch."""
        return {
            "value": self.trainer.first_epoch_accuracy if boundary.number >= 0 else None,
            "stderr": None,
            "definition": "learning speed: accuracy on the task's test images after one epoch",
        }

    def _training_images(self, task: Task, number: int) -> tuple[Tensor, Tensor]:
        """Training images of the task drawn without replacement, and their labels."""
        generator = torch.Generator().manual_seed(stream_seed(self.options.seed, "measure", number))
        rows = torch.randperm(len(task.train_y), generator=generator)[: self.options.measure_images]
        rows = rows.to(task.train_y.device)
        images = self.trainer.normalised(take(task.train_x, rows))
        return self.trainer.as_input(images), task.train_y[rows]

    def _redundancy(self, name: str, boundary: Boundary) -> dict[str, Any]:
        n = self.options.redundancy_n
        if self._inputs.get(name) is self._current:
            task = boundary.task if name == THIS_TASK else boundary.following
            assert task is not None
            n = min(n, self._tasks.fewest)
            self._current.images = _some_images(task, n)
        if name == FITTED and name not in self._inputs:
            images = _some_images(self._tasks.load(0), _FITTED_ON)
            self._inputs[name] = fastlr.GaussianInputs(normalise(images))
        if name not in self._estimators:
            self._estimators[name] = redundancy_estimator(
                self.trainer, self._inputs[name], self.chunks.get(name), n=n
            )
        with apart():  # so that the ranks of a run go on after a value that is not finite
            estimate = self._estimators[name].measure()
        self.chunks[name] = estimate.batch_size
        if name == "local_redundancy":
            self.per_image = estimate.per_sample
        return redundancy_record(estimate, FIELDS[name].inputs)


def _some_images(task: Task, most: int) -> Tensor:
    """Return training images of a task, uint8: the first ``most`` of one random order."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(task.train_y), generator=generator)[:most]
    return take(task.train_x, order.to(task.train_x.device))


def measure_record(measure: metrics.Measure) -> dict[str, Any]:
    """Return the record of a measure of `fastlr.metrics`; one that is infinite has a reason."""
    record = {"stderr": None, **measure.to_dict()}
    if not math.isfinite(measure):
        reason = record.pop("reason", f"it is {float(measure)}")
        record |= {"value": None, "error": reason}
    return record


def redundancy_record(estimate: fastlr.Estimate, inputs: str) -> dict[str, Any]:
    """Return the record of a measurement of local redundancy.

    Args:
        estimate: The measurement.
        inputs: What it was measured on, in words.
    """
    per_parameter = estimate.per_parameter.items()
    return {
        "value": estimate.value,
        "stderr": or_none(estimate.stderr),
        "definition": _LR.format(n=estimate.inputs_used, inputs=inputs) + by_batches(estimate),
        "n": estimate.n,
        "probe": estimate.probe,
        "per_parameter": {key: float(f"{value:.6g}") for key, value in per_parameter},
    }
