"""Process-wide state that a measurement changes: random generators and warning filters."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


def quiet_rng(device: torch.device) -> AbstractContextManager[None]:
    """Leave the random states of the CPU and of ``device`` as they were."""
    gpus = [device] if device.type == "cuda" else []
    return torch.random.fork_rng(gpus)


@contextmanager
def warnings_ignored() -> Iterator[None]:
    """Ignore warnings within this context."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
