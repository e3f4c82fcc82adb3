"""Process-wide state that a measurement changes: random generators and warning filters.

The CPU's generator, and that of a GPU, is one for all threads. The first of the threads that
measure at the same time keeps its state, the last puts it back: none turns it back while another,
which may have seeded it, still draws.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from fastlr.ops.held import SharedContext

_changed = threading.Lock()  # of the two below
_inside: Counter[int] = Counter()  # thread -> how often it is within `quiet_rng`
_states: dict[torch.device, Tensor] = {}  # generator -> its state before the first thread came
_CPU = torch.device("cpu")


@contextmanager
def quiet_rng(device: torch.device) -> Iterator[None]:
    """Leave the random states of the CPU and of ``device`` as they were."""
    thread = threading.get_ident()
    mine = {
        generator: _state(generator)
        for generator in {_CPU, device}
        if generator.type in ("cpu", "cuda")
    }
    with _changed:
        _inside[thread] += 1
        for generator, state in mine.items():
            _states.setdefault(generator, state)
    try:
        yield
    finally:
        with _changed:
            _inside[thread] -= 1
            if not _inside[thread]:
                del _inside[thread]
            if not _inside:
                _put_back(_states)
                _states.clear()
            elif set(_inside) == {thread}:
                _put_back(mine)


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


def _state(generator: torch.device) -> Tensor:
    return torch.get_rng_state() if generator.type == "cpu" else torch.cuda.get_rng_state(generator)


def _put_back(states: dict[torch.device, Tensor]) -> None:
    for generator, state in states.items():
        if generator.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, generator)


def _forked() -> None:
    """In a forked process: of its parent's threads there is but the one that forked."""
    global _changed, _filters
    _changed, _filters = threading.Lock(), SharedContext(_ignoring)
    for thread in [one for one in _inside if one != threading.get_ident()]:
        del _inside[thread]
    if not _inside:
        _states.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
