"""How many inputs fit the memory at a time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from fastlr.ghost.model.view import ModelView
from fastlr.ops.deferred_checks import out_of_memory
from fastlr.ops.memory import free_bytes, total_bytes
from fastlr.ops.objects import storage

_CPU_BYTES, _GPU_BYTES, _LARGEST_CHUNK = 3 << 30, 48 << 30, 512
# Peak memory of a chunk over the activations that plain autograd saves for it. Kernels fold blocks
# and make few temporaries.
_WORK, _WORK_OF_KERNELS = 3.0, 1.5
_COPIES = 4  # of the output on a GPU: cotangents, gradients, and what is made on the way
# Of the free memory, at most: a captured chunk keeps its own, one beside it takes as much.
_SHARE = 0.4


class InputsThatFit(NamedTuple):
    """How many inputs a chunk may take.

    Attributes:
        device: a quarter of its memory, whatever else holds some of it: the same in every run, as
            chunks of another size may give other last bits.
        free: what is free of it now.
    """

    device: int
    free: int


def chunk_for_memory(view: ModelView, few: int, forward: Callable[[int], Tensor]) -> InputsThatFit:
    """Return how many inputs fit the memory, by the bytes that a small forward pass saves.

    Args:
        view: Model that the forward pass runs.
        few: Number of inputs of that pass.
        forward: Runs so many inputs and returns the output, with its graph.
    """
    try:
        saved, output = _saved_bytes(view, lambda: forward(few))
    except Exception as error:
        if not out_of_memory(error):
            raise
        return InputsThatFit(1, 1)
    work, most = _WORK * saved / few, _CPU_BYTES
    if view.device.type != "cpu":
        # Weights that the pass has cast or computed are saved once, whatever the number of inputs.
        activations = saved / few
        if few > 1:
            with suppress(Exception):  # the model may take no single input
                activations = saved - _saved_bytes(view, lambda: forward(few - 1))[0]
        work, most = _WORK_OF_KERNELS * activations + _COPIES * output / few, _GPU_BYTES
    weights = max(p.nbytes for p in view.parameters.values())
    per_input = work + weights + 1
    of_device, of_free = total_bytes(view.device) / 4, _SHARE * free_bytes(view.device)
    inputs = [int(min(budget, most) // per_input) for budget in (of_device, of_free)]
    return InputsThatFit(*[max(1, min(_LARGEST_CHUNK, fitting)) for fitting in inputs])


def _saved_bytes(view: ModelView, forward: Callable[[], Tensor]) -> tuple[int, int]:
    """Return the bytes that a forward pass leaves but for the model's own, and its output's."""
    storages: dict[int, int] = {}

    def saved(t: Tensor) -> Tensor:
        storages[storage(t)] = t.untyped_storage().nbytes()
        return t.detach()  # t itself would keep its graph for ever

    with torch.autograd.graph.saved_tensors_hooks(saved, lambda kept: kept):
        output = forward()
    storages[output.data_ptr()] = output.nbytes
    for t in (*view.module.parameters(), *view.module.buffers()):
        storages.pop(storage(t), None)
    return sum(storages.values()), output.nbytes
