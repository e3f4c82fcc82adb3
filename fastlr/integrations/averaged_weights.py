"""Averaged weights (EMA, SWA) in a model for as long as it is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fastlr.distributed.sharding import ALONE, team
from fastlr.errors import InputError, few
from fastlr.ghost.model_io import unwrap
from fastlr.ops.model_lock import locked

Weights = nn.Module | Mapping[str, Tensor] | Callable[[], "nn.Module | Mapping[str, Tensor]"]
_PREFIXES = (
    "",
    "module.",
    "_orig_mod.",
    "module.module.",
    "module._orig_mod.",
    "_orig_mod.module.",
    "shadow.",
)


@contextmanager
def with_weights(model: nn.Module, weights: Weights | None) -> Iterator[None]:
    """Let the model's parameters and buffers have other values within this context.

    Afterwards they are the same memory as before.

    Nothing is copied where device and dtype agree: the tensors' memory is exchanged, so that what
    autograd saved of the model's own values stays valid, and so do references to its parameters.

    Args:
        model: the model; DDP and torch.compile wrappers are looked through.
        weights: name -> tensor for every parameter (buffers that are missing keep their values), a
            module that holds them (a copy of the model, ``torch.optim.swa_utils.AveragedModel``,
            timm's ``ModelEma``), or a function that returns either. Sharded ones are gathered where
            all ranks measure, as a model under ``fully_shard``. None: nothing changes.

    Raises:
        InputError: a parameter is missing, has another shape, or is sharded and this process
            measures alone.
    """
    if weights is None:
        yield
        return
    module = unwrap(model)
    with locked(module):
        with _exchanged(module, _values(module, weights)):
            yield


@contextmanager
def _exchanged(module: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Let the parameters and buffers of these names have these values."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    before: list[tuple[Tensor, Tensor]] = []
    try:
        with torch.no_grad(), torch.inference_mode(False):
            for name, tensor in tensors.items():
                if name not in values:
                    continue
                value: Any = values[name].detach()
                if hasattr(value, "full_tensor"):
                    if team() is ALONE:
                        raise InputError(
                            f"weights[{name!r}] is a sharded DTensor, but this process measures "
                            "alone: pass whole weights"
                        )
                    value = value.full_tensor()
                if value.shape != tensor.shape:
                    raise InputError(
                        f"weights[{name!r}] has shape {tuple(value.shape)}, the model "
                        f"{tuple(tensor.shape)}: the average is of another architecture"
                    )
                before.append((tensor, tensor.data))
                tensor.data = value.to(tensor.device, tensor.dtype)
        yield
    finally:
        for tensor, data in before:
            tensor.data = data


def _values(module: nn.Module, weights: Any) -> Mapping[str, Tensor]:
    """The averaged tensors by the model's own names."""
    if callable(weights) and not isinstance(weights, nn.Module):
        weights = weights()
    if isinstance(weights, nn.Module):
        if weights is module:
            raise InputError("weights is the model itself: pass its average, or leave weights out")
        with locked(weights):  # another thread may be measuring it
            weights = {**dict(weights.named_parameters()), **dict(weights.named_buffers())}
    if not isinstance(weights, Mapping):
        raise InputError(
            "weights must be a module, a state dict or a function of none, not "
            f"{type(weights).__name__}"
        )
    names = [name for name, _ in module.named_parameters()]
    for prefix in _PREFIXES:
        if all(prefix + name in weights for name in names):
            start = len(prefix)
            return {
                n[start:]: v
                for n, v in weights.items()
                if n.startswith(prefix) and isinstance(v, Tensor)
            }
    missing = [name for name in names if name not in weights]
    raise InputError(
        f"weights lacks {few(missing, 1)} of the model's parameters: pass the average of the "
        "model that is measured"
    )
