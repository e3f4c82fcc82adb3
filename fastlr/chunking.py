"""How many inputs of an estimate are worked on at a time: what fits the memory that is free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fastlr.checks import out_of_memory
from fastlr.ghost.adapt import trainable, unwrap
from fastlr.runtime import free_bytes

_CPU_BYTES, _GPU_BYTES, _LARGEST_CHUNK = 3 << 30, 48 << 30, 1024
_WORK = 3  # a chunk's peak memory over the activations that its graph saves


def chunk_for_memory(model: nn.Module, device: torch.device, few: int, forward: Callable[[], Tensor]) -> int:
    """Return how many inputs fit a quarter of the free memory, from the bytes that a small forward pass saves.

    Args:
        model: what the forward pass runs.
        device: of its parameters.
        few: inputs of that pass.
        forward: runs it and returns the output, with its graph.
    """
    output: list[Tensor] = []
    try:
        storages = _saved_storages(lambda: output.append(forward()))
    except Exception as error:
        if not out_of_memory(error):
            raise
        return 1
    storages[output[0].data_ptr()] = output[0].nbytes
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    activations = sum(size for pointer, size in storages.items() if pointer not in own) / few
    weights = max(p.numel() * p.element_size() for p in trainable(unwrap(model)).values())
    budget = min(free_bytes(device) / 4, _CPU_BYTES if device.type == "cpu" else _GPU_BYTES)
    return int(max(1, min(_LARGEST_CHUNK, budget // (_WORK * activations + weights + 1))))


def _saved_storages(forward: Callable[[], Any]) -> dict[int, int]:
    """Address -> bytes of the memory that autograd saves during a forward pass."""
    storages: dict[int, int] = {}

    def saved(t: Tensor) -> Tensor:
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(saved, lambda t: t):
        forward()
    return storages
