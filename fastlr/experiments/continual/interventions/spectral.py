"""Spectral regularisation: the largest singular value of each layer is drawn to 1."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastlr.errors import InputError
from fastlr.experiments.continual.interventions.base import Intervention, Learner
from fastlr.experiments.runs.options import option


class SpectralRegularisation(
    Intervention, name="spectral", source="Lewandowski et al. 2024 (arXiv:2406.06811)"
):
    """Adds the gradient of ``strength * sum over layers of (sigma^k - 1)^2 + ||b||^(2k)``.

    sigma is the largest singular value of the layer's weight, a convolution's as a matrix with a
    row for each output channel, b its bias and k ``power``. A layer is what has a parameter
    ``weight`` with two axes or more; scales and shifts of norm layers are left alone.

    sigma is estimated from below by power iteration, one a step: ``u = W v / ||W v||``, ``v = W^T u
    / ||W^T u||``, ``sigma = u^T W v``, whose gradient is ``u v^T``; v is kept from step to step.

    The gradient is added to ``.grad`` before the optimiser's step, which is the same as adding the
    penalty to the loss, the mean over the batch. The penalty is not in the recorded train_loss.

    Raises:
        InputError: The model has no such layer.

    Source: Lewandowski et al. 2024, "Learning continually by spectral regularization"
    (arXiv:2406.06811).
    """

    strength: float = option(
        0.0,
        at_least=0,
        named="spectral",
        about="Strength of spectral regularisation, (sigma^k - 1)^2 a layer; 0: off. Not in "
        "train_loss.",
    )
    power: int = option(2, at_least=1, about="The exponent k of the largest singular value.")

    def __init__(self, trainer: Learner) -> None:
        super().__init__(trainer)
        named = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
        self.weights: list[nn.Parameter] = []
        self.biases: list[nn.Parameter] = []
        self.directions: list[Tensor] = []  # v of each weight
        generator = self.generator_for(0)
        for name, p in named.items():
            if name.endswith("weight") and p.ndim > 1:
                self.weights.append(p)
                v = torch.randn(p[0].numel(), generator=generator).to(p.device)
                self.directions.append(F.normalize(v, dim=0))
                bias = named.get(name.removesuffix("weight") + "bias")
                if bias is not None:
                    self.biases.append(bias)
        if not self.weights:
            raise InputError("spectral: no layer of the model has a trainable weight: leave it out")

    def written(self) -> Iterable[Tensor]:
        """Return the directions of the power iteration."""
        return self.directions

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Add the penalty's gradient to ``.grad`` of every parameter that the loss has reached."""
        k = self.power
        for p, v in zip(self.weights, self.directions, strict=True):
            if p.grad is not None:
                matrix = p.float().flatten(1)
                u = F.normalize(matrix @ v, dim=0)
                back = matrix.T @ u
                sigma = back.norm()
                v.copy_(F.normalize(back, dim=0))
                slope = 2 * k * (sigma**k - 1) * sigma ** (k - 1)
                p.grad.add_((slope * torch.outer(u, v)).view(p.shape), alpha=self.strength)
        for p in self.biases:
            if p.grad is not None:
                slope = 2 * k * p.square().sum() ** (k - 1)
                p.grad.add_(slope * p, alpha=self.strength)

    def state(self) -> dict[str, Any]:
        """The directions of the power iteration."""
        return {"directions": self.directions}

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Put it into a state that `state` returned."""
        for v, saved in zip(self.directions, state["directions"], strict=True):
            v.copy_(saved)

    @torch.no_grad()
    def record(self) -> dict[str, Any]:
        """The largest estimate of a singular value after the task."""
        pairs = zip(self.weights, self.directions, strict=True)
        values = [(p.float().flatten(1) @ v).norm() for p, v in pairs]
        return {"largest_singular_value": float(torch.stack(values).max())}
