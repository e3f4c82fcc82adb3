"""What passes write into a model, put back in the same memory.

In: a model. Out: a context that leaves it as it was (`unchanged`), and one for each forward pass
within (`forward_pass`).

Every forward pass begins with the state that the model had. What it writes stays for its backward
pass, until another begins or the measurement ends.

Small buffers and other small tensors are copied when a measurement begins. Parameters and large
tensors are hardly ever written. So the first forward pass in each mode compares them with copies,
and those that it has written are copied from then on. Later passes are watched by the tensors'
versions. A model that writes its parameters is refused, unless it limits their norm by
``max_norm``, as embeddings do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fastlr.errors import ModelError, few
from fastlr.ghost.model.attributes import Attributes, caches_to_empty
from fastlr.ops.objects import address, storage, weakly_by_module
from fastlr.ops.torch_private import is_view, no_torch_function

LARGE = 16_384  # elements of a tensor that is copied only if a pass has written it
# Tensors are compared as integers of their size: torch compares all of these, to the bit.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# model -> mode in which a forward pass was watched -> names of tensors that passes write in it
_written: Any = weakly_by_module()


class _Held:
    """A tensor that passes may write, with a copy of its values.

    Attributes:
        name: Its name, or that of its container.
        tensor: The tensor.
        bits: Its memory, as integers.
        values: A copy of them.
    """

    def __init__(self, name: str, tensor: Tensor, bits: Tensor) -> None:
        self.name, self.tensor, self.bits = name, tensor, bits
        self.values = bits.clone()
        self._memory = tensor.data  # with a version counter of its own
        self._requires_grad = tensor.requires_grad

    @property
    def is_moved(self) -> bool:
        """True if the tensor has other memory, another shape or another dtype."""
        return not self.tensor.is_set_to(self._memory)

    @property
    def is_written(self) -> bool:
        """True if the memory has other values than the copy."""
        return not torch.equal(self.bits, self.values)

    @property
    def needs_put_back(self) -> bool:
        """True unless the memory has the values of the copy. A GPU is not waited for.

        What a CUDA graph would capture is not put back: copies go before the graph does.
        """
        if self.bits.is_cuda:
            return not torch.cuda.is_current_stream_capturing()
        return self.is_written

    @property
    def has_other_values(self) -> bool:
        """True if the tensor has other values than the copy, whatever their dtype."""
        dtype = self._memory.dtype
        return not torch.equal(self.tensor.data.to(dtype), self.values.view(dtype))

    def reattach(self) -> None:
        """Give the tensor the memory and the place in the graph that it had.

        Raises:
            ModelError: It is a view that a pass has made part of its graph.
        """
        t = self.tensor
        if self.is_moved:
            t.data = self._memory
        if t.requires_grad and not self._requires_grad:
            if is_view(t):
                raise ModelError(
                    f"a forward pass makes {self.name}, a view, part of its graph, which nobody "
                    "can undo: write to it under torch.no_grad()"
                )
            t.detach_()


def _held(tensors: Iterable[tuple[str, Tensor]]) -> list[_Held]:
    """Return tensors with copies, without those that have no values in memory of their own."""
    with no_torch_function(), torch.no_grad():
        with_bits = [(name, t, _bits(t)) for name, t in tensors]
        return [_Held(name, t, bits) for name, t, bits in with_bits if bits is not None]


def _bits(t: Tensor) -> Tensor | None:
    """Return each element of a tensor once, as integers; None if torch cannot write it so."""
    if t.numel() and not address(t):
        return None
    try:
        real = torch.view_as_real(t.data) if t.is_complex() else t.data
        bits = real.view(_INTEGERS[real.element_size()])
    except (KeyError, RuntimeError):
        return None
    if real.is_contiguous():
        return bits
    sizes = [size if step else 1 for size, step in zip(bits.shape, bits.stride(), strict=True)]
    return bits.as_strided(sizes, bits.stride())


class ModelState:
    """The state of a model, and of the modules that its attributes hold, when this was made.

    Attributes:
        modules: The modules.
        caches: Dicts of tensors that it holds.
        kept: Tensors with copies, which are put back.
        written: Names of tensors that passes write in this mode, as far as any has run.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._attributes = model, Attributes(model)
        self.modules, self.caches = self._attributes.modules, self._attributes.caches
        self._mode = tuple([module.training for module in self.modules])
        self._modes = _written.setdefault(model, {})
        self.written: set[str] = self._modes.get(self._mode, set())
        self._limited = frozenset[int]()  # parameters whose norm passes limit, as of embeddings
        for module in self.modules:
            if vars(module).get("max_norm") is not None:
                self._limited = self._limited.union(map(id, module._parameters.values()))
        self._has_run = False
        small, self._large = list[Any](), list[Any]()
        for name, t in self._attributes.tensors:
            is_small = type(t) is Tensor and t.numel() <= LARGE
            is_kept = is_small or id(t) in self._limited or name in self.written
            (small if is_kept else self._large).append((name, t))
        self.kept = _held(small) if small else []

    def put_back(self) -> None:
        """Put back what passes have changed."""
        self._has_run = False
        self._attributes.put_back()
        if not self.kept:
            return
        with no_torch_function(), torch.no_grad():
            changed = [one for one in self.kept if one.needs_put_back]
            if changed:
                values = [one.values for one in changed]
                torch._foreach_copy_([one.bits for one in changed], values)
            for one in self.kept:
                one.reattach()

    def put_back_if_run(self) -> None:
        """Put back what an earlier pass has changed, before another one."""
        if self._has_run:
            self.put_back()
        self._has_run = True

    @contextmanager
    def forward_pass(self, copies: bool) -> Iterator[None]:
        """Run a forward pass within this context, and see what it writes."""
        self.put_back_if_run()
        for _, cache in caches_to_empty():
            cache.clear()
        is_first = self._mode not in self._modes
        large = _held(self._large) if is_first else []
        hooks = [(held, dict(held)) for held in filter(None, self._attributes.hooks)]
        before = self._versions()
        saving: AbstractContextManager[Any] = nullcontext()
        if copies and self.written:
            saving = saving_copies(one.bits for one in self.kept)
        try:
            with saving:
                yield
            self._modes[self._mode] = self.written
        finally:
            for registry in filter(None, self._attributes.hooks):
                registry.clear()
            for registry, entries in hooks:
                registry.update(entries)
            self._record_writes(before, large, is_first)

    def _versions(self) -> list[int]:
        with no_torch_function():
            return [t._version for _, t in self._attributes.tensors]

    def _record_writes(self, before: list[int], large: list[_Held], is_first: bool) -> None:
        """Record what a pass has written.

        Args:
            before: Versions of the tensors before it.
            large: Copies of large tensors, before the first pass in this mode.
            is_first: Whether it was that pass. Then values are compared, later only versions.

        Raises:
            ModelError: It has written parameters, or a tensor of which there is no copy.
        """
        now = self._versions()
        if not is_first and not self.written and now == before:
            return
        versions = zip(self._attributes.tensors, before, now, strict=True)
        names = {name for (name, _), old, new in versions if old != new}
        if is_first:
            with no_torch_function(), torch.no_grad():
                names |= {one.name for one in self.kept + large if one.is_moved or one.is_written}
        self.kept += [one for one in large if one.name in names]
        lost = names - {one.name for one in self.kept} - self.written
        self.written |= names
        self._refuse_written_parameters()
        if lost and not is_first:
            raise ModelError(
                f"a forward pass has written to {few(lost)}, as none had when the model was first "
                "measured in this mode: this call leaves that changed. Measure again: from now on "
                "it is copied before"
            )

    def _refuse_written_parameters(self) -> None:
        """Refuse a model of which a pass has written parameters, or made others."""
        names = []
        with no_torch_function(), torch.no_grad():
            for name, t in Attributes(self._model).tensors:
                if type(t) is nn.Parameter and id(t) not in self._attributes.known:
                    names.append(name)
            for one in self.kept:
                is_free = type(one.tensor) is Tensor or id(one.tensor) in self._limited
                if not is_free and one.has_other_values:
                    names.append(one.name)
        if names:
            self.put_back()
            raise ModelError(
                f"a forward pass writes parameters of the model ({few(names)}): write them in the "
                "training loop, or only where self.training is true, and call model.eval(); if "
                "the first pass alone does so, run one before"
            )


