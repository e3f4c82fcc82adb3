"""Tokens of Python values: equal contents give equal tokens, whatever objects hold them.

Plain values stand for themselves, everything else for a tuple that begins with a tag. Tokens are made of what `marshal`
can write, so that they hold no object alive; what cannot be looked into is numbered, and no number is given twice.

`Reader.of` makes the token of one value: it finds the function below that reads values of its class, by the table that
`reads` fills. Objects of other classes are read as the built-in value that they extend, if any, and as their attributes.
No code of a value's own class is needed for that; where some is asked and raises, the value "cannot be read".
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import marshal
import sys
import sysconfig
import threading
import weakref
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, UserString, defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from contextvars import ContextVar
from enum import Enum
from types import BuiltinFunctionType, CodeType, FunctionType, MappingProxyType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary, WeakIdRef

from fastlr.ghost.introspection import (
    PROXIES,
    bases,
    behind_proxy,
    built_in_attribute,
    class_dict,
    instance_dict,
    module_dict,
    module_name,
    slots,
)
from fastlr.ops.torch_private import no_torch_function_of_subclasses

PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None), type(Ellipsis)))
SMALL = 16  # elements of a tensor on the CPU that is read by value
_SMALL_ARRAY = 1 << 16  # bytes of an array, or of an input without samples, that is read by value
_DEPTH = 5  # containers within containers
_GLOBAL_DEPTH = 3  # of them below a global name
_BREADTH = 256  # entries of one container
_PLAIN_BREADTH = 1 << 13  # of one that holds plain values only
_VALUES = 2000  # values below one attribute
_CLOSED = frozenset((*sys.stdlib_module_names, "torch", "numpy", "lightning", "pytorch_lightning"))  # not looked into
_OPEN = (SimpleNamespace, argparse.Namespace)  # of Python's classes, looked into like a user's
_INSTALLED = tuple({sysconfig.get_path(where) for where in ("stdlib", "purelib", "platlib")})
TENSORS = frozenset((Tensor, nn.Parameter))
_UNSET = "unset"


# -- numbers of objects ------------------------------------------------------------------------------------------------

_numbers: dict[int, tuple[Callable, int]] = {}  # id of an object -> a weak reference to it, its number
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
    """Drop the number of an object that has come to its end, unless a new object at its address has one already."""
    if key in _numbers and _numbers[key][0] is gone:
        del _numbers[key]


def digest(token: Any) -> bytes:
    """A hash of a token by which tokens are compared."""
    return hashlib.blake2b(_written(token), digest_size=32).digest()


def _written(token: Any) -> bytes:
    """A token as bytes."""
    try:
        return marshal.dumps(token, 2)
    except ValueError:  # marshal takes no subclasses: an attribute's name may be a member of an enum
        return marshal.dumps(_of_exact_types(token), 2)


def _of_exact_types(token: Any) -> Any:
    """A token with texts of a class of their own replaced by the texts that they are."""
    if type(token) in (tuple, list):
        return tuple([_of_exact_types(part) for part in token])
    return str.__str__(token) if isinstance(token, str) else token


# -- tensors -----------------------------------------------------------------------------------------------------------


def version(tensor: Tensor) -> int:
    """How often a tensor has been written to; 0 for one that does not know (of inference mode, not initialised)."""
    try:
        return 0 if tensor.is_inference() else tensor._version
    except Exception:
        return 0


def _address(t: Tensor) -> int:
    """Where a tensor's elements are; 0 for one that has several places, as a sparse one."""
    try:
        return t.data_ptr()
    except RuntimeError:
        return 0


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Its text, which takes torch long to make."""
    return str(dtype)


def of_tensor(t: Tensor, versions: bool = True) -> tuple:
    """By value where it is small and on the CPU, otherwise which tensor it is and (``versions``) how often written to."""
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
    return "tensor", kind, shape, str(t.device), number(t), version(t) if versions else _address(t)


def _of_tensor_subclass(t: Tensor, versions: bool) -> tuple:
    """Which tensor it is; nothing is computed of it, as it may stand for something that is yet to be computed."""
    with no_torch_function_of_subclasses():
        try:
            shape = str(tuple(t.shape))  # sizes may be symbols
        except Exception:  # not initialised
            shape = ""
        return "tensor", number(type(t)), shape, number(t), version(t) if versions else 0


def of_values(t: Tensor) -> tuple:
    """By value if it is on the CPU and no more than a small array's bytes, otherwise its dtype and number of axes."""
    token = dtype_name(t.dtype), t.ndim
    if type(t) not in TENSORS or t.device.type != "cpu" or t.layout != torch.strided or t.nbytes > _SMALL_ARRAY:
        return token
    return *token, t.resolve_conj().resolve_neg().flatten().view(torch.uint8).numpy().tobytes()


