"""Parameters whose values are in memory only while something uses them.

In: the whole parameters of a model, one after another. Out: parameters of the same names, shapes
and graph whose values lie in a file that the ranks of a host share, and which each rank reads by
itself: no rank waits for another.

Between uses a parameter is one NaN, expanded: what should read that would not be silently wrong. A
call of torch that is given one has its values (`OnDemand`, a mode that sees every call), and what
autograd saves of them is kept as its place in the file (`OnDemand.pack`), so that a graph holds no
parameter either.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from math import nan
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fastlr.distributed.shared_file import SharedFile
from fastlr.errors import ModelError
from fastlr.ops.compiled_parts import uncompiled
from fastlr.ops.memory import give_back
from fastlr.ops.torch_private import no_torch_function, run_backward

RECENT = 1 << 24  # bytes of values that stay for their next use
# Bytes of values after which malloc gives back: what it kept would be more than all parameters.
FREED = 1 << 25
_METHODS = (
    "dim ndimension size numel nelement is_floating_point is_complex element_size register_hook "
    "requires_grad_ __len__"
)
_PROPERTIES = (
    "shape ndim dtype device layout is_cuda is_sparse is_quantized is_meta requires_grad is_leaf "
    "grad grad_fn nbytes itemsize _version _backward_hooks output_nr"
)
_get: Any = lambda name: getattr(Tensor, name)  # noqa: E731
_OF_NO_VALUES = {
    torch.autograd.grad,
    *map(_get, _METHODS.split()),
    *(_get(name).__get__ for name in _PROPERTIES.split()),
}
# Calls that exchange the memory, or whose result is memory that nobody can be seen to use: from
# then on the values stay.
_LASTING = {
    *map(_get, "data_ptr untyped_storage storage numpy __array__ __dlpack__ share_memory_".split()),
    _get("data").__get__,
    _get("data").__set__,
}


# -- the parameters
# --------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Held:
    """A tensor that is on demand.

    Attributes:
        tensor: itself.
        stub: its data between uses.
        number: of the tensor of the file that its values are made of.
        make: makes them of that.
        version: how often it was written to when it became one.
        stays: it was written to, or its memory was asked for: its values stay.
    """

    tensor: Tensor
    stub: Tensor
    number: int
    make: Callable[[Tensor], Tensor]
    version: int
    stays: bool = False


class _Packed(NamedTuple):
    """What a graph keeps of a saved tensor."""

    held: _Held
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any
    version: int


_active: ContextVar[OnDemand | None] = ContextVar("fastlr_on_demand", default=None)


class OnDemand(TorchFunctionMode):
    """Gives every call of torch the values of the parameters that are its arguments.

    They are taken away after the call.

    Args:
        file: with the values.
    """

    def __init__(self, file: SharedFile) -> None:
        super().__init__()
        self._file = file
        self._held: dict[int, _Held] = {}  # by id of the tensor
        self._stored: dict[
            int, _Held
        ] = {}  # by address of its stub, and of its values while they are here
        self.saves_nothing = False
        self._made = 0  # bytes of values, since malloc last gave back
        # Values that are here, the latest last.
        self._recent: OrderedDict[_Held, Tensor] = OrderedDict()

    def add(self, tensor: Tensor, number: int, make: Callable[[Tensor], Tensor]) -> None:
        """Have a tensor's values made of a tensor of the file whenever something uses them."""
        with no_torch_function():
            stub = torch.full((), nan, dtype=tensor.dtype, device=tensor.device)
            held = _Held(tensor, stub.expand(tensor.shape), number, make, tensor._version)
            tensor.data = held.stub
            self._held[id(tensor)] = self._stored[stub.data_ptr()] = held

    def find(self, tensor: Tensor) -> _Held | None:
        """What is known of a tensor that is on demand."""
        return self._held.get(id(tensor))

    def derived(
        self, tensor: Tensor, dtype: torch.dtype, make: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """A tensor of this dtype with the values ``make(tensor)``, on demand as the tensor is."""
        source = self._held[id(tensor)]
        with no_torch_function():
            result = torch.empty((), dtype=dtype, device=tensor.device).expand(tensor.shape)
            if source.stays:
                return make(source.tensor.detach())
        self.add(result, source.number, lambda values: make(source.make(values)))
        return result

    def __torch_function__(
        self, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # noqa: D105
        kwargs = kwargs or {}
        used = [] if func in _OF_NO_VALUES else [*self._used((*args, *kwargs.values()))]
        if not used:
            return func(*args, **kwargs)
        given: list[_Held] = []
        try:
            for held in used:
                self._give(held)
                given.append(held)
            return func(*args, **kwargs)
        finally:
            for held in given:
                self._take(held, lasting=func in _LASTING)
            self._trim()

    def _used(self, values: Iterable[Any]) -> Iterator[_Held]:
        for value in values:
            if type(value) in (list, tuple):
                yield from self._used(value)
            elif (held := self._held.get(id(value))) is not None and not held.stays:
                yield held

    def _give(self, held: _Held) -> None:
        values = self._values(held)
        with no_torch_function():
            held.tensor.data = values

    def _take(self, held: _Held, *, lasting: bool) -> None:
        """Take the values away after a call, unless it has written them or ``lasting``."""
        with no_torch_function():
            if held.tensor._version == held.version and not lasting:
                held.tensor.data = held.stub
                return
            held.stays = True
            values = self._recent.pop(held, None)
            if values is not None:
                self._stored.pop(values.data_ptr(), None)

    def _values(self, held: _Held) -> Tensor:
        """The values of a tensor, here from now on."""
        if held in self._recent:
            self._recent.move_to_end(held)
            return self._recent[held]
        with no_torch_function(), torch.inference_mode(False), torch.no_grad():
            if held.tensor._version != held.version:
                raise ModelError(
                    f"the model writes to a parameter of shape {tuple(held.tensor.shape)} through "
                    "another tensor, which is lost where parameters are in memory while they are "
                    "used: measure within full_params(model, whole=True)"
                )
            values = held.make(self._file.read(held.number)).detach()
            self._stored[values.data_ptr()] = held
            self._made += values.nbytes
            if self._made > FREED:
                give_back()
                self._made = 0
        self._recent[held] = values
        return values

    def _trim(self) -> None:
        """Forget what was used longest ago, beyond what may stay; never the latest."""
        with no_torch_function():
            total = sum(values.nbytes for values in self._recent.values())
            while total > RECENT and len(self._recent) > 1:
                held, values = self._recent.popitem(last=False)
                total -= values.nbytes
                self._stored.pop(values.data_ptr(), None)
                self._file.forget(held.number)

    # -- what autograd saves
    # -------------------------------------------------------------------------------------------

    def pack(self, t: Tensor) -> Any:
        """Return what a graph keeps in place of a tensor that it saves.

        For a tensor that is on demand it is the tensor's place, else the tensor itself.
        """
        if self.saves_nothing:
            return None
        with no_torch_function():
            try:
                held = self._stored.get(t.untyped_storage().data_ptr())
            except (RuntimeError, NotImplementedError):  # it has no memory
                return t.detach()  # itself would keep the graph for ever
            if held is None or t.dtype != held.tensor.dtype or held.stays:
                return t.detach()
            if t.untyped_storage().data_ptr() == held.stub.data_ptr():
                # It is saved between calls, as a whole.
                if t.shape != held.stub.shape:
                    return t.detach()
                t = torch.empty(t.shape, device="meta")
            return _Packed(held, t.size(), t.stride(), t.storage_offset(), held.tensor._version)

    def unpack(self, kept: Any) -> Tensor:
        """The tensor."""
        if type(kept) is not _Packed:
            return kept
        held = kept.held
        with no_torch_function(), torch.no_grad():
            if held.tensor._version != kept.version:
                raise RuntimeError(
                    f"a parameter of shape {tuple(held.tensor.shape)} that is needed for a "
                    "gradient was written to"
                )
            values = held.tensor.detach() if held.stays else self._values(held)
            self._trim()
            return values.as_strided(kept.size, kept.stride, kept.offset)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within this context the parameters can be used."""
        token = _active.set(self)
        try:
            with ExitStack() as stack:
                stack.enter_context(uncompiled())
                stack.enter_context(
                    torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
                )
                stack.enter_context(self)
                yield
        finally:
            _active.reset(token)


# -- for those who handle parameters
# -----------------------------------------------------------------------------------


def active() -> bool:
    """Return True if some model's parameters are on demand here."""
    return _active.get() is not None


def notes() -> tuple[str, ...]:
    """For the user of a result."""
    return (
        ("each parameter was in memory only while it was used: full_params(model, whole=False)",)
        if active()
        else ()
    )


def is_on_demand(tensor: Tensor) -> bool:
    """Return True if a tensor's values are in memory only while something uses them."""
    mode = _active.get()
    return mode is not None and mode.find(tensor) is not None


def derived(tensor: Tensor, dtype: torch.dtype, make: Callable[[Tensor], Tensor]) -> Tensor:
    """``make(tensor)``, of this dtype: at once, or on demand where the tensor is."""
    mode = _active.get()
    if mode is None or mode.find(tensor) is None:
        return make(tensor)
    return mode.derived(tensor, dtype, make)


def hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """Return hooks of saved tensors by which graphs hold no parameter that is on demand.

    Returns None where no parameter is.
    """
    mode = _active.get()
    return None if mode is None else (mode.pack, mode.unpack)


@contextmanager
def graphs_without_saved_tensors() -> Iterator[None]:
    """Within this context graphs save nothing where parameters are on demand.

    They can be walked, but not run backward.
    """
    mode = _active.get()
    if mode is None:
        yield
        return
    before, mode.saves_nothing = mode.saves_nothing, True
    try:
        yield
    finally:
        mode.saves_nothing = before


def has_numbers(tensor: Tensor) -> bool:
    """Return True for floating-point numbers that any operation takes.

    Those of a quantised tensor's subclass go through few.
    """
    own = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    return tensor.is_floating_point() and (not own or is_on_demand(tensor))


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor without its graph, in this dtype if it `has_numbers`, on demand if it is so."""
    if not has_numbers(tensor):
        return tensor.detach()
    return derived(tensor, dtype, lambda values: values.detach().to(dtype))


def gradients(
    z: Tensor, inputs: Sequence[Any], v: Tensor, *, retain: bool
) -> tuple[Tensor | None, ...]:
    """Return the gradients of <v, z>, as torch.autograd.grad gives them.

    Hooks that run within have the values of parameters that are on demand, too.
    """
    if _active.get() is None:
        return torch.autograd.grad(z, inputs, v, retain_graph=retain, allow_unused=True)
    return run_backward(z, inputs, v, retain=retain)


def each_gradient(
    z: Tensor,
    parameters: Sequence[Tensor],
    v: Tensor,
    take: Callable[[int, Tensor], None],
    *,
    retain: bool,
) -> None:
    """Call ``take(number, gradient)`` for the gradient of <v, z> of each parameter that has one.

    Those on demand are taken as they come, so that there is one at a time.
    """

    def taken(number: int, gradient: Tensor | None) -> Tensor | None:
        if gradient is None or gradient.layout != torch.strided:
            return None  # it is among the results
        take(number, gradient)
        came.add(number)
        return gradient.new_zeros(()).expand_as(gradient)

    came: set[int] = set()
    ours = [(i, p) for i, p in enumerate(parameters) if is_on_demand(p)]
    handles = [p.register_hook(partial(taken, i)) for i, p in ours]
    try:
        found = gradients(z, parameters, v, retain=retain)
    finally:
        for handle in handles:
            handle.remove()
    for number, gradient in enumerate(found):
        if gradient is not None and number not in came:
            take(number, gradient)
