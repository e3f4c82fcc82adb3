"""What stands in for a CUDA graph where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    ),
]


class Again:
    """A recorder that repeats a function into its first result's tensors, as a CUDA graph does.

    It stands in for one on the CPU.
    """

    captures = 0

    def __init__(self, device: torch.device, pool: Any = None) -> None:
        self.replays = 0

    def capture(self, function: Callable[[], Any]) -> Any:
        Again.captures += 1
        self.function, self.result = function, function()
        return self.result

    def replay(self) -> None:
        self.replays += 1
        for mine, new in zip(
            tree_flatten(self.result)[0], tree_flatten(self.function())[0], strict=True
        ):
            if isinstance(mine, Tensor):
                mine.copy_(new)


class Tape:
    """A recorder that repeats a function's operations on the tensors they had, with no Python run.

    So a number that Python has read, an object that was replaced and memory that moved show as they
    would on a GPU.
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


class Waits(TorchDispatchMode):
    """A mode that notes what would make the host wait for a GPU.

    That is reading a tensor's values on the host, or making a tensor of the host's.

    The first ``.cpu()`` is noted too, as "copied"; what it gives, and what is made of that, is the
    host's from then on.

    Args:
        events: notes are added to it.
    """

    MAKE_WAIT = ("_local_scalar_dense", "equal", "nonzero", "lift_fresh")

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events, self.quiet = events, False
        self.host: dict[int, Any] = {}  # storages, kept so that no other takes their place

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        given = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        if given and all(map(self.on_host, given)):
            self.keep(result)
        elif not self.quiet and operation.overloadpacket.__name__ in self.MAKE_WAIT:
            self.events.append(operation.overloadpacket.__name__)
        return result

    def on_host(self, t: Tensor) -> bool:
        return t.untyped_storage()._cdata in self.host

    def keep(self, result: Any) -> None:
        storages = [t.untyped_storage() for t in tree_flatten(result)[0] if isinstance(t, Tensor)]
        self.host |= {storage._cdata: storage for storage in storages}

    def read(self, name: str, t: Tensor) -> None:
        if not (self.quiet or self.on_host(t)):
            self.events.append(name)

    @contextmanager
    def noting(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Note what happens inside, `Tensor.cpu` and `Tensor.tolist` too.

        These do not show in a dispatch mode on the CPU.
        """
        tolist = Tensor.tolist

        def cpu(t: Tensor) -> Tensor:
            self.read("copied", t)
            copy = t.clone()
            self.keep(copy)
            return copy

        def listed(t: Tensor) -> Any:
            self.read("tolist", t)
            return tolist(t)

        with monkeypatch.context() as patched, self:
            patched.setattr(Tensor, "cpu", cpu)
            patched.setattr(Tensor, "tolist", listed)
            yield
