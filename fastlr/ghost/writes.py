"""What passes write into a model, put back in the same memory.

In: a model. Out: a context that leaves it as it was (`unchanged`), and one for each forward pass
within (`forward_pass`).

Passes may write to buffers, to tensors among the attributes, and to parameters. Small tensors are
copied when a measurement begins, and every forward pass begins with these values. Parameters and
large tensors are hardly ever written. So the first forward pass in each mode compares them with
copies, and only what it has written is copied from then on. Later passes are watched by the
tensors' versions.

Parameters are put back at the end of a measurement: a pass that reads what the pass before has
written there is refused as random. A graph keeps a copy of whatever else its own pass has written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from fastlr.errors import ModelError, few
from fastlr.ghost.objects import address, storage, weakly_by_module
from fastlr.ghost.state import (
    Attributes,
    attributes_of,
    cast_attributes,
    emptied_caches,
    remove_hooks_since,
)
from fastlr.ops.torch_private import is_view, no_torch_function, saved_tensors_are_hooked

LARGE = 1 << 14  # elements of a tensor that is copied only if a pass has written it

_written = WeakTensorKeyDictionary()  # tensor -> modes in which a forward pass has written it
_seen = WeakTensorKeyDictionary()  # large tensor -> modes in which it was watched
_watched_modes = weakly_by_module()  # model -> modes in which a forward pass was watched


def written_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a model that forward passes were seen to write."""
    return [p for p in model.parameters() if p in _written]


def copied_if_written(t: Tensor, buffer: Tensor) -> Tensor:
    """Return a tensor that stands for a buffer: a copy where a forward pass may write it."""
    is_small = t.numel() <= LARGE and _can_be_compared(t.dtype)
    return t.clone() if is_small or buffer in _written else t


class _Held:
    """A tensor that passes may write, and what it was.

    Attributes:
        module: Module that holds it.
        name: Name in that module.
        tensor: The tensor.
        values: Copy of its values; None where there is none.
    """

    __slots__ = (
        "_memory",
        "requires_grad",
        "elements",
        "is_parameter",
        "module",
        "name",
        "tensor",
        "values",
    )

    def __init__(self, module: nn.Module, name: str, tensor: Tensor, is_parameter: bool) -> None:
        self.module, self.name, self.tensor = module, name, tensor
        self.is_parameter = is_parameter
        self.values: Any = None

    def prepare(self) -> None:
        """Make room for the values."""
        self.requires_grad = self.tensor.requires_grad
        self._memory = self.tensor.data  # with a version counter of its own
        self.elements = _once_each(self._memory)
        self.values = torch.empty_like(self.elements)

    @property
    def differs(self) -> bool:
        """True if there is a copy, and the tensor has other values or another dtype."""
        if self.values is None:
            return False
        now = _once_each(self.tensor.data)
        return now.dtype != self.values.dtype or not torch.equal(now, self.values)

    def reattach(self) -> None:
        """Give the tensor the memory and the place in the graph that it had."""
        t, memory = self.tensor, self._memory
        if t.data_ptr() != memory.data_ptr() or t.dtype != memory.dtype or t.shape != memory.shape:
            t.data = memory
        if t.requires_grad and not self.requires_grad and not is_view(t):
            t.detach_()

    @property
    def needs_put_back(self) -> bool:
        """True unless the memory has the values of the copy. A GPU is not waited for."""
        return self.elements.is_cuda or not torch.equal(self.elements, self.values)


def _once_each(t: Tensor) -> Tensor:
    """Return an expanded tensor with each of its elements once, without lazy conjugation."""
    t = t.conj() if t.is_conj() else t
    if not t.is_contiguous():
        for dim, (size, stride) in enumerate(zip(t.shape, t.stride(), strict=True)):
            if stride == 0 and size > 1:
                t = t.narrow(dim, 0, 1)
    return t


def _may_be_written(t: Any) -> bool:
    """Return True for a tensor of torch's own classes that has values in memory."""
    if type(t) is not Tensor and type(t) is not nn.Parameter:
        return False
    plain = t.layout is torch.strided and not (t.is_inference() or t.is_meta or t.is_nested)
    has_values = plain and (address(t) != 0 or not t.numel())
    return has_values and not t.is_neg() and _can_be_compared(t.dtype)


@cache
def _can_be_compared(dtype: torch.dtype) -> bool:
    """Return False for dtypes that torch can hardly do anything with."""
    try:
        t = torch.zeros(1, dtype=torch.uint8).expand(16).clone().view(dtype)
        torch._foreach_copy_([t], [t.clone()])
        return torch.equal(t, t)
    except (RuntimeError, NotImplementedError):
        return False


def _keep(tensors: Iterable[_Held]) -> None:
    """Copy the values of some tensors."""
    held = list(tensors)
    for one in held:
        one.prepare()
    if held:
        torch._foreach_copy_([one.values for one in held], [one.elements for one in held])