def saving_copies(tensors: Iterable[Tensor]) -> saved_tensors_hooks:
    """Have graphs that are made within this context save copies of some tensors."""
    copied = {storage(t) for t in tensors}

    def pack(t: Tensor) -> tuple[Tensor, int]:
        saved = (t.clone() if storage(t) in copied else t).detach()
        return saved, saved._version

    return saved_tensors_hooks(pack, unpack)


def unpack(packed: tuple[Tensor, int]) -> Tensor:
    """Return what a graph has saved within `saving_copies`."""
    saved, version = packed
    if saved._version != version:
        raise RuntimeError(
            "a tensor that is needed for the gradient was modified by an inplace operation"
        )
    return saved


_open: ContextVar[tuple[ModelState, ...]] = ContextVar("fastlr_open", default=())


def _state_of(model: Any) -> ModelState | None:
    """Return the innermost state that is kept here and that holds a model."""
    for state in reversed(_open.get()):
        if any(module is model for module in state.modules):
            return state
    return None


def tensor_caches(model: nn.Module) -> list[tuple[str, dict[Any, Tensor]]]:
    """Return the dicts of tensors that a model holds, with their names (see `Attributes`)."""
    return (_state_of(model) or ModelState(model)).caches


def put_back_writes(model: nn.Module) -> None:
    """Put back what passes have changed in a model, before another one, or a look at the model."""
    state = _state_of(model)
    if state is not None:
        state.put_back_if_run()


def passes_have_written() -> bool:
    """Return True if passes of a model that is kept here write tensors."""
    return any(state.written for state in _open.get())


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Put back after this context what passes have written into a model, and its attributes."""
    state = _state_of(model) or ModelState(model)
    token = _open.set((*_open.get(), state))
    try:
        yield
    finally:
        _open.reset(token)
        state.put_back()


def forward_pass(model: Any, *, copies: bool = True) -> AbstractContextManager[None]:
    """Run one forward pass of a model within this context, from the state that is kept of it.

    What the pass changes stays for its backward pass, until another begins or `unchanged` ends.

    Args:
        model: Module, or a function, which has no state.
        copies: Whether its graph saves copies of tensors that passes write.
    """
    state = _state_of(model)
    return nullcontext() if state is None else state.forward_pass(copies)
