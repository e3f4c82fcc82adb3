"""The arguments of one call of a model: its inputs, with copies of the objects among them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import partial
from typing import Any

from torch import Tensor

from fastlr.errors import InputError
from fastlr.ghost.tokens import PLAIN, version
from fastlr.ops.torch_private import tree_map


@contextmanager
def arguments(x: Any) -> Iterator[tuple[tuple, dict]]:
    """Yield the arguments by position and by name, for one call within this context.

    The call has its own copies of objects that it may change, such as a cache of keys and values.

    Raises:
        InputError: It has changed tensors of such an object, whose samples cannot be picked; or the
            object is an iterator that cannot be copied.
    """
    copies = []

    def own(name: Any, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) or type(leaf) in (*PLAIN, object) or callable(leaf):
            return leaf
        try:
            copy = deepcopy(leaf)
        except Exception as error:  # of the object's own code, too
            if isinstance(leaf, Iterator):
                raise InputError(
                    f"a forward pass uses up input {name} ({type(leaf).__name__}): pass a list of "
                    "what it gives"
                ) from error
            return leaf
        copies.append((name, copy, _tensors(copy)))
        return copy

    named = x if isinstance(x, dict) else dict(enumerate(x if isinstance(x, tuple) else (x,)))
    given = {name: tree_map(partial(own, name), value) for name, value in named.items()}
    yield ((), given) if named is x else (tuple(given.values()), {})
    for name, copy, before in copies:
        if _tensors(copy)[: len(before)] != before:
            raise InputError(
                f"the forward pass changes tensors of input {name} ({type(copy).__name__}), whose "
                "samples cannot be picked: leave it out, or pass its tensors and have the model "
                "make the object"
            )


def _tensors(thing: Any) -> list[tuple]:
    """Return the shapes of the tensors that an object holds, and how often each was written."""
    parts: dict[int, Any] = {}
    with suppress(Exception):  # the forward pass has left something in it that refuses
        deepcopy(thing, parts)
    held = parts.get(id(parts), ())  # the originals of what was copied
    return [(t.shape, version(t)) for t in held if isinstance(t, Tensor)]
