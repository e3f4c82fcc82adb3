"""Objects of foreign classes that a model may hold, and that refuse to be looked at."""

import contextvars  # noqa: F401, named in _OBJECTS
import enum
import threading  # noqa: F401
import types
import weakref  # noqa: F401
from collections import OrderedDict, UserDict, defaultdict, deque
from functools import cache, partial

import numpy as np
import torch


def refuse(*given, **named):
    """Stand for any method that raises; not by one of the errors that models usually raise."""
    raise OSError("this object does not like to be looked at")


class Target:
    """A plain object with one value."""

    def __init__(self, alpha=0.0):
        self.alpha = alpha


# -- containers that refuse their own protocol -----------------------------------------------------


def refusing(names):
    """Methods of these names that raise."""
    return dict.fromkeys(names.split(), refuse)


_REFUSING = refusing("__len__ __iter__ __getitem__ __contains__ __bool__ __eq__ __repr__ __copy__")
_NO_VIEWS = refusing("keys values items get copy")


class Irreps(tuple):
    """As e3nn's: iterates, but refuses ``len()``."""

    def __len__(self):
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

    def __init__(self, alpha):
        self.__alpha = alpha

    def set(self, alpha):
        self.__alpha = alpha

    def __getattr__(self, name):
        return refuse()


class Proxy:
    """Stands for another object, as werkzeug's LocalProxy.

    It asks all that it is asked of that object, if there is any.
    """

    __slots__ = ("__find",)

    def __init__(self, find):
        object.__setattr__(self, "_Proxy__find", find)

    def __getattr__(self, name):
        return getattr(self.__find(), name)

    def __bool__(self):
        return bool(self.__find())

    __class__ = property(lambda self: self.__find().__class__)  # type: ignore[assignment]
    __dict__ = property(lambda self: self.__find().__dict__)  # type: ignore[assignment]


class RefusingMeta(type):
    """Classes of it refuse to be hashed, compared or looked into."""

    __hash__ = __eq__ = __repr__ = __bool__ = refuse  # type: ignore[assignment]
    __mro__ = __dict__ = __module__ = __name__ = property(refuse)  # type: ignore[assignment]

    def __getattribute__(cls, name):
        return refuse()


@cache
def class_of_refusing_meta():
    """Return a class that refuses everything.

    The file does not hold it: pytest looks at all there.
    """

    class OfRefusingMeta(metaclass=RefusingMeta):
        def __init__(self, alpha=0.0):
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


def _unbound():
    raise RuntimeError("Working outside of application context.")


def _proxy_of(thing):
    return Proxy(lambda: thing)


def _cell_never_filled():
    if not torch:
        late = 1
    return lambda: late


def _lazy_module():
    module = types.ModuleType("lazy")
    module.__getattr__ = refuse  # type: ignore[method-assign]
    return module


def _dict_of_odd_names():
    held = Target()
    setattr(held, Name.ALPHA, 1.0)
    return held


def _array_of_itself():
    array = np.empty(2, dtype=object)
    array[0] = array
    return array


def _holds_itself():
    held = RefusingList()
    list.append(held, held)
    return held


# Each must leave an estimate as it is without the object.
_OBJECTS = """
Irreps([(1, (0, 1)), (2, (1, -1))])
RefusingTuple((1, 2))
RefusingList([1, torch.ones(2)])
RefusingDeque([1, 2])
RefusingSet({1, 2})
RefusingFrozenset({1, 2})
RefusingDict(a=1)
RefusingOrderedDict(a=1)
RefusingDefaultDict(int, a=1)
RefusingUserDict(a=1)
RefusingInt(3)
RefusingFloat(3.0)
RefusingComplex(3.0)
RefusingStr("a")
RefusingBytes(b"a")
RefusingBytearray(b"a")
np.ones(3).view(RefusingArray)
RefusingPartial(torch.add, alpha=1)
RefusingDunderDict()
RefusingGetattr()
RefusingGetattribute()
RefusingProperty()
RefusingClass()
RefusingComparison()
PrivateSlot(0.0)
Proxy(_unbound)
Proxy(lambda: torch.ones(2))
_proxy_of(torch.nn.Linear(2, 2))
Proxy(dict)
class_of_refusing_meta()()
class_of_refusing_meta()
weakref.ref(Target())
weakref.proxy(Target())
weakref.WeakMethod(Target().__init__)
weakref.WeakSet([Target()])
contextvars.ContextVar("unset")
threading.local()
_cell_never_filled()
_lazy_module()
_dict_of_odd_names()
_array_of_itself()
_holds_itself()
torch.ones(2).as_subclass(FalseShape)
torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
np.ma.masked_array(np.ones(3), mask=[True, False, True])
torch.ones(2, device="meta")
torch.nn.UninitializedBuffer()
"""


def _makers(texts):
    """Text -> a function that makes what it says."""
    return {text: partial(eval, text, globals()) for text in texts.strip().splitlines()}


ODD = _makers(_OBJECTS)
