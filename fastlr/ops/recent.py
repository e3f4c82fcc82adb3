"""What was used most recently, kept up to a limit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

KEPT = 256  # entries, unless a cache says otherwise


class Recent(Generic[Key, Value]):
    """A cache: the entry that was used least recently goes when there are too many.

    A missing entry may cost time, never a check: whoever finds none does the work again.

    Args:
        limit: number of entries that are kept.
    """

    def __init__(self, limit: int = KEPT) -> None:
        self._limit = limit
        self._entries: OrderedDict[Key, Value] = OrderedDict()

    def get(self, key: Key) -> Value | None:
        """Return the value of a key, which is then the one used last; None where there is none."""
        try:
            self._entries.move_to_end(key)
            return self._entries[key]
        except KeyError:
            return None

    def put(self, key: Key, value: Value) -> Value:
        """Keep a value, and return it."""
        self._entries[key] = value
        self._entries.move_to_end(key)
        while len(self._entries) > self._limit:
            self._entries.popitem(last=False)
        return value

    def clear(self) -> None:
        """Forget every value."""
        self._entries.clear()

    def __contains__(self, key: Key) -> bool:
        """Return True if there is a value of this key; that is no use of it."""
        return key in self._entries

    def items(self) -> list[tuple[Key, Value]]:
        """Return all keys with their values."""
        return list(self._entries.items())

    def __len__(self) -> int:
        """Return the number of values."""
        return len(self._entries)
