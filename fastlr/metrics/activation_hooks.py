"""Watching one forward pass, for the activations of its units.

The layer that the output comes from is found, too.

A `Watch` is a TorchFunctionMode, so it sees functional calls (``F.relu`` in a model's forward) as
well as modules, and it reduces each activation to one sum a unit at once, so that nothing is kept
and later in-place changes do not matter.

Two things are followed from tensor to tensor, in weak tables: which axis holds the units, and which
layer made it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from fastlr.errors import InputError, ModelError
from fastlr.ops.torch_private import no_torch_function, tree_leaves

RELU = {"relu", "relu6"}


def _functions(names: str, *owners: Any) -> dict[Any, str]:
    """The functions of these names that the modules and classes have, and their names."""
    return {
        getattr(owner, name): name
        for owner in owners
        for name in names.split()
        if hasattr(owner, name)
    }


_ACTIVATIONS = "relu relu6 hardswish gelu silu mish elu selu celu leaky_relu prelu rrelu hardtanh"
FUNCTIONS = {
    function: name.replace("_", "")
    for names in (_ACTIVATIONS, _ACTIVATIONS.replace(" ", "_ ") + "_")
    for function, name in _functions(names, F, torch, Tensor).items()
}
# Written-out formulas (Hugging Face's NewGELUActivation, a user's SquaredReLU) are known by the
# names of their classes.
_MODULES = re.compile(
    r"(?i:relu|gelu|silu|swish|mish)|ELU|LaplaceActivation|Tanh$|Softsign|Softplus"
)
_CHANNEL_NORMS = {F.batch_norm, F.group_norm, F.instance_norm}
_LAST_NORMS = {F.layer_norm, F.rms_norm}
CONVOLUTIONS = {getattr(F, f"conv{kind}{n}d"): n for kind in ("", "_transpose") for n in (1, 2, 3)}
_PRODUCTS = {
    *_functions("matmul mm bmm addmm baddbmm einsum __matmul__ __rmatmul__", torch, Tensor),
    F.scaled_dot_product_attention,
}
MOVES = {
    *_functions("permute transpose swapaxes swapdims movedim moveaxis t adjoint", torch, Tensor),
    *(getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH")),
}


@dataclass(eq=False)
class Activation:
    """One call of an activation: its units' sums of |a| (signed: of a).

    With the number of values behind each sum.
    """

    name: str
    kind: str
    sums: Tensor
    count: int


@dataclass(eq=False)
class Origin:
    """The layer that a tensor comes from, elementwise operations and rearrangements aside."""

    kind: str  # "linear", or the name of another function
    name: str
    features: Tensor | None = None  # the linear layer's input
    version: int = 0


class Watch(TorchFunctionMode):
    """Record the activations and the origins of a model's forward passes in its thread.

    It is used through `watching`.

    Args:
        model: the model, unwrapped.
        also: further activations: module classes, or functions of torch such as ``torch.tanh``.
        layer: name of a module whose input is kept as features.
        signed: sum the activations as they are, not their absolute values.
    """

    def __init__(
        self,
        model: nn.Module,
        also: Sequence[Any] = (),
        layer: str | None = None,
        *,
        signed: bool = False,
    ) -> None:
        super().__init__()
        self.model, self.layer, self.signed = model, layer, signed
        self.classes = tuple(a for a in also if isinstance(a, type))
        self.functions = FUNCTIONS | {
            a: getattr(a, "__name__", str(a)) for a in also if not isinstance(a, type)
        }
        self.activations: dict[tuple[str, str, int], Activation] = {}
        self.layer_input: Tensor | None = None
        self.layer_input_axis: int | None = None
        self.weights = {p.untyped_storage().data_ptr() for p in model.parameters()} - {0}
        self.thread = threading.get_ident()
        self.here: set[str] = set()  # names of the modules that ran in this thread, in all passes
        self.elsewhere: set[str] = set()
        self.reset()

    def reset(self) -> None:
        """Forget the last forward pass, its sums aside."""
        self.path: list[str] = []
        self.inside = 0
        self.seen: dict[tuple[str, str], int] = {}
        self.axes = WeakTensorKeyDictionary()
        self.origins = WeakTensorKeyDictionary()
        self.layer_input = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the model's forward passes within this context."""
        self.reset()
        names = dict(self.model.named_modules())
        if self.layer is not None and self.layer not in names:
            known = [name for name, m in names.items() if isinstance(m, nn.Linear)]
            raise InputError(
                f"layer={self.layer!r} is no module of the model; its linear layers: "
                f"{', '.join(known[-6:]) or 'none'}"
            )
        handles = []
        try:
            for name, module in names.items():
                active = self._is_activation(module)
                handles.append(
                    module.register_forward_pre_hook(self._enter(name, active), with_kwargs=True)
                )
                handles.append(module.register_forward_hook(self._leave(active), always_call=True))
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()
        unseen = sorted(self.elsewhere - self.here)
        if unseen:
            raise ModelError(
                f"module {unseen[0]} runs in another thread than the forward pass, where its "
                "activations are not seen: let it run in this one, and no other thread use the "
                "model meanwhile"
            )

    def _ours(self, name: str) -> bool:
        """Note a call of a module; return True unless another thread makes it.

        Another thread's forward pass is not the one that is watched.
        """
        ours = threading.get_ident() == self.thread
        (self.here if ours else self.elsewhere).add(name)
        return ours

    def _is_activation(self, module: nn.Module) -> bool:
        if self.classes and isinstance(module, self.classes):
            return True
        simple = next(module.children(), None) is None and all(
            p.ndim < 2 for p in module.parameters()
        )
        return simple and bool(_MODULES.search(type(module).__name__))

    def _enter(self, name: str, active: bool) -> Callable:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            if not self._ours(name):
                return
            self.path.append(name)
            self.inside += active
            if name == self.layer:
                self.layer_input = next(
                    (t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)), None
                )
                if self.layer_input is not None:
                    convolution = isinstance(module, nn.modules.conv._ConvNd)
                    linear = isinstance(module, nn.Linear)
                    tagged = self.axes.get(self.layer_input)
                    self.layer_input_axis = (
                        1 if convolution else -1 if linear or tagged is None else tagged
                    )
                    with no_torch_function():  # whatever happens to it in place later
                        self.layer_input = self.layer_input.detach().clone()

        return hook

    def _leave(self, active: bool) -> Callable:
        def hook(module: nn.Module, args: Any, result: Any) -> None:
            if threading.get_ident() != self.thread:
                return
            if active:
                self.inside -= 1
                if self.inside == 0 and isinstance(result, Tensor):
                    self._add(_plain(type(module).__name__), result)
            if self.path:
                self.path.pop()

        return hook

    def __torch_function__(
        self, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run a function of torch and look at its result."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        results = [
            t
            for t in (result if isinstance(result, (tuple, list)) else [result])
            if isinstance(t, Tensor)
        ]
        if results:
            operands = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            self._follow_axis(func, args, kwargs, operands, results)
            self._follow_origin(func, operands, results)
            kind = self.functions.get(func)
            if (
                kind
                and self.inside == 0
                and not (operands and isinstance(operands[0], nn.Parameter))
            ):
                self._add(kind, results[0])
        return result

    def features(self, output: Tensor | None) -> tuple[Tensor, int, str]:
        """Return the representation behind the output.

        Returned with it are its axis of features, and the name of the layer that it goes into.

        Raises ModelError where there is none.
        """
        if self.layer is not None:
            if self.layer_input is None or not self.layer_input.is_floating_point():
                raise ModelError(
                    f"layer={self.layer!r} was not called with floating-point features in this "
                    "forward pass: choose another"
                )
            return (
                self.layer_input,
                self.layer_input_axis if self.layer_input_axis is not None else -1,
                self.layer,
            )
        origin = None if output is None else self.origins.get(output)
        remedy = "pass layer= with the name of the module whose input is the representation"
        if origin is None:
            raise ModelError(f"no layer was found that makes the model's output; {remedy}")
        if origin.kind != "linear" or origin.features is None:
            where = f"{origin.name} ({origin.kind})" if origin.name else origin.kind
            raise ModelError(f"the output comes from {where}, not from one linear layer; {remedy}")
        name = origin.name or "(model)"
        if origin.features._version != origin.version:
            raise ModelError(f"the input of {name} was changed in place after its use; {remedy}")
        return origin.features, -1, name

    # -- activations
    # ----------------------------------------------------------------------------------------------

    def _add(self, kind: str, a: Tensor) -> None:  # a: any axes, the units along one of them
        """Add one activation to the sums of its units."""
        path = self.path[-1] if self.path else ""
        at = self.seen[path, kind] = self.seen.get((path, kind), 0) + 1
        if a.ndim == 0 or not a.is_floating_point() or a.numel() == 0:
            return
        name = (path or "(model)") + (f"#{at}" if at > 1 else "")
        with no_torch_function(), torch.autocast(a.device.type, enabled=False):
            axis = self.axes.get(a)
            if axis is None:
                axis = 1 if a.ndim >= 4 else a.ndim - 1
            others = [d for d in range(a.ndim) if d != axis]
            a = a.detach()
            # Float64 would cost a copy of the activation.
            wide = torch.promote_types(a.dtype, torch.float32)
            if self.signed:
                sums = a.sum(others, dtype=wide).double() if others else a.double()
            else:
                sums = (
                    torch.linalg.vector_norm(a, 1, others, dtype=wide).double()
                    if others
                    else a.abs().double()
                )
            activation = self.activations.get((path, kind, at))
            if activation is None:
                self.activations[path, kind, at] = Activation(
                    name, kind, sums, a.numel() // len(sums)
                )
            elif len(activation.sums) != len(sums):
                raise ModelError(
                    f"{name} ({kind}) has {len(activation.sums)} units in one batch and "
                    f"{len(sums)} in another: give batches of one shape"
                )
            else:
                activation.sums = activation.sums + sums
                activation.count += a.numel() // len(sums)

    # -- the axis that holds the units
    # ------------------------------------------------------------------------------

    def _follow_axis(
        self, func: Any, args: Any, kwargs: Any, operands: list[Tensor], results: list[Tensor]
    ) -> None:
        result = results[0]
        if func in CONVOLUTIONS:
            self.axes[result] = 1 if result.ndim == CONVOLUTIONS[func] + 2 else 0
            return
        weights = [t for t in operands if self._is_weight(t)]
        if func is F.linear or (func in _PRODUCTS and weights and func is not torch.einsum):
            self.axes[result] = result.ndim - (
                2 if func is not F.linear and operands[0] is weights[0] else 1
            )
            return
        source = next((t for t in operands if t in self.axes), None)
        if source is None:
            if func in _CHANNEL_NORMS and result.ndim > 1:
                self.axes[result] = 1
            elif func in _LAST_NORMS:
                self.axes[result] = result.ndim - 1
            return
        before: int = self.axes[source]
        for t in results:
            after = (
                moved(func, args, kwargs, source, before)
                if func in MOVES
                else _kept(source, before, t)
            )
            if after is not None:
                self.axes[t] = after

    # -- the layer that it comes from
    # -------------------------------------------------------------------------------

    def _is_weight(self, t: Tensor) -> bool:
        return (
            t.layout == torch.strided
            and t.ndim >= 2
            and t.untyped_storage().data_ptr() in self.weights
        )

    def _follow_origin(self, func: Any, operands: list[Tensor], results: list[Tensor]) -> None:
        module = self.path[-1] if self.path else ""
        function = getattr(func, "__name__", str(func))
        weights = [t for t in operands if self._is_weight(t)]
        origin: Origin | None = None
        if func is F.linear:
            origin = Origin("linear", module, operands[0], operands[0]._version)
        elif func in _PRODUCTS:
            origin = Origin(function, module)
            rest = [t for t in operands if not self._is_weight(t) and t.ndim > 1]
            if (
                len(weights) == 1 == len(rest)
                and weights[0].ndim == 2
                and operands[0] is not weights[0]
            ):
                origin = Origin("linear", module, rest[0], rest[0]._version)
        elif weights:
            origin = Origin(function, module)
        else:
            origins = {id(o): o for o in (self.origins.get(t) for t in operands) if o is not None}
            if len(origins) == 1:
                (origin,) = origins.values()
            elif origins:
                origin = Origin(
                    " and ".join(sorted({o.name or "(model)" for o in origins.values()})), ""
                )
        if origin is not None:
            for t in results:
                self.origins[t] = origin


def _plain(name: str) -> str:
    """Turn the name of a class into a kind: ReLU -> relu, NewGELUActivation -> newgelu."""
    return name.lower().removesuffix("activation")


def moved(func: Any, args: tuple, kwargs: dict, source: Tensor, axis: int) -> int | None:
    """Return an axis's place after a permutation, None where it cannot be told.

    The permutation is run on a small tensor that is 2 long there and 1 elsewhere.
    """
    if not args or args[0] is not source:
        return None
    marker = torch.empty([2 if d == axis else 1 for d in range(source.ndim)])
    shape = list(func(marker, *args[1:], **kwargs).shape)
    return shape.index(2)


def _kept(source: Tensor, axis: int, result: Tensor) -> int | None:
    """Return an axis's place in a result: the same place, or where a view has put it.

    A view has put it where an axis of the same size has as many elements before it.
    """
    size = source.shape[axis]
    if result.numel() == source.numel() and result.shape != source.shape:
        before, wanted = 1, source.shape[:axis].numel()
        for d, n in enumerate(result.shape):
            if before == wanted and n == size:
                return d
            before *= n
        return None
    return axis if result.ndim == source.ndim else None
