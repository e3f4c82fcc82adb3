"""Arguments of a call of a torch function that is written in Python."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

_signature = cache(inspect.signature)


def by_name(func: Callable, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call by name, with defaults."""
    bound = _signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments
