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
from fastlr.ghost.fallback import Forward, SingleSamples
from fastlr.ghost.fusion.mode import OURS
from fastlr.ghost.graph import exact_grads
from fastlr.ghost.known import Plan
from fastlr.ghost.model_io import ModelView
from fastlr.ghost.planner import Chunk, batch_of
from fastlr.ghost.recurrent import Unfused
from fastlr.ghost.verification.agreement import NORMS_IN_FEW_DIGITS, low_precision
from fastlr.ghost.verification.record import Ledger
from fastlr.ops.cudnn import cudnn_as_user_set

_WRONG_ALONE = OURS | {"NativeBatchNormBackward0"}  # batch norm, folded or not


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


def norms_of_one(chunk: Chunk, v: Tensor, *, retain: bool) -> dict[str, Tensor]:
    """Return the squared norms [1] of a batch of one sample, by plain autograd."""
    parameters = chunk.view.parameters
    if not _is_right_alone(chunk):
        return norms_by_loop(chunk, v, parameters)
    with cudnn_as_user_set(chunk.view.device):
        exact = exact_grads(chunk.z, parameters, v, retain=retain)
    return {name: norm[None] for name, norm in zip(parameters, exact, strict=True)}


def norms_by_loop(chunk: Chunk, v: Tensor, chosen: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the squared norms [B] of some parameters' gradients by the loop.

    It makes one forward and backward pass a sample, beside a copy of it where that alone is right.
    """
    view, alone = chunk.view, _is_right_alone(chunk)
    samples = SingleSamples(forward_of(view, batch_of(chunk)), view.out_dim, chosen)
    with cudnn_as_user_set(view.device):
        norms = [samples.run(k, [view.row(v, k)], alone=alone).norms[0] for k in range(chunk.count)]
    return dict(zip(chosen, map(torch.stack, zip(*norms, strict=True)), strict=True))


def _is_right_alone(chunk: Chunk) -> bool:
    """Return True if autograd is right for a batch of one sample.

    Torch's batch norm is not on a CPU: of one sample, it takes the strides of a transposed view for
    another memory format.
    """
    return _WRONG_ALONE.isdisjoint(chunk.graph.names)


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
