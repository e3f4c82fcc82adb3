"""Convolution, batch norm in eval mode and activation as one node of the autograd graph, and its rule.

The definitions and identities are in fastlr.reference.folded; which blocks of a model run so is decided in
fastlr.ghost.fuse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fastlr import ops
from fastlr.ghost.factors import Dense, Factor, Norms
from fastlr.ghost.graph import Graph
from fastlr.ghost.layout import Regular
from fastlr.ghost.rules import Site, Unsupported, rule
from fastlr.torch_folded import conv_and_product, keeps_product

NODE = "FoldedConvBackward"
ONE_IMAGE = Regular(0, 1, 1)
SEVERAL = "a sample owns several images"


class FoldRefuted(Exception):
    """A folded block did not give the exact norms: these weights must run unfolded."""

    def __init__(self, names: list[str], reason: str) -> None:
        super().__init__(reason)
        self.names, self.reason = names, reason


class FoldedConv(torch.autograd.Function):
    """Activation of batch norm (running statistics) of a convolution (plus a residual), one node with correct gradients.

    Attributes of a node: ``roles`` names its inputs; ``ready`` hands over what the rule has computed before the backward
    pass reaches the node (the output gradient and the input gradient for it); ``norms_only`` says that the gradients of
    the parameters will not be looked at.
    """

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gamma: Tensor | None,
        beta: Tensor | None,
        residual: Tensor | None,
        mean: Tensor,
        var: Tensor,
        eps: float,
        act: str,
        dtype: torch.dtype,
        options: tuple,
    ) -> Tensor:
        last = x.ndim == 4 and dtype != torch.float64  # the faster order for convolutions, on CPUs too
        x = x.to(dtype, memory_format=torch.channels_last if last else torch.preserve_format)
        folded, folded_bias, scale, rstd, shift = ops.run(
            "fold_weights", weight, bias, gamma, beta, mean, var, eps, dtype
        )
        if ops.backend_for(x) == "torch" and keeps_product(x, weight, *options):
            out, kept, product = conv_and_product(x, weight, scale, folded_bias, act, options, residual)
        else:
            product = None
            out, kept = ops.run("folded_conv", x, folded, folded_bias, act, *options, residual)
        needed = None if act == "none" else kept  # the model may add to the output in place
        ctx.save_for_backward(x, product, needed, weight, folded, scale, rstd, shift)
        ctx.act, ctx.options, ctx.ready, ctx.norms_only = act, options, None, False
        ctx.adds = residual is not None
        tensors = {"x": x, "weight": weight, "bias": bias, "gamma": gamma, "beta": beta, "residual": residual}
        ctx.roles = tuple(role for role, t in tensors.items() if t is not None)
        return out

    @staticmethod
    def moments(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
        """The gradient handed to the residual, and what fastlr.reference.folded.folded_conv_backward returns."""
        x, product, kept, weight, folded, scale, _, _ = ctx.saved_tensors
        want, act = ctx.needs_input_grad[0], ctx.act
        if ctx.adds and kept is not None:  # the gradient before the activation has to be made anyway
            grad, kept, act = ops.run("activation_grad", grad, kept, act), None, "none"
        kept = grad if kept is None else kept
        given = (x, grad, kept, act, folded, weight, scale, *ctx.options, want)
        return grad, *ops.run("folded_conv_backward", *given, *(() if product is None else (product,)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:  # noqa: D102
        ready, ctx.ready = ctx.ready, None
        if ready is not None and ready[0] is grad:
            return (ready[1], *[None] * 4, ready[2] if ctx.adds else None, *[None] * 6)
        x, _, kept, weight, folded, scale, rstd, shift = ctx.saved_tensors
        g = grad if kept is None else ops.run("activation_grad", grad, kept, ctx.act)
        *rest, groups = ctx.options
        mask = [ctx.needs_input_grad[0], any(ctx.needs_input_grad[1:5]) and not ctx.norms_only, False]
        gx, gw, _ = torch.ops.aten.convolution_backward(
            g, x, folded, None, *rest, False, [0] * len(rest[0]), groups, mask
        )
        through = g if ctx.needs_input_grad[5] else None
        if gw is None:
            return (gx, *[None] * 4, through, *[None] * 6)
        gw, sums = gw.to(scale.dtype), g.to(scale.dtype).sum([0, *range(2, g.ndim)])
        per_channel = [-1, *[1] * (weight.ndim - 1)]
        inner = (gw * weight).flatten(1).sum(1)
        found = (gw * scale.view(per_channel), sums * scale, (inner + shift * sums) * rstd, sums)
        wanted = ctx.needs_input_grad[1:5]
        return (
            gx,
            *(t.to(weight.dtype) if w else None for t, w in zip(found, wanted, strict=True)),
            through,
            *[None] * 6,
        )


@rule(NODE, about="convolution folded with batch norm in eval mode and an activation")
def folded(site: Site, slots: Sequence[int]) -> dict[int, Factor]:
    """Weight, bias, gamma and beta from the moments; the input gradient comes with them and is kept for the node."""
    if site.layout != ONE_IMAGE:
        raise Unsupported(SEVERAL)
    node = site.node
    if any(node.roles[slot] == "residual" for slot in slots):
        raise Unsupported("what is added is computed of parameters alone")
    through, gx, sq, inner, sums = FoldedConv.moments(node, site.g)
    node.ready = (site.g, gx, through)
    scale, rstd, shift = node.saved_tensors[-3:]
    factors: dict[str, Factor] = {
        "weight": Norms(sq),
        "bias": Dense(sums * scale.to(sums.dtype)),
        "gamma": Dense((inner + shift.to(sums.dtype) * sums) * rstd.to(sums.dtype)),
        "beta": Dense(sums),
    }
    return {slot: factors[node.roles[slot]] for slot in slots}


def weight_of(graph: Graph, node: int) -> list[str]:
    """Name by which a node of ours is known to the folding, that of its first parameter; none if it is frozen."""
    child, _ = graph.children[node][1]  # after x
    return [graph.parameters[child]] if child in graph.parameters else []


def parameters_of(graph: Graph, node: int) -> list[str]:
    """Names of all parameters of a node of ours, first the one that the folding knows it by; none if that is frozen."""
    return weight_of(graph, node) and [graph.parameters[c] for c, _ in graph.children[node][1:] if c in graph.parameters]


def refuse_parts_of_samples(graph: Graph, layouts: Mapping[tuple[int, int], Regular]) -> None:
    """Raise FoldRefuted with all folded convolutions of which a sample is known to own several images: they have no rule."""
    names = [
        weight_of(graph, i)
        for i, kind in enumerate(graph.names)
        if kind == NODE and layouts.get((i, 0), ONE_IMAGE) != ONE_IMAGE
    ]
    if names:
        raise FoldRefuted([] if [] in names else [name for held in names for name in held], SEVERAL)
