"""The backward formula of one node, run outside of a backward pass."""

from __future__ import annotations

from itertools import compress
from typing import Any

import torch
from torch import Tensor

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
    needed = compress(by_argument, node.needs_input_grad)
    return tuple(None if child is None else next(needed) for child, _ in node.next_functions)


def dense(grad: Tensor | None) -> Tensor:
    """Return a sparse gradient (nn.Embedding(sparse=True)) as a dense one."""
    assert grad is not None
    return grad.to_dense() if grad.layout != torch.strided else grad
