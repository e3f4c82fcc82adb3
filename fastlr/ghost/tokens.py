"""Tokens of Python values: equal contents give equal tokens, whatever objects hold them.

Plain values stand for themselves, everything else for a tuple that begins with a tag. Tokens are made of what `marshal`
can write, so that they hold no object alive; what cannot be looked into is numbered, and no number is given twice.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import marshal
import sys
import sysconfig
import weakref
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from enum import Enum
from types import BuiltinFunctionType, CodeType, FunctionType, MappingProxyType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fastlr.ops.torch_private import no_torch_function_of_subclasses

PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None), type(Ellipsis)))
SMALL = 16  # elements of a tensor on the CPU that is read by value
_SMALL_ARRAY = 1 << 16  # bytes of an array, or of an input without samples, that is read by value
_DEPTH = 5  # containers within containers
_GLOBAL_DEPTH = 3  # of them below a global name
_BREADTH = 256  # entries of one container
_PLAIN_BREADTH = 1 << 13  # of one that holds plain values only
_VALUES = 2000  # values below one attribute
_TEXTS = (range, torch.dtype, torch.device, torch.layout, torch.memory_format)
_CLOSED = frozenset((*sys.stdlib_module_names, "torch", "numpy", "lightning", "pytorch_lightning"))  # not looked into
_INSTALLED = tuple({sysconfig.get_path(where) for where in ("stdlib", "purelib", "platlib")})
TENSORS = frozenset((Tensor, nn.Parameter))
_numbers: dict[int, tuple[Callable, int]] = {}
_codes: dict[int, tuple[CodeType, int, tuple[str, ...]]] = {}
_equal_codes: dict[CodeType, int] = {}
_next = itertools.count(1)


def number(thing: Any) -> int:
    """A number that this object has and no other has or will have (its address, where nothing can tell of its end)."""
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
    if key in _numbers and _numbers[key][0] is gone:
        del _numbers[key]


def digest(token: Any) -> bytes:
    """A hash of a token by which tokens are compared."""
    return hashlib.blake2b(marshal.dumps(token, 2), digest_size=32).digest()


def version(tensor: Tensor) -> int:
    """How often a tensor has been written to; a tensor of inference mode does not know."""
    return 0 if tensor.is_inference() else tensor._version


def _address(t: Tensor) -> int:
    try:
        return t.data_ptr()
    except RuntimeError:  # a sparse one has several
        return 0


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Its text, which takes torch long to make."""
    return str(dtype)


def of_tensor(t: Tensor, versions: bool = True) -> tuple:
    """By value where it is small and on the CPU, otherwise which tensor it is and (``versions``) how often written to."""
    if type(t) not in TENSORS:  # nothing is computed of it: it may be one that stands for what is yet to be computed
        with no_torch_function_of_subclasses():
            return "tensor", number(type(t)), tuple(t.shape), number(t), version(t) if versions else 0
    kind, shape = dtype_name(t.dtype), tuple(t.shape)
    if t.numel() <= SMALL and t.device.type == "cpu" and t.layout == torch.strided:
        try:
            return "tensor", kind, shape, repr(t.tolist())
        except (RuntimeError, NotImplementedError):  # a fake one, one within a function transform
            pass
    return "tensor", kind, shape, str(t.device), number(t), version(t) if versions else _address(t)


def of_values(t: Tensor) -> tuple:
    """By value if it is on the CPU and no more than a small array's bytes, otherwise its dtype and number of axes."""
    token = dtype_name(t.dtype), t.ndim
    if type(t) not in TENSORS or t.device.type != "cpu" or t.layout != torch.strided or t.nbytes > _SMALL_ARRAY:
        return token
    return *token, t.resolve_conj().resolve_neg().flatten().view(torch.uint8).numpy().tobytes()


def code(held: CodeType) -> tuple[int, tuple[str, ...]]:
    """The number of a piece of code, equal for equal ones, and the global names that it may read.

    Of installed packages none: they have many, and few that change.
    """
    known = _codes.get(id(held))
    if known is None:
        if len(_codes) > 20_000:
            _codes.clear()
            _equal_codes.clear()
        names = () if held.co_filename.startswith(_INSTALLED) else tuple(sorted(_names(held)))
        known = held, _equal_codes.setdefault(held, next(_next)), names
        _codes[id(held)] = known
    return known[1:]


def _names(held: CodeType) -> set[str]:
    inner = (constant for constant in held.co_consts if isinstance(constant, CodeType))
    return set(held.co_names).union(*map(_names, inner))


