"""A small network that training changes in every way, its data, and a hand-written loop.

It has dropout and batch norm, and is trained with momentum.
"""

import random
from contextlib import nullcontext

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import fastlr

SHAPE = (3, 8, 8)
INPUTS = fastlr.ShapeImages(SHAPE)
N = 24


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(144, 2),
    )


def data(count=64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, *SHAPE, generator=generator), torch.randint(
        0, 2, (count,), generator=generator
    )


def seed_all(seed=3):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def random_states():
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())


def without_draws(make, *args, **options):
    """Return what is made, without a random number drawn."""
    states = random_states()
    made = make(*args, **options)
    assert random_states() == states
    return made


def train(
    model,
    watch=lambda: None,
    *,
    steps=6,
    accumulate=1,
    autocast=False,
    seed=3,
    mid=lambda: None,
    each=lambda: None,
):
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

    rows = ()  # (step, epoch, value, estimate)

    def __init__(self, *args, **options):
        without_draws(super().__init__, *args, **options)

    def measure(self, *args):
        wanted = self.estimate(*args)
        result = super().measure(*args)
        self.rows = (*self.rows, (self.last.step, self.last.epoch, self.last.value, wanted))
        return result


def same_bits(a, b):
    """Return True if two models agree in every bit of parameters and buffers."""
    left, right = a.state_dict(), b.state_dict()
    return list(left) == list(right) and all(map(torch.equal, left.values(), right.values()))
