"""The mean over all positions of squeeze-and-excitation as an autograd node, and its product.

The mean's backward pass gives one number per sample and channel, expanded. Torch's own writes a
tensor of the input's size.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlr.ops.torch_private import is_view

_POOLS = {F.adaptive_avg_pool1d: 1, F.adaptive_avg_pool2d: 2, F.adaptive_avg_pool3d: 3}
MEANS: set[Callable] = {torch.mean, Tensor.mean, *_POOLS}
PRODUCTS: set[Callable] = {torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__}

_LEAST_OF_A_SERIES = 1 << 15  # numbers of a sample [C, L] from which a node of ours saves time


class ChannelMeans(torch.autograd.Function):
    """``mean(x)``, for x [B, C, *spatial].

    ``mean`` is a function that takes the mean over all spatial axes.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Callable[[Tensor], Tensor]) -> Tensor:  # noqa: D102
        ctx.shape = x.shape
        result = mean(x)
        return result.clone() if is_view(result) else result  # a view could not be changed in place

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # noqa: D102
        one = g.reshape(*ctx.shape[:2], *[1] * (len(ctx.shape) - 2)) / prod(ctx.shape[2:])
        return one.expand(ctx.shape), None


def _saves_time(x: Tensor) -> bool:
    """Return True unless samples are short series, as norms written in Python work on."""
    is_series = x.ndim == 3
    return not is_series or prod(x.shape[1:]) >= _LEAST_OF_A_SERIES


def is_whole_mean(func: Callable, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Return True for a call of one of MEANS that is over all spatial axes."""
    if len(args) != 2 or not isinstance(args[0], Tensor):
        return False
    axes, numbers = args[0].ndim, args[1]  # sizes of the result, or summed axes
    numbers = numbers if isinstance(numbers, (tuple, list)) else [numbers]
    if func in _POOLS:
        return axes == _POOLS[func] + 2 and all(size == 1 for size in numbers) and not kwargs
    if (
        axes < 3
        or not all(isinstance(axis, int) for axis in numbers)
        or kwargs.keys() - {"keepdim"}
    ):
        return False
    return sorted(axis % axes for axis in numbers) == list(range(2, axes))


def keeps_axes(func: Callable, kwargs: dict[str, Any]) -> bool:
    """Return True for a call of one of MEANS whose result has the spatial axes, of size 1."""
    return func in _POOLS or bool(kwargs.get("keepdim"))


def channel_means(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
    """Return the result of a call for which `is_whole_mean` holds, by `ChannelMeans`.

    None if the input needs no gradient, or if that saves no time.
    """
    if not args[0].requires_grad or args[0].is_leaf:
        return None
    if func not in _POOLS and not _saves_time(args[0]):
        return None
    return ChannelMeans.apply(args[0], lambda t: func(t, args[1], **kwargs))


def is_gate(numbers: Any, x: Tensor) -> bool:
    """Return True for one number a sample and channel of ``x``, computed of parameters.

    ``x`` is [B, C, *spatial].
    """
    if not isinstance(numbers, Tensor) or not numbers.requires_grad or numbers.is_leaf:
        return False
    per_channel = (*x.shape[:2], *[1] * (x.ndim - 2))
    fits = x.ndim > 2 and numbers.shape == per_channel and x.numel() > numbers.numel()
    return fits and numbers.dtype == x.dtype and numbers.device == x.device
