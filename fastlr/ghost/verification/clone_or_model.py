"""Forward passes with other parameters and buffers, which no other thread is to meet in the model.

In: a model. Out: a `CloneOrModel`, which runs it with other tensors: on a clone, modules of the
same classes that hold the same tensors, if that is sure to compute what the model would, else on
the model itself. A clone costs no memory to speak of.

A clone is another object than the model. What holds on to the model (a closure, a hook, a patched
forward, a registry) goes on reading the model's own tensors, so that a parameter could seem to have
no effect. A clone stands in only where

- with the model's own tensors it gives the model's output to the bit, by the same graph;
- with other tensors no operation of a forward pass is given one of the model's parameters or
  buffers, or memory of theirs, and none is a leaf of the graph: seen in a first pass by every
  operation, in all others by all calls from Python.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from fastlr.ghost.batch import cast_inputs, copied
from fastlr.ghost.fusion.conv_bn import FoldRefuted
from fastlr.ghost.graph import walk
from fastlr.ghost.model_io import ModelView, call, call_with, select_output
from fastlr.ghost.objects import storage
from fastlr.ghost.state import emptied_caches
from fastlr.ghost.writes import put_back
from fastlr.ops.model_lock import all_modules
from fastlr.ops.torch_private import DispatchMode, hooks_of_all_modules, tree_leaves

_DICTS = (dict, OrderedDict, defaultdict)
_SEQUENCES = (list, tuple, set, deque)
_LARGE = 256  # entries of a container that are not looked through: modules in it stay the model's
_DEEP = 5  # containers within each other that are copied
_Result = TypeVar("_Result")
_right = WeakIdKeyDictionary()  # model whose clone was right -> True


class ReadsModel(Exception):
    """A forward pass of a clone has read the model, or has failed: the model must make it."""


class CloneOrModel:
    """Runs a model with other parameters and buffers: itself, or a clone once one was found.

    Args:
        view: the model; while it runs itself, other threads see it with these tensors.
        x: inputs of a few samples, by which a clone is tried.

    Attributes:
        model: the module.
        clone: what runs in place of the model; None: the model itself.
    """

    def __init__(self, view: ModelView, x: Any) -> None:
        self.view, self.model, self.x = view, view.module, x
        self.clone: nn.Module | None = None
        self._tried = False

    def find_clone(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        """Look, once, for a clone that is sure to be right.

        Args:
            tensors: name -> other values, for all parameters and buffers.
            dtype: of these; inputs are cast to it.
        """
        if self._tried:
            return
        self._tried = True
        put_back(self.model)
        if not self._may_have_clone():
            return
        device = next(iter(tensors.values())).device.type
        try:
            self._make()
            with torch.autocast(device, enabled=False), torch.enable_grad():
                right = self._gives_the_same() and self._reads_nothing(tensors, dtype)
        except Exception:  # whatever a model raises that is not what it was, or not run as it was
            right = False
        if right:
            _right[self.model] = True
        else:
            self.clone = None
            _right.pop(self.model, None)

    def take_known_clone(self) -> None:
        """Run a clone where one of the model was found to be right before."""
        self._tried = True
        put_back(self.model)
        if self.model in _right and self._may_have_clone():
            self._make()

    def _may_have_clone(self) -> bool:
        """Return False where a clone would not be what the model is, as where it is compiled."""
        if emptied_caches() or any(hooks_of_all_modules()):
            return False
        try:
            return all(map(_is_plain, all_modules(self.model)))
        except Exception:  # whatever an object raises that does not let itself be looked at
            return False

    def _make(self) -> None:
        self._own = _Own(self.model)
        self.clone = _clone(self.model)

    @property
    def running(self) -> nn.Module:
        """The module that runs."""
        return self.model if self.clone is None else self.clone

    def call_with(
        self, tensors: Mapping[str, Tensor], x: Any, *, dtype: torch.dtype | None = None
    ) -> Any:
        """Run the forward pass with these tensors.

        Raises:
            ReadsModel: the clone is not to be trusted; see `carry_out`.
        """
        if self.clone is None:
            return call_with(self.model, tensors, x, dtype=dtype)
        return self._watched(tensors, x, dtype, nullcontext())

    def _watched(
        self,
        tensors: Mapping[str, Tensor],
        x: Any,
        dtype: torch.dtype | None,
        within: AbstractContextManager[Any],
    ) -> Any:
        """Run the clone with these tensors; ReadsModel if a call reads the model's own."""
        calls = _Calls(self._own.ids)
        try:
            both = _both(within, calls)
            result = call_with(self.running, tensors, x, dtype=dtype, within=both)
        except FoldRefuted:
            raise
        except Exception as error:
            raise ReadsModel from error
        if calls.found:
            raise ReadsModel
        return result

    def carry_out(self, work: Callable[[], _Result]) -> _Result:
        """Do work that calls `call_with`.

        Where the clone is not to be trusted, all of the work is done again in place.
        """
        try:
            return work()
        except ReadsModel:
            self.clone = None
        return work()

    def _gives_the_same(self) -> bool:
        """Return True if the clone, with the model's tensors, gives the same by the same graph."""
        parameters = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        outputs, graphs = [], []
        for module in (self.model, self.running):
            z = select_output(call(module, copied(self.x)), self.view.output)
            graph = walk(z, parameters)
            outputs.append(z.detach())
            graphs.append((graph.signature(), [id(graph.nodes[i].variable) for i in graph.others]))
        return torch.equal(*outputs) and graphs[0] == graphs[1]

    def _reads_nothing(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> bool:
        """Return True if the clone reads none of the model's tensors where it is given others.

        Every parameter in its graph must have been seen to be read: what happens where nothing is
        seen (in threads of the model's own) is not to be trusted either.
        """
        operations = _Operations(self._own.storages)
        x = copied(cast_inputs(self.x, dtype))
        z = select_output(self._watched(tensors, x, dtype, operations), self.view.output)
        graph = walk(z, tensors)
        leaves = {id(graph.nodes[i].variable) for i in graph.others} | {id(z)}
        used = {storage(tensors[name]) for name in graph.parameters.values()}
        return not operations.found and leaves.isdisjoint(self._own.ids) and used <= operations.seen


@contextmanager
def _both(
    first: AbstractContextManager[Any], second: AbstractContextManager[Any]
) -> Iterator[None]:
    with first, second:
        yield


class _Own:
    """The parameters and buffers of a model: what a clone must not read.

    Attributes:
        ids: of the tensors.
        storages: addresses of their memory.
    """

    def __init__(self, model: nn.Module) -> None:
        held = [
            t
            for m in all_modules(model)
            for d in (m._parameters, m._buffers)
            for t in d.values()
            if t is not None
        ]
        self.ids = frozenset(map(id, held))
        self.storages = frozenset(map(storage, held)) - {0}


class _Calls(TorchFunctionMode):
    """Sees whether a call from Python is given one of some tensors."""

    def __init__(self, ids: Collection[int]) -> None:
        super().__init__()
        self.ids, self.found = ids, False

    def __torch_function__(
        self, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # noqa: D105
        kwargs = kwargs or {}
        if not self.found:
            self.found = self._any(args) or self._any(kwargs.values())
        return func(*args, **kwargs)

    def _any(self, values: Any) -> bool:
        for value in values:
            if isinstance(value, Tensor):
                if id(value) in self.ids:
                    return True
            elif isinstance(value, (tuple, list, dict)):
                if any(id(t) in self.ids for t in tree_leaves(value)):
                    return True
        return False


class _Operations(DispatchMode):
    """Sees whether an operation reads some memory, and which memory operations read."""

    def __init__(self, storages: Collection[int]) -> None:
        super().__init__()
        self.storages, self.found = storages, False
        self.seen: set[int] = set()

    def __torch_dispatch__(
        self, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # noqa: D105
        kwargs = kwargs or {}
        self._note([t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)])
        return func(*args, **kwargs)

    def _note(self, tensors: list[Tensor]) -> None:
        """Note which memory an operation on these tensors reads."""
        try:
            read = set(map(storage, tensors))
        except RuntimeError:
            wraps_tensors_that_it_does_not_show = True  # as a nested tensor does
            self.found = wraps_tensors_that_it_does_not_show
            return
        self.seen |= read
        self.found |= not read.isdisjoint(self.storages)


# -- the clone
# --------------------------------------------------------------------------------------------------


def _is_plain(module: nn.Module) -> bool:
    """Return True if its attributes are all that a module holds, and its calls not compiled."""
    kind, held = type(module), vars(module)
    if isinstance(module, torch.jit.ScriptModule) or held.get("_compiled_call_impl") is not None:
        return False
    if any(type(held.get(name)) not in _DICTS for name in ("_parameters", "_buffers", "_modules")):
        return False
    if any(vars(base).get("__slots__") for base in kind.__mro__):
        return False
    return not any(
        hasattr(f, "_torchdynamo_orig_callable") for f in (held.get("forward"), kind.forward)
    )


def _clone(model: nn.Module) -> nn.Module:
    """Return modules of the same classes, with copies of containers that hold the same objects.

    Modules of the model, and their methods, become those of the clone wherever an attribute or
    container has them.
    """
    modules = all_modules(model)
    clones: dict[int, Any] = {id(module): object.__new__(type(module)) for module in modules}
    copies = _Copies(clones)
    for module in modules:
        attributes = vars(clones[id(module)])
        for name, value in dict(vars(module)).items():
            attributes[name] = copies.of(value)
    return clones[id(model)]


class _Copies:
    """Copies of containers, each made once, in which clones stand for their modules."""

    def __init__(self, clones: Mapping[int, nn.Module]) -> None:
        self.clones = clones
        self.made: dict[int, Any] = {}

    def of(self, value: Any, depth: int = 0) -> Any:
        """The copy of a container, the clone of a module, or the value itself."""
        clone = self.clones.get(id(value))
        if clone is not None:
            return clone
        if type(value) is MethodType and id(value.__self__) in self.clones:
            return MethodType(value.__func__, self.clones[id(value.__self__)])
        if type(value) in _DICTS or type(value) in _SEQUENCES:
            if id(value) not in self.made:
                self.made[id(value)] = self._container(value, depth)
            return self.made[id(value)]
        return value

    def _container(self, value: Any, depth: int) -> Any:
        if type(value) is tuple:
            small = len(value) <= _LARGE and depth < _DEEP
            return tuple(self.of(entry, depth + 1) for entry in value) if small else value
        copy = self.made[id(value)] = value.copy()  # at once: it may hold itself
        if len(value) > _LARGE or depth >= _DEEP:
            return copy
        if type(value) in _DICTS:
            for key, entry in value.items():
                copy[key] = self.of(entry, depth + 1)
            return copy
        entries = [self.of(entry, depth + 1) for entry in value]
        copy.clear()
        if type(value) is set:
            copy.update(entries)
        else:
            copy.extend(entries)
        return copy
