"""What a class defines, of which most is known again by identity.

In: a class. Out: a hash of what it defines that is *settled*, and whatever else it defines, to be
read at each fingerprint (`contents`).

A value is settled if it leads to nothing but functions, their code, defaults, closures and globals,
classes, built-in containers, and plain values. Nobody but an assignment changes such a value, and
an assignment puts another object in some place. So all that it leads to is looked up again each
time, and while in every place there is the object that was there when it was read, the hash is that
of then. Nothing that is kept here holds a class or a function alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import nn

from fastlr.ghost.introspection import (
    bases,
    class_dict,
    instance_dict,
    module_dict,
    slots,
)
from fastlr.ghost.reader import DEPTH, Reader, only_numbered
from fastlr.ghost.tokens import (
    PLAIN,
    closed,
    code,
    from_user,
    number,
    packaged,
    token_hash,
)
from fastlr.ops.recent import Recent

_PARTS = attrgetter("__code__", "__defaults__", "__kwdefaults__", "__closure__", "__dict__")

# -- what a value leads to -------------------------------------------------------------------------


def _of_function(value: FunctionType) -> Sequence[Any]:
    """What decides what a function does: code, defaults, closure, attributes, globals it names."""
    held, defaults, keywords, closure, attributes = _PARTS(value)
    names = code(held).names
    parts: list[Any] = [held]
    if defaults:
        parts.append(defaults)
    if keywords:
        parts.append(keywords)
    if closure:
        parts += [part for cell in closure for part in reached(cell.cell_contents, names)]
    if attributes:
        parts += _of_dict(attributes)
    if names:
        parts += [part for named in globals_read(value, names) for part in named]
    return parts


def _of_dict(value: dict) -> Sequence[Any]:
    return [*value, *value.values()]


def _of_class(value: type) -> Sequence[Any]:
    """What a class itself defines, if it is one that is looked into."""
    if closed(value) or issubclass(value, nn.Module):
        return ()
    return [part for item in own(value) for part in item]


def _of_object(value: Any) -> Sequence[Any]:
    """What an object of an installed package's class holds; nothing, if that is not looked into."""
    kind = type(value)
    if closed(kind):
        return ()
    parts = [part for named in slots(value) for part in named]
    if issubclass(kind, property):
        parts += [vars(property)[name].__get__(value) for name in ("fget", "fset")]
    return [*parts, *_of_dict(instance_dict(value) or {})]


_OF_CONTAINER: dict[type, Callable[[Any], Sequence[Any]]] = {
    MethodType: attrgetter("__func__", "__self__"),
    property: attrgetter("fget", "fset"),
    staticmethod: lambda value: (value.__func__,),
    classmethod: lambda value: (value.__func__,),
    dict: _of_dict,
    list: tuple,
    tuple: tuple,
}
_LEADS_TO = _OF_CONTAINER | {FunctionType: _of_function, type: _of_class}
_LEAVES = PLAIN | {CodeType}
_UNTOLD = _LEAVES.union(_OF_CONTAINER)  # of whose end nothing tells, or need not
MOST = 2000  # objects that a settled value may lead to
LEVELS = DEPTH + 2


class _Found(NamedTuple):
    """All that some values lead to.

    Attributes:
        objects: these, each before what it leads to.
        kinds: the classes of those that lead on, in their order.
        sizes: to how many objects each of them leads.
    """

    objects: list[Any]
    kinds: list[type]
    sizes: list[int]

    @property
    def identity(self) -> tuple:
        """What is the same where values lead to the same, and holds none of the objects."""
        return list(map(id, self.objects)), self.kinds, self.sizes


def _found(values: Iterable[Any], most: int) -> _Found | None:
    """Return all that some values lead to, or None if it is more than ``most`` objects.

    What is met again is not followed again, nor what lies deeper than a `Reader` reads.
    """
    objects, kinds, sizes = list[Any](), list[type](), list[int]()
    followed: dict[int, Any] = {}
    level = list(values)
    for _ in range(LEVELS):
        objects += level
        if not level or len(objects) > most:
            break
        leading = {id(value): value for value in level if type(value) not in _LEAVES}
        new = [value for key, value in leading.items() if key not in followed]
        followed |= leading
        parts = [_LEADS_TO.get(type(value), _of_object)(value) for value in new]
        kinds += map(type, new)
        sizes += map(len, parts)
        level = list(chain.from_iterable(parts))
    return _Found(objects, kinds, sizes) if len(objects) <= most else None


def _known_again(value: Any) -> bool:
    """Return True if a value is what it was while it is the same object and leads to the same."""
    kind = type(value)
    if kind in _LEAVES or kind in _LEADS_TO:
        return True
    weakref.ref(value)  # raises for objects that cannot tell of their end
    return only_numbered(kind) or all(map(_of_package, bases(kind)))


def _of_package(kind: type) -> bool:
    """Return True for a class of an installed package, and for those that `_of_object` opens."""
    return kind in (object, property) or not (closed(kind) or from_user(kind))