class ModelState:
    """The state of a model, and of the modules that its attributes hold, when this was made.

    Attributes:
        attributes: State of the modules, but for the values of tensors.
        ids: Ids of the modules.
        mode: Whether each of them is in train mode.
        first_writes: Number of tensors that a pass has written, and none before in this mode.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.attributes: list[Attributes] = []
        self.first_writes = 0
        self._is_changed = False
        self._next_hook = RemovableHandle.next_id
        self._kept: list[_Held] = []  # before every pass
        self._written: list[_Held] = []  # those among them that passes write in this mode
        self._parameters: list[_Held] = []  # that passes write
        self._large: list[_Held] = []  # of which there is no copy, parameters among them
        self._take_in(())

    def _take_in(self, built: Collection[int]) -> None:
        """Take in modules as they are now: those of these ids, and new ones."""
        known = {id(one.module): one for one in self.attributes if id(one.module) not in built}
        self.attributes = [known.get(id(one.module), one) for one in attributes_of(self.model)]
        self.modules = [one.module for one in self.attributes]
        self.ids = frozenset(map(id, self.modules))
        self.mode = tuple([module.training for module in self.modules])
        before = (*self._kept, *self._parameters, *self._large)
        held = {id(one.tensor): one for one in before if id(one.module) not in built}
        self._kept, self._written, self._parameters, self._large = [], [], [], []
        with no_torch_function(), torch.no_grad():
            for one in self._tensors():
                self._sort(held.get(id(one.tensor), one))
            _keep(one for one in self._kept + self._parameters if one.values is None)
        self._unseen = [
            one
            for one in self._large
            if not one.is_parameter and self.mode not in _seen.get(one.tensor, ())
        ]

    @property
    def is_new(self) -> bool:
        """True before the first forward pass in this mode, or with other large tensors."""
        return bool(self._unseen) or self.mode not in _watched_modes.get(self.model, ())

    @property
    def writes(self) -> bool:
        """True if passes in this mode write tensors that are no parameters."""
        return bool(self._written)

    def _tensors(self) -> Iterator[_Held]:
        """Yield the tensors that passes may write, each once, parameters first."""
        others = [state for state in _open.get() if state is not self]
        known = {id(held.tensor) for state in others for held in state._kept}
        places: list[tuple[nn.Module, Iterable[tuple[str, Any]], bool]] = [
            (module, module._parameters.items(), True) for module in self.modules
        ]
        places += ((module, module._buffers.items(), False) for module in self.modules)
        places += ((one.module, one.parts, False) for one in self.attributes)
        for module, named, are_parameters in places:
            for name, t in named:
                if id(t) not in known and _may_be_written(t):
                    known.add(id(t))
                    yield _Held(module, name, t, are_parameters)

    def _sort(self, held: _Held) -> None:
        """Enter a tensor where it belongs."""
        modes = _written.get(held.tensor, ()) if len(_written) else ()
        if held.is_parameter:
            is_written = modes or vars(held.module).get("max_norm") is not None
            (self._parameters if is_written else self._large).append(held)
        elif modes or held.tensor.numel() <= LARGE:
            self._kept.append(held)
            if self.mode in modes:
                self._written.append(held)
        else:
            self._large.append(held)

    def put_back(self) -> None:
        """Put back all that passes may have changed, but for parameters."""
        if self._is_changed:
            self._put_back(self._kept)

    def begin_pass(self) -> None:
        """Put back what an earlier pass has changed, before another one."""
        self.put_back()
        self._is_changed = True

    def restore(self) -> None:
        """Put back all that differs."""
        remove_hooks_since(self._next_hook, self.attributes)
        self._put_back(self._kept + self._parameters)

    def _put_back(self, tensors: Sequence[_Held]) -> None:
        self._is_changed = False
        built = {id(one.module) for one in self.attributes if not one.restore()}
        with no_torch_function(), torch.no_grad():
            held = [one for one in tensors if id(one.module) not in built]
            for one in held:
                one.reattach()
            changed = [one for one in held if one.needs_put_back]
            if built:
                self._take_in(built)
            if any(one.elements.is_cuda for one in changed):
                if torch.cuda.is_current_stream_capturing():
                    return  # the copies would be repeated when their memory is no longer there
            if changed:
                to, values = [one.elements for one in changed], [one.values for one in changed]
                torch._foreach_copy_(to, values)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """See which tensors a forward pass writes within this context.

        Raises:
            ModelError: It has written to one of which there is no copy.
        """
        is_new = self.is_new
        with no_torch_function(), torch.no_grad():
            whole = self.mode not in _watched_modes.get(self.model, ())
            _keep(self._large if whole else self._unseen)
            tensors = self._kept + self._parameters + self._large
            before = [held.tensor._version for held in tensors]
        lost: list[_Held] = []
        try:
            yield
        finally:
            with no_torch_function(), torch.no_grad():
                now = [held.tensor._version for held in tensors]
                if is_new or now != before:
                    versions = zip(tensors, before, now, strict=True)
                    lost = self._note(
                        [t for t, old, new in versions if old != new or (is_new and t.differs)]
                    )
        _watched_modes.setdefault(self.model, set()).add(self.mode)
        for held in self._unseen:
            _seen.setdefault(held.tensor, set()).add(self.mode)
        self._unseen = []
        if lost:
            raise ModelError(
                f"a forward pass has written to {self._named(lost)}, as none had when the model "
                "was first measured in this mode: this call leaves that changed. Measure again: "
                "from now on it is put back"
            )
        views = [held for held in self._written if held.tensor.requires_grad]
        if any(is_view(held.tensor) and not held.requires_grad for held in views):
            raise ModelError(
                f"a forward pass makes {self._named(views)}, a view, part of its graph, which "
                "nobody can undo: write to it under torch.no_grad()"
            )

    def _named(self, tensors: Iterable[_Held]) -> str:
        paths = {id(module): f"{path}." for path, module in self.model.named_modules() if path}
        return few([paths.get(id(held.module), "") + held.name for held in tensors])

    def _note(self, written: Sequence[_Held]) -> list[_Held]:
        """Note which tensors passes write, and return those without a copy."""
        for held in written:
            modes = _written.setdefault(held.tensor, set())
            self.first_writes += self.mode not in modes
            modes.add(self.mode)
        copied = [held for held in (*self._kept, *self._large) if held.values is not None]
        self._large = [held for held in self._large if held.values is None]
        self._kept, self._written = [], []
        for held in copied:
            self._sort(held)
        for held in self._large:
            held.values = None
        return [held for held in written if held.values is None]

    @contextmanager
    def saved_copies(self) -> Iterator[None]:
        """Have graphs made within this context keep copies of what their pass has written."""
        if not self._written or saved_tensors_are_hooked():
            yield
            return
        storages = {storage(held.elements) for held in self._written}

        def pack(t: Tensor) -> tuple[Tensor, int]:
            kept = (t.clone() if storage(t) in storages else t).detach()
            return kept, kept._version

        def unpack(packed: tuple[Tensor, int]) -> Tensor:
            kept, version = packed
            if kept._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    "inplace operation"
                )
            return kept

        token = _hooks.set((pack, unpack))
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                yield
        finally:
            _hooks.reset(token)


_open: ContextVar[tuple[ModelState, ...]] = ContextVar("fastlr_open", default=())
_hooks: ContextVar[Any] = ContextVar("fastlr_saved_copies", default=None)


def own_hooks() -> Any:
    """Return the hooks of saved tensors that fastlr has set here, None where it has set none."""
    return _hooks.get()


def _state_of(model: nn.Module) -> ModelState | None:
    """Return the innermost state that is kept here and that holds a model."""
    return next((state for state in _open.get()[::-1] if id(model) in state.ids), None)


def put_back(model: nn.Module) -> None:
    """Put back what passes have changed in a model, before it is looked at."""
    state = _state_of(model)
    if state is not None:
        state.put_back()


def begin_pass(model: nn.Module) -> None:
    """Put back what passes have changed in a model, before a captured pass is repeated."""
    state = _state_of(model)
    if state is not None:
        state.begin_pass()


def passes_write() -> bool:
    """Return True if passes of a model that is kept here write tensors that are no parameters."""
    return any(state.writes for state in _open.get())


def first_writes(model: nn.Module) -> int | None:
    """Return how often a pass was the first to write to a tensor; None if none has run yet."""
    state = _state_of(model)
    return None if state is None or state.is_new else state.first_writes


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Put back after this context what passes have written into a model, and its attributes."""
    state = _state_of(model)
    if state is not None:
        try:
            yield
        finally:
            state.restore()
        return
    state = ModelState(model)
    token = _open.set((*_open.get(), state))
    try:
        yield
    finally:
        _open.reset(token)
        state.restore()


