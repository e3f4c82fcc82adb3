"""The backward formula of one node, run outside of a backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastlr.ghost.graph.layouts import Unsupported
from fastlr.ops.torch_private import output_metadata


def call_node(node: Any, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Run the backward formula of one node.

    Returns its vector-Jacobian product with respect to its inputs, by slot.
    """
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        return _call_own(node, gradients)
    result = node(*gradients)
    return result if isinstance(result, tuple) else (result,)


def _call_own(node: Any, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Run the backward formula of a `torch.autograd.Function` as the engine of autograd runs it.

    The engine hands it zeros for outputs that no gradient reaches. What it returns is by arguments
    of ``apply``, of which those that are no tensors have no slot.
    """
    given = tuple(
        torch.zeros(m.shape, dtype=m.dtype, device=m.device) if g is None else g
        for g, m in zip(gradients, output_metadata(node), strict=True)
    )
    result = node.apply(*given)
    by_argument = result if isinstance(result, tuple) else (result,)
    needed = [argument for argument, wanted in enumerate(node.needs_input_grad) if wanted]
    linked = [slot for slot, (child, _) in enumerate(node.next_functions) if child is not None]
    if len(needed) != len(linked) or max(needed) >= len(by_argument):
        raise Unsupported(f"{node.name()} does not say which of its arguments need a gradient")
    by_slot: list[Tensor | None] = [None] * len(node.next_functions)
    for slot, argument in zip(linked, needed, strict=True):
        by_slot[slot] = by_argument[argument]
    return tuple(by_slot)


def dense(grad: Tensor | None) -> Tensor:
    """Return a sparse gradient (nn.Embedding(sparse=True)) as a dense one."""
    assert grad is not None
    return grad.to_dense() if grad.layout != torch.strided else grad
