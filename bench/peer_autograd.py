"""Contenders that need only torch: a plain forward and backward pass, the loop over samples, torch.func."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.cases import Case, forward, loop_norms, map_inputs, trainable


class Contender:
    """One way of computing the squared gradient norm of every parameter and sample.

    Attributes:
        run: does the work once; returns name -> [B], or None if it has no norms to give (plain).
        notes: the repairs that the model needed, and the settings chosen.
    """

    def __init__(self, run: Callable[[], dict[str, Tensor] | None], notes: list[str] | None = None):
        self.run = run
        self.notes = notes or []


def plain(case: Case, cotangent: Tensor) -> Contender:
    """Forward and backward of the whole batch, weight gradients included, unfolded: the unit of the ratios."""
    params = list(trainable(case.model).values())

    def run() -> None:
        torch.autograd.grad(forward(case.model, case.x, case.kwargs.get("output")), params, cotangent)

    return Contender(run)


def loop(case: Case, cotangent: Tensor) -> Contender:
    """One forward and backward pass per sample."""
    return Contender(lambda: loop_norms(case, cotangent))


def vmap(case: Case, cotangent: Tensor, chunk: int = 4) -> Contender:
    """torch.func: vmap over samples of grad of a functional call, ``chunk`` samples at a time."""
    model, params = case.model, {name: p.detach() for name, p in trainable(case.model).items()}
    fixed = {name: t.detach() for name, t in (*model.named_parameters(), *model.named_buffers()) if name not in params}
    dims = map_inputs(case.x, lambda key, value: case.in_dim if case.is_batched(key, value) else None)
    output = case.kwargs.get("output")

    def value(params: dict[str, Tensor], x: Any, v: Tensor) -> Tensor:
        one = map_inputs(x, lambda key, t: t.unsqueeze(case.in_dim) if case.is_batched(key, case_x[key]) else t)
        arguments = ((), one) if isinstance(one, dict) else (one if isinstance(one, tuple) else (one,), {})
        z = _select(torch.func.functional_call(model, {**params, **fixed}, *arguments), output)
        return (z * v.unsqueeze(case.out_dim)).sum()

    case_x = case.x if isinstance(case.x, (dict, tuple, list)) else (case.x,)

    def norms(x: Any, v: Tensor) -> dict[str, Tensor]:
        return {name: g.square().sum() for name, g in torch.func.grad(value)(params, x, v).items()}

    mapped = torch.func.vmap(norms, in_dims=(dims, case.out_dim), chunk_size=chunk)
    return Contender(lambda: mapped(case.x, cotangent), [f"chunks of {chunk} samples"])


def _select(result: Any, output: Callable[[Any], Tensor] | None) -> Tensor:
    if output is None and isinstance(result, Tensor):
        return result
    holder = torch.nn.Module()
    holder.forward = lambda: result
    return forward(holder, (), output)


def fastlr(case: Case, cotangent: Tensor) -> Contender:
    """This package, on the model as it is; the plan and its proof are made by the first call and kept."""
    import fastlr as package

    measure = package.per_sample_grad_sq_norms
    return Contender(lambda: measure(case.model, case.x, cotangent, per_parameter=True, **case.kwargs))
