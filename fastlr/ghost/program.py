"""What a model does beside its tensors: numbers and flags that its modules hold, and the hooks that are on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

_PLAIN = (bool, int, float, str, type(None))
_EQUAL = frozenset((bool, int, str, type(None)))  # of which equal ones of one type do the same
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def attributes(model: nn.Module) -> tuple:
    """Every module's attributes that are numbers, strings, None or tuples of them: a forward pass may branch on them."""
    return tuple(own_attributes(module) for module in model.modules())


def own_attributes(module: nn.Module) -> tuple:
    """Of one module: (name, type, value or its text)."""
    return tuple(
        (name, type(value), value if type(value) in _EQUAL else repr(value))
        for name, value in vars(module).items()
        if is_plain(value)
    )


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a string, None, or a tuple of such."""
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(is_plain, value)))


def hooks(model: nn.Module) -> tuple:
    """Which hooks modules and parameters have: (whose, of which kind, the handles' numbers, which no two hooks share)."""
    return tuple((whose, kind, tuple(held)) for whose, kind, held in _held(model))


def hook_programs(model: nn.Module) -> tuple:
    """What these hooks do: (whose, of which kind, their code with the plain values that it has been given)."""
    return tuple((whose, kind, tuple(map(_program, held.values()))) for whose, kind, held in _held(model))


def _held(model: nn.Module) -> Iterator[tuple[Any, str, dict]]:
    for module in model.modules():
        held = vars(module)
        yield from ((id(module), kind, held[kind]) for kind in _HOOKS if held.get(kind))
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks:
            yield name, "_backward_hooks", parameter._backward_hooks


def _program(hook: Any) -> tuple:
    function = getattr(hook, "__func__", hook)
    if not hasattr(function, "__code__"):
        return (type(hook),)
    given = (*map(_contents, function.__closure__ or ()), *(function.__defaults__ or ()))
    return function.__code__, repr([value for value in given if is_plain(value)])


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def version(tensor: Tensor) -> int:
    """How often a tensor has been written to; a tensor of inference mode does not know."""
    return 0 if tensor.is_inference() else tensor._version
