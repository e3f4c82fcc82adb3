"""What tokens are made of: numbers of objects and code, values of tensors; and their hash.

A token stands for a Python value: equal contents give equal tokens, whatever objects hold them.
Plain values stand for themselves, everything else for a tuple that begins with a tag. Tokens are
made of what `marshal` can write, so that they hold no object alive; what cannot be looked into is
numbered, and no number is given twice. `fastlr.ghost.reader` makes the tokens of any value.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import marshal
import sys
import sysconfig
import weakref
from collections.abc import Callable, Iterable
from types import CodeType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastlr.ghost.introspection import module_dict, module_name
from fastlr.ops.recent import Recent
from fastlr.ops.torch_private import no_torch_function_of_subclasses

PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None), type(Ellipsis)))
TENSORS = frozenset((Tensor, nn.Parameter))
SMALL = 16  # elements of a tensor on the CPU that is read by value
SMALL_ARRAY = 1 << 16  # bytes of an array, or of an input without samples, that is read by value
# Packages whose objects are not looked into.
_CLOSED = frozenset((*sys.stdlib_module_names, "torch", "numpy", "lightning", "pytorch_lightning"))
_INSTALLED = tuple({sysconfig.get_path(where) for where in ("stdlib", "purelib", "platlib")})


# -- numbers of objects ----------------------------------------------------------------------------

# Id of an object -> a weak reference to it, its number.
_numbers: dict[int, tuple[Callable, int]] = {}
_next = itertools.count(1)


def number(thing: Any) -> int:
    """A number that this object has and no other has or will have.

    It is the object's address where nothing can tell of its end.
    """
    key = id(thing)
    known = _numbers.get(key)
    if known is not None and known[0]() is thing:
        return known[1]
    try:
        held = weakref.ref(thing, lambda gone: _forget(key, gone))
    except TypeError:
        return -key
    _numbers[key] = held, next(_next)
    return _numbers[key][1]


def _forget(key: int, gone: weakref.ref) -> None:
    """Drop the number of an object that came to its end, unless one in its place has a number."""
    if key in _numbers and _numbers[key][0] is gone:
        del _numbers[key]


# -- hashes of tokens ------------------------------------------------------------------------------


def token_hash(token: Any) -> bytes:
    """A hash of a token by which tokens are compared."""
    return hashlib.blake2b(written(token), digest_size=32).digest()


def written(token: Any) -> bytes:
    """A token as bytes."""
    try:
        return marshal.dumps(token, 2)
    except ValueError:  # it takes no subclasses: an attribute's name may be a member of an enum
        return marshal.dumps(_of_exact_types(token), 2)


def _of_exact_types(token: Any) -> Any:
    """A token in which names of classes of their own are the texts that they are, or numbers."""
    kind = type(token)
    if kind is tuple or kind is list:
        return tuple([_of_exact_types(part) for part in token])
    if kind in PLAIN:
        return token
    return str.__str__(token) if issubclass(kind, str) else number(token)


def all_plain(values: Iterable[Any]) -> bool:
    """Return True if all values are plain; False, too, if the class of one cannot be hashed."""
    try:
        return PLAIN.issuperset(map(type, values))
    except Exception:
        return False


# -- tensors ---------------------------------------------------------------------------------------


def version(tensor: Tensor) -> int:
    """How often a tensor has been written to.

    0 for one that does not know: of inference mode, or not initialised yet.
    """
    try:
        return 0 if tensor.is_inference() else tensor._version
    except Exception:
        return 0


def address(t: Tensor) -> int:
    """Where a tensor's elements are; 0 for one that has several places, as a sparse one."""
    try:
        return t.data_ptr()
    except RuntimeError:
        return 0


def storage(t: Tensor) -> int:
    """Where a tensor's memory begins; 0 for one that has none of its own, as some subclasses."""
    try:
        return t.untyped_storage().data_ptr()
    except RuntimeError:
        return 0


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Its text, which takes torch long to make."""
    return str(dtype)


def of_tensor(t: Tensor, versions: bool = True) -> tuple:
    """The token of a tensor: its values where it is small and on the CPU, else which one it is.

    Args:
        t: a tensor.
        versions: with which one it is goes how often it was written to; otherwise where it is.
    """
    if type(t) not in TENSORS:
        return _of_tensor_subclass(t, versions)
    if t.is_nested:  # it has no shape
        return "nested tensor", dtype_name(t.dtype), number(t), version(t)
    kind, shape = dtype_name(t.dtype), tuple(t.shape)
    if t.numel() <= SMALL and t.device.type == "cpu" and t.layout == torch.strided:
        try:
            return "tensor", kind, shape, repr(t.tolist())
        except (RuntimeError, NotImplementedError):  # a fake one, one within a function transform
            pass
    return "tensor", kind, shape, str(t.device), number(t), version(t) if versions else address(t)


def _of_tensor_subclass(t: Tensor, versions: bool) -> tuple:
    """Which tensor it is; nothing is computed of it, which may stand for what is yet to be made."""
    with no_torch_function_of_subclasses():
        try:
            shape = str(tuple(t.shape))  # sizes may be symbols
        except Exception:  # not initialised
            shape = ""
        return "tensor", number(type(t)), shape, number(t), version(t) if versions else 0


def of_values(t: Tensor) -> tuple:
    """The token of an input: its values if it is on the CPU and small, otherwise dtype and axes."""
    token = dtype_name(t.dtype), t.ndim
    if type(t) not in TENSORS or t.device.type != "cpu" or t.layout != torch.strided:
        return token
    if t.nbytes > SMALL_ARRAY:
        return token
    return *token, t.resolve_conj().resolve_neg().flatten().view(torch.uint8).numpy().tobytes()


# -- code and classes ------------------------------------------------------------------------------


class Code(NamedTuple):
    """A piece of code.

    Attributes:
        held: the code.
        number: equal for equal ones.
        installed: whether it is Python's or an installed package's.
        names: the global names that it may read; of what is installed none: that has many, and few
            that change.
    """

    held: CodeType
    number: int
    installed: bool
    names: tuple[str, ...]


CODES = 20_000  # pieces of code that are known at a time
_codes = Recent[int, Code](CODES)  # by their ids
_equal_codes = Recent[CodeType, int](CODES)  # code: the number of all that equal it


def code(held: CodeType) -> Code:
    """What is known of a piece of code."""
    known = _codes.get(id(held))
    if known is None:
        equal = _equal_codes.get(held) or _equal_codes.put(held, next(_next))
        installed = held.co_filename.startswith(_INSTALLED)
        names = () if installed else tuple(sorted(_names(held)))
        known = _codes.put(id(held), Code(held, equal, installed, names))
    return known


def _names(held: CodeType) -> set[str]:
    """The global names and attributes that code has, and the functions defined in it."""
    inner = (constant for constant in held.co_consts if isinstance(constant, CodeType))
    return set(held.co_names).union(*map(_names, inner))


def closed(kind: type) -> bool:
    """Return True if objects of a class are taken as they are: Python's, torch's and trainers'."""
    return module_name(kind).partition(".")[0] in _CLOSED


def from_user(kind: type) -> bool:
    """Return True if a class is from no package that does not change."""
    return not closed(kind) and not packaged(sys.modules.get(module_name(kind)))


def packaged(module: Any) -> bool:
    """Return True if a module is Python's or an installed package's."""
    if not issubclass(type(module), ModuleType):
        return False
    return str(module_dict(module).get("__file__") or "").startswith(_INSTALLED)
