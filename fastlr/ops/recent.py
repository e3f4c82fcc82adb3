"""What was used most recently, kept up to a limit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

KEPT = 256  # entries, unless a cache says otherwise


class Recent(OrderedDict[Key, Value]):
    """A cache: the entry that was used least recently goes when there are too many.

    A missing entry may cost time, never a check: whoever finds none does the work again.

    Args:
        limit: number of entries that are kept.
    """

    def __init__(self, limit: int = KEPT) -> None:
        super().__init__()
        self._limit = limit

    def get(self, key: Key) -> Value | None:  # type: ignore[override]
        """Return the value of a key, which is then the one used last; None where there is none."""
        try:
            self.move_to_end(key)
            return self[key]
        except KeyError:
            return None

    def put(self, key: Key, value: Value) -> Value:
        """Keep a value, and return it."""
        self[key] = value
        self.move_to_end(key)
        while len(self) > self._limit:
            self.popitem(last=False)
        return value
