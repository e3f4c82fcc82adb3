"""One thread at a time measures a model.

In: a model. Out: a context that no other thread is in with the same model, or with one that shares
a module, a parameter or a buffer with it (`locked`). A measurement moves flags, buffers and for a
while tensors of the model, and reads what another has moved. Threads with models of their own do
not wait for each other.

Nothing is kept of a model: what is held is known by identity while it is held, so a copied or
pickled model has no lock.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from itertools import islice
from typing import Any, TypeVar, cast

from torch import nn

from fastlr.errors import FastlrError, ModelError

_OWN = frozenset(vars(nn.Module()))  # attributes of every module
_MOST = 256  # entries of a container that are looked at

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(eq=False)
class _Hold:
    """What a thread holds: a model, and the ids of all modules, parameters and buffers in it."""

    thread: int
    model: nn.Module
    parts: frozenset[int]


_changed = threading.Condition()  # of the two below
_held: list[_Hold] = []
_waiting: dict[int, _Hold] = {}  # thread -> what it waits for


@contextmanager
def locked(model: Any) -> Iterator[None]:
    """Let no other thread in with this model, or one that shares modules or tensors with it.

    A thread may enter it again. What is no module is left to whoever refuses it.

    Raises:
        FastlrError: this thread would wait for one that waits for it.
    """
    thread = threading.get_ident()
    if not isinstance(model, nn.Module) or _holds(thread, model):
        yield
        return
    hold = _Hold(thread, model, _parts(model))
    _take(hold)
    try:
        yield
    finally:
        with _changed:
            _held.remove(hold)
            _changed.notify_all()


def locks_model(function: _Function) -> _Function:
    """Have a function hold the lock of its first argument, a model (see `locked`)."""

    @wraps(function)
    def alone(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with locked(model):
            return function(model, *args, **kwargs)

    return cast(_Function, alone)


def all_modules(model: nn.Module) -> list[nn.Module]:
    """The model and the modules in it, each once.

    They are found by identity, several times as fast as by ``model.modules()``.
    """
    modules, known = [model], {id(model)}
    for module in modules:  # which grows meanwhile
        for part in module._modules.values():
            if part is not None and id(part) not in known:
                known.add(id(part))
                modules.append(part)
    return modules


def _holds(thread: int, model: nn.Module) -> bool:
    """Return True if a thread, this one, holds the very model already."""
    return any(hold.thread == thread and hold.model is model for hold in list(_held))


def _parts(model: nn.Module) -> frozenset[int]:
    """Return the ids of the modules, parameters and buffers of a model.

    Raises:
        ModelError: what stands in a module's place is none. A mock of one passes torch's own
            checks, by its ``__class__``.
    """
    parts: set[int] = set()
    todo = [("the model", model)]
    while todo:
        name, module = todo.pop()
        if id(module) in parts:
            continue
        if not issubclass(type(module), nn.Module):
            raise ModelError(
                f"{name} is no nn.Module but a {type(module).__name__}: put a real module in its "
                "place, such as nn.Identity()"
            )
        parts.add(id(module))
        parts.update(map(id, module._parameters.values()))
        parts.update(map(id, module._buffers.values()))
        below = type(module).__name__
        todo += [(f"{key} of {below}", m) for key, m in module._modules.items() if m is not None]
        todo += [(f"an attribute of {below}", m) for m in _outside(module)]
    parts.discard(id(None))
    return frozenset(parts)


def _outside(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that a module's attributes hold beside its submodules, one deep."""
    held = vars(module)
    for name in held.keys() - _OWN:
        value = held[name]
        kind = type(value)
        entries = value.values() if kind is dict else value if kind is list or kind is tuple else ()
        for entry in (value, *islice(entries, _MOST)):
            if issubclass(type(entry), nn.Module):
                yield entry


def _take(hold: _Hold) -> None:
    """Wait until no other thread holds a part of it."""
    with _changed:
        while blockers := _blockers(hold):
            if _would_wait_for(hold.thread, blockers):
                raise FastlrError(
                    f"this thread would wait for ever to measure a {type(hold.model).__name__}: "
                    "another thread measures it, and waits for a model that this one is measuring. "
                    "Measure one after the other, not one within the measurement of the other"
                )
            _waiting[hold.thread] = hold
            try:
                _changed.wait()
            finally:
                del _waiting[hold.thread]
        _held.append(hold)


def _blockers(hold: _Hold) -> set[int]:
    """The other threads that hold a part of it."""
    others = (other for other in _held if other.thread != hold.thread)
    return {other.thread for other in others if not other.parts.isdisjoint(hold.parts)}


def _would_wait_for(thread: int, blockers: set[int]) -> bool:
    """Return True if a blocker waits for what the thread holds, itself or through others."""
    seen: set[int] = set()
    todo = list(blockers)
    while todo:
        blocker = todo.pop()
        if blocker == thread:
            return True
        if blocker not in seen and blocker in _waiting:
            todo.extend(_blockers(_waiting[blocker]))
        seen.add(blocker)
    return False


def _forked() -> None:
    """In a forked process: of its parent's threads there is but the one that forked."""
    global _changed
    _changed = threading.Condition()
    _waiting.clear()
    thread = threading.get_ident()
    _held[:] = [hold for hold in _held if hold.thread == thread]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
