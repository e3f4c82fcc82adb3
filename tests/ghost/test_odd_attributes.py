"""Objects of foreign classes that a model holds break nothing, and are read where they can be."""

import gc
import threading
import weakref
from collections import OrderedDict, deque  # noqa: F401, named in CHANGES
from contextvars import ContextVar  # noqa: F401

import numpy as np  # noqa: F401
import odd_objects as odd
import torch
from odd_objects import Target
from pytest import mark
from single_samples import Written
from torch import nn

import fastlr
from fastlr.ghost.program import fingerprint, hook_programs

pytestmark = mark.filterwarnings("ignore:The PyTorch API of nested tensors")


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


@mark.parametrize("name", odd.ODD)
def test_a_program_with_it_is_read(name):
    for place in PLACES:
        net = two_layers()
        held = odd.ODD[name]()
        place(net, held)
        assert fingerprint(net) == fingerprint(net), place.__name__
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


@mark.long
@mark.parametrize("place", PLACES)
@mark.parametrize("name", odd.ODD | odd.SLOW)
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


@mark.parametrize("kind", KINDS)
def test_models_of_odd_classes(kind):
    assert_measured(kind(seeded()).eval())


@mark.parametrize("kind", [*KINDS, ModuleWithoutClass])
def test_parts_of_odd_classes(kind):
    assert_measured(nn.Sequential(kind(seeded()), nn.Identity()).eval())


# -- what is read ----------------------------------------------------------------------------------


class ThreadLocal(threading.local):
    __slots__ = ("slot",)


# What is made, what of it the model holds, and what changes it.
CHANGES = """
t = Target() | weakref.ref(t) | t.alpha = 1.0
t = [Target()] | weakref.ref(t[0]) | t.clear()
t = Target() | weakref.proxy(t) | t.alpha = 1.0
t = Target() | weakref.WeakMethod(t.__init__) | t.alpha = 1.0
t = torch.zeros(100) | weakref.ref(t) | t.add_(1)
t = torch.zeros(100) | weakref.proxy(t) | t.add_(1)
t = nn.Dropout(0.1) | weakref.ref(t) | t.p = 0.2
t = nn.Dropout(0.1) | weakref.proxy(t) | t.p = 0.2
t = Target() | weakref.WeakSet([t]) | t.alpha = 1.0
t = Target() | weakref.WeakValueDictionary(held=t) | t.alpha = 1.0
t = Target(); keys = weakref.WeakKeyDictionary({t: 0.0}) | keys | keys[t] = 1.0
t = np.array([0, "a"], dtype=object) | t | t[0] = 1
t = np.empty((1, 1), dtype=object); t[0, 0] = Target() | t | t[0, 0].alpha = 1.0
t = Target() | np.array([(1, t)], dtype=[("number", "i4"), ("object", "O")]) | t.alpha = 1.0
t = np.ma.masked_array(np.ones(3), mask=[True, False, False]) | t | t[1] = np.ma.masked
t = ContextVar("t") | t | t.set(1.0)
t = ContextVar("t"); t.set(Target()) | t | t.get().alpha = 1.0
t = threading.local(); t.alpha = 0.0 | t | t.alpha = 1.0
t = ThreadLocal(); t.alpha = t.slot = 0.0 | t | t.alpha = 1.0
t = ThreadLocal(); t.alpha = t.slot = 0.0 | t | t.slot = 1.0
t = ContextVar("t"); t.set(Target()) | odd.Proxy(lambda: t.get()) | t.set(Target(1.0))
t = OrderedDict(a=1, b=2) | t | t.move_to_end("a")
t = [odd.Irreps([1, 2])] | t | t[0] = odd.Irreps([1, 3])
t = odd.RefusingList([1]) | t | list.append(t, 2)
t = odd.RefusingDeque([1]) | t | deque.append(t, 2)
t = odd.RefusingSet({1}) | t | set.add(t, 2)
t = odd.RefusingDict(a=1) | t | dict.__setitem__(t, "a", 2)
t = [odd.RefusingComplex(0)] | t | t[0] = odd.RefusingComplex(1)
t = [odd.RefusingPartial(torch.add, alpha=1)] | t | t[0] = odd.RefusingPartial(torch.add, alpha=2)
t = np.ones(3).view(odd.RefusingArray) | t | np.ndarray.__setitem__(t, 0, 2.0)
t = odd.PrivateSlot(0.0) | t | t.set(1.0)
t = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]) | t | t.mul_(2)
t = odd.RefusingGetattr() | t | object.__setattr__(t, "alpha", 1.0)
t = odd.RefusingGetattribute() | t | object.__setattr__(t, "alpha", 1.0)
t = odd.RefusingClass() | t | object.__setattr__(t, "alpha", 1.0)
t = odd.RefusingComparison() | t | object.__setattr__(t, "alpha", 1.0)
t = odd.class_of_refusing_meta()() | t | object.__setattr__(t, "alpha", 1.0)
"""


@mark.parametrize("change", CHANGES.strip().splitlines())
def test_a_change_is_seen(change):
    made, held, changes = change.split(" | ")
    for place in (as_attribute, in_a_list, in_a_closure):
        net, names = two_layers(), dict(globals())
        exec(made, names)
        place(net, eval(held, names))
        before = fingerprint(net)
        assert fingerprint(net) == before, place.__name__
        with torch.no_grad():
            exec(changes, names)
        assert fingerprint(net) != before, place.__name__


def test_a_fingerprint_keeps_nothing_alive():
    """What is referred to weakly ends as if nobody had looked, without the garbage collector."""
    net = two_layers()
    held = Target()
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
