"""Where nothing can be measured whatever the model.

PyTorch makes something else of tensors at the place of the call.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fastlr.errors import InputError
from fastlr.ops.torch_private import (
    is_fake,
    is_transformed,
    modes_without_values,
    within_transform,
)


def refuse_surroundings(parameters: Iterable[Tensor]) -> None:
    """Raise InputError where new tensors have no values, or what is done with them is traced.

    So it is where something else has been put for parameters.
    """
    if torch.get_default_device().type == "meta":
        raise InputError(
            "the default device is meta, on which tensors have no values, those that fastlr makes "
            "neither: measure outside of "
            'torch.device("meta"), or after torch.set_default_device("cpu")'
        )
    without_values = modes_without_values()
    if without_values:
        raise InputError(
            f"fastlr is called within torch's {' and '.join(without_values)} (FakeTensorMode, "
            "make_fx, torch.export), where tensors have no values to measure: call it outside, on "
            "a model and inputs that were made outside"
        )
    if torch.jit.is_tracing():
        raise InputError(
            "fastlr is called within torch.jit.trace, which would keep what is measured now as a "
            "constant: call it outside of the traced function"
        )
    within = within_transform()
    for parameter in parameters:
        if within or is_fake(parameter):
            refuse_unreadable(parameter, "a parameter")


def refuse_unreadable(tensor: Tensor, name: str) -> None:
    """Raise InputError for a tensor without values, or one that torch.func has wrapped.

    What is measured depends on its values.
    """
    if tensor.is_meta:
        raise InputError(f"{name} is on meta, a device without values: give it on the model's")
    if is_fake(tensor):
        raise InputError(
            f"{name} is a FakeTensor, which has no values: make models and inputs to measure "
            "outside of torch's FakeTensorMode"
        )
    if is_transformed(tensor):
        raise InputError(
            f"{name} is one of torch.func's tensors within vmap, grad or jvp, which fastlr cannot "
            "read: call fastlr outside of the transformed function, in a loop in place of vmap "
            "(it gives a value for each sample by itself)"
        )
