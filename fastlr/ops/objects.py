"""Identity of objects, and where tensors are."""

from __future__ import annotations

import itertools
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None)))
# Entries of every nn.Module.
INTERNAL = frozenset(vars(nn.Module())) - {"training"} | {"_compiled_call_impl"}


def weakly_by_module() -> WeakIdKeyDictionary:
    """Return a mapping of modules whose entries go when their modules do.

    Modules are found by identity: they may compare equal.
    """
    return WeakIdKeyDictionary()


# -- numbers of objects ----------------------------------------------------------------------------

_numbers = weakly_by_module()
_next = itertools.count(1)


def number(thing: Any) -> int:
    """Return a number that no other object has or will have.

    It is the object's address, negative, if its end cannot be seen.
    """
    try:
        if thing not in _numbers:
            _numbers[thing] = next(_next)
        return _numbers[thing]
    except TypeError:
        return -id(thing)


# -- tensors ---------------------------------------------------------------------------------------


def version(tensor: Tensor) -> int:
    """Return how often a tensor has been written to.

    It is 0 for a tensor of inference mode and for one that is not initialised.
    """
    try:
        return 0 if tensor.is_inference() else tensor._version
    except Exception:
        return 0


def address(t: Tensor) -> int:
    """Return where a tensor's elements are; 0 if they are in several places, as of a sparse one."""
    try:
        return t.data_ptr()
    except RuntimeError:
        return 0


def storage(t: Tensor) -> int:
    """Return where a tensor's memory begins; 0 if it has none of its own, as some subclasses."""
    try:
        return t.untyped_storage().data_ptr()
    except RuntimeError:
        return 0
