"""Objects of foreign classes that a model may hold, and that refuse to be looked at."""

from __future__ import annotations

import contextvars
import enum
import threading
import types
import weakref
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import torch


def refuse(*given: Any, **named: Any) -> Any:
    """Stand for any method that raises; not by one of the errors that models usually raise."""
    raise OSError("this object does not like to be looked at")


class Target:
    """A plain object with one value."""

    def __init__(self, alpha: float = 0.0) -> None:
        self.alpha = alpha


# -- containers that refuse their own protocol -----------------------------------------------------


def refusing(names: str) -> dict[str, Any]:
    """Methods of these names that raise."""
    return dict.fromkeys(names.split(), refuse)


_REFUSING = refusing("__len__ __iter__ __getitem__ __contains__ __bool__ __eq__ __repr__ __copy__")
_NO_VIEWS = refusing("keys values items get copy")


class Irreps(tuple):
    """As e3nn's: iterates, but refuses ``len()``."""

    def __len__(self) -> int:
        raise NotImplementedError


RefusingTuple = type("RefusingTuple", (tuple,), {**_REFUSING, "__hash__": refuse})
RefusingList = type("RefusingList", (list,), _REFUSING)
RefusingDeque = type("RefusingDeque", (deque,), _REFUSING)
RefusingSet = type("RefusingSet", (set,), _REFUSING)
RefusingFrozenset = type("RefusingFrozenset", (frozenset,), _REFUSING)
RefusingDict = type("RefusingDict", (dict,), {**_REFUSING, **_NO_VIEWS})
RefusingOrderedDict = type("RefusingOrderedDict", (OrderedDict,), {**_REFUSING, **_NO_VIEWS})
RefusingDefaultDict = type("RefusingDefaultDict", (defaultdict,), {**_REFUSING, **_NO_VIEWS})
RefusingUserDict = type("RefusingUserDict", (UserDict,), refusing("__len__ __iter__ __bool__"))

# -- plain values of classes of their own ----------------------------------------------------------

_NO_TEXT = refusing("__repr__ __str__ __eq__ __hash__ __bool__")
RefusingInt = type("RefusingInt", (int,), {**_NO_TEXT, "__int__": refuse, "__index__": refuse})
RefusingFloat = type("RefusingFloat", (float,), {**_NO_TEXT, "__float__": refuse})
RefusingComplex = type("RefusingComplex", (complex,), {**_NO_TEXT, "__complex__": refuse})
RefusingStr = type("RefusingStr", (str,), {**_NO_TEXT, "__len__": refuse, "__iter__": refuse})
RefusingBytes = type("RefusingBytes", (bytes,), _NO_TEXT | refusing("__len__ __getitem__"))
RefusingBytearray = type("RefusingBytearray", (bytearray,), refusing("__repr__ __len__ __iter__"))
RefusingArray = type("RefusingArray", (np.ndarray,), refusing("tobytes __repr__"))
RefusingArray.dtype = property(refuse)
RefusingPartial = type("RefusingPartial", (partial,), refusing("__repr__"))
RefusingPartial.func = property(refuse)

# -- objects that refuse attributes ----------------------------------------------------------------


class RefusingDunderDict:
    """Its ``__dict__`` is a property that raises."""

    __dict__ = property(refuse)  # type: ignore[assignment]


class RefusingGetattr(Target):
    """Raises for attributes that it does not have, and not AttributeError."""

    __getattr__ = refuse


class RefusingGetattribute(Target):
    """Raises for every attribute."""

    __getattribute__ = refuse  # type: ignore[assignment]


class RefusingProperty(Target):
    """All that may be asked of it raises."""

    value = property(refuse)
    shape = property(refuse)
    data = property(refuse)


class RefusingClass(Target):
    """Raises where ``isinstance`` asks for its class, as an unbound proxy does."""

    __class__ = property(refuse)  # type: ignore[assignment]


class RefusingComparison(Target):
    """Has neither equality nor a hash nor a truth."""

    __eq__ = __hash__ = __bool__ = __ne__ = refuse  # type: ignore[assignment]


class PrivateSlot:
    """Has a slot whose name the compiler mangles, and one that is empty."""

    __slots__ = ("__alpha", "empty")

    def __init__(self, alpha: float) -> None:
        self.__alpha = alpha

    def set(self, alpha: float) -> None:
        self.__alpha = alpha

    def __getattr__(self, name: str) -> Any:
        return refuse()


class Proxy:
    """Stands for another object, as werkzeug's LocalProxy.

    It asks all that it is asked of that object, if there is any.
    """

    __slots__ = ("__find",)

    def __init__(self, find: Callable[[], Any]) -> None:
        object.__setattr__(self, "_Proxy__find", find)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__find(), name)

    def __bool__(self) -> bool:
        return bool(self.__find())

    __class__ = property(lambda self: self.__find().__class__)  # type: ignore[assignment]
    __dict__ = property(lambda self: self.__find().__dict__)  # type: ignore[assignment]


