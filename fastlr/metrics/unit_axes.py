"""Follow the axes that hold the units of an activation, from the layer that makes them on.

A unit is a channel of a convolution or an element of the last axis after a linear layer. Heads
split that axis in two, transpositions move it, and a mean over positions takes others away.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fastlr.ghost.model.view import FAILURES
from fastlr.ops.torch_private import no_torch_function, tree_leaves, tree_map

Axes = tuple[int, ...]


def named(names: str) -> set[Any]:
    """Return torch's functions of these names, in place or not, and the operators among them.

    Args:
        names: Separated by spaces.
    """
    forms = " ".join(f"{n} {n}_ __{n}__ __r{n}__ __i{n}__" for n in names.split()).split()
    owners = F, torch, Tensor
    return {getattr(owner, n) for owner in owners for n in forms if hasattr(owner, n)}


_CHANNEL_NORMS = {F.batch_norm, F.group_norm, F.instance_norm}
_LAST_NORMS = {F.layer_norm, F.rms_norm}
CONVOLUTIONS = {getattr(F, f"conv{kind}{n}d"): n for kind in ("", "_transpose") for n in (1, 2, 3)}
PRODUCTS = named("matmul mm bmm addmm baddbmm einsum scaled_dot_product_attention")
MOVES = named("permute transpose swapaxes swapdims movedim moveaxis t adjoint") | {
    getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH")
}
_SIZE = 10_007  # of the axis that is looked for: a prime, so that no other axis has it


class UnitAxes:
    """Which axes of the tensors of a forward pass hold units.

    Args:
        is_weight: tells the weights of layers from other tensors.
    """

    def __init__(self, is_weight: Callable[[Tensor], bool]) -> None:
        self._is_weight = is_weight
        self._of = WeakTensorKeyDictionary()

    def forget(self) -> None:
        """Forget the last forward pass."""
        self._of = WeakTensorKeyDictionary()

    def of(self, t: Tensor) -> Axes | None:
        """Return the axes that hold the units of a tensor, None where they are not known."""
        axes: Axes | None = self._of.get(t)
        return axes

    def follow(
        self, func: Any, args: Any, kwargs: Any, operands: list[Tensor], results: list[Tensor]
    ) -> None:
        """Note which axes of the results hold units, where a function makes or carries them."""
        new = self._of_layer(func, args, operands, results[0])
        if new is not None:
            self._of[results[0]] = new
            return
        sources = [t for t in operands if t in self._of]
        if not sources:
            new = _of_norm(func, results[0])
            if new is not None:
                self._of[results[0]] = new
            return
        for number, t in enumerate(results):
            found = (self._carried(func, args, kwargs, s, t, number) for s in sources)
            axes = next(filter(None, found), None)
            if axes:
                self._of[t] = axes

    def _of_layer(
        self, func: Any, args: Any, operands: list[Tensor], result: Tensor
    ) -> Axes | None:
        """Return the axes of the units that a layer makes; None for what is no layer."""
        if func in CONVOLUTIONS:
            return (1,) if result.ndim == CONVOLUTIONS[func] + 2 else (0,)
        if func is F.linear:
            return (result.ndim - 1,)
        weights = [self._is_weight(t) for t in operands]
        if not any(weights) or func not in PRODUCTS:
            return None
        if func is torch.einsum:
            return _of_einsum(args[0], weights)
        return (result.ndim - (2 if weights[0] else 1),)

    def _carried(
        self, func: Any, args: Any, kwargs: Any, source: Tensor, result: Tensor, number: int
    ) -> Axes | None:
        """Return where a function puts the axes of an operand in the result of this number."""
        axes: Axes = self._of[source]
        if func not in MOVES and func not in PRODUCTS:
            same_size = result.numel() == source.numel()
            if same_size and result.shape != source.shape:
                return _after_view(source.shape, axes, result.shape)
            if result.ndim == source.ndim:
                return axes
        found = [place_of(axis, func, args, kwargs, source, number) for axis in axes]
        kept = tuple(place for place in found if place is not None)
        return kept if len(kept) == len(axes) or func not in PRODUCTS else None


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in a nest of containers."""
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor)]


def _of_norm(func: Any, result: Tensor) -> Axes | None:
    """Return the axis of the units that a norm makes of a tensor in which none are known."""
    if func in _CHANNEL_NORMS and result.ndim > 1:
        return (1,)
    return (result.ndim - 1,) if func in _LAST_NORMS else None


def _of_einsum(equation: Any, weights: Sequence[bool]) -> Axes | None:
    """Return the axes of an einsum's result that the weights among its operands alone have.

    None where the equation does not tell.
    """
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return None
    given, result = equation.replace(" ", "").split("->")
    terms = given.split(",")
    if len(terms) != len(weights):
        return None
    of_others = {
        letter for term, own in zip(terms, weights, strict=True) if not own for letter in term
    }
    return tuple(d for d, letter in enumerate(result) if letter not in of_others) or None


def _after_view(shape: Sequence[int], axes: Axes, result: Sequence[int]) -> Axes | None:
    """Return the axes that hold the same elements once a view has split or joined some.

    None where units and others are joined.
    """
    found: list[int] = []
    for start in sorted(axes):
        if start - 1 in axes:  # it goes with the axis before it
            continue
        stop = start + 1
        while stop in axes:
            stop += 1
        span = _span(result, math.prod(shape[:start]), math.prod(shape[start:stop]))
        if span is None:
            return None
        found += span
    return tuple(found)


def _span(shape: Sequence[int], before: int, size: int) -> range | None:
    """Return the axes of a shape that hold ``size`` elements, with ``before`` ones before them."""
    for start in range(len(shape)):
        if math.prod(shape[:start]) != before or (shape[start] == 1 and size > 1):
            continue
        for stop in range(start + 1, len(shape) + 1):
            if math.prod(shape[start:stop]) == size:
                return range(start, stop)
    return None


def place_of(
    axis: int, func: Any, args: Any, kwargs: Any, source: Tensor, number: int = 0
) -> int | None:
    """Return an axis's place in a result of a function, None where it is gone or cannot be told.

    The function is run on tensors without values, in which that axis has a size of its own.
    """

    def without_values(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        shape = list(t.shape)
        if t is source or (t.shape == source.shape and func not in PRODUCTS):
            shape[axis] = _SIZE
        return torch.empty(shape, dtype=t.dtype, device="meta")

    with no_torch_function(), torch.no_grad():
        try:
            result = func(*tree_map(without_values, args), **tree_map(without_values, kwargs))
        except FAILURES:
            return None
    shape = tensors_in(result)[number].shape
    return next((d for d, size in enumerate(shape) if size and size % _SIZE == 0), None)
