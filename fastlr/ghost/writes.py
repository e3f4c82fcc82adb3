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

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from fastlr.errors import ModelError, few
from fastlr.ghost.batch import copied
from fastlr.ghost.introspection import weakly_by_module
from fastlr.ghost.state import attributes_of, cast_attributes, emptied_caches, remove_hooks_since
from fastlr.ghost.tokens import TENSORS, address
from fastlr.ops.torch_private import no_torch_function, saved_tensors_are_hooked

_Result = TypeVar("_Result")
LARGE = 1 << 16  # elements of a tensor that is copied only if a pass has written it

_written = WeakTensorKeyDictionary()  # tensor -> modes in which a forward pass has written it
_watched_modes = weakly_by_module()  # model -> modes in which a forward pass was watched


def written_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a model that forward passes were seen to write."""
    return [p for p in model.parameters() if p in _written]


def copied_if_written(t: Tensor) -> Tensor:
    """Return a copy of a buffer that a forward pass may write, another one as it is."""
    return t.clone() if t.numel() <= LARGE or t in _written else t


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
        "_requires_grad",
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
        self._requires_grad = self.tensor.requires_grad
        self._memory = self.tensor.data  # with a version counter of its own
        self.elements = _once_each(self._memory)
        self.values = torch.empty_like(self.elements)

    @property
    def differs(self) -> bool:
        """True if the tensor has other values than the copy, or another dtype."""
        now = _once_each(self.tensor.data)
        return now.dtype != self.values.dtype or not torch.equal(now, self.values)

    def reattach(self) -> None:
        """Give the tensor the memory and the place in the graph that it had."""
        t, memory = self.tensor, self._memory
        if t.data_ptr() != memory.data_ptr() or t.dtype != memory.dtype or t.shape != memory.shape:
            t.data = memory
        if t.requires_grad and not self._requires_grad:
            t.detach_()


def _once_each(t: Tensor) -> Tensor:
    """Return an expanded tensor with each of its elements once."""
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
    return plain and (address(t) != 0 or not t.numel())


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
        built: Ids of those that have built submodules or parameters since: these stay as they are.
        first_writes: Number of tensors that a pass has written, and none before in this mode.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.attributes = model, attributes_of(model)
        self.modules = [one.module for one in self.attributes]
        self.ids = frozenset(map(id, self.modules))
        self.mode = tuple([module.training for module in self.modules])
        self.built: frozenset[int] = frozenset()
        self.first_writes = 0
        self._next_hook = RemovableHandle.next_id
        self._kept: list[_Held] = []  # before every pass
        self._written: list[_Held] = []  # those among them that passes write in this mode
        self._parameters: list[_Held] = []  # that passes write
        self._large: list[_Held] = []  # of which there is no copy, parameters among them
        with no_torch_function(), torch.no_grad():
            for held in self._tensors():
                self._sort(held)
            _keep(self._kept + self._parameters)

    @property
    def is_new(self) -> bool:
        """True before the first forward pass in this mode."""
        return self.mode not in _watched_modes.get(self.model, ())

    def _tensors(self) -> Iterator[_Held]:
        """Yield the tensors that passes may write, each once, parameters first."""
        known = {id(held.tensor) for state in _open.get() for held in state._kept}
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
            is_written = modes or "max_norm" in vars(held.module)
            (self._parameters if is_written else self._large).append(held)
        elif modes or held.tensor.numel() <= LARGE:
            self._kept.append(held)
            if self.mode in modes:
                self._written.append(held)
        else:
            self._large.append(held)

    def begin_pass(self) -> None:
        """Put back the values of tensors, but for parameters."""
        self._put_back(self._kept)

    def end_pass(self) -> list[nn.Module]:
        """Put back the attributes, and the values of tensors that passes write.

        Returns the modules of which that is done.
        """
        unbuilt = [one.module for one in self.attributes if one.restore()]
        if len(unbuilt) < len(self.modules):
            self.built = self.ids.difference(map(id, unbuilt))
        self._put_back(self._written)
        return unbuilt

    def restore(self) -> None:
        """Put back all that differs."""
        remove_hooks_since(self._next_hook, self.end_pass())
        self._put_back(self._kept + self._parameters)

    def _put_back(self, tensors: Sequence[_Held]) -> None:
        if not tensors or (tensors[0].tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
            return  # a captured copy would be repeated when its memory is no longer there
        with no_torch_function(), torch.no_grad():
            held = [one for one in tensors if id(one.module) not in self.built]
            for one in held:
                one.reattach()
            if held:
                torch._foreach_copy_([one.elements for one in held], [one.values for one in held])

    @contextmanager
    def watched(self) -> Iterator[None]:
        """See which tensors a forward pass writes within this context.

        Raises:
            ModelError: It has written to one of which there is no copy.
        """
        is_new = self.is_new
        with no_torch_function(), torch.no_grad():
            if is_new:
                _keep(self._large)
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
        if lost:
            paths = {id(module): f"{path}." for path, module in self.model.named_modules() if path}
            names = [paths.get(id(held.module), "") + held.name for held in lost]
            raise ModelError(
                f"a forward pass has written to {few(names)}, as none had when the model was first "
                "measured in this mode: this call leaves that changed. Measure again: from now on "
                "it is put back"
            )

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
        """Have graphs made within this context keep copies of what their pass has written.

        The model's own tensors are put back before such a graph runs backward.
        """
        if not self._written or saved_tensors_are_hooked():
            yield
            return
        storages = {held.elements.untyped_storage().data_ptr() for held in self._written}

        def pack(t: Tensor) -> tuple[Tensor, int]:
            if type(t) in TENSORS and t.layout is torch.strided:
                if t.untyped_storage().data_ptr() in storages:
                    t = t.clone()
            kept = t.detach()
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


def begin_pass(model: nn.Module) -> None:
    """Put back the values of tensors that passes may write, before a captured pass is repeated."""
    state = _state_of(model)
    if state is not None:
        state.begin_pass()


def run_twice_if_it_writes(model: nn.Module, x: Any, forward: Callable[[Any], _Result]) -> _Result:
    """Run a forward pass, and again where it is the first to write to a tensor.

    The graph of the first one has no copy of that. Inputs are copied where they could be written.
    """
    state = _state_of(model)
    if state is None:
        return forward(x)
    before = state.first_writes
    result = forward(copied(x) if state.is_new else x)
    return result if state.first_writes == before else forward(x)


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
    model: Any, *, dtype: torch.dtype | None = None, watched: bool = True
) -> Iterator[None]:
    """Run one forward pass of a model within this context, and put back its state.

    Args:
        model: Module, or a function, which has no state.
        dtype: Type of plain floating-point tensors among the modules' attributes meanwhile.
        watched: Whether the pass may write the model's own tensors.
    """
    if not isinstance(model, nn.Module):
        yield
        return
    own, states = _state_of(model), _open.get()
    others = [] if own else attributes_of(model)
    next_hook = RemovableHandle.next_id
    for state in states:
        state.begin_pass()
    for module, name in emptied_caches():
        vars(module)[name].clear()
    if dtype is not None:
        for one in own.attributes if own else others:
            cast_attributes(one.held, dtype)
    try:
        with own.watched() if own and watched else nullcontext():
            with own.saved_copies() if own else nullcontext():
                yield
    finally:
        unbuilt = [one.module for one in others if one.restore()]
        for state in states:
            unbuilt += state.end_pass()
        remove_hooks_since(next_hook, unbuilt)
