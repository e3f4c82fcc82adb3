"""How a training step uses a model, as the ranks that share a batch must know it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

ONE_PROCESS = "which processes cannot share: start one"


class Usage(NamedTuple):
    """How a training pass uses the model, on any rank."""

    reached: list[bool]  # each trainable parameter has a gradient
    norm_uses: list[int]  # times that each norm with running statistics is used


class Observer:
    """Observes how a step uses a model: how often each norm, and what else it changes.

    Args:
        model: Before the step.
        norms: Its layers with running statistics.
    """

    def __init__(self, model: nn.Module, norms: list[Any]) -> None:
        merged = {
            id(t) for m in norms for t in (m.running_mean, m.running_var, m.num_batches_tracked)
        }
        self._others = {
            name: (t, t.clone()) for name, t in model.named_buffers() if id(t) not in merged
        }
        self._norms, self._names = norms, {id(m): name for name, m in model.named_modules()}
        self._counts = [_passes(m) for m in norms]

    def observed(self, updates: int) -> tuple[list[int], str | None]:
        """Return how often each updating part used each norm, and why processes cannot share it.

        This is asked after a step with ``updates`` updating parts; the second is None where they
        can.
        """
        failure, uses = None, []
        for m, count in zip(self._norms, self._counts, strict=True):
            more = _passes(m) - count
            uses.append(more // updates if updates else 0)
            if updates and more % updates:
                failure = f"{self._names[id(m)]} takes part in some passes only, {ONE_PROCESS}"
        for name, (t, before) in self._others.items():
            if not torch.equal(t, before):
                failure = f"training changes the buffer {name}, {ONE_PROCESS}"
        return uses, failure


def _passes(norm: Any) -> int:
    """Return the number of passes that a norm layer has seen in training.

    It is 0 for a layer that does not count them (it updates once a pass).
    """
    return 0 if norm.num_batches_tracked is None else int(norm.num_batches_tracked)
