"""The arguments of one call of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy, deepcopy
from functools import partial
from typing import Any

from torch import Tensor, nn

from fastlr.errors import InputError
from fastlr.ops.objects import PLAIN
from fastlr.ops.torch_private import tree_map


def arguments(model: Callable, x: Any) -> tuple[tuple, dict[Any, Any]]:
    """Return the arguments of one call of a model by position and by name.

    The call has its own copies of objects, such as an iterator or a cache of keys and values. They
    share the model's modules, parameters and buffers with the originals. An object that cannot be
    copied deeply is copied as far as its attributes. Tensors, modules and functions are passed as
    they are, and so are objects that cannot be copied at all.

    Raises:
        InputError: The call would use up a generator.
    """
    named = x if isinstance(x, dict) else dict(enumerate(x if isinstance(x, tuple) else (x,)))
    memo: dict[int, Any] = {}  # of all copies of this call
    given = {name: tree_map(partial(_own, model, memo, name), v) for name, v in named.items()}
    return ((), given) if named is x else (tuple(given.values()), {})


def _own(model: Callable, memo: dict[int, Any], name: Any, leaf: Any) -> Any:
    """Return an argument, or a copy of it, for one call."""
    if isinstance(leaf, Tensor) or type(leaf) in PLAIN or callable(leaf):
        return leaf
    if not memo and isinstance(model, nn.Module):
        shared = *model.modules(), *model.parameters(), *model.buffers()
        memo |= {id(part): part for part in shared}
    for make in (partial(deepcopy, memo=memo), copy):
        try:
            return make(leaf)
        except Exception:  # whatever its parts raise
            continue
    if isinstance(leaf, Iterator):
        raise InputError(
            f"a forward pass uses up input {name} ({type(leaf).__name__}): pass a list of what it "
            "gives"
        )
    return leaf
