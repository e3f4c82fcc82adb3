"""What was used most recently, up to a limit: the one cache that forgets by itself."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Recent(Generic[Key, Value]):
    """Keeps the values of the keys that were used last, and drops the one used longest ago.

    What was dropped must be found again by whoever asks: it costs time, never a check. Threads may
    use it at the same time.

    Args:
        limit: Number of values kept.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: OrderedDict[Key, Value] = OrderedDict()  # the one used last is the last

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Key) -> Value | None:
        """Return the value of a key, which counts as used now, or None if it is not kept."""
        try:
            self._values.move_to_end(key)
            return self._values[key]
        except KeyError:  # never put, or dropped, perhaps by another thread just now
            return None

    def put(self, key: Key, value: Value) -> Value:
        """Keep a value, drop what was used longest ago beyond the limit, and return the value."""
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self._limit:
            self._values.popitem(last=False)
        return value

    def forget(self, which: Callable[[Key], bool] = lambda key: True) -> None:
        """Drop the values of the keys for which ``which`` is true: by default all."""
        for key in [key for key in list(self._values) if which(key)]:
            self._values.pop(key, None)
