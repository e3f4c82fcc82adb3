"""The attributes of a model's modules, put back where a forward pass has changed them.

In: a module. Out: its entries, containers, hooks and buffers by identity (`Attributes`). The values
of tensors are kept by `fastlr.ghost.writes`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from fastlr.ghost.introspection import is_instance
from fastlr.ghost.program import INTERNAL
from fastlr.ops.model_lock import all_modules

# Ids, as the class of an attribute may be one that cannot be hashed.
_DICTS = frozenset(map(id, (dict, OrderedDict, defaultdict, Counter)))
_CONTAINERS = _DICTS.union(map(id, (list, set, deque)))
_MOST = 256  # entries of a container that are looked at
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


@contextmanager
def train_flags_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put back after this context whether each of some modules is in train mode.

    Flags are set directly: ``model.train()`` may be overridden, and merge or freeze things.
    """
    flags = [(module, module.training) for module in modules]
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag


def reached_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model, and those that their attributes hold outside of its tree."""
    modules = all_modules(model)
    known = set(map(id, modules))
    for module in modules:  # which grows meanwhile
        for name, value in vars(module).items():
            if name in INTERNAL:
                continue
            for entry in (value, *_entries_of(value)):
                if issubclass(type(entry), nn.Module) and id(entry) not in known:
                    parts = [part for part in all_modules(entry) if id(part) not in known]
                    known.update(map(id, parts))
                    modules += parts
    return modules


def _entries_of(value: Any) -> Iterable[Any]:
    """Return the entries of a container, at most `_MOST`."""
    kind = type(value)
    if kind is tuple or id(kind) in _CONTAINERS:
        return islice(value.values() if id(kind) in _DICTS else value, _MOST)
    return ()


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
        self.buffers = dict(module._buffers.items())
        self.built = (*module._modules.values(), *module._parameters.values())

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """Yield names and values of the attributes, and of the entries of containers among them."""
        for name, value in self.entries.items():
            if name in INTERNAL:
                continue
            yield name, value
            yield from ((name, entry) for entry in _entries_of(value))

    def restore(self) -> bool:
        """Put back what differs in the module; False if it has built other parts, and stays."""
        parts = (*self.module._modules.values(), *self.module._parameters.values())
        if not _same(parts, self.built):
            return False
        module, held, entries = self.module, self.held, self.entries
        if not (_same(held, entries) and all(map(is_, held.values(), entries.values()))):
            self._entries()
        for value, before in self.contents:
            _refill(value, before)
        for registry, before in self.hooks:
            _refill(registry, before)
        if any(self.no_hooks):
            for registry in self.no_hooks:
                registry.clear()
        if not _same(module._buffers.values(), self.buffers.values()):
            self._put_back_buffers()
        return True

    def _put_back_buffers(self) -> None:
        buffers: Any = self.module._buffers
        if isinstance(buffers, _REGISTRIES):
            buffers.clear()
        for name, buffer in self.buffers.items():
            buffers[name] = buffer

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

    These passes are those of `forward_pass`; for the dicts see `tensor_caches`.
    """
    token = _emptied.set(caches)
    try:
        yield
    finally:
        _emptied.reset(token)


def emptied_caches() -> Collection[tuple[nn.Module, str]]:
    """Return the dicts that forward passes run without here."""
    return _emptied.get()


def cast_attributes(held: dict[str, Any], dtype: torch.dtype) -> None:
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
