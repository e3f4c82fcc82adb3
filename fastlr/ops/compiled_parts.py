"""Parts of a model that torch.compile has compiled, run as they were written.

A compiled part is one node of the autograd graph, whose uses of parameters are not to be seen, and
whose backward pass runs once ("donated buffers"). As written, it is a graph like any other. How
compiled functions run (`torch.compiler.set_stance`) is a setting of the process: what other threads
call meanwhile runs as written too, which is slower and gives the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock
from typing import Any

import torch

from fastlr.ops.torch_private import anything_compiled


class _Stance:
    """Compiled functions run as written as long as some thread is within `held`."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._holders = 0
        self._context: Any = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """The first to enter sets the stance, the last to leave puts back the one before.

        That holds whatever thread each is.
        """
        with self._lock:
            if not self._holders:
                self._context = torch.compiler.set_stance("force_eager")  # it is set from here on
            self._holders += 1
        try:
            yield
        finally:
            with self._lock:
                self._holders -= 1
                if not self._holders:
                    self._context.__exit__(None, None, None)


_STANCE = _Stance()


def uncompiled() -> AbstractContextManager:
    """Let compiled parts of models run as they were written."""
    return _STANCE.held() if anything_compiled() else nullcontext()
