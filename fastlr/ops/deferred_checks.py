"""Checks of values on a device, at once or gathered as flags.

They are gathered while a CUDA graph is captured, which must not wait for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_gathered: list[Tensor] | None = None


def refuse_where(bad: Tensor, error: Callable[[], Exception]) -> None:
    """Raise ``error()`` if any element of ``bad`` is true.

    Within `gathered`, keep the question instead.
    """
    if _gathered is not None:
        _gathered.append(bad.any())
    elif bool(bad.any()):
        raise error()


def refuse_beyond(values: Tensor, error: Callable[[], Exception]) -> None:
    """Raise ``error()`` if any element of ``values`` is plus infinity or not a number.

    Within `gathered`, keep the question instead.
    """
    largest = values.amax()
    if _gathered is not None or not float(largest) < math.inf:
        # Nor is that so of what is not a number.
        refuse_where(~(largest < math.inf), error)


def may_wait_for_device() -> bool:
    """Return True if checks may wait for the device."""
    return _gathered is None


@contextmanager
def gathered() -> Iterator[list[Tensor]]:
    """Gather checks instead of making them: scalar tensors, true where something is wrong."""
    global _gathered
    before, _gathered = _gathered, []
    try:
        yield _gathered
    finally:
        _gathered = before


def out_of_memory(error: BaseException) -> bool:
    """Return True for an error that says that memory ran out, on any device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(
        sign in str(error) for sign in ("can't allocate memory", "out of memory", "ALLOC_FAILED")
    )
