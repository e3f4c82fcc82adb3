"""What a measurement must leave alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Hold that a model and the random state are to the bit what they were, also where the call fails.

    Its parameters and buffers are the same tensors, with the same values and gradients; flags and hooks are as before.
    """
    tensors, values, before = *_contents(model), _around(model)
    try:
        yield
    finally:
        there, found = _contents(model)
        assert list(map(id, tensors)) == list(map(id, there)), "a parameter or buffer is another"
        for old, new in zip(values, found, strict=True):
            same = old is new if old is None or new is None else torch.equal(old, new)
            assert same, "a parameter, a buffer or a .grad changed"
        assert _around(model) == before, "flags, hooks or the random state changed"


def _contents(model: nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """The tensors of a model; copies of them and of their gradients."""
    tensors = [*model.parameters(), *model.buffers()]
    return tensors, [None if t is None else t.detach().clone() for t in (*tensors, *(t.grad for t in tensors))]


def _around(model: nn.Module) -> list[Any]:
    """The flags and the number of hooks of each module, and the random state."""
    modules = [
        (m.training, len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()
    ]
    return [modules, [p.requires_grad for p in model.parameters()], torch.get_rng_state().tolist()]