# -- globals that functions read -------------------------------------------------------------------


def globals_read(function: FunctionType, names: tuple[str, ...]) -> list[tuple[str, Any]]:
    """The names and values of those globals that a function with these names may see change."""
    held = function.__globals__
    values = [(name, dict.get(held, name)) for name in names]
    return [
        (name, part)
        for name, value in values
        for part in reached(value, names)
        if part is not None and not _unchanging(part)
    ]


def reached(value: Any, names: tuple[str, ...]) -> Iterable[Any]:
    """What code with these names may read through a value: it; of a user's module what it names."""
    if not issubclass(type(value), ModuleType):
        return (value,)
    if packaged(value):
        return ()
    held = module_dict(value)
    return [held[name] for name in names if name in held]


def _unchanging(value: Any) -> bool:
    """Return True if a value of a global name is a module, or a function or class of a package."""
    kind = type(value)
    if kind is FunctionType:
        return code(value.__code__).installed
    if issubclass(kind, type):
        return closed(value) or issubclass(value, nn.Module)
    return issubclass(kind, ModuleType) or kind is BuiltinFunctionType


# -- what classes define ---------------------------------------------------------------------------


class _Contents(NamedTuple):
    """What classes defined when they were read.

    Attributes:
        names: of all that the classes' dicts have, one dict after the other.
        settled: of each class the names of what is settled.
        others: of each class the names of whatever else is to be read.
        size: number of all objects that the settled values lead to.
        identity: of what they lead to (`_Found.identity`).
        plain: those of these objects that are plain values or code, so that no other has their id.
        alive: weak references to those of them that are no containers.
        token: the hash of the settled values.
    """

    names: list[str]
    settled: list[list[str]]
    others: list[list[str]]
    size: int
    identity: tuple
    plain: list[Any]
    alive: list[weakref.ref]
    token: bytes

    def are_of(self, dicts: Sequence[Mapping[str, Any]]) -> bool:
        """Return True if classes' dicts have these names, and settled values that lead to the same.

        Containers that came to an end may leave their ids to others, which then hold the same.
        """
        if list(chain.from_iterable(dicts)) != self.names:
            return False
        try:
            found = _found(_values(dicts, self.settled), self.size)
        except Exception:
            return False
        leads_to_the_same = found is not None and found.identity == self.identity
        return leads_to_the_same and None not in [one() for one in self.alive]


_known: Recent[tuple[int, ...], _Contents] = Recent()  # by the classes' numbers


def contents(kinds: Sequence[type]) -> tuple[bytes, list[list[tuple[str, Any]]]]:
    """The hash of what is settled of classes, and of each the names and values of what else is."""
    dicts, which = list(map(class_dict, kinds)), tuple(map(number, kinds))
    known = _known.get(which)
    if known is None or not known.are_of(dicts):
        known = _known.put(which, _read(kinds, dicts))
    others = zip(dicts, known.others, strict=True)
    return known.token, [[(name, held[name]) for name in names] for held, names in others]


def own(kind: type) -> list[tuple[str, Any]]:
    """What a class itself defines: functions, and values of names without underscores before."""
    return [
        (name, value)
        for name, value in class_dict(kind).items()
        if type(value) is FunctionType or type(name) is not str or not name.startswith("__")
    ]


def _values(dicts: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]]) -> list[Any]:
    """The values of names, some of each dict."""
    return [held[name] for held, some in zip(dicts, names, strict=True) for name in some]


def _read(kinds: Sequence[type], dicts: Sequence[Mapping[str, Any]]) -> _Contents:
    """Tell what is settled of classes from what is to be read each time."""
    settled: list[list[str]] = []
    others: list[list[str]] = []
    for kind in kinds:
        told = {name: _is_settled(name, value) for name, value in own(kind)}
        settled.append([name for name, is_settled in told.items() if is_settled])
        others.append([name for name, is_settled in told.items() if not is_settled])
    values = _values(dicts, settled)
    found = _found(values, MOST * len(values))
    assert found is not None  # each of them leads to MOST at most
    tokens = [Reader().named(zip(chain.from_iterable(settled), values, strict=True))]
    return _Contents(
        names=list(chain.from_iterable(dicts)),
        settled=settled,
        others=others,
        size=len(found.objects),
        identity=found.identity,
        plain=[one for one in found.objects if type(one) in _LEAVES],
        alive=[weakref.ref(one) for one in found.objects if type(one) not in _UNTOLD],
        token=token_hash((*map(len, settled), *tokens)),
    )


def _is_settled(name: Any, value: Any) -> bool:
    """Return True if a value of a class leads to nothing but what is known again by identity."""
    if type(name) is not str or type(value) in PLAIN:
        return False
    try:
        found = _found((value,), MOST)
        return found is not None and all(map(_known_again, found.objects))
    except Exception:  # a cell of a closure is empty, or a class cannot be hashed
        return False
