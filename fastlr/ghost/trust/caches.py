"""Tensors that earlier forward passes have left in a model, and that ours run without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fastlr.errors import HiddenParameterError
from fastlr.ghost.graph.walk import walk
from fastlr.ghost.model.attributes import emptied
from fastlr.ghost.model.batch import copied
from fastlr.ghost.model.view import ModelView
from fastlr.ghost.model.writes import tensor_caches
from fastlr.ghost.trust.agreement import agree, output_tolerance
from fastlr.ops.objects import version
from fastlr.ops.recent import Recent


class Caches:
    """Finds the caches of one model, and keeps what it has found."""

    def __init__(self) -> None:
        self._are_caches: Recent[tuple, bool] = Recent(1)

    def of(self, view: ModelView, flags: Callable[[], tuple], x: Any) -> list[tuple[str, dict]]:
        """Return the dicts of tensors in a model that cache what its parameters give.

        A forward pass without a graph may have filled them, as LeViT's attention biases. Parameters
        would then seem unused.

        Args:
            view: Model.
            flags: Function that returns the flags under which the model would run.
            x: Inputs.

        Raises:
            HiddenParameterError: A dict holds something else than its parameters give now.
        """
        caches = tensor_caches(view.module)
        if not caches:
            return []
        held = [*view.parameters.values(), *(t for _, cache in caches for t in cache.values())]
        key = (flags(), *((id(t), version(t)) for t in held))
        are_caches = self._are_caches.get(key)
        if are_caches is None:
            are_caches = self._are_caches.put(key, _are_caches(view, caches, x))
        return caches if are_caches else []


def _are_caches(view: ModelView, caches: list[tuple[str, dict]], x: Any) -> bool:
    with_caches = view.forward(copied(x))
    try:
        with emptied(caches):
            without = view.forward(copied(x))
    except Exception:  # whatever a model raises that misses what it needs
        return False
    relative = output_tolerance(with_caches, view.parameters.values())
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
