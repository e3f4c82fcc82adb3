"""What a model does beside its tensors: numbers and flags that its modules hold, and the hooks that are on it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

_PLAIN = frozenset((bool, int, float, str, type(None)))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def attributes(model: nn.Module) -> tuple:
    """Every module's attributes that are numbers, strings, None or tuples of them: a forward pass may branch on them."""
    return tuple(tuple(item for item in vars(module).items() if is_plain(item[1])) for module in model.modules())


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a string, None, or a tuple of such."""
    return type(value) in _PLAIN or (isinstance(value, tuple) and all(map(is_plain, value)))


def hooks(model: nn.Module) -> tuple:
    """Which hooks modules and parameters have: (whose, of which kind, the handles' numbers, which no two hooks share)."""
    found: list[tuple] = []
    for module in model.modules():
        held = vars(module)
        found += [(id(module), kind, tuple(held[kind])) for kind in _HOOKS if held.get(kind)]
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks:
            found.append((name, "_backward_hooks", tuple(parameter._backward_hooks)))
    return tuple(found)


def version(tensor: Tensor) -> int:
    """How often a tensor has been written to; a tensor of inference mode does not know."""
    return 0 if tensor.is_inference() else tensor._version