# -- code and classes --------------------------------------------------------------------------------------------------

_codes: dict[int, tuple[CodeType, int, tuple[str, ...]]] = {}  # id of code -> the code, its number, its global names
_equal_codes: dict[CodeType, int] = {}  # code -> the number of all that equal it


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
    """The global names and attributes that code has, and the functions defined in it."""
    inner = (constant for constant in held.co_consts if isinstance(constant, CodeType))
    return set(held.co_names).union(*map(_names, inner))


def own(kind: type) -> list[tuple[str, Any]]:
    """The names and values that a class itself defines: functions, and attributes without underscores on both sides."""
    items = class_dict(kind).items()
    return [(n, v) for n, v in items if not n.startswith("__") or type(v) is FunctionType]


def closed(kind: type) -> bool:
    """Return True if objects of a class are taken as they are: those of Python, torch and trainers."""
    return module_name(kind).partition(".")[0] in _CLOSED


def _packaged(module: Any) -> bool:
    """Return True if a module is Python's or an installed package's."""
    return type(module) is ModuleType and str(module_dict(module).get("__file__") or "").startswith(_INSTALLED)


def _of_user(kind: type) -> bool:
    """Return True if a class is of none of the packages that do not change."""
    name = module_name(kind)
    return name.partition(".")[0] not in _CLOSED and not _packaged(sys.modules.get(name))


def _unchanging(value: Any) -> bool:
    """Return True if a value of a global name is of a package that does not change: a function, a class, a module."""
    kind = type(value)
    if kind is FunctionType:
        return value.__code__.co_filename.startswith(_INSTALLED)
    if issubclass(kind, type):
        return closed(value) or issubclass(value, nn.Module)
    return kind is ModuleType or kind is BuiltinFunctionType


def _reached(value: Any, names: tuple[str, ...]) -> Iterable[Any]:
    """What code with these names may read through a value: itself; of a user's module what it has by these names."""
    if type(value) is not ModuleType:
        return (value,)
    if _packaged(value):
        return ()
    held = module_dict(value)
    return [held[name] for name in names if name in held]


def _all_plain(values: Iterable[Any]) -> bool:
    """Return True if all values are plain; False, too, if the class of one cannot be hashed."""
    try:
        return PLAIN.issuperset(map(type, values))
    except Exception:
        return False


# -- the reader --------------------------------------------------------------------------------------------------------


class Reader:
    """Makes the tokens of one fingerprint; what it has read once it only refers to afterwards.

    Args:
        module: makes the token of a module that is met on the way; by default it is numbered.
        versions: how often large tensors were written to counts; otherwise where they are.

    Attributes:
        tensors: that were met.
        classes: by id, those of objects that were met, and their bases, but for those of installed packages.
        free: ids of those whose values do not matter.
    """

    def __init__(self, module: Callable[[nn.Module], Any] = number, versions: bool = True) -> None:
        self._module, self.versions = module, versions
        self.free: set[int] = set()
        self.tensors: list[Tensor] = []
        self.classes: dict[int, type] = {}
        self._read: dict[int, tuple[int, int, Any]] = {}  # id -> (which one it was, depth that was left, the object)
        self._left = 0

    def top(self, value: Any) -> Any:
        """The token of a value, with a budget of its own."""
        self._left = _VALUES
        if type(value) is FunctionType:
            return _function(self, value, FunctionType, _DEPTH)
        return self.of(value, _DEPTH)

    def named(self, items: Iterable[tuple[str, Any]], but: Collection[str] = ()) -> list[Any]:
        """The names and tokens of what a module or a class holds, in turn, ``but`` for some; each with its own budget."""
        tokens: list[Any] = []
        for name, value in items:
            if name in but:
                continue
            try:
                plain = type(value) in PLAIN
            except Exception:  # its class cannot be hashed
                plain = False
            tokens += name, value if plain else self.top(value)
        return tokens

    def of(self, value: Any, depth: int) -> Any:
        """The token of a value, ``depth`` containers deep."""
        kind = type(value)
        try:
            if kind in PLAIN:
                return value
            if kind is tuple and PLAIN.issuperset(map(type, value)):
                return "tuple", *value
            self._left -= 1
            if isinstance(value, Tensor):
                return self._tensor(value)
            if isinstance(value, nn.Module):
                return "module", self._module(behind_proxy(value) if kind in PROXIES else value)
        except Exception:  # asked for its hash or its class it raises: it is neither
            pass
        if depth <= 0 or self._left < 0:
            return "more", number(kind)
        before = self._read.get(id(value))
        if before is not None and before[1] >= depth:
            return "again", before[0]
        read = _READERS.get(id(kind)) or _reader_of_subclass(kind)
        if read is not _text:
            self._read[id(value)] = len(self._read), depth, value
        try:
            return read(self, value, kind, depth - 1)
        except Exception:
            return "cannot be read", number(kind), number(value)

    def entries(self, tag: str, length: int, values: Iterable[Any], depth: int) -> tuple:
        """The tokens of a container's values: all of them, or the first ones of many that are not plain."""
        if length <= _BREADTH:
            return tag, *[self.of(v, depth) for v in values]
        if length <= _PLAIN_BREADTH:
            values = list(values)
            if _all_plain(values):
                return tag, *values
        return tag, length, *[self.of(v, depth) for v in itertools.islice(values, _BREADTH)]

    def meet(self, kinds: Iterable[type]) -> None:
        """Note classes whose own attributes and functions are to be read, too."""
        for kind in kinds:
            self.classes[id(kind)] = kind

    def _tensor(self, value: Tensor) -> tuple:
        """The token of a tensor; of one whose values do not matter only which one it is."""
        if type(value) in PROXIES:
            value = behind_proxy(value)
        self.tensors.append(value)
        return ("free", number(value)) if id(value) in self.free else of_tensor(value, self.versions)


# -- readers by class: each makes the token of a value of a class or of a subclass of it, ``depth`` containers deep -----

Read = Callable[[Reader, Any, type, int], Any]
_READERS: dict[int, Read] = {}  # id of a class (which hashes nothing) -> what reads its objects
_FAMILIES: dict[int, Read] = {}  # id of a class -> what reads the objects of its subclasses, all that there is to them


def reads(*kinds: type, subclasses: bool = False) -> Callable[[Read], Read]:
    """Enter a function as the one that reads objects of these classes.

    Args:
        kinds: classes. The function is given the one of them as which it is to read the value.
        subclasses: it also reads objects of subclasses, whole; otherwise it reads of them what they have of that class.
    """

    def enter(read: Read) -> Read:
        table = _FAMILIES if subclasses else _READERS
        table.update({id(kind): read for kind in kinds})
        return read

    return enter


def _reader_of_subclass(kind: type) -> Read:
    """What reads objects of a class that has no entry of its own."""
    for base in bases(kind):
        if id(base) in _FAMILIES:
            return _FAMILIES[id(base)]
    return _object


def _object(reader: Reader, value: Any, kind: type, depth: int) -> tuple:
    """Any object: its class, the built-in value that it extends, its attributes and slots; if closed, which one it is."""
    parts: list[Any] = [number(kind)]
    base = next((base for base in bases(kind) if id(base) in _READERS), None)
    if base is not None:
        parts.append(_READERS[id(base)](reader, value, base, depth))
    if closed(kind) and not issubclass(kind, _OPEN):
        return "object", *parts, number(value)
    if id(kind) not in reader.classes:
        reader.meet(filter(_of_user, bases(kind)))
    attributes, slotted = instance_dict(value), slots(value)
    if attributes is None and not slotted and base is None:
        parts.append(number(value))
    if attributes is not None:
        parts.append(_dict(reader, attributes, dict, depth))
    parts += [reader.of(part, depth) for slot in slotted for part in slot]
    return "object", *parts


@reads(Enum, subclasses=True)
def _enum(reader: Reader, value: Enum, kind: type, depth: int) -> tuple:
    """A member of an enum: its class, name and value."""
    return "enum", number(kind), reader.of(value._name_, depth), reader.of(value._value_, depth)


@reads(type, subclasses=True)
def _class(reader: Reader, value: type, kind: type, depth: int) -> tuple:
    """A class: which one it is, and what it defines itself."""
    if closed(value) or issubclass(value, nn.Module):
        return "class", number(value)
    return "class", number(value), *[reader.of(part, depth) for item in own(value) for part in item]


# Containers.


@reads(list, tuple, deque, torch.Size)
def _sequence(reader: Reader, value: Any, kind: type, depth: int) -> tuple:
    """Entries in their order."""
    return reader.entries(kind.__name__, kind.__len__(value), kind.__iter__(value), depth)


@reads(dict, defaultdict, Counter)
def _dict(reader: Reader, value: dict, kind: type, depth: int) -> tuple:
    """Keys and values in their order."""
    length = dict.__len__(value)
    keys = reader.entries("keys", length, dict.keys(value), depth)
    return kind.__name__, keys, reader.entries("values", length, dict.values(value), depth)


@reads(OrderedDict)
def _ordered_dict(reader: Reader, value: OrderedDict, kind: type, depth: int) -> tuple:
    """Keys and values in the order in which a dict has them, and then the keys in the order that it was given since."""
    order = {id(key): place for place, key in enumerate(dict.keys(value))}
    places = [order[id(key)] for key in OrderedDict.__iter__(value)]
    moved = places if places != sorted(places) else []
    return *_dict(reader, value, kind, depth), *moved


@reads(set, frozenset)
def _set(reader: Reader, value: Collection, kind: type, depth: int) -> tuple:
    """Entries, sorted by their tokens: equal sets may have them in another order."""
    read = [reader.of(v, depth) for v in itertools.islice(kind.__iter__(value), _BREADTH)]
    return kind.__name__, kind.__len__(value), *sorted(map(_written, read))


@reads(MappingProxyType)
def _mapping_proxy(reader: Reader, value: MappingProxyType, kind: type, depth: int) -> tuple:
    """A view of a dict, as that dict."""
    return _dict(reader, dict(value), dict, depth)


# Objects of Python's that are what a few of their attributes are.

_CACHED = type(functools.cache(_names))
_CONSISTS_OF: dict[type, tuple[str, ...]] = {
    slice: ("start", "stop", "step"),
    MethodType: ("__func__", "__self__"),
    functools.partial: ("func", "args", "keywords"),
    property: ("fget", "fset"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    _CACHED: ("__wrapped__",),
}
_HOLDS: dict[type, str] = {  # containers written in Python -> the attribute that has the entries
    ChainMap: "maps",
    UserDict: "data",
    UserList: "data",
    UserString: "data",
    weakref.WeakSet: "data",
    weakref.WeakKeyDictionary: "data",
    weakref.WeakValueDictionary: "data",
    WeakIdKeyDictionary: "data",
    TensorWeakRef: "ref",
}


@reads(*_CONSISTS_OF)
def _composed(reader: Reader, value: Any, kind: type, depth: int) -> tuple:
    """An object that is what a few of its attributes are."""
    parts = [built_in_attribute(value, kind, name) for name in _CONSISTS_OF[kind]]
    return kind.__name__, *[reader.of(part, depth) for part in parts]


@reads(*_HOLDS)
def _wrapped(reader: Reader, value: Any, kind: type, depth: int) -> tuple:
    """A container around another: not one more container deep."""
    return kind.__name__, reader.of(built_in_attribute(value, kind, _HOLDS[kind]), depth + 1)


# What refers to a value that is kept elsewhere.


@reads(weakref.ref, weakref.KeyedRef, WeakIdRef)
def _weak_reference(reader: Reader, value: weakref.ref, kind: type, depth: int) -> tuple:
    """What a weak reference refers to, not one container deeper; None where that is gone."""
    return "weak", reader.of(weakref.ref.__call__(value), depth + 1)


@reads(weakref.WeakMethod)
def _weak_method(reader: Reader, value: weakref.WeakMethod, kind: type, depth: int) -> tuple:
    """The method that a weak reference refers to; None where it is gone."""
    return "weak", reader.of(weakref.WeakMethod.__call__(value), depth + 1)


@reads(*PROXIES)
def _weak_proxy(reader: Reader, value: Any, kind: type, depth: int) -> tuple:
    """What a weak proxy stands for; None where that is gone."""
    return "weak", reader.of(behind_proxy(value), depth + 1)


@reads(ContextVar)
def _context_variable(reader: Reader, value: ContextVar, kind: type, depth: int) -> tuple:
    """Which variable it is, and its value in this context."""
    return "context variable", number(value), reader.of(value.get(_UNSET), depth + 1)


@reads(threading.local)
def _thread_local(reader: Reader, value: threading.local, kind: type, depth: int) -> tuple:
    """What this thread has put into it."""
    return "local", _dict(reader, instance_dict(value) or {}, dict, depth)


# Functions.


@reads(FunctionType)
def _function(reader: Reader, value: FunctionType, kind: type, depth: int) -> tuple:
    """Code, what the closure holds, defaults, and the values of the global names that the code has."""
    which, names = code(value.__code__)
    token: list[Any] = ["function", which]
    if value.__closure__:
        for held in map(_content_of, value.__closure__):
            token += [reader.of(part, depth) for part in _reached(held, names)]
    if value.__defaults__ is not None:
        token += "defaults", reader.of(value.__defaults__, depth)
    if value.__kwdefaults__ is not None:
        token += "keywords", reader.of(value.__kwdefaults__, depth)
    if dict.__len__(value.__dict__):
        token += "attributes", reader.of(value.__dict__, depth)
    if names:
        token += _globals(reader, value.__globals__, names, min(depth, _GLOBAL_DEPTH))
    return tuple(token)


def _globals(reader: Reader, held: dict[str, Any], names: tuple[str, ...], depth: int) -> list[Any]:
    """The names and tokens of the global values that code with these names may read and that may change."""
    tokens: list[Any] = []
    for name in names:
        value = dict.get(held, name)
        if value is None:
            continue
        for part in _reached(value, names):
            if part is not None and not _unchanging(part):
                tokens += name, reader.of(part, depth)
    return tokens


def _content_of(cell: Any) -> Any:
    """What a cell of a closure holds; None if it is not filled yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


@reads(BuiltinFunctionType)
def _built_in_function(reader: Reader, value: Any, kind: type, depth: int) -> tuple:
    """Which function it is, and what it is a method of."""
    return "builtin", number(value), reader.of(value.__self__, depth)


# Single values.


@reads(range, torch.dtype, torch.device, torch.layout, torch.memory_format)
def _text(reader: Reader, value: Any, kind: type, depth: int) -> tuple:
    """A value that is told whole by its text."""
    return "text", repr(value)


@reads(bytearray)
def _bytes(reader: Reader, value: bytearray, kind: type, depth: int) -> tuple:
    """Bytes that may be written to."""
    return "bytearray", bytes(bytearray.__getitem__(value, slice(None)))


@reads(np.ndarray, np.matrix, np.memmap, np.recarray)
def _array(reader: Reader, value: np.ndarray, kind: type, depth: int) -> tuple:
    """An array of objects as they are read, a small one of numbers by its bytes, otherwise which array it is."""
    array = np.ndarray.view(value, np.ndarray)
    token = "array", str(array.dtype), array.shape
    if array.dtype.hasobject:
        return *token, *reader.entries("objects", array.size, array.flat, depth)
    return *token, number(value) if array.nbytes > _SMALL_ARRAY else array.tobytes()


@reads(np.ma.MaskedArray)
def _masked_array(reader: Reader, value: np.ma.MaskedArray, kind: type, depth: int) -> tuple:
    """An array of which some entries do not count: all entries, and which."""
    mask = (instance_dict(value) or {}).get("_mask")
    return "masked", _array(reader, value, kind, depth), reader.of(mask, depth + 1)


@reads(np.generic, subclasses=True)
def _scalar(reader: Reader, value: np.generic, kind: type, depth: int) -> tuple:
    """A number of numpy's: its dtype and bytes; of a record with objects in it, its fields."""
    if value.dtype.hasobject:
        return "record", str(value.dtype), reader.of(value.item(), depth)
    return "scalar", str(value.dtype), value.tobytes()


# Subclasses of plain values, as the plain values that they are.


@reads(int)
def _integer(reader: Reader, value: int, kind: type, depth: int) -> int:
    """An integer of another class."""
    return int.__int__(value)


@reads(float)
def _float(reader: Reader, value: float, kind: type, depth: int) -> float:
    """A float of another class."""
    return float.__float__(value)


@reads(complex)
def _complex(reader: Reader, value: complex, kind: type, depth: int) -> complex:
    """A complex number of another class."""
    return complex.__pos__(value)


@reads(str)
def _string(reader: Reader, value: str, kind: type, depth: int) -> str:
    """A text of another class."""
    return str.__str__(value)


@reads(bytes)
def _byte_string(reader: Reader, value: bytes, kind: type, depth: int) -> bytes:
    """Bytes of another class."""
    return bytes.__getitem__(value, slice(None))
