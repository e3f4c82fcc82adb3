"""Activation checkpointing: a checkpointed part is run again, as the model says.

So nothing in it may run otherwise the first time, nor may what was begun before it be computed as a
part of it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fastlr.ghost.writes import own_hooks
from fastlr.ops.torch_private import saved_tensors_are_hooked


def is_checkpointed() -> bool:
    """Return True within a checkpointed part."""
    return saved_tensors_are_hooked(besides=own_hooks())


def before_checkpoints() -> AbstractContextManager:
    """Have autograd save tensors within this context as it does before a checkpointed part."""
    if not is_checkpointed():
        return nullcontext()
    pack, unpack = own_hooks() or (_unchanged, _unchanged)
    return saved_tensors_hooks(pack, unpack)


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor
