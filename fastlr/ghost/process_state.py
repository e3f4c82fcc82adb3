"""Process-wide state that a measurement changes: random generators and warning filters."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from fastlr.ops.held import SharedContext


def quiet_rng(device: torch.device) -> AbstractContextManager[None]:
    """Leave the random states of the CPU and of ``device`` as they were."""
    gpus = [device] if device.type == "cuda" else []
    return torch.random.fork_rng(gpus)


def warnings_ignored() -> AbstractContextManager[None]:
    """Ignore warnings as long as any thread is within such a context.

    The filters are the process's: two threads that put them back would mix them up. None waits for
    another, which may wait for it to run a backward pass.
    """
    return _filters.held()


@contextmanager
def _ignoring() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


_filters = SharedContext(_ignoring)


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """As `quiet_rng`, with seeded generators. The caller holds `fastlr.ops.model_lock.locked`."""
    with quiet_rng(device):
        torch.manual_seed(seed)
        yield


def _forked() -> None:
    """In a forked process: of its parent's threads there is but the one that forked."""
    global _filters
    _filters = SharedContext(_ignoring)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
