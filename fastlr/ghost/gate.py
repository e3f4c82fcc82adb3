"""Squeeze-and-excitation's mean over all positions, and its product with one number a sample and channel, as own nodes.

The product's backward pass reads the gradient and the input once, where torch's own makes and reads a product of their
size. The mean's gives one number a sample and channel, expanded, where torch's own writes a tensor of the input's size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlr import ops

_POOLS = {F.adaptive_avg_pool1d: 1, F.adaptive_avg_pool2d: 2, F.adaptive_avg_pool3d: 3}
MEANS = {torch.mean, Tensor.mean, *_POOLS}


class Squeeze(torch.autograd.Function):
    """``mean(x)``, for x [B, C, *spatial] and a function that takes the mean over all spatial axes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Callable[[Tensor], Tensor]) -> Tensor:  # noqa: D102
        ctx.shape = x.shape
        result = mean(x)
        return result.clone() if result._is_view() else result  # a view could not be changed in place

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # noqa: D102
        one = g.reshape(*ctx.shape[:2], *[1] * (len(ctx.shape) - 2)) / prod(ctx.shape[2:])
        return one.expand(ctx.shape), None


def squeezed(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
    """The input of a call that is a mean over all spatial axes which `Squeeze` can take; None if it is not one."""
    x, size = args if len(args) == 2 else (None, None)
    if not isinstance(x, Tensor) or not x.requires_grad or x.is_leaf or x.ndim < 3:
        return None
    sizes = list(size) if isinstance(size, (tuple, list)) else [size]
    if func in _POOLS:
        whole = x.ndim == _POOLS[func] + 2 and all(n == 1 for n in sizes) and not kwargs
    else:
        axes = [axis % x.ndim for axis in sizes if isinstance(axis, int)]
        whole = len(axes) == len(sizes) and sorted(axes) == list(range(2, x.ndim)) and kwargs.keys() <= {"keepdim"}
    return x if whole else None


class Gate(torch.autograd.Function):
    """``x * gate`` for x [B, C, *spatial] and gate [B, C, 1, ...]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:  # noqa: D102
        ctx.save_for_backward(x, gate)
        return x * gate

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102
        return ops.run("gate_grad", g, *ctx.saved_tensors)


def gated(factors: Sequence[Any]) -> tuple[Tensor, Tensor] | None:
    """The two factors of a product that a `Gate` can make, as (x, gate); None if it cannot."""
    if len(factors) != 2 or not all(isinstance(t, Tensor) and t.requires_grad and not t.is_leaf for t in factors):
        return None
    gate, x = sorted(factors, key=Tensor.numel)
    per_channel = (*x.shape[:2], *[1] * (x.ndim - 2))
    fits = x.ndim > 2 and gate.shape == per_channel and x.numel() > gate.numel()
    return (x, gate) if fits and gate.dtype == x.dtype and gate.device == x.device else None
