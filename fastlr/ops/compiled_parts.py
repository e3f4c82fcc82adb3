"""Parts of a model that torch.compile has compiled, run as they were written.

A compiled part is one node of the autograd graph, whose uses of parameters are not to be seen, and
whose backward pass runs once ("donated buffers"). As written, it is a graph like any other. How
compiled functions run (`torch.compiler.set_stance`) is a setting of the process: what other threads
call meanwhile runs as written too, which is slower and gives the same.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch

from fastlr.ops.held import SharedContext
from fastlr.ops.torch_private import anything_compiled

Result = TypeVar("Result")
_STANCE = SharedContext(lambda: torch.compiler.set_stance("force_eager"))


def uncompiled() -> AbstractContextManager:
    """Let compiled parts of models run as they were written."""
    return _STANCE.held() if anything_compiled() else nullcontext()


def retry_after_first_compilation(function: Callable[[], Result]) -> Result:
    """Call a function, and once more if torch has compiled something for the first time in it.

    Torch's compiler does not work within fastlr's modes. From then on `uncompiled` avoids it.
    """
    nothing_was_compiled = not anything_compiled()
    try:
        return function()
    except Exception:
        if not (nothing_was_compiled and anything_compiled()):
            raise
    return function()
