"""The arguments of one call of a model."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from typing import Any

from torch import Tensor

from fastlr.errors import InputError
from fastlr.ops.objects import PLAIN
from fastlr.ops.torch_private import tree_map


def arguments(x: Any) -> tuple[tuple, dict[Any, Any]]:
    """Return the arguments of one call by position and by name.

    The call has its own copies of objects, such as an iterator or a cache of keys and values.
    Tensors, modules, functions and objects that cannot be copied are passed as they are.

    Raises:
        InputError: The call would use up a generator.
    """
    named = x if isinstance(x, dict) else dict(enumerate(x if isinstance(x, tuple) else (x,)))
    given = {name: tree_map(partial(_own, name), value) for name, value in named.items()}
    return ((), given) if named is x else (tuple(given.values()), {})


def _own(name: Any, leaf: Any) -> Any:
    """Return an argument, or a copy of it, for one call."""
    if isinstance(leaf, Tensor) or type(leaf) in PLAIN or callable(leaf):
        return leaf
    try:
        return deepcopy(leaf)
    except Exception as error:  # whatever its parts raise
        if isinstance(leaf, Iterator):
            raise InputError(
                f"a forward pass uses up input {name} ({type(leaf).__name__}): pass a list of what "
                "it gives"
            ) from error
        return leaf
