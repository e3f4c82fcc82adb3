"""The training loop of every experiment: model, optimiser, steps, ranks, state.

It says how a step runs and how ranks share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastlr.experiments.training.data_parallel import Parallel
from fastlr.experiments.training.optim import (
    load_optimiser,
    optimiser_tensors,
    trainable_parameters,
)
from fastlr.experiments.training.options import TrainingOptions
from fastlr.experiments.training.steps import Compiled, TrainingSteps, resolve_mode
from fastlr.ghost.model.view import select_output


class TrainingLoop:
    """A model, its optimiser and its steps; a subclass defines the `loss`, and makes the optimiser.

    A step adds the gradients of a batch's mean loss part by part, the ranks sharing the parts (see
    `fastlr.experiments.training.data_parallel`), and updates the parameters. It is launched,
    compiled or replayed (see `fastlr.experiments.training.steps`).

    Args:
        model: On the device; trained in place.
        device: Device of the model.
        options: Precision, sizes of batches and parts; with "bf16-weights", the model becomes
            bfloat16.
        step: A `fastlr.experiments.training.steps.StepMode`.

    Attributes:
        optimiser: Optimiser of the trainable parameters.
        dtype: In which the model computes: `torch.bfloat16` or `torch.float32`.
        forward: The model as training calls it: compiled, or itself.
        steps: Runs the training steps.
        parallel: The ranks that train together.
    """

    optimiser: torch.optim.Optimizer

    def __init__(
        self, model: nn.Module, device: torch.device, options: TrainingOptions, step: str = "eager"
    ) -> None:
        mode = resolve_mode(step, device)
        self.model = model.bfloat16() if options.dtype == "bf16-weights" else model
        self.device, self.options = device, options
        self.dtype = torch.float32 if options.dtype == "fp32" else torch.bfloat16
        self.parallel = Parallel(model, options)
        full_parts = self.parallel.part_sizes(options.batch_size)
        self.forward: Callable[[Tensor], Any] = (
            Compiled(model, full_parts) if mode == "compile" else model
        )
        graph = device.type == "cuda" and mode != "eager"
        self.steps = TrainingSteps(
            self.work, model, self.changed_tensors, device, graph, strict=step == "graph"
        )

    def loss(self, *part: Tensor) -> Tensor:
        """Return the sum of the losses of the samples of a part.

        The samples are given as the ``samples`` of `train_batch` are.
        """
        raise NotImplementedError

    def adamw(self, learning_rate: float, weight_decay: float) -> torch.optim.AdamW:
        """Return AdamW for the trainable parameters, fused or capturable where these apply.

        Both depend on the device and on how steps run.
        """
        return torch.optim.AdamW(
            trainable_parameters(self.model),
            lr=learning_rate,
            weight_decay=weight_decay,
            fused=self.fused,
            capturable=self.device.type == "cuda" and self.steps.captured,
        )

    @property
    def fused(self) -> bool:
        """True if the optimiser takes a step in one kernel."""
        return self.device.type == "cuda" or self.options.fused

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype of autocast, None for none."""
        return torch.bfloat16 if self.options.dtype == "bf16" else None

    def autocast(self) -> torch.autocast:
        """Return the context in which the model runs."""
        return torch.autocast(
            self.device.type, dtype=torch.bfloat16, enabled=self.autocast_dtype is not None
        )

    def as_input(self, x: Tensor) -> Tensor:
        """Return samples as the model takes them: bfloat16 where its weights are."""
        return x.bfloat16() if self.options.dtype == "bf16-weights" else x

    def outputs(self, x: Tensor, model: Callable[[Tensor], Any] | None = None) -> Tensor:
        """Return the outputs for samples ``x`` of the model as it is trained, or of ``model``."""
        with self.autocast():
            return select_output((model or self.forward)(self.as_input(x)), None)

    @property
    def step_mode(self) -> str:
        """How steps run: ``eager``, ``graph``, ``compile``, or ``compile+graph``."""
        words = []
        if isinstance(self.forward, Compiled):
            words.append("compile")
        if self.steps.captured:
            words.append("graph")
        return "+".join(words) or "eager"

    def train_batch(
        self, span: tuple[int, int], samples: Callable[[int, int], Sequence[Tensor]]
    ) -> Tensor:
        """Take a step of the optimiser.

        Args:
            span: Where the batch begins and ends in the order of samples.
            samples: (start, stop) -> tensors with a sample axis 0, of which `loss` takes parts.

        Returns:
            The sum of the losses of this rank's samples, float64, on the device; valid until the
            next step.
        """
        size, (start, stop) = span[1] - span[0], self.parallel.own_span(*span)
        if self.parallel.alone:
            total: Tensor = self.steps(size, *samples(start, stop))
            return total
        total = self.parallel.set_gradients(size, lambda: self.steps(size, *samples(start, stop)))
        self.update()
        return total

    def work(self, size: int, *batch: Tensor) -> Any:
        """Do the part of a training step that may be captured.

        It is all of it, or, with several ranks, what comes before they exchange gradients.

        Args:
            size: Samples of the whole batch, over which the mean of the losses is taken.
            batch: This rank's samples.

        Returns:
            The sum of these samples' losses, float64, on the device; with several ranks also
            `Parallel.take_gradients`.
        """
        self.optimiser.zero_grad(set_to_none=True)
        total = torch.zeros((), dtype=torch.float64, device=batch[0].device)
        for part in self.parallel.parts(size, batch):
            loss = self.loss(*part)
            (loss / size).backward()
            total += loss.detach()
        if self.parallel.alone:
            self.update()
            return total
        return total, self.parallel.take_gradients()

    def update(self) -> None:
        """Update the parameters by their gradients."""
        self.optimiser.step()

    def changed_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that a step changes, the gradients apart."""
        yield from self.model.parameters()
        yield from self.model.buffers()
        yield from optimiser_tensors(self.optimiser)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it, by reference."""
        return {"model": self.model.state_dict(), "optimiser": self.optimiser.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load what `state` returned."""
        self.model.load_state_dict(state["model"])
        load_optimiser(self.optimiser, state["optimiser"])
