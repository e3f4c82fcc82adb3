"""The attributes of a model's modules, put back where a forward pass has changed them.

In: a module. Out: its entries, containers and hooks by identity (`Attributes`). The values of
tensors are kept by `fastlr.ghost.model.writes`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from itertools import islice
from operator import is_
from typing import Any

from torch import Tensor, nn

from fastlr.ops.objects import INTERNAL, PLAIN

_DICTS = frozenset((dict, OrderedDict, defaultdict, Counter))
_CONTAINERS = _DICTS.union((list, set, deque, tuple))
_MOST = 256  # entries of a container that are looked at
_HOOKS = frozenset(n for n in INTERNAL if n.startswith(("_forward", "_backward")))
# Of classes of their own in scripted modules.
_REGISTRIES = frozenset(("_parameters", "_buffers", "_modules"))
_SKIPPED = INTERNAL - _REGISTRIES - _HOOKS - {"_non_persistent_buffers_set"}


class Attributes:
    """The attributes of a model's modules, as they were when this was made.

    Containers among them are looked at one deep.

    Attributes:
        modules: The modules of the model, and those that attributes hold.
        hooks: Registries of the modules' hooks.
        tensors: Parameters, buffers and other tensors, each with the name of what holds it.
        caches: Dicts of plain tensors and nothing else, such as the attention biases that timm's
            LeViT keeps, each with its name.
        known: Ids of these modules and tensors.
    """

    def __init__(self, model: nn.Module) -> None:
        self.hooks: list[Any] = []
        self.tensors: list[tuple[str, Tensor]] = []
        self.caches: list[tuple[str, dict[Any, Tensor]]] = []
        self.known = {id(model)}
        self._contents = list[Any]()  # containers, and what they held
        self._empty: list[Any] = []
        self._scripted = list[Any]()  # registries of scripted modules
        self._found = [(model, "")]
        for module, prefix in self._found:  # which grows meanwhile
            self._take(vars(module), prefix)
        self.modules = [module for module, _ in self._found]

    def _take(self, held: dict[str, Any], prefix: str) -> None:
        self._contents.append((held, held.copy()))
        for name, value in held.items():
            if name in _SKIPPED or type(value) in PLAIN:
                continue
            if name in _HOOKS:
                self.hooks.append(value)
            elif name in _REGISTRIES:
                self._keep(value)
                for key, entry in value.items():
                    self._enter(entry, prefix, key)
            elif type(value) in _CONTAINERS:
                self._keep(value)
                if type(value) is dict and {*map(type, value.values())} == {Tensor}:
                    self.caches.append((f"{prefix}{name}", value))
                entries = value.values() if type(value) in _DICTS else value
                for entry in islice(entries, _MOST):
                    self._enter(entry, prefix, name)
            else:
                self._enter(value, prefix, name)

    def _keep(self, container: Any) -> None:
        if not container:
            self._empty.append(container)
        elif type(container) in _CONTAINERS:
            self._contents.append((container, copy(container)))
        else:
            self._scripted.append((container, dict(container.items())))

    def _enter(self, value: Any, prefix: str, name: str) -> None:
        """Enter what an attribute, or a container among them, holds."""
        kind = type(value)
        is_tensor = kind is Tensor or kind is nn.Parameter
        if not (is_tensor or issubclass(kind, nn.Module)) or id(value) in self.known:
            return
        self.known.add(id(value))
        if not is_tensor:
            self._found.append((value, f"{prefix}{name}."))
        elif not value.is_inference():
            self.tensors.append((f"{prefix}{name}", value))

    def put_back(self) -> None:
        """Put back what differs, but for hooks."""
        for container in filter(None, self._empty):
            container.clear()
        for container, before in self._contents:
            is_same = len(container) == len(before) and all(map(is_, container, before))
            if is_same and type(container) in _DICTS:
                is_same = all(map(is_, container.values(), before.values()))
            if is_same:
                continue
            container.clear()
            if type(container) in (list, deque):
                container.extend(before)
            else:
                container.update(before)
        for registry, entries in self._scripted:
            for name in [name for name, entry in entries.items() if registry[name] is not entry]:
                registry[name] = entries[name]


_emptied: ContextVar[Collection[tuple[str, dict]]] = ContextVar("fastlr_emptied", default=())


@contextmanager
def emptied(caches: Collection[tuple[str, dict]]) -> Iterator[None]:
    """Run forward passes of ours within this context with these dicts empty.

    These passes are those of `forward_pass`; for the dicts see `fastlr.ghost.trust.caches`.
    """
    token = _emptied.set(caches)
    try:
        yield
    finally:
        _emptied.reset(token)


caches_to_empty = _emptied.get  # the dicts that forward passes run without here
