"""What stands in for a CUDA graph where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


class Again:
    """Repeats a function into the tensors of its first result: on the CPU what a CUDA graph is on a GPU."""

    captures = 0

    def __init__(self, device: torch.device, pool: Any = None) -> None:
        self.replays = 0

    def capture(self, function: Callable[[], Any]) -> Any:
        Again.captures += 1
        self.function, self.result = function, function()
        return self.result

    def replay(self) -> None:
        self.replays += 1
        for mine, new in zip(tree_flatten(self.result)[0], tree_flatten(self.function())[0], strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(new)


class Tape:
    """Repeats the operations of a function on the very tensors that they had: nothing of Python runs again, as in a graph.

    So a number that Python has read, an object that was replaced and memory that moved show as they would on a GPU.
    """

    def __init__(self, device: torch.device, pool: Any = None) -> None:
        self.operations: list[tuple] = []

    def capture(self, function: Callable[[], Any]) -> Any:
        function()  # what happens the first time only is not kept
        tape = self.operations

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
                result = operation(*args, **(kwargs or {}))
                tape.append((operation, args, kwargs or {}, result))
                return result

        with Mode():
            return function()

    @torch.no_grad()
    def replay(self) -> None:
        for operation, args, kwargs, result in self.operations:
            new = tree_flatten(operation(*args, **kwargs))[0]
            for mine, other in zip(tree_flatten(result)[0], new, strict=True):
                if isinstance(mine, Tensor) and mine.data_ptr() != other.data_ptr():
                    mine.copy_(other)
