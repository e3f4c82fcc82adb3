"""Settings of the process that several threads hold at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import RLock


class SharedContext:
    """A context of the process: the first thread to enter begins it, the last to leave ends it.

    Args:
        begin: Returns the context.

    Attributes:
        lock: Held while the context begins or ends.
    """

    def __init__(self, begin: Callable[[], AbstractContextManager[None]]) -> None:
        self.lock, self._begin = RLock(), begin
        self._holders = 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the context, whatever thread this is."""
        with self.lock:
            if not self._holders:
                self._context = self._begin()
                self._context.__enter__()
            self._holders += 1
        try:
            yield
        finally:
            with self.lock:
                self._holders -= 1
                if not self._holders:
                    self._context.__exit__(None, None, None)
