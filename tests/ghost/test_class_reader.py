"""What classes define is read once, and any change of it is seen."""

import functools
import gc
import types
import weakref

import pytest
from torch import nn

from fastlr.ghost import class_reader
from fastlr.ghost.program import fingerprint

LIMITS = [1.0]


class Chosen:
    alpha = 1.0


def traced(function):
    @functools.wraps(function)
    def inner(*args):
        return function(*args)

    return inner


def made_class():
    """A class with every kind of settled value, each of which leads to a list of its own."""
    count = 0

    class Block(nn.Module):
        bounds = [1.0, [2.0]]
        table = {"a": (1, 2)}
        settings = type("Settings", (), {"alpha": 1.0})

        def __init__(self):
            super().__init__()

        def forward(self, x, scale=1.0, *, shift=0.0):
            return x * scale + shift + count + LIMITS[0] + Chosen.alpha

        def __dir__(self):
            return [""]

        @property
        def wide(self):
            return True

        @classmethod
        def named(cls):
            return cls.__name__

        @staticmethod
        def plain():
            return 1

        @traced
        def decorated(self):
            return 2

    return Block


def _other():
    return "another"


# Statements, each of which changes what a class ``kind`` of `made_class` defines or reads.
CHANGES = """
kind.forward = _other
kind.__dir__.__code__ = (lambda self: []).__code__
kind.forward.__defaults__ = (2.0,)
kind.forward.__kwdefaults__.update(shift=1.0)
kind.forward.__closure__[0].cell_contents = 5
kind.forward.mode = "fast"
LIMITS.append(3.0)
Chosen.alpha = 2.0
kind.wide = property(_other)
kind.wide.fget.__code__ = (lambda self: 3).__code__
kind.named.__func__.__defaults__ = (1,)
kind.plain.__code__ = _other.__code__
kind.decorated.__wrapped__.__code__ = (lambda self: 4).__code__
kind.bounds[1].append(1)
kind.bounds[1] = (2.0,)
kind.table.update(b=1)
kind.table.update(a=(1, True))
kind.settings.alpha = 2.0
kind.more = 1
kind.limits = kind.bounds; del kind.bounds
"""


@pytest.fixture
def reads(monkeypatch):
    """The classes that were read, one entry a reading."""
    made = []
    read = class_reader._read

    def counted(kinds, dicts):
        made.append(kinds)
        return read(kinds, dicts)

    monkeypatch.setattr(class_reader, "_read", counted)
    yield made
    LIMITS[:] = [1.0]
    Chosen.alpha = 1.0


def test_classes_are_read_once(reads):
    model = nn.Sequential(made_class()(), nn.Linear(2, 2))
    first = fingerprint(model)
    assert reads
    reads.clear()
    assert fingerprint(model) == first
    assert not reads


@pytest.mark.parametrize("change", CHANGES.strip().splitlines())
def test_a_change_of_what_a_class_defines_is_seen(change, reads):
    kind = made_class()
    model = kind()
    before = fingerprint(model)
    exec(change, globals(), {"kind": kind})
    changed = fingerprint(model)
    assert changed != before
    assert fingerprint(model) == changed


def test_a_function_put_back_gives_the_fingerprint_that_was(reads):
    kind = made_class()
    model, forward = kind(), kind.forward
    before = fingerprint(model)
    kind.forward = _other
    assert fingerprint(model) != before
    kind.forward = forward
    assert fingerprint(model) == before


def test_a_list_in_the_place_of_one_that_ended_is_read_anew():
    kind = made_class()
    model = kind()
    before = fingerprint(model)
    for value in range(50):  # one of them may well have the address of the first
        del kind.bounds
        kind.bounds = [1.0, [2.0 + (value + 1)]]
        assert fingerprint(model) != before
    del kind.bounds
    kind.bounds = [1.0, [2.0]]


def test_nothing_of_a_class_is_kept_alive():
    kind = made_class()
    fingerprint(kind())
    held = [weakref.ref(kind), weakref.ref(kind.forward), weakref.ref(kind.settings)]
    del kind
    gc.collect()
    assert [one() for one in held] == [None, None, None]


def test_what_leads_to_very_much_is_read_each_time_and_no_deeper_than_before(reads):
    kind = made_class()
    kind.bounds = [[number] for number in range(class_reader.MOST)]
    model = kind()
    before = fingerprint(model)
    assert "bounds" in [name for names in _known(kind).others for name in names]
    kind.bounds[0][0] = -1
    assert fingerprint(model) != before


def test_an_object_of_the_users_is_read_each_time(reads):
    kind = made_class()
    kind.space = types.SimpleNamespace(alpha=1.0)
    model = kind()
    before = fingerprint(model)
    kind.space.alpha = 2.0
    assert fingerprint(model) != before


def _known(kind):
    (found,) = [
        known
        for known in class_reader._known._entries.values()
        if known.names[: len(vars(kind))] == list(vars(kind))
    ][-1:]
    return found
