"""The arguments of one call of a model: its inputs, and the state of objects among them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastlr.errors import InputError
from fastlr.ghost.model.attributes import Contents
from fastlr.ops.objects import PLAIN
from fastlr.ops.torch_private import tree_map


@contextmanager
def arguments(x: Any) -> Iterator[tuple[tuple, dict]]:
    """Yield the arguments by position and by name, for one call within this context.

    The call has its own copies of iterators. Other objects, such as a cache of keys and values, are
    afterwards as before.

    Raises:
        InputError: The call has changed tensors of an object, whose samples cannot be picked; or it
            would use up a generator.
    """
    objects: list[tuple[Any, Any, Contents]] = []

    def own(name: Any, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) or type(leaf) in PLAIN:
            return leaf
        if isinstance(leaf, torch.Generator):
            return torch.Generator(leaf.device).set_state(leaf.get_state())
        if not isinstance(leaf, Iterator):
            objects.append((name, leaf, Contents(leaf)))
            return leaf
        try:
            return copy(leaf)
        except TypeError as error:
            raise InputError(
                f"a forward pass uses up input {name} ({type(leaf).__name__}): pass a list of what "
                "it gives"
            ) from error

    named = x if isinstance(x, dict) else dict(enumerate(x if isinstance(x, tuple) else (x,)))
    given = {name: tree_map(partial(own, name), value) for name, value in named.items()}
    changed = []
    try:
        yield ((), given) if named is x else (tuple(given.values()), {})
    finally:
        changed = [(name, leaf) for name, leaf, contents in objects if contents.restore()]
    for name, leaf in changed:
        raise InputError(
            f"the forward pass changes tensors of input {name} ({type(leaf).__name__}), whose "
            "samples cannot be picked: leave it out, or pass its tensors and have the model make "
            "the object"
        )
