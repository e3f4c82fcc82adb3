"""The activations that blocks fold, by name."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fastlr.ops.block import Loaded

ACTIVATIONS = {
    "none": lambda t: t,
    "relu": F.relu,
    "relu6": F.relu6,
    "hardswish": F.hardswish,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
}
# Where the derivative can be told from the output, that is what is kept; elsewhere the activation's
# input.
KEEPS_OUTPUT = frozenset({"none", "relu", "relu6"})


def value_of(loaded: Loaded) -> Tensor:
    """Return what a `Loaded` stands for, in the dtype of its tensor."""
    value = ACTIVATIONS[loaded.activation](loaded.tensor)
    return value if loaded.gate is None else value * loaded.gate
