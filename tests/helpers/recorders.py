"""What stands in for a CUDA graph where there is no GPU."""

from contextlib import contextmanager

import pytest
import torch
from expected import needs_gpu
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]


class MeasureAgain:
    """A recorder that repeats a function into its first result's tensors, as a CUDA graph does.

    It stands in for one on the CPU.
    """

    captures = 0

    def __init__(self, device, pool=None):
        self.replays = 0

    def capture(self, function):
        MeasureAgain.captures += 1
        self.function, self.result = function, function()
        return self.result

    def replay(self):
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

    def __init__(self, device, pool=None):
        self.operations = []

    def capture(self, function):
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
    def replay(self):
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

    def __init__(self, events):
        super().__init__()
        self.events, self.quiet = events, False
        self.host = {}  # storages, kept so that no other takes their place

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        given = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        if given and all(map(self.on_host, given)):
            self.keep(result)
        elif not self.quiet and operation.overloadpacket.__name__ in self.MAKE_WAIT:
            self.events.append(operation.overloadpacket.__name__)
        return result

    def on_host(self, t):
        return t.untyped_storage()._cdata in self.host

    def keep(self, result):
        storages = [t.untyped_storage() for t in tree_flatten(result)[0] if isinstance(t, Tensor)]
        self.host |= {storage._cdata: storage for storage in storages}

    def read(self, name, t):
        if not (self.quiet or self.on_host(t)):
            self.events.append(name)

    @contextmanager
    def noting(self, monkeypatch):
        """Note what happens inside, `Tensor.cpu` and `Tensor.tolist` too.

        These do not show in a dispatch mode on the CPU.
        """
        tolist = Tensor.tolist

        def cpu(t):
            self.read("copied", t)
            copy = t.clone()
            self.keep(copy)
            return copy

        def listed(t):
            self.read("tolist", t)
            return tolist(t)

        with monkeypatch.context() as patched, self:
            patched.setattr(Tensor, "cpu", cpu)
            patched.setattr(Tensor, "tolist", listed)
            yield
