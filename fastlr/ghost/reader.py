"""Makes the token of any Python value (see fastlr.ghost.tokens), and refuses none.

`Reader.of` finds what reads values of a class in the table that `reads` fills, from
fastlr.ghost.value_readers. Objects of other classes are read as the built-in value that they
extend, if any, and as their attributes and slots. No code of a value's own class is needed for
that; where some is asked nevertheless and raises, the value "cannot be read".
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Collection, Iterable
from types import FunctionType, SimpleNamespace
from typing import Any

from torch import Tensor, nn

from fastlr.ghost.introspection import PROXIES, bases, behind_proxy, instance_dict, slots
from fastlr.ghost.tokens import PLAIN, all_plain, closed, from_user, number, of_tensor

DEPTH = 5  # containers within containers
_BREADTH = 256  # entries of one container
_PLAIN_BREADTH = 1 << 13  # of one that holds plain values only
_VALUES = 2000  # values below one attribute
_OPEN = (SimpleNamespace, argparse.Namespace)  # of Python's classes, looked into like a user's


class Reader:
    """Makes the tokens of one fingerprint; what it has read once it only refers to afterwards.

    Args:
        module: makes the token of a module that is met on the way; by default it is numbered.
        versions: how often large tensors were written to counts; otherwise where they are.

    Attributes:
        tensors: that were met.
        classes: by id, those of objects that were met, and their bases, but for those of installed
            packages.
        free: ids of those tensors whose values do not matter.
    """

    def __init__(self, module: Callable[[nn.Module], Any] = number, versions: bool = True) -> None:
        self._module, self.versions = module, versions
        self.free: set[int] = set()
        self.tensors: list[Tensor] = []
        self.classes: dict[int, type] = {}
        self._read: dict[int, tuple[int, int, Any]] = {}  # id -> (which, depth left, the object)
        self._left = 0

    def top(self, value: Any) -> Any:
        """The token of a value, with a budget of its own."""
        self._left = _VALUES
        if type(value) is FunctionType:
            return _READERS[id(FunctionType)](self, value, FunctionType, DEPTH)
        return self.of(value, DEPTH)

    def named(self, items: Iterable[tuple[str, Any]], but: Collection[str] = ()) -> list[Any]:
        """The names and tokens of what a module or a class holds, in turn.

        Args:
            items: names and values; each value is read with a budget of its own.
            but: names that are left out.
        """
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
        """The token of a value, read ``depth`` containers deep."""
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
        except Exception:  # asked for its hash or its class it raises: it is none of these
            pass
        if depth <= 0 or self._left < 0:
            return "more", number(kind)
        before = self._read.get(id(value))
        if before is not None and before[1] >= depth:
            return "again", before[0]
        if id(kind) in _TOLD_BY_TEXT:
            return "text", repr(value)
        self._read[id(value)] = len(self._read), depth, value
        read = _READERS.get(id(kind)) or _reader_of_subclass(kind)
        try:
            return read(self, value, kind, depth - 1)
        except Exception:
            return "cannot be read", number(kind), number(value)

    def entries(self, tag: str, length: int, values: Iterable[Any], depth: int) -> tuple:
        """The tokens of a container's values: all, or the first ones of many that are not plain."""
        if length > _PLAIN_BREADTH:
            return tag, length, *self.first(values, depth)
        values = list(values)
        if all_plain(values):
            return tag, *values
        if length <= _BREADTH:
            return tag, *[self.of(v, depth) for v in values]
        return tag, length, *self.first(values, depth)

    def first(self, values: Iterable[Any], depth: int) -> list[Any]:
        """The tokens of as many values as are read of one container."""
        return [self.of(v, depth) for v in itertools.islice(values, _BREADTH)]

    def meet(self, kinds: Iterable[type]) -> None:
        """Note classes whose own attributes and functions are to be read, too."""
        for kind in kinds:
            self.classes[id(kind)] = kind

    def let_go(self) -> None:
        """Hold nothing that was read any longer: what is referred to weakly may come to its end."""
        self._module = number
        self._read.clear()

    def _tensor(self, value: Tensor) -> tuple:
        """The token of a tensor; of one whose values do not matter only which one it is."""
        if type(value) in PROXIES:
            value = behind_proxy(value)
        self.tensors.append(value)
        if id(value) in self.free:
            return "free", number(value)
        return of_tensor(value, self.versions)


# -- what reads the values of a class --------------------------------------------------------------

Read = Callable[[Reader, Any, Any, int], Any]
_READERS: dict[int, Read] = {}  # id of a class (its hash may raise) -> what reads its objects
_FAMILIES: dict[int, Read] = {}  # id of a class -> what reads objects of its subclasses, whole
_TOLD_BY_TEXT: set[int] = set()  # ids of classes whose objects their texts tell whole


def reads(*kinds: type, subclasses: bool = False) -> Callable[[Read], Read]:
    """Enter a function as the one that reads objects of these classes.

    It is given the reader, the value, the class as which to read it, and how many containers deep
    to read what is in it. It returns a token.

    Args:
        kinds: classes.
        subclasses: it also reads objects of subclasses, whole. Otherwise it reads of these what
            they have of the class, and their attributes are read beside.
    """

    def enter(read: Read) -> Read:
        table = _FAMILIES if subclasses else _READERS
        for kind in kinds:
            table[id(kind)] = read
        return read

    return enter


def told_by_text(*kinds: type) -> None:
    """Have objects of these classes read by their texts, which tell them whole."""
    _TOLD_BY_TEXT.update(map(id, kinds))


def _reader_of_subclass(kind: type) -> Read:
    """Return what reads objects of a class that has no entry of its own."""
    for base in bases(kind):
        if id(base) in _FAMILIES:
            return _FAMILIES[id(base)]
    return _object


def only_numbered(kind: type) -> bool:
    """Return True if objects of a class are told by which ones they are, and by nothing else."""
    if not closed(kind) or issubclass(kind, (*_OPEN, Tensor, nn.Module)):
        return False
    return not any(id(base) in table for base in bases(kind) for table in (_READERS, _FAMILIES))


def _object(reader: Reader, value: Any, kind: type, depth: int) -> tuple:
    """Any object: its class, the built-in value that it extends, its attributes and slots.

    Instead of these it is which one it is, where it is Python's, torch's or a trainer's.
    """
    parts: list[Any] = [number(kind)]
    base = next((base for base in bases(kind) if id(base) in _READERS), None)
    if base is not None:
        parts.append(_READERS[id(base)](reader, value, base, depth))
    if closed(kind) and not issubclass(kind, _OPEN):
        return "object", *parts, number(value)
    if id(kind) not in reader.classes:
        reader.meet(filter(from_user, bases(kind)))
    attributes, slotted = instance_dict(value), slots(value)
    if attributes is None and not slotted and base is None:
        parts.append(number(value))
    if attributes is not None:
        parts.append(_READERS[id(dict)](reader, attributes, dict, depth))
    for name, content in slotted:
        parts += reader.of(name, depth), reader.of(content, depth)
    return "object", *parts
