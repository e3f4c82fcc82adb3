"""A small network that training changes in every way, its data, and a hand-written loop.

It has dropout and batch norm, and is trained with momentum.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import fastlr

SHAPE = (3, 8, 8)
INPUTS = fastlr.ShapeImages(SHAPE)
N = 24


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(144, 2),
    )


def data(count: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, *SHAPE, generator=generator), torch.randint(
        0, 2, (count,), generator=generator
    )


def seed_all(seed: int = 3) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def random_states() -> tuple:
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())


def train(
    model: nn.Module,
    watch: Callable[[], Any] = lambda: None,
    *,
    steps: int = 6,
    accumulate: int = 1,
    autocast: bool = False,
    seed: int = 3,
    mid: Callable[[], Any] = lambda: None,
    each: Callable[[], Any] = lambda: None,
) -> list[float]:
    """Train; call ``mid`` between backward passes, ``each`` and ``watch`` after optimizer steps.

    ``each`` is called before ``watch``.
    """
    seed_all(seed)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    x, y = data()
    losses = []
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            # Around the step too.
            for _ in range(accumulate):
                rows = torch.randperm(len(x))[:16]
                loss = F.cross_entropy(model(x[rows]).float(), y[rows]) / accumulate
                loss.backward()
                losses.append(loss.item())
                mid()
            optimizer.step()
            optimizer.zero_grad()
            each()
            watch()
    return losses


class Recorded:
    """An integration that also keeps in ``rows`` what it measured and what `estimate` says then."""

    rows: tuple[tuple, ...] = ()  # (step, epoch, value, estimate)

    def measure(self, *args: Any) -> Any:
        wanted = self.estimate(*args)
        result = super().measure(*args)
        self.rows = (*self.rows, (self.last.step, self.last.epoch, self.last.value, wanted))
        return result


def same_bits(a: nn.Module, b: nn.Module) -> bool:
    """Return True if two models agree in every bit of parameters and buffers."""
    left, right = a.state_dict(), b.state_dict()
    return list(left) == list(right) and all(torch.equal(left[name], right[name]) for name in left)
