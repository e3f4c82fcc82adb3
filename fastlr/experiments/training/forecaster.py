"""Train a network to forecast windows of a series on the device: batches, steps, validation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastlr.errors import InputError, NonFiniteError
from fastlr.experiments.data import Windows
from fastlr.experiments.training.loop import TrainingLoop
from fastlr.experiments.training.optim import spans
from fastlr.experiments.training.options import TrainingOptions


class Forecaster(TrainingLoop):
    """A network that forecasts, trained by the mean squared error in the normalised unit.

    The mean is over windows, time steps and features.

    Args:
        model: The network; moved to the device.
        device: Where it is trained.
        options: As for `TrainingLoop`; ``batch_size`` is also of windows without gradients at a
            time.
        compiled: Run it through `torch.compile`.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        options: TrainingOptions,
        compiled: bool = False,
    ) -> None:
        super().__init__(model.to(device), device, options)
        if compiled:
            self.forward = torch.compile(self.model)

    def loss(self, *part: Tensor) -> Tensor:
        """Return the sum over some windows of their mean squared errors, a scalar on the device.

        Args:
            part: What is seen of the windows ``[B, context, F]``, and what is forecast ``[B,
                horizon, F]``.

        Raises:
            InputError: The model's forecasts have another shape.
        """
        x, y = part
        z = self.outputs(x)
        if z.shape != y.shape:
            raise InputError(
                f"the model forecasts {tuple(z.shape)} from windows of {tuple(x.shape)}, not "
                f"{tuple(y.shape)}"
            )
        return F.mse_loss(z.float(), y) * len(x)

    @torch.no_grad()
    def validate(self, windows: Windows, stride: int) -> float:
        """Return the mean squared error on every ``stride``-th window, in eval mode.

        Raises:
            NonFiniteError: It is not finite.
        """
        self.model.eval()
        index = torch.arange(0, len(windows), stride, device=self.device)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for part in self.parallel.turns(index.split(self.options.batch_size)):
            total += self.loss(*windows.batch(part)).double()
        return _finite("validation", self.parallel.sum(total).item() / len(index))

    def train(
        self,
        windows: Windows,
        batches: Sequence[Tensor],
        *,
        rate: Callable[[int], float] | None = None,
        after: Callable[[int], bool] = lambda step: False,
        frozen: bool = False,
    ) -> float:
        """Take one step of the `optimiser` a batch, and return the mean loss over windows.

        Args:
            windows: Windows of the series.
            batches: Indices of windows.
            rate: step (from 0) -> learning rate; None leaves it.
            after: Called with the number of steps done; True ends the training. It may change the
                model's mode.
            frozen: Train in eval mode: no dropout, running statistics of batch norm.

        Raises:
            NonFiniteError: A loss was not finite.
        """
        total, trained = torch.zeros((), dtype=torch.float64, device=self.device), 0
        for step, index in enumerate(batches):
            if rate is not None:
                for group in self.optimiser.param_groups:
                    group["lr"] = rate(step)
            self.model.train(not frozen)

            def samples(start: int, stop: int, index: Tensor = index) -> tuple[Tensor, Tensor]:
                return windows.batch(index[start:stop].to(self.device))

            total += self.train_batch((0, len(index)), samples)
            trained += len(index)
            if after(step + 1):
                break
        return _finite("training", self.parallel.sum(total).item() / trained)


def _finite(which: str, loss: float) -> float:
    if not math.isfinite(loss):
        raise NonFiniteError(
            f"the {which} loss is not finite: lower the learning rate, in a new run"
        )
    return loss


def batches(n: int, size: int, steps: int, seed: int) -> list[Tensor]:
    """Return the batches of an epoch, indices into n windows.

    They are one pass in random order, or a number of steps.

    Args:
        n: Windows.
        size: Size of a batch; the last of a pass may be smaller.
        steps: 0: one pass; else so many full batches, drawn from one random order after another.
        seed: Seed of the order.

    Example:
        >>> [len(b) for b in batches(10, 4, 0, seed=0)], [len(b) for b in batches(10, 4, 5, seed=0)]
        ([4, 4, 2], [4, 4, 4, 4, 4])
    """
    generator = torch.Generator().manual_seed(seed)
    if not steps:
        order = torch.randperm(n, generator=generator)
        return [order[start:stop] for start, stop in spans(n, size)]
    passes = -(-steps * size // n)
    order = torch.cat([torch.randperm(n, generator=generator) for _ in range(passes)])
    return list(order[: steps * size].split(size))


def cosine(learning_rate: float, total: int) -> Callable[[int], float]:
    """Return the cosine schedule: a function step -> learning rate.

    It falls from ``learning_rate`` at step 0 to zero at step ``total``.

    Example:
        >>> [round(cosine(2.0, 4)(step), 3) for step in range(5)]
        [2.0, 1.707, 1.0, 0.293, 0.0]
    """
    return lambda step: learning_rate * 0.5 * (1 + math.cos(math.pi * step / total))


def evenly(total: int, points: int) -> list[int]:
    """Return ``points`` evenly spaced whole numbers up to ``total``, none of them 0.

    There are fewer where they coincide.

    Example:
        >>> evenly(54, 4), evenly(2, 4)
        ([14, 27, 41, 54], [1, 2])
    """
    return sorted({max(1, (2 * total * k + points) // (2 * points)) for k in range(1, points + 1)})
