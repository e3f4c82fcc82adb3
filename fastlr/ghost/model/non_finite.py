"""Which module of a model is the first to give numbers that are not finite."""

from __future__ import annotations

import math
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fastlr.ghost.model.batch import copied
from fastlr.ghost.model.view import FAILURES, ModelView
from fastlr.ops.torch_private import tree_leaves


def first_module_not_finite(view: ModelView, x: Any) -> str:
    """Return ", first in module ..." for the first module with such an output, or nothing.

    The model runs once more.
    """
    found: list[str] = []

    def note(name: str, module: nn.Module, inputs: tuple, result: Any) -> None:
        if found or not any(map(_is_not_finite, tree_leaves(result))):
            return
        place = "the inputs of module" if any(map(_is_not_finite, inputs)) else "module"
        held = tensors_not_finite(module)
        why = f", whose {held[0]} is not finite either" if held else ""
        found.append(f", first in {place} {name} ({type(module).__name__}){why}")

    with ExitStack() as hooks, torch.no_grad():
        for name, module in view.module.named_modules():
            if name:
                hooks.callback(module.register_forward_hook(partial(note, name)).remove)
        try:
            view.forward(copied(x))
        except FAILURES:  # it has run before
            pass
    return found[0] if found else ""


def tensors_not_finite(module: nn.Module) -> list[str]:
    """Return the names of parameters and buffers that are not finite."""
    held = [*module.named_parameters(), *module.named_buffers()]
    return [name for name, value in held if _is_not_finite(value)]


def _is_not_finite(value: Any) -> bool:
    """Return True for a tensor with NaN or infinity; minus infinity is a logit classes may have."""
    is_dense = isinstance(value, Tensor) and value.layout == torch.strided and not value.is_nested
    if not is_dense or not value.is_floating_point() or not value.numel():
        return False
    return not float(value.detach().amax()) < math.inf