class Reader:
    """Makes the tokens of one fingerprint; what it has read once it only refers to afterwards.

    Args:
        module: makes the token of a module that is met on the way; by default it is numbered.
        versions: how often large tensors were written to counts; otherwise where they are.

    Attributes:
        tensors: that were met.
        classes: of objects that were met, and their bases, but for those of installed packages.
        free: ids of those whose values do not matter.
    """

    def __init__(self, module: Callable[[nn.Module], Any] = number, versions: bool = True) -> None:
        self._module, self.versions = module, versions
        self.free: set[int] = set()
        self.tensors: list[Tensor] = []
        self.classes: dict[type, None] = {}
        self._read: dict[int, tuple[int, int, Any]] = {}  # id -> (which one it was, depth that was left, the object)
        self._left = 0

    def top(self, value: Any) -> Any:
        """The token of a value, with a budget of its own."""
        self._left = _VALUES
        return self.function(value, _DEPTH) if type(value) is FunctionType else self.of(value, _DEPTH)

    def of(self, value: Any, depth: int) -> Any:
        """The token of a value, ``depth`` containers deep."""
        kind = type(value)
        if kind in PLAIN:
            return value
        if kind is tuple:
            return ("tuple", *value) if PLAIN.issuperset(map(type, value)) else self._entries("tuple", value, depth)
        self._left -= 1
        if isinstance(value, Tensor):
            self.tensors.append(value)
            return ("free", number(value)) if id(value) in self.free else of_tensor(value, self.versions)
        if isinstance(value, nn.Module):
            return "module", self._module(value)
        if depth <= 0 or self._left < 0:
            return "more", number(kind)
        before = self._read.get(id(value))
        if before is not None and before[1] >= depth:
            return "again", before[0]
        read = _READERS.get(kind) or _reader(value)
        if read is not _text:
            self._read[id(value)] = len(self._read), depth, value
        return read(self, value, depth - 1)

    def _entries(self, tag: str, values: Collection, depth: int) -> tuple:
        if len(values) > _BREADTH:
            if len(values) <= _PLAIN_BREADTH and PLAIN.issuperset(map(type, values)):
                return tag, *values
            return tag, len(values), *(self.of(v, depth) for v in itertools.islice(values, _BREADTH))
        return tag, *[self.of(v, depth) for v in values]

    def _list(self, value: Any, depth: int) -> tuple:
        return self._entries(type(value).__name__, value, depth)

    def _dict(self, value: Any, depth: int) -> tuple:
        parts = (("keys", dict.keys(value)), ("values", dict.values(value)))
        return type(value).__name__, *[self._entries(tag, part, depth) for tag, part in parts]

    def _set(self, value: Any, depth: int) -> tuple:
        read = (self.of(v, depth) for v in itertools.islice(value, _BREADTH))
        return type(value).__name__, len(value), *sorted(marshal.dumps(token, 2) for token in read)

    def _array(self, value: Any, depth: int) -> tuple:
        if value.dtype.hasobject or value.nbytes > _SMALL_ARRAY:
            return "array", str(value.dtype), value.shape, number(value)
        return "array", str(value.dtype), value.shape, value.tobytes()

    def function(self, value: Any, depth: int) -> tuple:
        """Code, what the closure holds, defaults, and the values of the global names that the code has."""
        which, names = code(value.__code__)
        token: list[Any] = ["function", which]
        for held in map(_contents, value.__closure__ or ()):
            parts = self._parts(held, names) if type(held) is ModuleType else [held]
            token += [self.of(part, depth) for part in parts]
        for given in (value.__defaults__, value.__kwdefaults__, value.__dict__):
            token.append(self.of(given, depth) if given else None)
        find, depth = value.__globals__.get, min(depth, _GLOBAL_DEPTH)
        for name in names:
            value = find(name)
            for part in self._parts(value, names) if type(value) is ModuleType else [value]:
                if part is not None and not _installed(part):
                    token += name, self.of(part, depth)
        return tuple(token)

    @staticmethod
    def _parts(module: ModuleType, names: tuple[str, ...]) -> list[Any]:
        """The values that code with these names may read of a module; none of an installed one."""
        return [] if _packaged(module) else [vars(module)[n] for n in names if n in vars(module)]

    def _composed(self, value: Any, depth: int) -> tuple:
        """An object that is what a few of its attributes are (see _COMPOSED)."""
        kind = type(value)
        return kind.__name__, *[self.of(getattr(value, name), depth) for name in _COMPOSED[kind]]

    def _wrapped(self, value: Any, depth: int) -> tuple:
        """A container around others: not one more container deep."""
        return type(value).__name__, self.of(value.maps if type(value) is ChainMap else value.data, depth + 1)

    def _namespace(self, value: Any, depth: int) -> tuple:
        return "namespace", number(type(value)), self._dict(vars(value), depth)

    def _enum(self, value: Any, depth: int) -> tuple:
        return "enum", number(type(value)), value._name_, self.of(value._value_, depth)

    def _class(self, value: type, depth: int) -> tuple:
        if closed(value) or issubclass(value, nn.Module):
            return "class", number(value)
        return "class", number(value), *[self.of(part, depth) for item in own(value) for part in item]

    def _object(self, value: Any, depth: int) -> tuple:
        kind = type(value)
        parts: list[Any] = [number(kind)]
        for base, read in _SUBCLASSED:
            if isinstance(value, base):
                parts.append(read(self, value, depth))
                break
        if closed(kind):
            return "object", *parts, number(value)
        if kind not in self.classes:
            bases = (k for k in kind.__mro__ if not (closed(k) or _packaged(sys.modules.get(k.__module__))))
            self.classes |= dict.fromkeys(bases)
        held = getattr(value, "__dict__", None)
        slots = [n for k in kind.__mro__ for n in _slots(k)]
        if held is None and not slots and len(parts) == 1:
            parts.append(number(value))
        if held:
            parts.append(self._dict(held, depth))
        parts += [(n, self.of(getattr(value, n, None), depth)) for n in slots]
        return "object", *parts


