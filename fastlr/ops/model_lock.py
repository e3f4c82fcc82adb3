"""Measurements of all threads of a process take turns.

In: a model. Out: a context that one thread at a time is in (`locked`). A thread that waits for
other ranks there lets others in (`unlocked`): ranks come to their threads' models in any order.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

from torch import nn

from fastlr.ops.modules import all_modules

_Function = TypeVar("_Function", bound=Callable[..., Any])

_turn = threading.Condition()
_measured: dict[int, Any] = {}  # thread within `locked` -> its model


@contextmanager
def locked(model: Any) -> Iterator[None]:
    """Let no other thread measure a model meanwhile. A thread may enter it again.

    Raises:
        ModelError: a part of the model is no module.
    """
    thread = threading.get_ident()
    if thread in _measured:
        yield
        return
    with _turn:
        # The others in `_measured` wait for other ranks in the midst of their measurements.
        _turn.wait_for(lambda: not any(_share_modules(model, m) for m in _measured.values()))
        _measured[thread] = model
        try:
            yield
        finally:
            del _measured[thread]
            _turn.notify_all()


def _share_modules(one: Any, other: Any) -> bool:
    models = [model for model in (one, other) if issubclass(type(model), nn.Module)]
    parts = [set(map(id, all_modules(model))) for model in models]  # others are refused elsewhere
    return len(parts) == 2 and not parts[0].isdisjoint(parts[1])


@contextmanager
def unlocked() -> Iterator[None]:
    """Let other threads measure other models, while this one waits for other ranks."""
    if threading.get_ident() not in _measured:
        yield
        return
    _turn.release()
    try:
        yield
    finally:
        _turn.acquire()


def locks_model(function: _Function) -> _Function:
    """Have a function run in `locked` of its first argument, a model."""

    @wraps(function)
    def alone(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with locked(model):
            return function(model, *args, **kwargs)

    return cast(_Function, alone)


def _forked() -> None:
    """In a forked process: of its parent's threads there is but the one that forked."""
    global _turn
    for other in _measured.keys() - {threading.get_ident()}:
        del _measured[other]
    if not _measured:
        _turn = threading.Condition()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
