"""Batch norm in eval mode as a scaling and a shift of each channel.

It is one node of the autograd graph, with its rule.

For where no convolution comes before that it could be folded into. On a CPU, torch's own backward
pass of batch norm takes ten times as long as the multiplication that it is, unless channels lie
apart in memory; and its result is laid out anew, which the transposes around a batch norm in
sequence models then pay for again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastlr.ghost.norms.factors import Dense, Factor
from fastlr.ghost.norms.rules import Site, batch_norm_grads, rule

NODE = "FixedNormBackward"


class FixedNorm(torch.autograd.Function):
    """Batch norm in eval mode of each channel (axis 1), keeping the strides of ``x``.

    It is ``gamma (x - mean) / sqrt(var + eps) + beta``.

    Attributes of a node: ``roles`` names its inputs; ``block`` is the name of its first parameter;
    ``norms_only`` says that the gradients of the
    parameters will not be looked at.
    """

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        x: Tensor,
        gamma: Tensor | None,
        beta: Tensor | None,
        mean: Tensor,
        var: Tensor,
        eps: float,
        name: str,
    ) -> Tensor:
        rstd = torch.rsqrt(var + eps)
        scale = rstd if gamma is None else gamma * rstd
        shift = -mean * scale if beta is None else torch.addcmul(beta, mean, scale, value=-1)
        ctx.save_for_backward(x, mean, var, scale)
        ctx.eps, ctx.block, ctx.norms_only = eps, name, False
        tensors = {"x": x, "gamma": gamma, "beta": beta}
        ctx.roles = tuple(role for role, t in tensors.items() if t is not None)
        return torch.addcmul(_along(shift, x), x, _along(scale, x), out=torch.empty_like(x))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:  # noqa: D102
        x, mean, var, scale = ctx.saved_tensors
        gx = g * _along(scale, g) if ctx.needs_input_grad[0] else None
        if ctx.norms_only or not any(ctx.needs_input_grad[1:3]):
            return gx, *[None] * 6
        axes = [0, *range(2, g.ndim)]
        beta = g.sum(axes)
        gamma = ((x - _along(mean, x)) * g).sum(axes) * torch.rsqrt(var + ctx.eps)
        _, needs_gamma, needs_beta, *_ = ctx.needs_input_grad
        found = gamma if needs_gamma else None, beta if needs_beta else None
        return gx, *found, None, None, None, None


def _along(t: Tensor, like: Tensor) -> Tensor:
    """One number a channel, ready to be broadcast."""
    return t.view(-1, *[1] * (like.ndim - 2))


@rule(NODE, about="batch norm in eval mode, as a scaling and a shift")
def fixed_norm(site: Site, slots: Sequence[int]) -> dict[int, Factor]:
    """Gamma: sum g (x - mean) / sigma; beta: sum g."""
    site.require_axis(0)
    node = site.node
    x, mean, var, _ = node.saved_tensors
    grads = dict(
        zip(("gamma", "beta"), batch_norm_grads(site, x, mean, var, node.eps), strict=True)
    )
    return {slot: Dense(grads[node.roles[slot]]) for slot in slots}
