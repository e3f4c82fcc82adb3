"""Gradients of whole batches, and whether they stand for those of the samples."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fastlr.errors import InteractionError, NonlinearBackwardError
from fastlr.ghost.engine import Engine
from fastlr.ghost.graph.formulas import dense
from fastlr.ghost.model.batch import copied
from fastlr.ghost.model.view import FAILURES, ModelView
from fastlr.ghost.norms.cotangents import generic_cotangent
from fastlr.ghost.trust.agreement import norm_tolerance
from fastlr.ghost.trust.hooks import hooked, random_gradient, require_hooks_to_scale
from fastlr.ghost.trust.planning import COUNTED
from fastlr.ghost.trust.truth import exact_sq_norms
from fastlr.ops.autocast import full_precision


def refuse_mixed_gradients(engine: Engine, x: Any) -> None:
    """Require that samples have the gradients within their batch that they have alone.

    A measure that differentiates a whole batch rests on that. Where all parameters go by rules, the
    audits say so; for the loop over samples it need not be.

    Raises:
        InteractionError: a backward formula or a hook mixes samples, or counts those of the batch.
    """
    alone = engine.run(x, generic_cotangent, check=True)
    view, plan = engine.view, engine.plan
    if not plan.by_sample:
        return
    chosen = {name: p for name, p in engine.parameters.items() if name in plan.by_sample}
    for name, reason in plan.by_sample.items():
        if reason == COUNTED:  # in a later batch, if not in this
            raise _mixed(f"the gradient of parameter {name}")
    with engine.without_caches(x):
        z = view.forward(copied(x))
    v = generic_cotangent(z)
    close, norms_alone = norm_tolerance(chosen.values(), plan.dtype, v.device), alone.per_parameter
    for sample, total in enumerate(alone.total):
        own = torch.zeros_like(v)
        view.row(own, sample).copy_(view.row(v, sample))
        for name, within in zip(chosen, exact_sq_norms(z, chosen, own, retain=True), strict=True):
            exact = norms_alone[name][sample]
            if (within - exact).abs() > close * exact + 0.1 * close * total:
                raise _mixed(f"the gradient of parameter {name} for sample {sample}")


def _mixed(what: str) -> InteractionError:
    return InteractionError(
        f"{what} is another within its batch than alone: a backward formula or a hook mixes "
        "samples, or counts those of the batch (nn.Embedding(scale_grad_by_freq=True)), and this "
        "measure differentiates the whole batch. Make it work on each sample alone, or use "
        "fastlr.estimate or per_sample_grad_sq_norms, which go sample by sample"
    )


def gradient_of_batch(view: ModelView, z: Tensor, v: Tensor) -> list[Tensor]:
    """Return the gradient of <v, z> in float64; z and v have the output's shape.

    v is scaled to unit size in the backward pass, so that half precision keeps its bits. So hooks
    of parameters must scale as it does, and gradients of parts add up to that of all.
    """
    if view.has_hooked_parameters:
        require_hooks_to_scale(view, z, v)
    require_hooks_to_add(view)
    exponent = max(math.frexp(float(v.abs().max()))[1], -1000)
    unit = (v.double() * 2.0**-exponent).to(z.dtype)
    parameters = list(view.parameters.values())
    with full_precision(z.device):
        grads = torch.autograd.grad(z, parameters, unit, materialize_grads=True)
    return [dense(g).double() * 2.0**exponent for g in grads]


def require_hooks_to_add(view: ModelView) -> None:
    """Require of hooks of parameters that they give for a sum of gradients the sum of theirs.

    Where the squared norm of a batch's gradient stands for those of its samples, scaling is not
    enough: a hook that keeps positive numbers alone scales.

    Raises:
        NonlinearBackwardError: a hook does not.
    """
    for name, p in view.parameters.items():
        if p._backward_hooks and not _hooks_add(p):
            raise NonlinearBackwardError(
                f"a hook of parameter {name} does not give for the sum of two gradients the sum of "
                "what it gives for each, so that a batch's gradient does not stand for those of "
                "its samples; remove it for the measurement"
            )


def _hooks_add(p: Tensor) -> bool:
    one, other = random_gradient(p, 0), random_gradient(p, 1)
    try:
        apart, together = hooked(p, one) + hooked(p, other), hooked(p, one + other)
    except FAILURES:  # it takes no such gradient
        return True
    rounding = 100 * torch.finfo(p.dtype).eps
    return torch.allclose(apart, together, rtol=rounding, atol=rounding * float(apart.abs().max()))
