"""Tensors in the middle of buffers of NaN, to see whether a kernel reads or writes beyond them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastlr.ops.block import changed

BORDER = 1 << 12  # elements before and behind a tensor: more than a tile reaches
aten = torch.ops.aten
ALLOCATIONS = (
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
    aten.new_zeros,
    aten.zeros,
    aten.zeros_like,
)


class Borders(TorchDispatchMode):
    """As a context, it puts tensors that are allocated within into the middle of buffers of NaN.

    What is read there shows in results; what is written there, `broken` finds. Buffers of integers
    hold the largest one instead.
    """

    def __init__(self) -> None:
        super().__init__()
        self._buffers: list[Tensor] = []

    def around(self, t: Tensor) -> Tensor:
        """Return a tensor of the same values and strides, in the middle of a buffer of its own."""
        reach = sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True)) + 1
        size = reach + 2 * BORDER if t.numel() else 2 * BORDER
        buffer = t.new_full((size,), _filling(t.dtype))
        self._buffers.append(buffer)
        inside = buffer.as_strided(t.shape, t.stride(), BORDER)
        if t.numel():
            # Along axes of stride 0 the one element stands for all.
            every = [slice(0, 1) if step == 0 else slice(None) for step in t.stride()]
            inside[tuple(every)] = t[tuple(every)]
        return inside

    def around_all(self, args: Sequence[Any]) -> list[Any]:
        """Return the arguments of an op, all tensors among them as `around` returns them."""
        return changed(lambda a, _: self.around(a) if isinstance(a, Tensor) else a, args)

    def broken(self) -> bool:
        """Return True if something was written beyond a tensor."""
        for buffer in self._buffers:
            untouched = buffer.new_full((BORDER,), _filling(buffer.dtype)).view(torch.uint8)
            for border in (buffer[:BORDER], buffer[-BORDER:]):
                if not torch.equal(border.view(torch.uint8), untouched):
                    return True
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation of torch; what it allocates comes in the middle of a buffer."""
        result = func(*args, **(kwargs or {}))
        has_memory = func.overloadpacket in ALLOCATIONS and not result.is_meta
        return self.around(result) if has_memory else result


def _filling(dtype: torch.dtype) -> float | int | bool:
    """Return what a buffer is filled with."""
    if dtype.is_floating_point:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max
