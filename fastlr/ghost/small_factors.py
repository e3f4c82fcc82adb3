"""Norms of many small factors, taken by few operations.

Of a tensor of a few thousand elements an operation costs its call more than its arithmetic. So
small factors wait for others of the same form, dtypes and shapes, and are joined along their
samples: one product and one sum for all of them. Large ones never wait, so little memory is held.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastlr import ops
from fastlr.ghost.factors import Dense, Factor, Outer

SMALL = 1 << 16  # elements of a factor up to which a copy of it costs less than a call saves
HELD = 1 << 20  # elements of factors that wait at a time
_TENSORS: dict[type[Factor], tuple[str, ...]] = {Outer: ("a", "g"), Dense: ("grads",)}
Take = Callable[[str, Tensor], None]


class SmallFactors:
    """Gathers factors and hands out their squared norms [B], those of large ones at once.

    Args:
        take: is given the name of a parameter and the squared norms of a factor of it.
    """

    def __init__(self, take: Take) -> None:
        self._take = take
        self._waiting: dict[tuple, list[tuple[str, Factor]]] = {}  # by form
        self._held = 0  # elements of those that wait

    def add(self, name: str, factor: Factor) -> None:
        """Add the factor of a parameter."""
        tensors = [getattr(factor, of) for of in _TENSORS.get(type(factor), ())]
        elements = sum([t.numel() for t in tensors])
        if not 0 < elements <= SMALL or not _on_cpu_in_plain_torch(tensors[0]):
            self._take(name, factor.sq_norms())
            return
        form = type(factor), *[part for t in tensors for part in (t.dtype, t.shape)]
        self._waiting.setdefault(form, []).append((name, factor))
        self._held += elements
        if self._held > HELD:
            self.flush()

    def flush(self) -> None:
        """Hand out the norms of all factors that wait."""
        waiting, self._waiting, self._held = self._waiting, {}, 0
        for alike in waiting.values():
            names, factors = zip(*alike, strict=True)
            for name, norms in zip(names, _norms_of_alike(factors), strict=True):
                self._take(name, norms)


def _on_cpu_in_plain_torch(t: Tensor) -> bool:
    return t.device.type == "cpu" and ops.backend_for(t) == "torch"


def _norms_of_alike(factors: tuple[Factor, ...]) -> tuple[Tensor, ...]:
    """Squared norms [B] of each of some factors of one form."""
    first = factors[0]
    if len(factors) == 1:
        return (first.sq_norms(),)
    joined = [
        torch.cat([getattr(factor, of) for factor in factors]) for of in _TENSORS[type(first)]
    ]
    together = Dense(*joined) if isinstance(first, Dense) else Outer(*joined, shape=())
    return together.sq_norms().view(len(factors), -1).unbind()
