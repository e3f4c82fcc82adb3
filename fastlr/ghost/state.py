"""The attributes of a model's modules, put back where a forward pass has changed them.

In: a module. Out: its entries, containers, hooks and buffers by identity (`Attributes`). The values
of tensors are kept by `fastlr.ghost.writes`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from itertools import islice
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fastlr.ghost.objects import INTERNAL, instance_dict, is_instance, version
from fastlr.ops.modules import all_modules

# Ids, as the class of an attribute may be one that cannot be hashed.
_DICTS = frozenset(map(id, (dict, OrderedDict, defaultdict, Counter)))
_CONTAINERS = _DICTS.union(map(id, (list, set, deque)))
_MOST = 256  # entries of a container that are looked at
_DEEP = 5  # containers and objects within each other that are looked at in an input
_REGISTRIES = (dict, OrderedDict)  # of nn.Module; scripted modules have others
_HOOKS = tuple(n for n in sorted(INTERNAL) if n.startswith(("_forward", "_backward")))


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


class Attributes:
    """The state of one module, but for the values of tensors.

    Attributes:
        module: The module.
        held: Its attributes by name, as they are now.
        hooks: Its registries of hooks that are not empty, with copies.
        parts: Tensors and modules that its attributes and their containers hold, with names.
    """

    __slots__ = (
        "_buffers",
        "_contents",
        "_entries",
        "_modules",
        "_parameters",
        "held",
        "hooks",
        "module",
        "parts",
    )

    def __init__(self, module: nn.Module) -> None:
        self.module, self.held = module, vars(module)
        self._entries = self.held.copy()
        names = self.held.get("_non_persistent_buffers_set")
        self._contents: list[tuple[Any, Any]] = [] if names is None else [(names, names.copy())]
        self.parts: list[tuple[str, Any]] = []
        hooks = filter(None, map(self.held.get, _HOOKS))
        self.hooks = [(registry, registry.copy()) for registry in hooks]
        self._buffers = dict(module._buffers.items())
        self._modules = dict(module._modules.items())
        self._parameters = list(module._parameters.values())
        for name in self.held.keys() - INTERNAL:
            value = self.held[name]
            kind = type(value)
            if kind is tuple or id(kind) in _CONTAINERS:
                if kind is not tuple:
                    self._contents.append((value, value.copy()))
                self.parts += [(name, e) for e in islice(_values(value), _MOST) if _is_part(e)]
            elif _is_part(value):
                self.parts.append((name, value))

    @property
    def has_built(self) -> bool:
        """True if the module has made submodules or parameters, with which the rest belongs."""
        before, now = self._modules, self.module._modules.items()
        if any(part is not None and before.get(name) is None for name, part in now):
            return True
        return not _same(self.module._parameters.values(), self._parameters)

    def restore(self) -> bool:
        """Put back what differs in the module; False if it has built other parts, and stays.

        Hooks that were registered since also stay: see `remove_hooks_since`.
        """
        if self.has_built:
            return False
        module, held, entries = self.module, self.held, self._entries
        if not (_same(held, entries) and all(map(is_, held.values(), entries.values()))):
            self._put_back_entries()
        for value, before in self._contents:
            _refill(value, before)
        for registry, before in self.hooks:
            if not before.keys() <= registry.keys():
                now = registry.copy()
                registry.clear()
                registry.update(before | now)
        for registry, entries in (module._buffers, self._buffers), (module._modules, self._modules):
            if not _same(registry.values(), entries.values()):
                _put_back_registry(registry, entries)
        return True

    def _put_back_entries(self) -> None:
        for name in [n for n in self.held if n not in self._entries and n not in INTERNAL]:
            del self.held[name]
        for name, value in self._entries.items():
            if name not in self.module._buffers and self.held.get(name, self) is not value:
                self.held[name] = value


def _put_back_registry(registry: Any, entries: dict[str, Any]) -> None:
    if isinstance(registry, _REGISTRIES):
        registry.clear()
    for name, entry in entries.items():
        registry[name] = entry


def _is_part(value: Any) -> bool:
    kind = type(value)
    return kind is Tensor or kind is nn.Parameter or issubclass(kind, nn.Module)


def attributes_of(model: nn.Module) -> list[Attributes]:
    """Return the state of a model's modules, and of those that attributes of theirs hold."""
    modules = all_modules(model)
    known = set(map(id, modules))
    attributes = list(map(Attributes, modules))
    for one in attributes:  # which grows meanwhile
        for _, part in one.parts:
            if id(part) not in known and isinstance(part, nn.Module):
                others = [module for module in all_modules(part) if id(module) not in known]
                known.update(map(id, others))
                attributes += map(Attributes, others)
    return attributes


def remove_hooks_since(number: int, attributes: Iterable[Attributes]) -> None:
    """Remove hooks of modules that were registered since a handle would have had a number.

    Those of modules that have built other parts stay.
    """
    if RemovableHandle.next_id == number:
        return
    for one in attributes:
        if one.has_built:
            continue
        # A model that was unpickled may have hooks of any number.
        kept = {id(registry): before for registry, before in one.hooks}
        for registry in filter(None, map(one.held.get, _HOOKS)):
            before = kept.get(id(registry), ())
            for handle in [h for h in registry if h not in before and _is_since(h, number)]:
                del registry[handle]


def _is_since(handle: Any, number: int) -> bool:
    return not isinstance(handle, int) or handle >= number


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


class Contents:
    """The contents of an object, and of the plain containers and objects in it."""

    def __init__(self, thing: Any) -> None:
        self._parts: dict[int, tuple[Any, Any]] = {}
        self._tensors: dict[int, tuple[Tensor, int, Tensor]] = {}
        self._add(thing, _DEEP)

    def _add(self, thing: Any, depth: int) -> None:
        if isinstance(thing, Tensor):
            self._tensors[id(thing)] = thing, version(thing), thing.detach().clone()
            return
        if callable(thing):  # modules and functions
            return
        is_container = type(thing) is tuple or id(type(thing)) in _CONTAINERS
        held: Any = thing if is_container else instance_dict(thing)
        if held is None or not depth or id(held) in self._parts or len(held) > _MOST:
            return
        self._parts[id(held)] = held, copy(held)
        for entry in _values(held):
            self._add(entry, depth - 1)

    def restore(self) -> bool:
        """Put the contents back, and return True if a tensor was exchanged or written."""
        is_changed = False
        for t, times, values in self._tensors.values():
            if version(t) != times:
                t.data.copy_(values)
                is_changed = True
        for held, before in self._parts.values():
            now = set(map(id, _values(held)))
            tensors = [t for t in _values(before) if isinstance(t, Tensor)]
            is_changed |= any(id(t) not in now for t in tensors)
            if type(held) is not tuple:
                _refill(held, before)
        return is_changed


def _values(held: Any) -> Any:
    return held.values() if id(type(held)) in _DICTS else held


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
