"""Activation checkpointing: a checkpointed part is run again, as the model says.

So nothing in it may run otherwise the first time, nor may what was begun before it be computed as a
part of it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fastlr.ghost.model.writes import unpack
from fastlr.ops.torch_private import saved_tensors_are_hooked


def is_checkpointed() -> bool:
    """Return True within a checkpointed part."""
    return saved_tensors_are_hooked(besides=unpack)


def before_checkpoints() -> AbstractContextManager:
    """Have autograd save tensors within this context as it does before a checkpointed part."""
    if not is_checkpointed():
        return nullcontext()
    return saved_tensors_hooks(_unchanged, _unchanged)


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor
