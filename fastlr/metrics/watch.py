"""Watching one forward pass: the activations of its units, and the layer that its output comes from.

A `Watch` is a TorchFunctionMode, so it sees functional calls (``F.relu`` in a model's forward) as well as modules, and it
reduces each activation to one sum a unit at once, so that nothing is kept and later in-place changes do not matter.

Two things are followed from tensor to tensor, in weak tables: which axis holds the units, and which layer made it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from fastlr.errors import InputError, ModelError

RELU = {"relu", "relu6"}
_NAMES = "relu relu6 hardswish gelu silu mish elu selu celu leaky_relu prelu rrelu hardtanh".split()
FUNCTIONS: dict[Any, str] = {
    getattr(owner, name + end): name.replace("_", "")
    for name in _NAMES
    for owner in (F, torch, Tensor)
    for end in ("", "_")
    if hasattr(owner, name + end)
}
# Written-out formulas (Hugging Face's NewGELUActivation, a user's SquaredReLU) are known by the names of their classes.
_MODULES = re.compile(r"(?i:relu|gelu|silu|swish|mish)|ELU|LaplaceActivation|Tanh$|Softsign|Softplus")
_CHANNEL_NORMS = {F.batch_norm, F.group_norm, F.instance_norm}
_LAST_NORMS = {F.layer_norm, F.rms_norm}
CONVOLUTIONS = {
    **{getattr(F, f"conv{n}d"): n for n in (1, 2, 3)},
    **{getattr(F, f"conv_transpose{n}d"): n for n in (1, 2, 3)},
}
_PRODUCTS = {
    getattr(owner, name)
    for owner in (torch, Tensor)
    for name in "matmul mm bmm addmm baddbmm einsum __matmul__ __rmatmul__".split()
    if hasattr(owner, name)
} | {F.scaled_dot_product_attention}
MOVES = {
    getattr(owner, name)
    for owner in (torch, Tensor)
    for name in "permute transpose swapaxes swapdims movedim moveaxis t adjoint".split()
    if hasattr(owner, name)
} | {getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH")}


@dataclass(eq=False)
class Site:
    """One call of an activation: its units' sums of |a| and the number of values behind each."""

    name: str
    kind: str
    sums: Tensor
    count: int


@dataclass(eq=False)
class Source:
    """The layer that a tensor comes from, elementwise operations and rearrangements aside."""

    kind: str  # "linear", or what it is instead
    name: str
    features: Tensor | None = None  # the linear layer's input
    version: int = 0


