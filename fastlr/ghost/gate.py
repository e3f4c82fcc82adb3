"""A product with one number a sample and channel, the last step of squeeze-and-excitation, as one node of the graph.

Its backward pass reads the gradient and the input once, where torch's own makes and reads a product of their size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastlr import ops


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