def _packaged(module: ModuleType | None) -> bool:
    """Return True if a module is Python's or an installed package's."""
    return str(getattr(module, "__file__", None) or "").startswith(_INSTALLED)


def _installed(value: Any) -> bool:
    """Return True if a value of a global name is of a package that does not change: a function, a class, a module."""
    if type(value) is FunctionType:
        return value.__code__.co_filename.startswith(_INSTALLED)
    if isinstance(value, type):
        return closed(value) or issubclass(value, nn.Module)
    return type(value) in (ModuleType, BuiltinFunctionType)


def own(kind: type) -> list[tuple[str, Any]]:
    """The names and values that a class itself defines: functions, and attributes without underscores on both sides."""
    return [(n, v) for n, v in vars(kind).items() if not n.startswith("__") or type(v) is FunctionType]


def closed(kind: type) -> bool:
    """Return True if objects of a class are taken as they are: those of Python, torch and trainers."""
    return str(kind.__module__).partition(".")[0] in _CLOSED


def _slots(kind: type) -> Iterable[str]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else slots
    return [n for n in names if n not in ("__dict__", "__weakref__")]


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _text(_: Reader, value: Any, depth: int) -> tuple:
    return "text", repr(value)


_CACHED = type(functools.cache(_slots))
_COMPOSED: dict[type, tuple[str, ...]] = {  # class -> the attributes that an object of it consists of
    slice: ("start", "stop", "step"),
    MethodType: ("__func__", "__self__"),
    functools.partial: ("func", "args", "keywords"),
    property: ("fget", "fset"),
    **dict.fromkeys((staticmethod, classmethod, _CACHED), ("__wrapped__",)),
}
_READERS: dict[type, Callable[[Reader, Any, int], Any]] = {
    **dict.fromkeys((list, deque, torch.Size), Reader._list),
    **dict.fromkeys((dict, OrderedDict, defaultdict, Counter), Reader._dict),
    **dict.fromkeys((set, frozenset), Reader._set),
    **dict.fromkeys(_TEXTS, _text),
    **dict.fromkeys(_COMPOSED, Reader._composed),
    **dict.fromkeys((ChainMap, UserDict, UserList), Reader._wrapped),
    bytearray: lambda reader, value, depth: ("bytearray", bytes(value)),
    FunctionType: Reader.function,
    MappingProxyType: lambda reader, value, depth: reader._dict(dict(value), depth),
    BuiltinFunctionType: lambda reader, value, depth: ("builtin", number(value), reader.of(value.__self__, depth)),
    np.ndarray: Reader._array,
}
_SUBCLASSED: tuple[tuple[type, Callable[[Reader, Any, int], Any]], ...] = (
    (dict, Reader._dict),
    (tuple, Reader._list),
    (list, Reader._list),
    (set, Reader._set),
    (frozenset, Reader._set),
    (bool, lambda reader, value, depth: bool(value)),
    (int, lambda reader, value, depth: int.__int__(value)),
    (float, lambda reader, value, depth: float.__float__(value)),
    (str, lambda reader, value, depth: str.__str__(value)),
    (bytes, lambda reader, value, depth: bytes.__getitem__(value, slice(None))),
)


def _reader(value: Any) -> Callable[[Reader, Any, int], Any]:
    """How to read an object of a class that has no entry of its own."""
    if isinstance(value, Enum):
        return Reader._enum
    if isinstance(value, np.generic):
        return lambda reader, value, depth: ("scalar", str(value.dtype), value.tobytes())
    if isinstance(value, np.ndarray):
        return Reader._array
    if isinstance(value, type):
        return Reader._class
    if isinstance(value, (SimpleNamespace, argparse.Namespace)):
        return Reader._namespace
    return Reader._object
