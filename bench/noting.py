"""Launches of Triton kernels are noted instead of made, on memory that is zero and takes no room.

So a chunk of a thousand images at full size is gone through on a CPU in seconds: what would compute
is a launch, and pages of zeros that nobody writes are not allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fastlr import ops

# Called with kernel, arguments, options and constants, and the number of programs.
Note = Callable[[Any, tuple, dict[str, Any], int], None]


def zeros(meta: Tensor) -> Tensor:
    """Zeros of the shape, strides and dtype of a tensor on the meta device."""
    with _disable_current_modes():
        memory = np.zeros(max(1, meta.untyped_storage().nbytes()), np.uint8)
        flat = torch.from_numpy(memory)[: meta.untyped_storage().nbytes()].view(meta.dtype)
        return flat.as_strided(meta.shape, meta.stride())


@contextmanager
def noted(note: Note) -> Iterator[None]:
    """Call ``note`` in place of launching a Triton kernel; new memory is zero."""
    from triton.runtime.jit import JITFunction

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool = False, **given: Any) -> None:
        note(self, args, given, grid[0])

    before = JITFunction.run, torch.empty, torch.empty_like
    empty, empty_like = before[1:]

    def zeros_for_empty(*size: Any, **options: Any) -> Tensor:
        with _disable_current_modes():
            return zeros(empty(*size, **options | {"device": "meta"}))

    def zeros_for_empty_like(t: Tensor, **options: Any) -> Tensor:
        with _disable_current_modes():
            return zeros(empty_like(t, **options | {"device": "meta"}))

    def zeros_for_new_empty(t: Tensor, *size: Any, **options: Any) -> Tensor:
        return zeros_for_empty(*size, **{"dtype": t.dtype} | options)

    # Over the one that it inherits.
    Tensor.new_empty = zeros_for_new_empty  # type: ignore[method-assign, assignment]
    JITFunction.run = run  # type: ignore[method-assign]
    torch.empty = zeros_for_empty  # type: ignore[assignment]
    torch.empty_like = zeros_for_empty_like  # type: ignore[assignment]
    try:
        with ops.using("triton"):
            yield
    finally:
        JITFunction.run, torch.empty, torch.empty_like = before  # type: ignore[method-assign]
        del Tensor.new_empty
