"""The squared norms of a batch's gradients, by the routes that its plan says.

In: a batch with its graph (`Chunk`), what is known of it (`Plan`) and a cotangent. Out: squared
norms [B] by parameter: by rules where they hold, by one pass a sample elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fastlr.ghost.backward import sq_norms
from fastlr.ghost.batch import Batch
from fastlr.ghost.fallback import Forward, SingleSamples, right_copies
from fastlr.ghost.graph import exact_grads
from fastlr.ghost.known import Plan
from fastlr.ghost.model_io import ModelView
from fastlr.ghost.planner import Chunk, batch_of
from fastlr.ghost.recurrent import Unfused
from fastlr.ghost.verification.agreement import NORMS_IN_FEW_DIGITS, low_precision
from fastlr.ghost.verification.record import Ledger
from fastlr.ops.cudnn import cudnn_as_user_set


def norms_by_rules(
    chunk: Chunk, plan: Plan, v: Tensor, *, skip: frozenset[str], retain: bool
) -> dict[str, Tensor]:
    """Return the squared norms [B] of all parameters but those in ``skip``.

    Where a rule turns out not to apply, the ledger has the node's own formula from now on. A new
    plan keeps the graph for these formulas.
    """
    if skip.issuperset(chunk.graph.parameters.values()):
        return {}
    routes = chunk.ledger.routes(tolerant=plan.is_new)
    try:
        with cudnn_as_user_set(chunk.view.device):
            return sq_norms(
                chunk.graph,
                plan.structure.uses,
                chunk.z,
                v,
                plan.shapes.layouts,
                chunk.count,
                routes,
                retain=retain or plan.is_new,
                skip=skip,
            )
    finally:
        chunk.ledger.give_up(routes.given_up)


def norms_of_one(chunk: Chunk, plan: Plan, v: Tensor, *, retain: bool) -> dict[str, Tensor]:
    """Return the squared norms [1] of a batch of one sample, by plain autograd."""
    parameters = chunk.view.parameters
    if _copies(chunk, plan, v) > 1:
        return norms_by_loop(chunk, plan, v, parameters)
    with cudnn_as_user_set(chunk.view.device):
        exact = exact_grads(chunk.z, parameters, v, retain=retain)
    return {name: norm[None] for name, norm in zip(parameters, exact, strict=True)}


def norms_by_loop(
    chunk: Chunk, plan: Plan, v: Tensor, chosen: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the squared norms [B] of some parameters' gradients by the loop.

    It makes one forward and backward pass a sample.
    """
    view, copies = chunk.view, _copies(chunk, plan, v)
    samples = SingleSamples(forward_of(view, batch_of(chunk)), view.out_dim, chosen)
    by_sample = []  # [parameters] each
    with cudnn_as_user_set(view.device):
        for sample in range(chunk.count):
            beside = samples.run_copies(sample, [view.row(v, sample)], copies)
            by_sample.append(torch.stack(beside.norms[0]))
    return dict(zip(chosen, torch.stack(by_sample, 1), strict=True))


def _copies(chunk: Chunk, plan: Plan, v: Tensor) -> int:
    """Return how often the loop runs a sample at once, which a plan keeps (see `right_copies`)."""
    view, shapes = chunk.view, plan.shapes
    if shapes.copies is None:
        samples = SingleSamples(forward_of(view, batch_of(chunk)), view.out_dim, view.parameters)
        close = norm_tolerance(view, chunk.ledger, v.device)
        shapes.copies = right_copies(samples, view.row(v, 0), close)
    return shapes.copies


def forward_of(view: ModelView, batch: Batch) -> Forward:
    """Return the function that runs the model, as it is, on samples of a batch."""

    def forward(samples: Sequence[int]) -> Tensor:
        with Unfused():
            return view.forward(batch.pick(samples), copies=False)

    return forward


def norm_tolerance(view: ModelView, ledger: Ledger, device: torch.device) -> float:
    """Return the relative difference of squared norms that is rounding in the model's precision."""
    dtypes = {p.dtype for p in view.parameters.values()}
    if dtypes == {torch.float64} and ledger.dtype is not None:
        dtypes = {ledger.dtype}  # the model may cast to fewer digits
    if low_precision(device, dtypes):
        return NORMS_IN_FEW_DIGITS
    return 1e-8 if dtypes == {torch.float64} else 1e-3