class Watch(TorchFunctionMode):
    """Sees the activations and the sources of a model's forward passes; used through `watching`.

    Args:
        model: the model, unwrapped.
        also: further activations: module classes, or functions of torch such as ``torch.tanh``.
        layer: name of a module whose input is kept as features.
    """

    def __init__(self, model: nn.Module, also: Sequence[Any] = (), layer: str | None = None) -> None:
        super().__init__()
        self.model, self.layer = model, layer
        self.classes = tuple(a for a in also if isinstance(a, type))
        self.functions = FUNCTIONS | {a: getattr(a, "__name__", str(a)) for a in also if not isinstance(a, type)}
        self.sites: dict[tuple[str, str, int], Site] = {}
        self.given: Tensor | None = None
        self.given_axis: int | None = None
        self.weights = {p.untyped_storage().data_ptr() for p in model.parameters()} - {0}
        self.reset()

    def reset(self) -> None:
        """Forget the last forward pass, its sums aside."""
        self.path: list[str] = []
        self.inside = 0
        self.seen: dict[tuple[str, str], int] = {}
        self.axes = WeakTensorKeyDictionary()
        self.sources = WeakTensorKeyDictionary()
        self.given = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what the model does within this context."""
        self.reset()
        names = dict(self.model.named_modules())
        if self.layer is not None and self.layer not in names:
            known = [name for name, m in names.items() if isinstance(m, nn.Linear)]
            raise InputError(
                f"layer={self.layer!r} is no module of the model; its linear layers: {', '.join(known[-6:]) or 'none'}"
            )
        handles = []
        try:
            for name, module in names.items():
                active = self._is_activation(module)
                handles.append(module.register_forward_pre_hook(self._enter(name, active), with_kwargs=True))
                handles.append(module.register_forward_hook(self._leave(active), always_call=True))
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _is_activation(self, module: nn.Module) -> bool:
        if self.classes and isinstance(module, self.classes):
            return True
        simple = next(module.children(), None) is None and all(p.ndim < 2 for p in module.parameters())
        return simple and bool(_MODULES.search(type(module).__name__))

    def _enter(self, name: str, active: bool) -> Callable:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            self.path.append(name)
            self.inside += active
            if name == self.layer:
                self.given = next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)), None)
                if self.given is not None:
                    convolution = isinstance(module, nn.modules.conv._ConvNd)
                    linear = isinstance(module, nn.Linear)
                    tagged = self.axes.get(self.given)
                    self.given_axis = 1 if convolution else -1 if linear or tagged is None else tagged
                    with torch._C.DisableTorchFunction():  # whatever happens to it in place later
                        self.given = self.given.detach().clone()

        return hook

    def _leave(self, active: bool) -> Callable:
        def hook(module: nn.Module, args: Any, result: Any) -> None:
            if active:
                self.inside -= 1
                if self.inside == 0 and isinstance(result, Tensor):
                    self._add(_plain(type(module).__name__), result)
            if self.path:
                self.path.pop()

        return hook

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch and look at its result."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        results = [result] if isinstance(result, Tensor) else []
        if isinstance(result, (tuple, list)):
            results = [t for t in result if isinstance(t, Tensor)]
        if results:
            given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            self._follow_axis(func, args, kwargs, given, results)
            self._follow_source(func, args, given, results)
            kind = self.functions.get(func)
            if kind and self.inside == 0 and not (given and isinstance(given[0], nn.Parameter)):
                self._add(kind, results[0])
        return result

    def features(self, output: Tensor | None) -> tuple[Tensor, int, str]:
        """The representation behind the output, its axis of features, and the layer that it goes into.

        Raises ModelError where there is none.
        """
        if self.layer is not None:
            if self.given is None or not self.given.is_floating_point():
                raise ModelError(
                    f"layer={self.layer!r} was not called with floating-point features in this forward pass: choose another"
                )
            return self.given, self.given_axis if self.given_axis is not None else -1, self.layer
        source = None if output is None else self.sources.get(output)
        remedy = "pass layer= with the name of the module whose input is the representation"
        if source is None:
            raise ModelError(f"no layer was found that makes the model's output; {remedy}")
        if source.kind != "linear" or source.features is None:
            where = f"{source.name} ({source.kind})" if source.name else source.kind
            raise ModelError(f"the output comes from {where}, not from one linear layer; {remedy}")
        name = source.name or "(model)"
        if source.features._version != source.version:
            raise ModelError(f"the input of {name} was changed in place after its use; {remedy}")
        return source.features, -1, name

    # -- activations ------------------------------------------------------------------------------------------------

    def _add(self, kind: str, a: Tensor) -> None:
        """Add one activation to the sums of its units."""
        path = self.path[-1] if self.path else ""
        at = self.seen[path, kind] = self.seen.get((path, kind), 0) + 1
        if a.ndim == 0 or not a.is_floating_point() or a.numel() == 0:
            return
        name = (path or "(model)") + (f"#{at}" if at > 1 else "")
        with torch._C.DisableTorchFunction(), torch.autocast(a.device.type, enabled=False):
            axis = self.axes.get(a)
            if axis is None:
                axis = 1 if a.ndim >= 4 else a.ndim - 1
            others = [d for d in range(a.ndim) if d != axis]
            a = a.detach()
            wide = torch.promote_types(a.dtype, torch.float32)  # float64 would cost a copy of the activation
            sums = torch.linalg.vector_norm(a, 1, others, dtype=wide).double() if others else a.abs().double()
            site = self.sites.get((path, kind, at))
            if site is None:
                self.sites[path, kind, at] = Site(name, kind, sums, a.numel() // len(sums))
            elif len(site.sums) != len(sums):
                raise ModelError(
                    f"{name} ({kind}) has {len(site.sums)} units in one batch and {len(sums)} in another: give batches of "
                    "one shape"
                )
            else:
                site.sums = site.sums + sums
                site.count += a.numel() // len(sums)

    # -- the axis that holds the units ------------------------------------------------------------------------------

    def _follow_axis(self, func: Any, args: Any, kwargs: Any, given: list[Tensor], results: list[Tensor]) -> None:
        result = results[0]
        if func in CONVOLUTIONS:
            self.axes[result] = 1 if result.ndim == CONVOLUTIONS[func] + 2 else 0
            return
        weights = [t for t in given if self._is_weight(t)]
        if func is F.linear or (func in _PRODUCTS and weights and func is not torch.einsum):
            self.axes[result] = result.ndim - (2 if func is not F.linear and given[0] is weights[0] else 1)
            return
        source = next((t for t in given if t in self.axes), None)
        if source is None:
            if func in _CHANNEL_NORMS and result.ndim > 1:
                self.axes[result] = 1
            elif func in _LAST_NORMS:
                self.axes[result] = result.ndim - 1
            return
        before: int = self.axes[source]
        for t in results:
            after = moved(func, args, kwargs, source, before) if func in MOVES else _kept(source, before, t)
            if after is not None:
                self.axes[t] = after

    # -- the layer that it comes from -------------------------------------------------------------------------------

    def _is_weight(self, t: Tensor) -> bool:
        return t.ndim >= 2 and t.untyped_storage().data_ptr() in self.weights

    def _follow_source(self, func: Any, args: Any, given: list[Tensor], results: list[Tensor]) -> None:
        name = self.path[-1] if self.path else ""
        source: Source | None = None
        weights = [t for t in given if self._is_weight(t)]
        if func is F.linear:
            source = Source("linear", name, given[0], given[0]._version)
        elif func in _PRODUCTS:
            rest = [t for t in given if not self._is_weight(t) and t.ndim > 1]
            if len(weights) == 1 == len(rest) and weights[0].ndim == 2 and given[0] is not weights[0]:
                source = Source("linear", name, rest[0], rest[0]._version)
            else:
                source = Source(getattr(func, "__name__", str(func)), name)
        elif weights:
            source = Source(getattr(func, "__name__", str(func)), name)
        else:
            sources = {id(s): s for s in (self.sources.get(t) for t in given) if s is not None}
            if len(sources) == 1:
                (source,) = sources.values()
            elif sources:
                source = Source(" and ".join(sorted({s.name or "(model)" for s in sources.values()})), "")
        for t in results:
            if source is not None:
                self.sources[t] = source


def _plain(name: str) -> str:
    """Turn the name of a class into a kind: ReLU -> relu, NewGELUActivation -> newgelu."""
    return name.lower().removesuffix("activation")


def moved(func: Any, args: tuple, kwargs: dict, source: Tensor, axis: int) -> int | None:
    """Where an axis goes in a permutation, by running it on a small tensor that is 2 long there and 1 elsewhere."""
    if not args or args[0] is not source:
        return None
    marker = torch.empty([2 if d == axis else 1 for d in range(source.ndim)])
    shape = list(func(marker, *args[1:], **kwargs).shape)
    return shape.index(2)


def _kept(source: Tensor, axis: int, result: Tensor) -> int | None:
    """Where an axis is in a result: the same place, or where a view has the same size with as much before it."""
    size = source.shape[axis]
    if result.numel() == source.numel() and result.shape != source.shape:
        before, wanted = 1, source.shape[:axis].numel()
        for d, n in enumerate(result.shape):
            if before == wanted and n == size:
                return d
            before *= n
        return None
    return axis if result.ndim == source.ndim else None
