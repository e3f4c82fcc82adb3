"""What a measurement changes of a model, put back after it.

In: what was kept of a model: the attributes of its modules, its buffers, its train flags. Out: a
context within which these may be written (`put_back`). Parameters are kept where forward passes
have been seen to write them (fastlr.ghost.parameter_writes).
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from operator import is_
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fastlr.ghost.introspection import attribute, is_instance, weakly_by_module
from fastlr.ghost.program import INTERNAL, own_attributes
from fastlr.ghost.tokens import TENSORS, address, version
from fastlr.ops.model_lock import all_modules

# Ids, as the class of an attribute may be one that cannot be hashed.
_DICTS = frozenset(map(id, (dict, OrderedDict, defaultdict, Counter)))
_CONTAINERS = _DICTS.union(map(id, (list, set, deque)))
_REGISTRIES = (dict, OrderedDict)  # of nn.Module; scripted modules have others
_HOOKS = tuple(n for n in sorted(INTERNAL) if n.startswith(("_forward", "_backward")))


def _containers(held: dict[str, Any]) -> list[tuple[Any, Any]]:
    """The plain containers among a module's attributes, each with a copy."""
    return [
        (value, value.copy())
        for name, value in held.items()
        if name not in INTERNAL and id(type(value)) in _CONTAINERS
    ]


def _same(a: Collection, b: Collection) -> bool:
    return len(a) == len(b) and all(map(is_, a, b))


class Kept(Protocol):
    """A part of a model, as it was when this was made."""

    def restore(self) -> None:
        """Put back what differs."""


@contextmanager
def put_back(*parts: Kept) -> Iterator[None]:
    """Put back parts of a model at the end of this context, in this order."""
    tensors = [part for part in parts if type(part) is KeptTensors]
    token = _open.set((*_open.get(), *tensors))
    try:
        yield
    finally:
        _open.reset(token)
        for part in parts:
            part.restore()


class TrainFlags:
    """Whether each of some modules is in train mode.

    Flags are set directly: ``model.train()`` may be overridden, and merge or freeze things.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._flags = [(module, module.training) for module in modules]

    def restore(self) -> None:
        """Put them back."""
        for module, flag in self._flags:
            module.training = flag


class Attributes:
    """The state of one module.

    Its entries, the contents of those that are containers, and which buffers it has.
    """

    __slots__ = ("buffers", "built", "contents", "entries", "held", "hooks", "module", "no_hooks")

    def __init__(self, module: nn.Module) -> None:
        self.module, self.held = module, vars(module)
        self.entries = self.held.copy()
        self.contents = _containers(self.entries)
        registries = [self.held[n] for n in _HOOKS if n in self.held]
        self.hooks = [(registry, registry.copy()) for registry in registries if registry]
        self.no_hooks = [registry for registry in registries if not registry]
        buffers = module._buffers
        self.buffers = buffers.copy() if buffers and isinstance(buffers, _REGISTRIES) else None
        self.built = (*module._modules.values(), *module._parameters.values())

    def restore(self) -> None:
        """Put back what differs in the module.

        Nothing is put back in a module that has made submodules or parameters: they belong
        together.
        """
        module, held, entries = self.module, self.held, self.entries
        if not _same((*module._modules.values(), *module._parameters.values()), self.built):
            return
        if not (_same(held, entries) and all(map(is_, held.values(), entries.values()))):
            self._entries()
        for value, before in self.contents:
            _refill(value, before)
        for registry, before in self.hooks:
            _refill(registry, before)
        if any(self.no_hooks):
            for registry in self.no_hooks:
                registry.clear()
        if self.buffers is not None and not _same(module._buffers.values(), self.buffers.values()):
            module._buffers.clear()
            module._buffers.update(self.buffers)

    def _entries(self) -> None:
        module = self.module
        for name in [n for n in self.held if n not in self.entries and n not in INTERNAL]:
            del self.held[name]
        for name, value in self.entries.items():
            if name not in module._buffers and self.held.get(name, self) is not value:
                self.held[name] = value


def _refill(value: Any, before: Any) -> None:
    """Give a container the contents that it had, if it has others."""
    if id(type(value)) in _DICTS:
        if not (_same(value, before) and _same(value.values(), before.values())):
            value.clear()
            value.update(before)
    elif type(value) is set:
        if {id(v) for v in value} != {id(v) for v in before}:
            value.clear()
            value.update(before)
    elif not _same(value, before):
        value.clear()
        value.extend(before)


_emptied: ContextVar[Collection[tuple[nn.Module, str]]] = ContextVar("fastlr_emptied", default=())


@contextmanager
def emptied(caches: Collection[tuple[nn.Module, str]]) -> Iterator[None]:
    """Run forward passes of ours within this context with these dicts empty.

    These passes are in `attributes_kept`; for the dicts see `tensor_caches`.
    """
    token = _emptied.set(caches)
    try:
        yield
    finally:
        _emptied.reset(token)


def caches_are_emptied() -> bool:
    """Return True within `emptied`, if there is a dict to be emptied."""
    return bool(_emptied.get())


@contextmanager
def attributes_kept(model: Callable, *, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Put back the state of all modules after this context.

    That is their attributes, what is in those that are containers, their hooks, and which buffers
    they have.

    What is written into tensors stays. Entries are compared by identity, and only what differs is
    touched.

    Args:
        model: a module; anything else is left alone.
        dtype: meanwhile, plain floating-point tensors among them are of this dtype.
    """
    modules = all_modules(model) if isinstance(model, nn.Module) else ()
    kept = list(map(Attributes, modules))
    with put_back(*kept):
        for module, name in _emptied.get():
            vars(module)[name].clear()
        if dtype is not None:
            for module_state in kept:
                _cast(module_state.held, dtype)
        yield


