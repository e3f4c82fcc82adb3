"""A deep copy of a model in more digits, on which what its own cannot show is checked.

Few digits hide small errors: a tolerance of bfloat16 hides that samples share a quantisation step.
Parameters that are all zero hide rules: LoRA's first factor has no gradient until its second one
has moved.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastlr.ghost.graph.plan import Plan
from fastlr.ghost.model.batch import Batch
from fastlr.ghost.model.view import ModelView
from fastlr.ghost.model.writes import put_back_writes
from fastlr.ghost.trust.agreement import agree, rounding
from fastlr.ops.modules import all_modules
from fastlr.ops.objects import INTERNAL
from fastlr.ops.torch_private import tree_leaves, tree_map

MATRIX_NOISE, VECTOR_NOISE = 0.3, 0.1


def deep_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy of a model in a floating-point dtype.

    It shares nothing with the model. Tensors with a graph among the attributes, which torch does
    not copy, become leaves. Copying raises whatever the model's objects raise.

    Args:
        model: Any module.
        dtype: Type of its parameters, buffers and tensors among the attributes.
    """

    def cast(t: Any) -> Any:
        plain = isinstance(t, Tensor) and t.is_floating_point() and not t.requires_grad
        return t.to(dtype) if plain else t

    held = [t for _, _, value in _attributes(model) for t in tree_leaves(value)]
    made = {id(t): t.detach().clone() for t in held if isinstance(t, Tensor) and t.grad_fn}
    clone = copy.deepcopy(model, made).to(dtype)
    for module, name, value in list(_attributes(clone)):
        vars(module)[name] = tree_map(cast, value)
    return clone


def deep_copies(view: ModelView) -> Iterator[tuple[ModelView, torch.dtype]]:
    """Yield copies of a model in float64 and float32, as far as it can be copied.

    A view holds its copy weakly: the copy lives until the next one.
    """
    for dtype in (torch.float64, torch.float32):
        put_back_writes(view.module)  # which puts back what passes have written
        try:
            clone = deep_copy(view.module, dtype)
        except Exception:  # whatever objects and tensors that it holds raise
            continue
        yield ModelView.of(clone, view.output, view.in_dim, view.out_dim), dtype


def _attributes(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Yield tensors and plain containers among the attributes of a model's modules."""
    for module in all_modules(model):
        for name, value in vars(module).items():
            if name not in INTERNAL and type(value) in (Tensor, list, tuple, dict):
                yield module, name, value


def add_noise(parameters: Iterable[Tensor]) -> None:
    """Add normal noise to parameters: of columns of unit length times 0.3, or of size 0.1."""
    generator = torch.Generator().manual_seed(0)
    for p in parameters:
        width = MATRIX_NOISE / math.sqrt(p.shape[1:].numel()) if p.ndim > 1 else VECTOR_NOISE
        noise = torch.randn(p.shape, generator=generator, dtype=torch.float64, device="cpu")
        p.data.add_((noise * width).to(p))


def zero_parameters(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters whose every element is zero."""
    return [p for p in parameters if p.numel() and not p.detach().any()]


def running_copies(
    view: ModelView, batch: Batch, samples: Sequence[int]
) -> Iterator[tuple[ModelView, torch.dtype, Tensor]]:
    """Yield the deep copies of a model that run, their dtypes, and their outputs for some samples.

    Left out are copies that fail, are not finite, or do not follow the samples. Their hooks may
    write into the model, so that they read what another pass has left.
    """
    for copied, dtype in deep_copies(view):
        try:
            with torch.autocast(view.device.type, enabled=False):
                z = copied.outputs(batch.pick(samples, dtype))
                turned = copied.outputs(batch.pick(samples[::-1], dtype))
            follows = agree(z.flip(view.out_dim), turned, rounding(torch.float32), view.out_dim)
            runs = follows and not bool((z.isnan() | z.isposinf()).any())
        except Exception:  # whatever a copy raises
            continue
        if runs:
            yield copied, dtype, z


def untested_by_audits(view: ModelView, plan: Plan) -> set[str]:
    """Return the parameters that the audits of a model leave untested.

    In few digits these are all that rules measure. Otherwise these are the ones without a gradient
    in any audit, if some parameter is all zero.
    """
    parameters = view.parameters.values()
    by_rules = {name for name in plan.names if name not in plan.by_sample}
    if any(p.dtype.itemsize < 4 for p in parameters) or torch.is_autocast_enabled(view.device.type):
        return by_rules
    had_a_gradient = plan.deviations.keys()
    return by_rules - had_a_gradient if zero_parameters(parameters) else set()
