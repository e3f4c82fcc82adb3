"""Convolution, batch norm in eval mode and activation as one node of the autograd graph.

With its rule.

The definitions and identities are in fastlr.ops.folded; which blocks of a model run so is
decided in fastlr.ghost.fusion.mode.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastlr import ops
from fastlr.ghost.fusion.precomputed import take_precomputed
from fastlr.ghost.graph.layouts import SAMPLES_FIRST
from fastlr.ghost.graph.uses import Uses
from fastlr.ghost.graph.walk import Graph
from fastlr.ghost.norms.factors import Factor, NormsOnly
from fastlr.ghost.norms.rules import Site, Unsupported, rule
from fastlr.ops.activations import value_of
from fastlr.ops.block import Block, Gradients, Loaded
from fastlr.ops.folded import (
    folded_and_unfolded_convolution,
    keeps_unfolded_convolution,
    through_activation,
    through_loading,
)
from fastlr.ops.geometry import ConvGeometry

NODE = "FoldedConvBackward"


class BlockOptions(NamedTuple):
    """What a folded block is but for its tensors.

    The last five are what it does for the blocks around it, where kernels serve.

    Attributes:
        name: Name of the convolution's weight.
        eps: Epsilon of the batch norm.
        activation: a key of fastlr.ops.activations.ACTIVATIONS.
        dtype: Dtype of the block's work, autocast's perhaps.
        geometry: Geometry of the convolution.
        x_activation: Activation of the block before, applied to ``x`` as it is loaded.
        gradient_at_output: See `fastlr.ops.block.Loaded`. `fastlr.ghost.fusion.pending` says who
            applies a derivative.
        residual_activation: applied to the residual as it is loaded.
        passes_on_x: ``x`` is an output too, for those who load it after this block: their
            gradient, at the output of the activation, comes here and is added.
        mean: the mean of the block's activation over all positions is an output too, and the first
            output is the activation's input.
    """

    name: str
    eps: float
    activation: str
    dtype: torch.dtype
    geometry: ConvGeometry
    x_activation: str = "none"
    gradient_at_output: bool = False
    residual_activation: str = "none"
    passes_on_x: bool = False
    mean: bool = False


class BlockTensors(NamedTuple):
    """The tensors of a folded block: the inputs of its node, by the names that ``roles`` gives."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    gamma: Tensor | None
    beta: Tensor | None
    residual: Tensor | None
    mean: Tensor
    var: Tensor
    gate: Tensor | None = None


INPUTS = ("options", *BlockTensors._fields)  # the arguments of a node
PARAMETERS = ("weight", "bias", "gamma", "beta")


class FoldedConv(torch.autograd.Function):
    """Activation of batch norm (running statistics) of a convolution, as one node.

    A residual may be added before the activation. The node has correct gradients. Its outputs
    are the block's own, and ``x`` and the mean if they are wanted. Of the mean alone, the second
    output is None.

    Attributes of a node:
        roles: names of its inputs, those of `BlockTensors` that are given.
        options: the `BlockOptions`.
        block: Name of the convolution's weight.
        ready: what the rule has computed before the backward pass reaches the node, or None.
        norms_only: the gradients of the parameters will not be looked at.
    """

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, options: BlockOptions, *given: Any
    ) -> tuple[Tensor | None, ...]:
        tensors = BlockTensors(*given)
        x, weight = _in_fastest_layout(tensors.x, options.dtype), tensors.weight
        per_channel = tensors.bias, tensors.gamma, tensors.beta, tensors.mean, tensors.var
        folded, channels = ops.run("fold_weights", options.dtype, options.eps, weight, *per_channel)
        block = Block(weight, folded, channels, options.activation, options.geometry)
        out, kept, unfolded_out, mean = _computed(x, block, tensors, options)
        if options.activation == "none":
            kept = None  # the model may add to the output in place
        ctx.save_for_backward(x, tensors.gate, weight, folded, channels, kept, unfolded_out)
        ctx.options, ctx.block, ctx.ready, ctx.norms_only = options, options.name, None, False
        ctx.roles = tuple(role for role, t in tensors._asdict().items() if t is not None)
        ctx.set_materialize_grads(False)
        outputs = out, tensors.x if options.passes_on_x else None, mean
        # To autograd a None is a float32 output, by which float64 models would be audited.
        return outputs if options.mean else outputs[: 1 + options.passes_on_x]

    @staticmethod
    def sq_norms(ctx: Any, *given: Tensor | None) -> tuple[dict[str, Tensor | None], dict]:
        """Return the gradients at the inputs of a node, and the squared norms of its parameters.

        Both by role; of the gradients only those of what is no parameter.
        """
        x, block, gradients, kept, unfolded_out = _to_differentiate(ctx, given)
        if "residual" in ctx.roles and block.activation != "none":
            # The gradient before the activation has to be made anyway: it is the residual's.
            g = through_activation(gradients, kept, block.activation)
            gradients, kept = Gradients(g, gradients.loaded), g
            block = block._replace(activation="none")
        want_input = ctx.needs_input_grad[INPUTS.index("x")]
        gx, *norms = ops.run(
            "folded_conv_backward", x, gradients, kept, block, want_input, unfolded_out
        )
        by_role = dict(zip((*PARAMETERS, "gate"), norms, strict=False))
        return {"x": gx, "residual": gradients.output, "gate": by_role.pop("gate", None)}, by_role

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> tuple:  # noqa: D102
        found = take_precomputed(ctx, given) or FoldedConv.gradients(ctx, *given)
        needed = zip(INPUTS, ctx.needs_input_grad, strict=True)
        return tuple(found.get(role) if is_needed else None for role, is_needed in needed)

    @staticmethod
    def gradients(ctx: Any, *given: Tensor | None) -> dict[str, Tensor | None]:
        """Return the gradients at the inputs of a node by role, as autograd's own would be."""
        x, block, gradients, kept, _ = _to_differentiate(ctx, given)
        g = through_activation(gradients, kept, block.activation)
        wanted = [ctx.needs_input_grad[INPUTS.index("x")], not ctx.norms_only, False]
        gx, gw, _ = torch.ops.aten.convolution_backward(
            g, value_of(x), block.folded, None, *block.geometry, wanted
        )
        found: dict[str, Tensor | None] = {"residual": g}
        if gx is not None:
            found["x"], found["gate"] = through_loading(gx, x, gradients.loaded)
        if gw is None:
            return found
        weight, (scale, rstd, shift) = block.weight, block.statistics
        gw, sums = gw.to(scale.dtype), g.to(scale.dtype).sum([0, *range(2, g.ndim)])
        inner = (gw * weight).flatten(1).sum(1)
        of_parameters = {
            "weight": gw * scale.view(-1, *[1] * (weight.ndim - 1)),
            "bias": sums * scale,
            "gamma": (inner + shift * sums) * rstd,
            "beta": sums,
        }
        return found | {role: t.to(weight.dtype) for role, t in of_parameters.items()}


