"""What objects hold, read past the code of their own classes.

In: any object, also one whose class raises in ``__getattr__``, ``__dict__``, ``__class__`` or
``__hash__`` (an unbound proxy, a dead weak reference). Out: its class's bases, its dict, its slots,
as the interpreter keeps them.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Mapping
from types import MemberDescriptorType, ModuleType
from typing import Any

from torch.utils.weak import WeakIdKeyDictionary, WeakIdRef

_TYPE = type.__dict__
PROXIES = (weakref.ProxyType, weakref.CallableProxyType)


class _ModuleRef(WeakIdRef):
    """A weak reference to a module, compared by identity.

    Other than torch's it asks the module for no attribute, which may raise.
    """

    __slots__ = ()

    def __call__(self) -> Any:
        return weakref.ref.__call__(self)


def weakly_by_module() -> WeakIdKeyDictionary:
    """Return a mapping of modules whose entries go when their modules do.

    Modules are found by identity: they may compare equal.
    """
    return WeakIdKeyDictionary(ref_type=_ModuleRef)


def attribute(value: Any, name: str) -> Any:
    """Return an attribute as ``getattr`` finds it; None where there is none, or where it raises."""
    try:
        return getattr(value, name, None)
    except Exception:
        return None


def is_instance(value: Any, kind: type | tuple[type, ...]) -> bool:
    """Return what ``isinstance`` says; False where it raises, as for a proxy of nothing."""
    try:
        return isinstance(value, kind)
    except Exception:
        return False


def bases(kind: type) -> tuple[type, ...]:
    """Return a class and its bases in the order of look-up, whatever its metaclass says."""
    return _TYPE["__mro__"].__get__(kind)


def class_dict(kind: type) -> Mapping[str, Any]:
    """Return what a class itself defines, whatever its metaclass says."""
    return _TYPE["__dict__"].__get__(kind)


def module_name(kind: type) -> str:
    """Return the name of the module that a class says it is from; "" where that is no text."""
    name = _TYPE["__module__"].__get__(kind)
    return name if type(name) is str else ""


def module_dict(module: ModuleType) -> dict[str, Any]:
    """Return what a module has now: nothing is imported late, no ``__getattr__`` asked."""
    return ModuleType.__getattribute__(module, "__dict__")


def instance_dict(value: Any) -> dict[str, Any] | None:
    """Return the dict of an object's attributes; None where it has none or refuses to give it.

    Of a `threading.local` it is the one of this thread.
    """
    kind = threading.local if issubclass(type(value), threading.local) else object
    try:
        held = kind.__getattribute__(value, "__dict__")
    except Exception:
        return None
    return held if issubclass(type(held), dict) else None


def slots(value: Any) -> list[tuple[str, Any]]:
    """Return the names and values of an object's slots, base by base; None for an empty one."""
    found = []
    for kind in bases(type(value)):
        held = class_dict(kind)
        if "__slots__" not in held:
            continue
        for name, slot in held.items():
            if type(slot) is MemberDescriptorType:
                found.append((name, _content(slot, value)))
    return found


def _content(slot: MemberDescriptorType, value: Any) -> Any:
    with contextlib.suppress(AttributeError):  # nothing was put into it
        return slot.__get__(value)
    return None


def built_in_attribute(value: Any, kind: type, name: str) -> Any:
    """Return an attribute that a class of Python's gives its objects, if a subclass hides it."""
    slot = class_dict(kind).get(name)
    if slot is not None:
        return slot.__get__(value)
    return (instance_dict(value) or {}).get(name)


def behind_proxy(proxy: Any) -> Any:
    """Return the object that a `weakref.proxy` stands for; None where it is gone."""
    try:
        return proxy.__init__.__self__  # a proxy hands out what it stands for in no other way
    except ReferenceError:
        return None
