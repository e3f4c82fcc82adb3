"""Objects of foreign classes that a model holds break nothing, and are read where they can be."""

import contextvars
import gc
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import odd_objects as odd
import pytest
import torch
from single_samples import Written
from torch import nn

import fastlr
from fastlr.ghost.program import fingerprint, hook_programs, own_attributes

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


def two_layers():
    """Return two layers, and a buffer, for which the module's numbers are looked at."""
    parts = {"a": nn.Linear(5, 4), "c": nn.Linear(4, 3), "mean": nn.Buffer(torch.zeros(4))}
    return Written(lambda m, x: m.c(m.a(x).tanh() - m.mean), **parts)


class Holder:
    """Holds an object in an attribute."""

    def __init__(self, held):
        vars(self)["held"] = held


class Hook:
    """A hook that is an object, of a class that holds one."""

    def __init__(self, held):
        vars(self)["held"] = held
        type(self).kept = [held]

    def __call__(self, *given):
        return None


def as_attribute(net, held):
    vars(net)["odd"] = held


def in_a_list(net, held):
    net.odd = [held, 1]


def in_a_tuple(net, held):
    net.odd = (held, 1)


def in_a_dict(net, held):
    net.odd = {"held": held}


def in_a_dict_like_a_cache(net, held):
    net.odd = {"tensor": torch.ones(1), "held": held}


def in_an_object(net, held):
    net.odd = Holder(held)


def in_a_closure(net, held):
    net.odd = lambda: held


def in_a_hook(net, held):
    net.a.register_forward_hook(Hook(held))


PLACES = (
    as_attribute,
    in_a_list,
    in_a_tuple,
    in_a_dict,
    in_a_dict_like_a_cache,
    in_an_object,
    in_a_closure,
    in_a_hook,
)


def norms(net):
    torch.manual_seed(1)
    return fastlr.per_sample_grad_sq_norms(net, torch.randn(4, 5), torch.randn(4, 3))


def seeded():
    torch.manual_seed(0)
    return two_layers().eval()


@pytest.mark.parametrize("name", odd.ODD)
def test_a_program_with_it_is_read(name):
    for place in PLACES:
        net = two_layers()
        held = odd.ODD[name]()
        place(net, held)
        assert fingerprint(net) == fingerprint(net), place.__name__
        assert own_attributes(net) == own_attributes(net), place.__name__
        hook_programs(net)


def test_a_model_that_holds_them_all_is_measured():
    net = seeded()
    for name, make in odd.ODD.items():
        vars(net)[f"odd {name}"] = make()
    net.all = [make() for make in odd.ODD.values()]
    net.by_name = {name: make() for name, make in odd.ODD.items()}
    before = dict(vars(net))
    assert torch.equal(norms(net), norms(seeded()))
    fastlr.estimate(net, fastlr.TensorInputs(torch.randn(4, 5)), 4)
    assert list(vars(net)) == list(before)
    assert all(vars(net)[name] is value for name, value in before.items())


@pytest.mark.long
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", odd.ODD | odd.SLOW)
def test_a_model_that_holds_it_is_measured(name, place):
    net = seeded()
    held = (odd.ODD | odd.SLOW)[name]()
    place(net, held)
    assert torch.equal(norms(net), norms(seeded()))
    fastlr.estimate(net, fastlr.TensorInputs(torch.randn(4, 5)), 4)
    str(fastlr.support_report(net, torch.randn(4, 5)))


# -- modules of odd classes ------------------------------------------------------------------------


