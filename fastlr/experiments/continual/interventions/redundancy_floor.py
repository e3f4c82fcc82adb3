"""A floor under local redundancy: a penalty as long as the running estimate is below it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import fastlr
from fastlr.errors import InputError
from fastlr.experiments.continual.interventions.base import Intervention, Learner
from fastlr.experiments.runs.folder import stream_seed
from fastlr.experiments.runs.options import option

DECAY = 0.99  # of the running mean, a step


class RedundancyFloor(Intervention, name="redundancy_floor", source="here"):
    """Raises local redundancy by a penalty while its running mean is below a floor.

    It adds the gradient of ``strength * log(floor / running)``.

    In every step `fastlr.redundancy_loss` R is taken on new synthetic shapes; the running mean M is
    that of the steps so far with weights that fall by `DECAY` a step, and ``-strength * grad R /
    M`` is added to ``.grad``: the same whatever the scale of R. The penalty is not in the recorded
    train_loss.

    Raises:
        InputError: Steps are captured as CUDA graphs, in which nothing can be decided.
    """

    floor: float = option(
        0.0,
        at_least=0,
        named="redundancy_floor",
        about="Penalty that holds local redundancy (nats) at this value where it falls below; 0: "
        "off. Not in train_loss. It differentiates local redundancy on shapes in every step, and "
        "needs eager steps.",
    )
    strength: float = option(
        0.1,
        at_least=0,
        named="floor_strength",
        about="Factor of the penalty log(redundancy_floor / running mean).",
    )
    samples: int = option(
        32, at_least=1, named="floor_images", about="Number of synthetic images per step."
    )

    def __init__(self, trainer: Learner) -> None:
        super().__init__(trainer)
        size = trainer.tasks.size
        if trainer.step_mode != "eager":
            raise InputError(f"redundancy_floor needs step=eager, not {trainer.step_mode}")
        self.images = fastlr.ShapeImages(size=(3, size, size))
        self.steps, self.total, self.weight = 0, 0.0, 0.0
        self.taken = self.below = 0  # steps of the task at hand

    @property
    def running(self) -> float:
        """The running mean, in nats per input per unit step size; 0 before the first step."""
        return self.total / self.weight if self.weight else 0.0

    def add_gradients(self) -> None:
        """Measure local redundancy, and add the penalty's gradient to ``.grad`` if it is too low.

        Parameters that the loss has not reached have no ``.grad`` and are left out.
        """
        n = self.samples
        seed = stream_seed(self.trainer.options.seed, self.name)
        x = self.images.batch(
            self.steps * n, (self.steps + 1) * n, seed=seed, device=self.trainer.device
        )
        assert isinstance(x, Tensor)
        with torch.enable_grad(), self.trainer.autocast():
            value = fastlr.redundancy_loss(
                self.trainer.model, self.trainer.as_input(x), seed=seed + self.steps
            )
        self.steps += 1
        self.total = DECAY * self.total + float(value.detach())
        self.weight = DECAY * self.weight + 1
        self.taken += 1
        if 0 < self.running < self.floor:
            self.below += 1
            parameters = [p for p in self.trainer.model.parameters() if p.grad is not None]
            gradients = torch.autograd.grad(value, parameters, allow_unused=True)
            for p, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None and p.grad is not None:
                    p.grad.add_(gradient, alpha=-self.strength / self.running)

    def state(self) -> dict[str, Any]:
        """The running mean and the number of steps."""
        return {"steps": self.steps, "total": self.total, "weight": self.weight}

    def load(self, state: Mapping[str, Any]) -> None:
        """Put it into a state that `state` returned."""
        self.steps, self.total, self.weight = (state[key] for key in ("steps", "total", "weight"))

    def record(self) -> dict[str, Any]:
        """The running mean after the task, and the share of its steps below the floor."""
        share, self.taken, self.below = self.below / max(self.taken, 1), 0, 0
        return {"running": self.running, "below": share}
