"""The formula of a node, sample by sample: exact for any node, and slower than a rule.

A node's backward formula is linear in the gradient. With the gradient of all other samples set to
zero, it gives the gradient of one sample, whatever the node computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from fastlr.errors import one_line
from fastlr.ghost.graph.formulas import call_node, dense
from fastlr.ghost.model.view import FAILURES
from fastlr.ghost.norms.factors import Dense
from fastlr.ghost.norms.rules import Site, Unsupported
from fastlr.ops.deferred_checks import out_of_memory
from fastlr.ops.torch_private import own_function


def by_node(site: Site, slots: Sequence[int]) -> dict[int, Dense]:
    """Return the per-sample gradients of the parameter slots of any node.

    They are made by the node's own backward formula, sample by sample: each time on the whole
    batch, as its zeros cost what other numbers do.

    Args:
        site: the node.
        slots: Slots of its parameters.
    """
    owners = [_owners(site, output) for output in range(len(site.gradients))]
    gradients: dict[int, list[Tensor]] = {slot: [] for slot in slots}
    for sample in range(site.count):
        own = tuple(
            None if g is None or of is None else g.where(of == sample, g.new_zeros(()))
            for g, of in zip(site.gradients, owners, strict=True)
        )
        with torch.no_grad():
            results = _formula(site.node, own)
        for slot in slots:
            grad, shape = results[slot], site.shapes[slot]
            if grad is None:
                device = next(g.device for g in own if g is not None)
                grad = torch.zeros(shape, device=device)
            # The engine sums over broadcast axes.
            gradients[slot].append(dense(grad).sum_to_size(shape))
    return {slot: Dense(torch.stack(grads)) for slot, grads in gradients.items()}


def _owners(site: Site, output: int) -> Tensor | None:
    """Return the sample of each row of the gradient at an output, to be broadcast along it.

    None where no gradient arrives.
    """
    gradient, layout = site.gradients[output], site.layouts.get(output)
    if gradient is None:
        return None
    if layout is None:
        raise Unsupported(f"the sample axis of output {output} is unknown")
    ids = layout.samples(site.count, gradient.device)
    shape = [1] * gradient.ndim
    shape[layout.dim] = len(ids)
    return ids.view(shape)


def _formula(node: Any, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """`call_node`, or Unsupported where a user's own formula does not run here.

    Some take what they are given only within autograd's engine.
    """
    try:
        return call_node(node, gradients)
    except FAILURES as error:
        is_python_function = own_function(node) is not None
        if not is_python_function or isinstance(error, CheckpointError) or out_of_memory(error):
            raise
        raise Unsupported(
            f"the backward formula of {node.name()} fails by itself: {one_line(error)[:200]}"
        ) from error
