"""What threads share and a measurement changes: generators, filters of warnings, cuDNN's switch.

The CPU's generator, and that of a GPU, is one for all threads. The first of the threads that
measure at the same time keeps its state, the last puts it back: none turns it back while another,
which may have seeded it, still draws.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from fastlr.ops.held import SharedContext
from fastlr.ops.torch_private import cudnn_enabled, enable_cudnn, narrow_products

_changed = threading.Lock()  # of the two below
_inside: Counter[int] = Counter()  # thread -> how often it is within `quiet_rng`
_states: dict[torch.device, Tensor] = {}  # generator -> its state before the first thread came
_seeded = threading.RLock()  # held while one draws from a generator that it has seeded
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


def without_cudnn(
    device: torch.device, parameters: Iterable[Tensor] = ()
) -> AbstractContextManager[None]:
    """Run convolutions on a GPU by torch's own kernels, except within `with_cudnn`.

    cuDNN plans every new problem (shape, dtype, direction) for 20 to 40 ms in every process.
    Verification meets hundreds of problems and runs each once. The switch is the process's.

    Args:
        device: Device of the model.
        parameters: Parameters of the measured pass. If some are float32 and that pass may use TF32,
            cuDNN stays on: torch's own kernels have more digits, and sound models would be refused.
    """
    if device.type not in _PLANNED_ON:
        return nullcontext()
    single = any(p.dtype == torch.float32 for p in parameters)
    if single and not torch.is_autocast_enabled(device.type) and narrow_products(device.type):
        return nullcontext()
    return _without_cudnn.held()


@contextmanager
def with_cudnn() -> Iterator[None]:
    """Run the measured pass as the user has set cuDNN."""
    before = cudnn_enabled()
    enable_cudnn(_cudnn_of_user[-1] if _cudnn_of_user else before)
    try:
        yield
    finally:
        enable_cudnn(before)


@contextmanager
def _cudnn_off() -> Iterator[None]:
    _cudnn_of_user.append(cudnn_enabled())
    enable_cudnn(False)
    try:
        yield
    finally:
        enable_cudnn(_cudnn_of_user.pop())


_PLANNED_ON = ("cuda",)  # types of devices
_cudnn_of_user: list[bool] = []  # setting of the user while cuDNN is off
_without_cudnn = SharedContext(_cudnn_off)


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """As `quiet_rng`, with seeded generators, which one thread at a time draws from here."""
    with _seeded, quiet_rng(device):
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
    global _changed, _seeded, _filters, _without_cudnn
    _changed, _seeded, _filters = threading.Lock(), threading.RLock(), SharedContext(_ignoring)
    _without_cudnn = SharedContext(_cudnn_off)
    for thread in [one for one in _inside if one != threading.get_ident()]:
        del _inside[thread]
    if not _inside:
        _states.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