class Wrapper(nn.Module):
    """Runs another module."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


class Strict(Wrapper):
    """Finds its submodules only; asked for anything else it raises, and not AttributeError."""

    def __getattr__(self, name):
        return self.__dict__["_modules"][name]


class RefusingProperties(Wrapper):
    max_norm = property(odd.refuse)
    _orig_mod = property(odd.refuse)
    device = property(odd.refuse)


class ModuleWithoutClass(Wrapper):
    __class__ = property(odd.refuse)  # type: ignore[assignment]


class Unhashable(type):
    __hash__ = __eq__ = None  # type: ignore[assignment]


class OfUnhashableClass(Wrapper, metaclass=Unhashable):
    pass


class NamedByAnEnum(Wrapper):
    """Its attributes, buffers and submodules have members of an enum as their names."""

    def __init__(self, inner):
        super().__init__(inner)
        setattr(self, odd.Name.ALPHA, 1)
        self.register_buffer(odd.Name.BUFFER, torch.ones(1))
        self.add_module(odd.Name.MODULE, nn.Identity())


class NotCopied(Wrapper):
    """Cannot be copied."""

    __deepcopy__ = odd.refuse  # type: ignore[assignment]


KINDS = (Strict, RefusingProperties, OfUnhashableClass, NamedByAnEnum, NotCopied)


def assert_measured(net):
    for _ in range(2):  # the second finds the engine of the first
        assert torch.equal(norms(net), norms(seeded()))
    fastlr.estimate(net, fastlr.TensorInputs(torch.randn(4, 5)), 4)


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_odd_classes(kind):
    assert_measured(kind(seeded()).eval())


@pytest.mark.parametrize("kind", [*KINDS, ModuleWithoutClass])
def test_parts_of_odd_classes(kind):
    assert_measured(nn.Sequential(kind(seeded()), nn.Identity()).eval())


# -- what is read ----------------------------------------------------------------------------------

Change = tuple[Any, Callable[[], Any]]
CHANGES = {}


def change(make):
    CHANGES[make.__name__.replace("_", " ")] = make
    return make


def raise_alpha(target):
    return lambda: object.__setattr__(target, "alpha", 1.0)


KEPT = []  # what weak references refer to


def target():
    KEPT.append(odd.Target())
    return KEPT[-1]


@change
def weak_reference():
    held = target()
    return weakref.ref(held), raise_alpha(held)


@change
def weak_reference_that_dies():
    held = [odd.Target()]
    return weakref.ref(held[0]), held.clear


@change
def weak_proxy():
    held = target()
    return weakref.proxy(held), raise_alpha(held)


@change
def weak_method():
    held = target()
    return weakref.WeakMethod(held.__init__), raise_alpha(held)


@change
def weak_reference_to_a_tensor():
    held = torch.zeros(100)
    KEPT.append(held)
    return weakref.ref(held), lambda: held.add_(1)


@change
def weak_proxy_of_a_tensor():
    held = torch.zeros(100)
    KEPT.append(held)
    return weakref.proxy(held), lambda: held.add_(1)


@change
def weak_reference_to_a_module():
    held = nn.Dropout(0.1)
    KEPT.append(held)
    return weakref.ref(held), lambda: setattr(held, "p", 0.2)


@change
def weak_proxy_of_a_module():
    held = nn.Dropout(0.1)
    KEPT.append(held)
    return weakref.proxy(held), lambda: setattr(held, "p", 0.2)


@change
def weak_set():
    held = target()
    return weakref.WeakSet([held]), raise_alpha(held)


@change
def weak_values():
    held = target()
    return weakref.WeakValueDictionary(held=held), raise_alpha(held)


@change
def weak_keys():
    held = target()
    mapping = weakref.WeakKeyDictionary({held: 0.0})
    return mapping, lambda: mapping.update({held: 1.0})


@change
def array_of_objects():
    held = np.array([0, "a"], dtype=object)
    return held, lambda: held.__setitem__(0, 1)


@change
def object_in_an_array():
    held = np.empty((1, 1), dtype=object)
    held[0, 0] = odd.Target()
    return held, raise_alpha(held[0, 0])


@change
def object_in_a_record():
    held = odd.Target()
    return np.array([(1, held)], dtype=[("number", "i4"), ("object", "O")]), raise_alpha(held)


@change
def masked_array():
    held = np.ma.masked_array(np.ones(3), mask=[True, False, False])
    return held, lambda: held.__setitem__(1, np.ma.masked)


@change
def context_variable():
    held = contextvars.ContextVar("held")
    return held, lambda: held.set(1.0)


@change
def object_in_a_context_variable():
    held = contextvars.ContextVar("held")
    held.set(odd.Target())
    return held, raise_alpha(held.get())


@change
def thread_local():
    held = threading.local()
    held.alpha = 0.0
    return held, lambda: setattr(held, "alpha", 1.0)


class ThreadLocal(threading.local):
    __slots__ = ("slot",)


@change
def subclass_of_a_thread_local():
    held = ThreadLocal()
    held.alpha = held.slot = 0.0
    return held, lambda: setattr(held, "alpha", 1.0)


@change
def slot_of_a_thread_local():
    held = ThreadLocal()
    held.alpha = held.slot = 0.0
    return held, lambda: setattr(held, "slot", 1.0)


@change
def proxy_of_a_context_variable():
    variable = contextvars.ContextVar("variable")
    variable.set(odd.Target())
    return odd.Proxy(lambda: variable.get()), lambda: variable.set(odd.Target(1.0))


@change
def order_of_an_ordered_dict():
    held = OrderedDict(a=1, b=2)
    return held, lambda: held.move_to_end("a")


@change
def refusing_tuple():
    held = [odd.Irreps([1, 2])]
    return held, lambda: held.__setitem__(0, odd.Irreps([1, 3]))


@change
def refusing_list():
    held = odd.RefusingList([1])
    return held, lambda: list.append(held, 2)


@change
def refusing_deque():
    held = odd.RefusingDeque([1])
    return held, lambda: deque.append(held, 2)


@change
def refusing_set():
    held = odd.RefusingSet({1})
    return held, lambda: set.add(held, 2)


@change
def refusing_dict():
    held = odd.RefusingDict(a=1)
    return held, lambda: dict.__setitem__(held, "a", 2)


@change
def refusing_complex_number():
    held = [odd.RefusingComplex(0)]
    return held, lambda: held.__setitem__(0, odd.RefusingComplex(1))


@change
def refusing_partial():
    held = [odd.RefusingPartial(torch.add, alpha=1)]
    return held, lambda: held.__setitem__(0, odd.RefusingPartial(torch.add, alpha=2))


@change
def refusing_array():
    held = np.ones(3).view(odd.RefusingArray)
    return held, lambda: np.ndarray.__setitem__(held, 0, 2.0)


@change
def private_slot():
    held = odd.PrivateSlot(0.0)
    return held, lambda: held.set(1.0)


@change
def nested_tensor():
    held = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    return held, lambda: held.mul_(2)


REFUSING = (
    odd.RefusingGetattr,
    odd.RefusingGetattribute,
    odd.RefusingClass,
    odd.RefusingComparison,
)
for _kind in REFUSING:
    CHANGES[_kind.__name__] = partial(lambda kind: (held := kind(), raise_alpha(held)), _kind)
CHANGES["OfRefusingMeta"] = lambda: (held := odd.class_of_refusing_meta()(), raise_alpha(held))


@pytest.fixture
def kept():
    """Let go of what weak references refer to."""
    yield
    KEPT.clear()


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name, kept):
    for place in (as_attribute, in_a_list, in_a_closure):
        net = two_layers()
        held, do = CHANGES[name]()
        place(net, held)
        before = fingerprint(net)
        assert fingerprint(net) == before, place.__name__
        with torch.no_grad():
            do()
        assert fingerprint(net) != before, place.__name__


def test_a_fingerprint_keeps_nothing_alive():
    """What is referred to weakly ends as if nobody had looked, without the garbage collector."""
    net = two_layers()
    held = odd.Target()
    net.odd = weakref.ref(held)
    gc.disable()
    try:
        fingerprint(net)
        del held
        assert net.odd() is None
    finally:
        gc.enable()


def test_another_thread_sees_its_own():
    net = two_layers()
    net.odd = threading.local()
    net.odd.alpha = 0.0
    found = []
    thread = threading.Thread(target=lambda: found.append(fingerprint(net)))
    thread.start()
    thread.join()
    assert found != [fingerprint(net)]
