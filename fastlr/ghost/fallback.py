"""Exact routes for what no rule covers.

`by_node` runs the backward formula of one node once for each sample, with the gradient of the other samples set to zero:
the formula is linear in that gradient, so this is that sample's gradient, whatever the node computes. `by_loop` slices the
inputs and runs the model forward and backward one sample at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fastlr.errors import ModelError
from fastlr.ghost import adapt
from fastlr.ghost.factors import Dense
from fastlr.ghost.graph import call_node, dense, exact_grads
from fastlr.ghost.layout import Ragged
from fastlr.ghost.recurrent import Unfused
from fastlr.ghost.rules import Site, Unsupported


def by_node(site: Site, slots: Sequence[int]) -> dict[int, Dense]:
    """Per-sample gradients of the parameter slots of any node, by its own backward formula, sample by sample."""
    masks: list[Tensor | None] = []
    for output, gradient in enumerate(site.gradients):
        if gradient is None:
            masks.append(None)
            continue
        layout = site.layouts.get(output)
        if layout is None:
            raise Unsupported(f"the sample axis of output {output} is unknown")
        if isinstance(layout, Ragged):
            if layout.ids is None:
                raise Unsupported("the rows of the samples are unknown")
            ids = layout.ids
        else:
            ids = layout.samples(gradient.shape[layout.dim], site.count, gradient.device)
        shape = [1] * gradient.ndim
        shape[layout.dim] = len(ids)
        masks.append(ids.view(shape))
    found: dict[int, list[Tensor]] = {slot: [] for slot in slots}
    for j in range(site.count):
        only = tuple(
            None if g is None or m is None else torch.where(m == j, g, torch.zeros((), dtype=g.dtype, device=g.device))
            for g, m in zip(site.gradients, masks, strict=True)
        )
        with torch.no_grad():
            results = call_node(site.node, only)
        for slot in slots:
            grad = results[slot]
            if grad is None:
                grad = torch.zeros(site.shapes[slot], device=next(g for g in only if g is not None).device)
            found[slot].append(dense(grad).sum_to_size(site.shapes[slot]))  # the engine sums over broadcast axes
    return {slot: Dense(torch.stack(grads)) for slot, grads in found.items()}


def by_loop(
    model: nn.Module,
    batch: adapt.Batch,
    v: Tensor,
    parameters: dict[str, Tensor],
    *,
    output: adapt.OutputSelector,
    out_dim: int,
) -> dict[str, Tensor]:
    """Squared norms [B] (float64) of the gradients of ``parameters``, one forward and backward pass a sample."""
    norms = {name: torch.zeros(batch.count, dtype=torch.float64, device=v.device) for name in parameters}
    for j in range(batch.count):
        with torch.enable_grad(), Unfused():
            z = adapt.select_output(adapt.call(model, batch.pick([j])), output)
        cotangent = v.narrow(out_dim, j, 1)
        if z.shape != cotangent.shape:
            raise ModelError(
                f"sample {j} alone gives an output of shape {tuple(z.shape)}, in the batch {tuple(cotangent.shape)}; "
                "check in_dim= and out_dim="
            )
        if not z.requires_grad:
            continue
        for name, value in zip(parameters, exact_grads(z, parameters, cotangent.to(z.dtype)), strict=True):
            norms[name][j] = value
    return norms
