"""cuDNN's switch and options, which all threads of a process share.

cuDNN plans every new problem (shape, dtype, direction) for 20 to 40 ms in every process.
Verification meets hundreds of problems and runs each once, so it runs convolutions by torch's own
kernels. The measured passes run as the user has set cuDNN.

Contexts of several threads overlap. One object counts them: the first keeps the user's setting, and
the last puts it back.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fastlr.ops.held import SharedContext
from fastlr.ops.torch_private import cudnn_enabled, enable_cudnn, narrow_products

PLANNED_ON = ("cuda",)  # types of devices


class _Switch:
    """Counts the contexts of all threads that switch cuDNN.

    Attributes:
        lock: Held while the switch changes.
        of_user: The user's setting.
        holders: Number of contexts of each kind: "never" and "verifying" switch cuDNN off, but for
            "measuring", which overrules "verifying".
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.of_user = True
        self.holders: Counter[str] = Counter()

    @contextmanager
    def held(self, kind: str) -> Iterator[None]:
        """Enter a context of a kind."""
        with self.lock:
            if not self.holders.total():
                self.of_user = cudnn_enabled()
            self._change(kind, 1)
        try:
            yield
        finally:
            with self.lock:
                self._change(kind, -1)

    def _change(self, kind: str, by: int) -> None:
        """Count a context, and set what follows from all of them."""
        self.holders[kind] += by
        off = self.holders["never"] or (self.holders["verifying"] and not self.holders["measuring"])
        enable_cudnn(self.of_user and not off)


def without_cudnn(
    device: torch.device, parameters: Iterable[Tensor], *, compared: bool = True
) -> AbstractContextManager[None]:
    """Run convolutions on a GPU by torch's own kernels, except within `cudnn_as_user_set`.

    cuDNN stays on for volumes, of which torch's own kernels make large copies.

    Args:
        device: Device of the model.
        parameters: Parameters of the model.
        compared: True if results are compared with those of the measured pass. Then cuDNN stays on
            where that pass may use TF32: torch's own kernels have more digits, and sound models
            would be refused.
    """
    if device.type not in PLANNED_ON:
        return nullcontext()
    kinds = {(p.ndim > 4, p.dtype) for p in parameters}
    has_volumes = any(volume for volume, _ in kinds)
    single = any(dtype == torch.float32 for _, dtype in kinds)
    narrow = single and not torch.is_autocast_enabled(device.type) and narrow_products(device.type)
    if has_volumes or (compared and narrow):
        return nullcontext()
    return _switch.held("verifying")


def cudnn_as_user_set(device: torch.device) -> AbstractContextManager[None]:
    """Run a measured pass on a GPU as the user has set cuDNN, whatever other threads do."""
    return _switch.held("measuring") if device.type in PLANNED_ON else nullcontext()


def never_cudnn() -> AbstractContextManager[None]:
    """Run without cuDNN, measured passes too."""
    return _switch.held("never")


def repeatable_cudnn() -> AbstractContextManager[None]:
    """Let cuDNN add in a fixed order, so that the same call gives the same bits."""
    return _repeatable.held()


@contextmanager
def _fixed_order() -> Iterator[None]:
    cudnn: Any = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic
    cudnn.benchmark, cudnn.deterministic = False, True
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = before


_switch, _repeatable = _Switch(), SharedContext(_fixed_order)
