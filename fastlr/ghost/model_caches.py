"""Tensors that earlier forward passes have left in a model, and that ours run without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fastlr.errors import HiddenParameterError
from fastlr.ghost.batch import copied
from fastlr.ghost.graph import walk
from fastlr.ghost.known import Known
from fastlr.ghost.model_io import ModelView
from fastlr.ghost.state import emptied
from fastlr.ghost.verification.agreement import agree, unexplained
from fastlr.ghost.writes import tensor_caches
from fastlr.ops.objects import version


def caches_of(
    view: ModelView, known: Known, flags: Callable[[], tuple], x: Any
) -> list[tuple[str, dict]]:
    """Return the dicts of tensors in the model that forward passes of ours run without.

    They are caches of what the model's parameters give.

    A forward pass without a graph may have filled them (LeViT's attention biases): then
    parameters would seem unused.

    Raises:
        HiddenParameterError: one holds something else than what its parameters give now.
    """
    caches = tensor_caches(view.module)
    if not caches:
        return []
    held = [
        *view.parameters.values(),
        *(t for _, cache in caches for t in cache.values()),
    ]
    key = (flags(), *((id(t), version(t)) for t in held))
    are_caches = known.are_caches.get(key)
    if are_caches is None:
        are_caches = known.are_caches.put(key, _are_caches(view, caches, x))
    return caches if are_caches else []


def _are_caches(view: ModelView, caches: list[tuple[str, dict]], x: Any) -> bool:
    with_caches = view.forward(copied(x))
    try:
        with emptied(caches):
            without = view.forward(copied(x))
    except Exception:  # whatever a model raises that misses what it needs
        return False
    relative = unexplained(with_caches, view.parameters.values())
    same = agree(with_caches, without, relative, view.out_dim)
    hidden = _used_parameters(view, without) - _used_parameters(view, with_caches)
    if not same and hidden:
        raise HiddenParameterError(
            f"parameter {min(hidden)} moves the output only through what an earlier forward "
            f"pass left in {caches[0][0]}, and that is no longer what it gives: clear it "
            "(model.train() and model.eval() does so in timm's models)"
        )
    return same


def _used_parameters(view: ModelView, z: Tensor) -> set[str]:
    return set(walk(z, view.parameters).parameters.values()) if z.requires_grad else set()
