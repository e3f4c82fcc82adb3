"""Training a network to forecast windows of a series that lie on the device: batches, steps, validation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastlr.data import Windows
from fastlr.drivers.batches import spans
from fastlr.drivers.optimising import add_gradients, autocast, trainable
from fastlr.drivers.parallel import Parallel
from fastlr.errors import InputError, NonFiniteError
from fastlr.ghost.adapt import select_output


class Forecaster:
    """A network and how it is run: mean squared error over windows, time steps and features, in the normalised unit.

    Args:
        model: The network.
        device: Where it is to lie.
        dtype: Of autocast; float32 means none.
        batch_size: Windows an optimiser step, and of those without gradients at a time.
        norm_batch: Windows a pass of training, so that batch norm's statistics are of so many; 0: the whole batch.
        compiled: Run it through `torch.compile`.

    Attributes:
        model: Trained in place.
        device: Where it lies.
        dtype: Of autocast.
        parallel: Who trains it together.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        dtype: torch.dtype,
        batch_size: int,
        norm_batch: int = 0,
        compiled: bool = False,
    ) -> None:
        self.model, self.device, self.dtype, self.batch_size = model.to(device), device, dtype, batch_size
        self.parallel = Parallel(self.model, batch_size, norm_batch)
        self._run = torch.compile(self.model) if compiled else self.model

    def autocast(self) -> torch.autocast:
        """Return the context in which the model runs."""
        return autocast(self.device, self.dtype)

    def loss(self, windows: Windows, index: Tensor) -> Tensor:
        """Return the sum over some windows of their mean squared errors, a scalar on the device.

        Raises:
            InputError: The model's forecasts have another shape.
        """
        x, y = windows.batch(index)
        with self.autocast():
            z = select_output(self._run(x), None)
        if z.shape != y.shape:
            raise InputError(
                f"the model forecasts {tuple(z.shape)} from windows of {tuple(x.shape)}, not {tuple(y.shape)}"
            )
        return F.mse_loss(z.float(), y) * len(index)

    @torch.no_grad()
    def validate(self, windows: Windows, stride: int) -> float:
        """Return the mean squared error on every ``stride``-th window, in eval mode.

        Raises:
            NonFiniteError: It is not finite.
        """
        self.model.eval()
        index = torch.arange(0, len(windows), stride, device=self.device)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for part in self.parallel.turns(index.split(self.batch_size)):
            total += self.loss(windows, part).double()
        return _finite("validation", self.parallel.sum(total).item() / len(index))

    def optimiser(self, learning_rate: float, weight_decay: float) -> torch.optim.Optimizer:
        """Return AdamW for the parameters that require grad."""
        fused = self.device.type == "cuda"
        return torch.optim.AdamW(trainable(self.model), lr=learning_rate, weight_decay=weight_decay, fused=fused)

    def train(
        self,
        windows: Windows,
        batches: Sequence[Tensor],
        optimiser: torch.optim.Optimizer,
        *,
        rate: Callable[[int], float] | None = None,
        after: Callable[[int], bool] = lambda step: False,
        frozen: bool = False,
    ) -> float:
        """Take one step a batch, and return the mean of their losses over windows.

        Args:
            windows: Of the series.
            batches: Indices of windows.
            optimiser: Of the model's parameters.
            rate: step (from 0) -> learning rate; None leaves it.
            after: Called with the number of steps done; True ends the training. It may change the model's mode.
            frozen: Train in eval mode: no dropout, running statistics of batch norm.

        Raises:
            NonFiniteError: A loss was not finite.
        """
        total, seen = torch.zeros((), dtype=torch.float64, device=self.device), 0

        def gradients(size: int, index: Tensor) -> Tensor:
            optimiser.zero_grad(set_to_none=True)
            return add_gradients(lambda part: self.loss(windows, part), (index,), self.parallel.own_parts(size), size)

        def update() -> None:
            optimiser.step()

        work = self.parallel.work(gradients, update)
        for step, index in enumerate(batches):
            if rate is not None:
                for group in optimiser.param_groups:
                    group["lr"] = rate(step)
            self.model.train(not frozen)

            def part(start: int, stop: int, index: Tensor = index) -> tuple[Tensor]:
                return (index[start:stop].to(self.device),)

            total += self.parallel.step(work, update, (0, len(index)), part)
            seen += len(index)
            if after(step + 1):
                break
        return _finite("training", self.parallel.sum(total).item() / seen)


def _finite(which: str, loss: float) -> float:
    if not math.isfinite(loss):
        raise NonFiniteError(f"the {which} loss is not finite: lower the learning rate, in a new run")
    return loss


def batches(n: int, size: int, steps: int, seed: int) -> list[Tensor]:
    """Return the batches of an epoch, indices into n windows: one pass in random order, or a number of steps.

    Args:
        n: Windows.
        size: Of a batch; the last of a pass may be smaller.
        steps: 0: one pass; else so many full batches, drawn from one random order after another.
        seed: Of the order.

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
    """Return step -> learning rate that falls from ``learning_rate`` at step 0 to zero at step ``total``.

    Example:
        >>> [round(cosine(2.0, 4)(step), 3) for step in range(5)]
        [2.0, 1.707, 1.0, 0.293, 0.0]
    """
    return lambda step: learning_rate * 0.5 * (1 + math.cos(math.pi * step / total))


def evenly(total: int, points: int) -> list[int]:
    """Return ``points`` evenly spaced whole numbers up to ``total``, fewer where they coincide; none is 0.

    Example:
        >>> evenly(54, 4), evenly(2, 4)
        ([14, 27, 41, 54], [1, 2])
    """
    return sorted({max(1, (2 * total * k + points) // (2 * points)) for k in range(1, points + 1)})