@contextmanager
def forward_pass(
    model: Any, *, dtype: torch.dtype | None = None, watched: bool = True, copies: bool = False
) -> Iterator[None]:
    """Run one forward pass of a model within this context, from the state that is kept of it.

    What the pass changes stays for its backward pass, until another begins or `unchanged` ends.
    A model of which no state is kept has its attributes put back at once.

    Args:
        model: Module, or a function, which has no state.
        dtype: Type of plain floating-point tensors among the modules' attributes meanwhile.
        watched: Whether the pass may write the model's own tensors.
        copies: Whether its graph keeps copies of what the pass writes.
    """
    if not isinstance(model, nn.Module):
        yield
        return
    own, states = _state_of(model), _open.get()
    others = [] if own else attributes_of(model)
    next_hook = RemovableHandle.next_id
    for state in states:
        state.begin_pass()
    _run_otherwise(own.attributes if own else others, dtype)
    noted = own.watched() if own and watched else nullcontext()
    copied = (own or states[-1]).saved_copies() if states and copies else nullcontext()
    try:
        with noted, copied:
            yield
    finally:
        remove_hooks_since(next_hook, chain(others, *(state.attributes for state in states)))
        for one in others:
            one.restore()
        for state in states if dtype else ():
            state.put_back()


def _run_otherwise(attributes: Iterable[Attributes], dtype: torch.dtype | None) -> None:
    """Empty caches, and cast plain tensors among attributes, for the pass that begins."""
    for module, name in emptied_caches():
        vars(module)[name].clear()
    if dtype is not None:
        for one in attributes:
            cast_attributes(one.held, dtype)