def _cast(held: dict[str, Any], dtype: torch.dtype) -> None:
    """Cast plain floating-point tensors among a module's attributes.

    One container deep; not those that require grad.
    """

    def cast(t: Any) -> Any:
        plain = is_instance(t, Tensor) and t.is_floating_point() and not t.requires_grad
        return t.to(dtype) if plain else t

    for name, value in list(held.items()):
        if name in INTERNAL:
            continue
        kind = type(value)
        if is_instance(value, Tensor):
            held[name] = cast(value)
        elif kind is tuple and any(is_instance(t, Tensor) for t in value):
            held[name] = tuple(map(cast, value))
        elif kind is not set and id(kind) in _CONTAINERS:
            places = value.items() if id(kind) in _DICTS else enumerate(value)
            for place, t in list(places):
                if is_instance(t, Tensor):
                    value[place] = cast(t)


def tensor_caches(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the plain dicts among the modules' attributes that hold only tensors.

    As (module, name), for dicts that hold tensors and nothing else.

    Such as the attention biases that timm's LeViT keeps: what an earlier forward pass has computed,
    maybe without a graph.
    """
    return [
        (module, name)
        for module in all_modules(model)
        for name, value in vars(module).items()
        if type(value) is dict
        and value
        and name not in INTERNAL
        and all(is_instance(t, Tensor) for t in value.values())
    ]


class HeldTensor(NamedTuple):
    """A buffer or parameter, and where a module has it: in ``place`` under ``name``."""

    module: nn.Module
    place: dict[str, Tensor | None]
    name: str
    tensor: Tensor


@dataclass(eq=False)
class Writes:
    """What is known of the parameters that forward passes of a model write.

    Attributes:
        watched: modes of its modules in which a forward pass was watched.
        places: where the parameters are that one has written, by id of the module and name.
    """

    watched: set[tuple] = field(default_factory=set)
    places: set[tuple[int, str]] = field(default_factory=set)


_WRITES = weakly_by_module()  # model -> its `Writes`


def writes_of(model: nn.Module) -> Writes:
    """Return what is known of the parameters that forward passes of a model write."""
    found: Writes = _WRITES.setdefault(model, Writes())
    return found


def _written_by_forward(modules: Sequence[nn.Module], writes: Writes) -> list[HeldTensor]:
    """Return what forward passes may write.

    That is buffers, weights that embeddings shorten, and parameters that were seen to be written.
    """
    places: list[tuple[nn.Module, Any]] = [(module, module._buffers) for module in modules]
    shortening = [module for module in modules if attribute(module, "max_norm") is not None]
    places += [(module, module._parameters) for module in shortening]
    held = [
        HeldTensor(module, place, name, tensor)
        for module, place in places
        for name, tensor in place.items()
        if tensor is not None
    ]
    if writes.places:
        known = {id(one.tensor) for one in held}
        held += [one for one in seen_written(modules, writes) if id(one.tensor) not in known]
    return held


def seen_written(modules: Sequence[nn.Module], writes: Writes) -> list[HeldTensor]:
    """Return the parameters among those of some modules that were seen to be written."""
    return [one for one in plain_parameters(modules) if (id(one.module), one.name) in writes.places]


def plain_parameters(modules: Sequence[nn.Module]) -> list[HeldTensor]:
    """Return the parameters of modules but for those whose class or layout is not torch's own."""
    places: list[tuple[nn.Module, Any]] = [(module, module._parameters) for module in modules]
    return [
        HeldTensor(module, place, name, p)
        for module, place in places
        if place
        for name, p in place.items()
        if type(p) in TENSORS and p.layout is torch.strided and not p.is_inference()
    ]


class Copied(NamedTuple):
    """A copy of a buffer, and how often that was written to when the copy was its like.

    ``memory`` is the buffer's own, where ``buffer.data = ...`` may give it another unseen.
    """

    buffer: Tensor
    version: int
    values: Tensor
    memory: Tensor | None = None

    @staticmethod
    def of(t: Tensor, *, unseen: bool) -> Copied:
        """Return a copy of a tensor, which may be written ``unseen``."""
        return Copied(t, version(t), t.detach().clone(), t.detach() if unseen else None)


class BufferKeeper:
    """Keeps buffers, call after call.

    So for parameters that forward passes write: weights of embeddings with ``max_norm``, which
    theirs shortens, and what was seen to be written. Copies of large buffers are kept from call to
    call and made anew only where the buffer's version says so.
    """

    LARGE = 1 << 16  # elements

    def __init__(self) -> None:
        self._copies: dict[int, Copied] = {}  # by id of the buffer

    def keep(
        self,
        modules: Sequence[nn.Module],
        *,
        unseen_writes: bool = False,
        with_attributes: bool = False,
    ) -> Kept:
        """Keep the buffers of modules as they are, and the parameters that forward passes write.

        Args:
            modules: all modules of a model, itself first.
            unseen_writes: put back also what is written without a trace, as batch norm's running
                statistics are in train mode.
            with_attributes: put none back of a module that holds another number than before, as
                with a table that grows: they belong together.
        """
        writes = writes_of(modules[0]) if modules else Writes()
        held = _written_by_forward(modules, writes)
        unseen = unseen_writes or bool(writes.places)
        self._refresh([one.tensor for one in held], unseen)
        return KeptTensors(modules, writes, held, self._copies, unseen, with_attributes)

    @torch.no_grad()
    def _refresh(self, tensors: list[Tensor], unseen: bool) -> None:
        """Make or refill the copies."""
        before, self._copies = self._copies, {}
        stale: list[Tensor] = []
        for t in tensors:
            known = before.get(id(t))
            if known is None or known.buffer is not t or not _alike(known.values, t):
                self._copies[id(t)] = Copied.of(t, unseen=unseen)
                continue
            if unseen or t.numel() <= self.LARGE or known.version != version(t):
                stale.append(t)
            memory = t.detach() if unseen else None
            self._copies[id(t)] = Copied(t, version(t), known.values, memory)
        if stale:
            torch._foreach_copy_([self._copies[id(t)].values for t in stale], stale)


class KeptTensors:
    """The buffers of a model and the parameters that it writes (see `BufferKeeper.keep`).

    Attributes:
        modules: of the model.
        writes: what is known of the parameters that it writes.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        writes: Writes,
        held: list[HeldTensor],
        copies: dict[int, Copied],
        unseen: bool,
        with_attributes: bool,
    ) -> None:
        self.modules, self.writes = modules, writes
        self._held, self._copies, self._unseen = held, copies, unseen
        holders = {id(one.module): one.module for one in held} if with_attributes else {}
        self._numbers = [(module, own_attributes(module)) for module in holders.values()]

    @cached_property
    def parameters(self) -> list[HeldTensor]:
        """The model's parameters that can be watched."""
        return plain_parameters(self.modules)

    def holds(self, tensor: Tensor) -> bool:
        """Return True if a tensor is put back."""
        return id(tensor) in self._copies

    def add(self, one: HeldTensor, copy: Copied) -> None:
        """Put back a parameter, too, that nothing has written before the copy was made."""
        if not self.holds(one.tensor):
            self._unseen = True
            self._held.append(one)
            self._copies[id(one.tensor)] = copy

    def restore(self) -> None:
        """Put back what was written into buffers, and buffers that others have replaced."""
        stays = {id(module) for module, before in self._numbers if own_attributes(module) != before}
        for module, place, name, tensor in self._held:
            if id(module) in stays:
                continue
            copy = self._copies[id(tensor)]
            if self._unseen or version(tensor) != copy.version:
                if copy.memory is not None and address(tensor) != address(copy.memory):
                    tensor.data = copy.memory
                with torch.no_grad():
                    tensor.copy_(copy.values)
                self._copies[id(tensor)] = copy._replace(version=version(tensor))
            if name not in place or place[name] is not tensor:  # scripted modules have no get
                place[name] = tensor


_open: ContextVar[tuple[KeptTensors, ...]] = ContextVar("fastlr_open", default=())


def kept_now(model: object) -> list[KeptTensors]:
    """Return what is kept of a model here and now, the innermost first."""
    return [kept for kept in _open.get()[::-1] if any(model is module for module in kept.modules)]


def _alike(a: Tensor, b: Tensor) -> bool:
    return (
        a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and a.layout == b.layout
    )
