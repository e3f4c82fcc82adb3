"""The measures at a task boundary: all that were asked for, each with its definition and its time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fastlr
from fastlr import metrics
from fastlr.data import ImageStore, Task, normalise, take
from fastlr.distributed.sharding import apart
from fastlr.drivers.continual_config import ContinualOptions
from fastlr.drivers.runs import stream_seed
from fastlr.drivers.training import Trainer
from fastlr.errors import ModelError, NonFiniteError
from fastlr.inputs import Inputs
from fastlr.runtime import clock

# Names in a run's records -> names in fastlr.metrics, for the measures that share one pass over the images.
ACTIVATIONS = {
    "dormant_ratio": "dormant_ratio",
    "dormant_ratio_tau": "dormant_ratio_tau",
    "effective_rank": "effective_rank_entropy",
    "srank": "effective_rank",
    "feature_rank": "feature_rank",
}
GRADIENTS = {"train_grad_norm": "train_grad_norm", "batch_grad_norm": "train_grad_norm_batch"}
REDUNDANCIES = ("local_redundancy", "local_redundancy_noise", "local_redundancy_next_task")
_LR = "local redundancy: mean over {n} {inputs} of E_y ||grad log P(y|x)||^2, y from the model, eval mode"


class CurrentImages(Inputs):
    """The first images of a task, as the inputs of an estimator that outlives the task: set ``images`` to change them."""

    def __init__(self) -> None:
        self.images = torch.empty(0, 3, 1, 1, dtype=torch.uint8)

    def _make(self, start: int, stop: int, seed: int, device: torch.device, dtype: torch.dtype | None) -> Tensor:
        return normalise(self.images[start:stop].to(device), dtype or torch.float32)

    def __len__(self) -> int:
        return len(self.images)


class Measurer:
    """Takes the measures of a run; keeps the estimators of local redundancy, so that their plans are made once.

    Attributes:
        chunks: Inputs at a time of each estimator, by name: chosen by the free memory when it is first used, and then kept
            in the checkpoint, as they change the last bits of a value.
    """

    def __init__(
        self,
        trainer: Trainer,
        options: ContinualOptions,
        store: ImageStore,
        initial: Mapping[str, Tensor],
        chunks: Mapping[str, int],
    ) -> None:
        self.trainer, self.options, self.initial, self.chunks = trainer, options, initial, dict(chunks)
        shape = (3, store.size, store.size)
        spans = [store.range(i, "train") for i in range(len(store.classes))]
        self._smallest = 2 * min(stop - start for start, stop in spans)  # images that every task has
        self._current = CurrentImages()
        self._inputs: dict[str, Any] = {
            "local_redundancy": fastlr.ShapeImages(size=shape),
            "local_redundancy_noise": fastlr.NoiseImages(size=shape),
            "local_redundancy_next_task": self._current,
        }
        self._estimators: dict[str, fastlr.LocalRedundancy] = {}

    @property
    def looks_ahead(self) -> bool:
        """Whether the next task's images are needed."""
        return "local_redundancy_next_task" in self.options.measures

    def due(self, number: int) -> bool:
        """Whether to measure after task ``number`` (-1: before the first)."""
        return (number + 1) % self.options.measure_every == 0

    def measure(self, task: Task, following: Task | None, number: int) -> tuple[dict[str, Any], dict[str, float]]:
        """Take the measures of the model as it is.

        Args:
            task: The one just learned: its training images serve the measures on real data.
            following: The next one, for local_redundancy_next_task.
            number: Of the task just learned, which decides the images chosen; -1: before the first.

        Returns:
            Records by name, and seconds by name; measures that share a pass have one time, under their names joined by "+".

        Raises:
            ModelError: A measure is not defined for this model, named.
            NonFiniteError: A measure is not finite and on_nan is "stop" (else its value is None).
        """
        wanted = self.options.measures
        found: dict[str, Any] = {}
        seconds: dict[str, float] = {}

        def take_all(names: list[str], compute: Callable[[], dict[str, dict[str, Any]]]) -> None:
            if not names:
                return
            began = clock(self.trainer.device)
            try:
                found.update(compute())
            except NonFiniteError as error:
                if self.options.on_nan == "stop":
                    raise NonFiniteError(f"after task {number}: {', '.join(names)}: {error}") from error
                found.update(
                    {name: {"value": None, "stderr": None, "definition": "", "error": str(error)} for name in names}
                )
            except ModelError as error:
                raise ModelError(f"{', '.join(names)}: {error}; or leave it out by --set measures=...") from error
            seconds["+".join(names)] = clock(self.trainer.device) - began

        for name in REDUNDANCIES:
            if name in wanted:
                take_all([name], lambda name=name: {name: self._redundancy(name, following)})  # type: ignore[misc]
        model = self.trainer.model
        if "weight_norm" in wanted:
            take_all(["weight_norm"], lambda: {"weight_norm": _record(metrics.weight_norm(model))})
        if "distance_from_init" in wanted:
            take_all(
                ["distance_from_init"],
                lambda: {"distance_from_init": _record(metrics.distance_from_init(model, self.initial))},
            )
        activations = [name for name in wanted if name in ACTIVATIONS]
        gradients = [name for name in wanted if name in GRADIENTS]
        if activations or gradients:
            x, y = self._some(task, number)
            take_all(activations, lambda: self._activations(activations, x))
            take_all(gradients, lambda: self._gradients(gradients, x, y))
        return {name: found[name] for name in wanted if name in found}, seconds

    def _some(self, task: Task, number: int) -> tuple[Tensor, Tensor]:
        """Training images of the task drawn without replacement, and their labels."""
        generator = torch.Generator().manual_seed(stream_seed(self.options.seed, "measure", number))
        rows = torch.randperm(len(task.train_y), generator=generator)[: self.options.measure_images]
        rows = rows.to(task.train_y.device)
        return normalise(take(task.train_x, rows)), task.train_y[rows]

    def _activations(self, names: list[str], x: Tensor) -> dict[str, dict[str, Any]]:
        with self.trainer.autocast():
            measures = metrics.activation_measures(
                self.trainer.model, x, measures=[ACTIVATIONS[name] for name in names], tau=self.options.tau
            )
        return {name: _record(measures[ACTIVATIONS[name]]) for name in names}

    def _gradients(self, names: list[str], x: Tensor, y: Tensor) -> dict[str, dict[str, Any]]:
        with self.trainer.autocast():
            measures = metrics.gradient_measures(
                self.trainer.model, x, y, F.cross_entropy, measures=[GRADIENTS[name] for name in names]
            )
        return {name: _record(measures[GRADIENTS[name]]) for name in names}

    def _redundancy(self, name: str, following: Task | None) -> dict[str, Any]:
        n = self.options.redundancy_n
        what = {"local_redundancy": "synthetic shapes", "local_redundancy_noise": "images of Gaussian noise"}.get(name)
        if name == "local_redundancy_next_task":
            assert following is not None
            n, what = min(n, self._smallest), "training images of the next task"
            order = torch.randperm(len(following.train_y), generator=torch.Generator().manual_seed(0))[:n]
            self._current.images = take(following.train_x, order.to(following.train_x.device))
        if name not in self._estimators:
            size = self.options.redundancy_batch or self.chunks.get(name)
            dtype = None if self.trainer.dtype == torch.float32 else self.trainer.dtype
            options: dict[str, Any] = {"seed": self.options.seed, "dtype": dtype, "batch_size": size}
            self._estimators[name] = fastlr.LocalRedundancy(self.trainer.model, self._inputs[name], n, **options)
        with apart():  # so that the ranks of a run go on after a value that is not finite
            estimate = self._estimators[name].measure()
        self.chunks[name] = estimate.batch_size
        return redundancy_record(estimate, str(what))


def redundancy_record(estimate: fastlr.Estimate, inputs: str) -> dict[str, Any]:
    """Return what the records of a run say of local redundancy.

    Args:
        estimate: Of it.
        inputs: What it was measured on, in words.
    """
    return {
        "value": estimate.value,
        "stderr": None if math.isnan(estimate.stderr) else estimate.stderr,
        "definition": _LR.format(n=estimate.n, inputs=inputs),
        "n": estimate.n,
        "per_parameter": {key: float(f"{value:.6g}") for key, value in estimate.per_parameter.items()},
    }


def _record(measure: metrics.Measure) -> dict[str, Any]:
    return {"stderr": None, **measure.to_dict()}
