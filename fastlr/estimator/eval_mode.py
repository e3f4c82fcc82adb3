"""A model in eval mode with gradients on, for as long as it is measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from fastlr.ghost.model.writes import unchanged
from fastlr.ops.cudnn import never_cudnn, repeatable_cudnn
from fastlr.ops.process_state import quiet_rng


@contextmanager
def eval_mode(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Put the model into eval mode with gradients on, and restore its state afterwards.

    Flags, buffers, attributes and random states are then as before.
    """
    modules = list(model.modules())
    with (
        train_flags_kept(modules),
        torch.inference_mode(False),
        torch.enable_grad(),
        quiet_rng(device),
        _repeatable(modules, device),
    ):
        for module in modules:
            module.training = False
        with unchanged(model):
            yield


@contextmanager
def _repeatable(modules: list[nn.Module], device: torch.device) -> Iterator[None]:
    """On a GPU, let cuDNN add in a fixed order, so that the same call gives the same bits.

    Models with recurrent layers do without it: it refuses their backward pass in eval mode.
    """
    if device.type != "cuda":
        yield
        return
    is_recurrent = any(isinstance(module, nn.RNNBase) for module in modules)
    with repeatable_cudnn(), never_cudnn() if is_recurrent else nullcontext():
        yield


@contextmanager
def train_flags_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put back after this context whether each of some modules is in train mode.

    Flags are set directly: ``model.train()`` may be overridden, and merge or freeze things.
    """
    flags = [(module, module.training) for module in modules]
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag
