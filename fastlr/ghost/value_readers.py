"""How values of Python's, numpy's and torch's own classes become tokens.

Each function here makes the token of a value of the classes that stand above it, or of what a
value of a subclass has of them: read by the built-in class's own methods, as a subclass's may
refuse (see fastlr.ghost.reader). ``kind`` is the class as which to read it, ``depth`` how many
containers deep to read on.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import (
    ChainMap,
    Counter,
    OrderedDict,
    UserDict,
    UserList,
    UserString,
    defaultdict,
    deque,
)
from collections.abc import Callable, Collection
from contextvars import ContextVar
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary, WeakIdRef

from fastlr.ghost.class_reader import globals_read, own, reached
from fastlr.ghost.introspection import (
    PROXIES,
    behind_proxy,
    built_in_attribute,
    instance_dict,
)
from fastlr.ghost.reader import Reader, reads, told_by_text
from fastlr.ghost.tokens import (
    SMALL_ARRAY,
    closed,
    code,
    number,
    written,
)

_GLOBAL_DEPTH = 3  # containers within containers below a global name
_UNSET = object()

told_by_text(range, torch.dtype, torch.device, torch.layout, torch.memory_format)


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


# -- containers ------------------------------------------------------------------------------------


@reads(list, tuple, deque, torch.Size)
def _sequence(reader: Reader, value: Any, kind: Any, depth: int) -> tuple:
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
    """Keys and values as a dict has them, and the order of the keys where it was changed since."""
    order = {id(key): place for place, key in enumerate(dict.keys(value))}
    places = [order[id(key)] for key in OrderedDict.__iter__(value)]
    moved = places if places != sorted(places) else []
    return *_dict(reader, value, kind, depth), *moved


@reads(set, frozenset)
def _set(reader: Reader, value: Collection, kind: Any, depth: int) -> tuple:
    """Entries, sorted by their tokens: equal sets may have them in another order."""
    tokens = reader.first(kind.__iter__(value), depth)
    return kind.__name__, kind.__len__(value), *sorted(map(written, tokens))


@reads(MappingProxyType)
def _mapping_proxy(reader: Reader, value: MappingProxyType, kind: type, depth: int) -> tuple:
    """A view of a dict, as that dict."""
    return _dict(reader, dict(value), dict, depth)


# -- objects that are what a few of their attributes are -------------------------------------------

_CACHED = type(functools.cache(code))  # of what `functools.cache` makes
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


# -- what refers to a value that is kept elsewhere -------------------------------------------------

_BEHIND: dict[type, Callable[[Any], Any]] = {  # None where that is gone
    **dict.fromkeys((weakref.ref, weakref.KeyedRef, WeakIdRef), weakref.ref.__call__),
    weakref.WeakMethod: weakref.WeakMethod.__call__,
    **dict.fromkeys(PROXIES, behind_proxy),
}


@reads(*_BEHIND)
def _weak(reader: Reader, value: Any, kind: type, depth: int) -> tuple:
    """What a weak reference or proxy stands for: not one container deeper."""
    return "weak", reader.of(_BEHIND[kind](value), depth + 1)


@reads(ContextVar)
def _context_variable(reader: Reader, value: ContextVar, kind: type, depth: int) -> tuple:
    """Which variable it is, and its value in this context if it has one."""
    content = value.get(_UNSET)
    if content is _UNSET:
        return "context variable", number(value)
    return "context variable", number(value), reader.of(content, depth + 1)


@reads(threading.local)
def _thread_local(reader: Reader, value: threading.local, kind: type, depth: int) -> tuple:
    """What this thread has put into it."""
    return "local", _dict(reader, instance_dict(value) or {}, dict, depth)


# -- functions -------------------------------------------------------------------------------------


@reads(FunctionType)
def _function(reader: Reader, value: FunctionType, kind: type, depth: int) -> tuple:
    """Code, what the closure holds, defaults, and the values of the globals that the code names."""
    known = code(value.__code__)
    names, token = known.names, ["function", known.number]
    if value.__closure__:
        for held in map(_content_of, value.__closure__):
            token += [reader.of(part, depth) for part in reached(held, names)]
    if value.__defaults__ is not None:
        token += "defaults", reader.of(value.__defaults__, depth)
    if value.__kwdefaults__ is not None:
        token += "keywords", reader.of(value.__kwdefaults__, depth)
    if dict.__len__(value.__dict__):
        token += "attributes", reader.of(value.__dict__, depth)
    if names:
        below = min(depth, _GLOBAL_DEPTH)
        for name, part in globals_read(value, names):
            token += name, reader.of(part, below)
    return tuple(token)


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


# -- single values ---------------------------------------------------------------------------------


@reads(bytearray)
def _bytes(reader: Reader, value: bytearray, kind: type, depth: int) -> tuple:
    """Bytes that may be written to."""
    return "bytearray", bytes(bytearray.__getitem__(value, slice(None)))


@reads(np.ndarray, np.matrix, np.memmap, np.recarray)
def _array(reader: Reader, value: np.ndarray, kind: type, depth: int) -> tuple:
    """An array of objects as these are read, of numbers by its bytes if small, else which it is."""
    array = np.ndarray.view(value, np.ndarray)
    token = "array", str(array.dtype), array.shape
    if array.dtype.hasobject:
        return *token, *reader.entries("objects", array.size, array.flat, depth)
    return *token, number(value) if array.nbytes > SMALL_ARRAY else array.tobytes()


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


# -- subclasses of plain values --------------------------------------------------------------------


_EXACT: dict[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    complex: complex.__pos__,
    str: str.__str__,
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
}


@reads(*_EXACT)
def _exact(reader: Reader, value: Any, kind: type, depth: int) -> Any:
    """A plain value of a class of its own, as that of the built-in class."""
    return _EXACT[kind](value)