def _in_fastest_layout(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the inputs of a block in a dtype, in the memory format that is fastest."""
    channels_last_is_faster = x.ndim == 4 and dtype != torch.float64
    layout = torch.channels_last if channels_last_is_faster else torch.preserve_format
    return x.to(dtype, memory_format=layout)


def _computed(
    x: Tensor, block: Block, tensors: BlockTensors, options: BlockOptions
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Compute a block for inputs in its dtype.

    Returns:
        (first output, what the activation's derivative is computed by, convolution by the unfolded
        weight, mean of the activation). The third is there where plain torch makes the norms of
        it, which loads nothing but tensors as they are.
    """
    if ops.backend_for(x) == "torch" and keeps_unfolded_convolution(
        x, block.weight, block.geometry
    ):
        return *folded_and_unfolded_convolution(x, block, tensors.residual), None
    loaded, residual = Loaded(x, options.x_activation, tensors.gate), None
    if tensors.residual is not None:
        residual = Loaded(tensors.residual, options.residual_activation)
    out, other = ops.run("folded_conv", loaded, block, residual, options.mean)
    return (out, out, None, other) if options.mean else (out, other, None, None)


def _to_differentiate(
    ctx: Any, given: Sequence[Tensor | None]
) -> tuple[Loaded, Block, Gradients, Tensor, Tensor | None]:
    """Return what the backward pass of a node works on for these gradients at its outputs.

    Returns:
        (what the block has loaded, the block with the activation to be differentiated, gradients
        at its outputs, what the derivative is computed by, convolution by the unfolded weight). The
        fourth is anything where there is no activation.
    """
    x, gate, weight, folded, channels, kept, unfolded_out = ctx.saved_tensors
    options = ctx.options
    output, *others = given
    if output is None:  # only others were used
        size = options.geometry.output_size(x.shape[2:], weight.shape[2:])
        output = x.new_zeros(()).expand(len(x), len(weight), *size)
    gradients = Gradients(output, *others)
    first_output_is_before_activation = options.mean
    mean_was_used = gradients.mean is not None
    activation_was_used = mean_was_used or not first_output_is_before_activation
    activation = options.activation if activation_was_used else "none"
    loaded = Loaded(x, options.x_activation, gate, options.gradient_at_output)
    block = Block(weight, folded, channels, activation, options.geometry)
    return loaded, block, gradients, output if kept is None else kept, unfolded_out


@rule(NODE, about="convolution folded with batch norm in eval mode and an activation")
def folded(site: Site, slots: Sequence[int]) -> dict[int, Factor]:
    """Return the norms of weight, bias, gamma and beta of a folded convolution.

    The input gradient comes with their norms and is kept for the node.
    """
    node = site.node
    reached = [o for o, g in enumerate(site.gradients) if g is not None]
    if 0 not in reached and not node.options.mean:
        raise Unsupported("no gradient at the first output")
    if any(site.layouts.get(o) != SAMPLES_FIRST for o in reached):
        raise Unsupported("a sample owns several images")
    if any(node.roles[slot] == "residual" for slot in slots):
        raise Unsupported("what is added is computed of parameters alone")
    at_inputs, norms = FoldedConv.sq_norms(node, *site.gradients)
    node.ready = site.gradients, at_inputs
    return {slot: NormsOnly(norms[node.roles[slot]]) for slot in slots}


def folded_blocks_with(graph: Graph, names: Collection[str], uses: Uses) -> set[str]:
    """Return the folded blocks that use some of these parameters."""
    nodes = {use.node for name in names for use in uses.of_name.get(name, ())}
    return {graph.nodes[i].block for i in nodes if hasattr(graph.nodes[i], "block")}