class RefusingMeta(type):
    """Classes of it refuse to be hashed, compared or looked into."""

    __hash__ = __eq__ = __repr__ = __bool__ = refuse  # type: ignore[assignment]
    __mro__ = __dict__ = __module__ = __name__ = property(refuse)  # type: ignore[assignment]

    def __getattribute__(cls, name: str) -> Any:
        return refuse()


@cache
def class_of_refusing_meta() -> Any:
    """Return a class that refuses everything.

    The file does not hold it: pytest looks at all there.
    """

    class OfRefusingMeta(metaclass=RefusingMeta):
        def __init__(self, alpha: float = 0.0) -> None:
            self.alpha = alpha

    return OfRefusingMeta


class Name(str, enum.Enum):
    """A text that is no plain one, and the name of an attribute."""

    ALPHA = "alpha_of_enum"
    BUFFER = "buffer_of_enum"
    MODULE = "module_of_enum"


class FalseShape(torch.Tensor):
    """A tensor that does not tell its shape."""

    shape = property(refuse)  # type: ignore[assignment]


def _unbound() -> Any:
    raise RuntimeError("Working outside of application context.")


def _proxy_of(thing: Any) -> Proxy:
    return Proxy(lambda: thing)


def _dead_reference() -> Any:
    return weakref.ref(Target())


def _dead_proxy() -> Any:
    return weakref.proxy(Target())


def _dead_method() -> Any:
    return weakref.WeakMethod(Target().__init__)


def _cell_never_filled() -> Any:
    if not torch:
        late = 1
    return lambda: late


def _lazy_module() -> types.ModuleType:
    module = types.ModuleType("lazy")
    module.__getattr__ = refuse  # type: ignore[method-assign]
    return module


def _dict_of_odd_names() -> Any:
    held = Target()
    setattr(held, Name.ALPHA, 1.0)
    return held


def _array_of_itself() -> Any:
    array = np.empty(2, dtype=object)
    array[0] = array
    return array


def _holds_itself() -> Any:
    held = RefusingList()
    list.append(held, held)
    return held


# Name -> makes the object. Each must leave an estimate as it is without the object.
ODD: dict[str, Callable[[], Any]] = {
    "Irreps": lambda: Irreps([(1, (0, 1)), (2, (1, -1))]),
    "tuple": lambda: RefusingTuple((1, 2)),
    "list": lambda: RefusingList([1, torch.ones(2)]),
    "deque": lambda: RefusingDeque([1, 2]),
    "set": lambda: RefusingSet({1, 2}),
    "frozenset": lambda: RefusingFrozenset({1, 2}),
    "dict": lambda: RefusingDict(a=1),
    "OrderedDict": lambda: RefusingOrderedDict(a=1),
    "defaultdict": lambda: RefusingDefaultDict(int, a=1),
    "UserDict": lambda: RefusingUserDict(a=1),
    "int": lambda: RefusingInt(3),
    "float": lambda: RefusingFloat(3.0),
    "complex": lambda: RefusingComplex(3.0),
    "str": lambda: RefusingStr("a"),
    "bytes": lambda: RefusingBytes(b"a"),
    "bytearray": lambda: RefusingBytearray(b"a"),
    "array": lambda: np.ones(3).view(RefusingArray),
    "partial": lambda: RefusingPartial(torch.add, alpha=1),
    "__dict__": RefusingDunderDict,
    "__getattr__": RefusingGetattr,
    "__getattribute__": RefusingGetattribute,
    "properties": RefusingProperty,
    "__class__": RefusingClass,
    "comparison": RefusingComparison,
    "private slot": lambda: PrivateSlot(0.0),
    "unbound proxy": lambda: Proxy(_unbound),
    "proxy of a tensor": lambda: Proxy(lambda: torch.ones(2)),
    "proxy of a module": lambda: _proxy_of(torch.nn.Linear(2, 2)),
    "proxy of a dict": lambda: Proxy(dict),
    "metaclass": lambda: class_of_refusing_meta()(),
    "class of a metaclass": class_of_refusing_meta,
    "dead reference": _dead_reference,
    "dead proxy": _dead_proxy,
    "dead method": _dead_method,
    "empty weak set": lambda: weakref.WeakSet([Target()]),
    "unset context variable": lambda: contextvars.ContextVar("unset"),
    "threading.local": threading.local,
    "cell never filled": _cell_never_filled,
    "lazy module": _lazy_module,
    "name of an enum": _dict_of_odd_names,
    "array of itself": _array_of_itself,
    "list of itself": _holds_itself,
    "tensor subclass": lambda: torch.ones(2).as_subclass(FalseShape),
    "nested tensor": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "masked array": lambda: np.ma.masked_array(np.ones(3), mask=[True, False, True]),
    "meta tensor": lambda: torch.ones(2, device="meta"),
    "uninitialised buffer": torch.nn.UninitializedBuffer,
}


def _jagged() -> Any:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


SLOW = {"jagged tensor": _jagged}  # torch imports its compiler for it
