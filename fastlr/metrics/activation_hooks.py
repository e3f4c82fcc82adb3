"""Watch a forward pass: sum the activations of its units, find the layer that makes the output.

A `Watch` is a TorchFunctionMode, so it sees functional calls (``F.relu`` in a model's forward) as
well as modules, and it reduces each activation to one sum a unit at once, so that nothing is kept
and later in-place changes do not matter.

It follows two things from tensor to tensor, in weak tables: which axes hold the units, and which
layer made the tensor.
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
from fastlr.metrics.unit_axes import PRODUCTS, UnitAxes, named, tensors_in
from fastlr.metrics.written_relus import WrittenReLUs
from fastlr.ops.objects import storage
from fastlr.ops.torch_private import Convolution, no_torch_function

RELU = {"relu", "relu6"}
_ACTIVATIONS = "relu relu6 hardswish gelu silu mish elu selu celu leaky_relu prelu rrelu hardtanh"
FUNCTIONS = {
    function: name.replace("_", "") for name in _ACTIVATIONS.split() for function in named(name)
}
# Written-out formulas (Hugging Face's NewGELUActivation, a user's SquaredReLU) are known by the
# names of their classes.
_MODULES = re.compile(
    r"(?i:relu|gelu|silu|swish|mish)|ELU|LaplaceActivation|Tanh$|Softsign|Softplus"
)


@dataclass(eq=False)
class Activation:
    """One call of an activation function, summed unit by unit.

    Attributes:
        name: Name of the module that makes the call, with ``#2`` for its second call.
        kind: Kind of activation function, such as ``relu``.
        sums: ``[units]``, float64: sums of |a|, or of a where the watch is signed.
        count: Values behind each sum.
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
        self.functions = FUNCTIONS | {a: name_of(a) for a in also if not isinstance(a, type)}
        self.activations: dict[tuple[str, str, int], Activation] = {}
        self.layer_input: Tensor | None = None
        self.axes = UnitAxes(self._is_weight)
        self.weights = {storage(p) for p in model.parameters()} - {0}
        self.thread = threading.get_ident()
        self.here: set[str] = set()  # names of the modules that ran in this thread, in all passes
        self.elsewhere: set[str] = set()
        self.reset()

    def reset(self) -> None:
        """Forget the last forward pass, its sums aside."""
        self.path: list[str] = []
        self.inside = 0
        self.seen: dict[tuple[str, str], int] = {}
        self.axes.forget()
        self.origins = WeakTensorKeyDictionary()
        self.kinds = WeakTensorKeyDictionary()  # of the activations, by their results
        self.written = WrittenReLUs(self.axes.of)
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

    @property
    def module_name(self) -> str:
        """Name of the module that is running; empty for the model itself."""
        return self.path[-1] if self.path else ""

    def _ours(self, name: str) -> bool:
        """Note a call of a module; return True unless another thread makes it.

        Another thread's forward pass is not the one that is watched.
        """
        ours = threading.get_ident() == self.thread
        names = self.here if ours else self.elsewhere
        names.add(name)
        return ours

    def _is_activation(self, module: nn.Module) -> bool:
        """Return True for a module that the user named, or a small one with such a class's name."""
        if self.classes and isinstance(module, self.classes):
            return True
        if list(module.children()) or any(p.ndim >= 2 for p in module.parameters()):
            return False
        return bool(_MODULES.search(type(module).__name__))

    def _enter(self, name: str, active: bool) -> Callable:
        """Return the hook that runs before a module's forward; ``active``: it is an activation."""

        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            if not self._ours(name):
                return
            self.path.append(name)
            self.inside += active
            if name == self.layer:
                self._keep_input(module, (*args, *kwargs.values()))

        return hook

    def _keep_input(self, module: nn.Module, given: Sequence[Any]) -> None:
        """Keep a copy of the first tensor that the user's layer is given, and its feature axis."""
        tensors = [t for t in given if isinstance(t, Tensor)]
        if not tensors:
            self.layer_input = None
            return
        x, axes = tensors[0], [-1]
        if isinstance(module, Convolution):
            axes = [1]
        elif not isinstance(module, nn.Linear):
            axes = list(self.axes.of(x) or axes)
        with no_torch_function():  # a copy: x may be changed in place later
            self.layer_input = _with_units_last(x.detach(), axes).clone()

    def _leave(self, active: bool) -> Callable:
        """Return the hook that runs after a module's forward; ``active``: it is an activation."""

        def hook(module: nn.Module, args: Any, result: Any) -> None:
            if threading.get_ident() != self.thread:
                return
            if active:
                self.inside -= 1
                if self.inside == 0 and isinstance(result, Tensor):
                    kind = self.kinds.get(result) or _plain(type(module).__name__)
                    self._add(kind, result)
            if self.path:
                self.path.pop()

        return hook

    def __torch_function__(
        self, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run a function of torch and look at its result."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # ``x[x < 0] = 0`` returns nothing.
        outcome = args[0] if func is Tensor.__setitem__ else result
        results = tensors_in(outcome)
        if not results:
            return result
        operands = tensors_in((args, kwargs))
        kind = self.written.kind(func, args, kwargs, outcome) or self.functions.get(func)
        self.axes.follow(func, args, kwargs, operands, results)
        origin = self._origin(func, operands)
        if origin is not None:
            for t in results:
                self.origins[t] = origin
        if operands and isinstance(operands[0], nn.Parameter):
            kind = None
        self.kinds[results[0]] = kind
        if kind and self.inside == 0:
            self._add(kind, results[0])
        return result

    def features(self, output: Tensor | None) -> tuple[Tensor, str]:
        """Return the representation behind the output.

        Returns:
            The representation, features along its last axis, and the name of the layer that it
            goes into.

        Raises:
            ModelError: There is none.
        """
        if self.layer is not None:
            if self.layer_input is None or not self.layer_input.is_floating_point():
                raise ModelError(
                    f"layer={self.layer!r} was not called with floating-point features in this "
                    "forward pass: choose another"
                )
            return self.layer_input, self.layer
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
        return origin.features, name

    def _add(self, kind: str, a: Tensor) -> None:
        """Add one activation, of any axes with the units along one of them, to its units' sums.

        Raises:
            ModelError: It had another number of units in the batch before.
        """
        path = self.module_name
        at = self.seen[path, kind] = self.seen.get((path, kind), 0) + 1
        if a.ndim == 0 or not a.is_floating_point() or a.numel() == 0:
            return
        name = path or "(model)"
        if at > 1:
            name += f"#{at}"
        with no_torch_function(), torch.autocast(a.device.type, enabled=False):
            sums = self._unit_sums(a)
            new = Activation(name, kind, sums, a.numel() // len(sums))
            activation = self.activations.setdefault((path, kind, at), new)
            if activation is new:
                return
            if len(activation.sums) != len(sums):
                raise ModelError(
                    f"{name} ({kind}) has {len(activation.sums)} units in one batch and "
                    f"{len(sums)} in another: give batches of one shape"
                )
            activation.sums = activation.sums + sums
            activation.count += new.count

    def _unit_sums(self, a: Tensor) -> Tensor:
        """Return the sums of |a| (signed: of a) over all axes but those of the units, float64."""
        axes = self.axes.of(a) or (1 if a.ndim >= 4 else a.ndim - 1,)
        others = [d for d in range(a.ndim) if d not in axes]
        a = a.detach()
        if not others:  # torch takes an empty list of axes for all of them
            return a.double().flatten() if self.signed else a.abs().double().flatten()
        # Float64 would cost a copy of the activation.
        wide = torch.promote_types(a.dtype, torch.float32)
        if self.signed:
            return a.sum(others, dtype=wide).double().flatten()
        return torch.linalg.vector_norm(a, 1, others, dtype=wide).double().flatten()

    def _is_weight(self, t: Tensor) -> bool:
        """Return True for a parameter of two axes or more, and for views of one."""
        return t.ndim >= 2 and storage(t) in self.weights

    def _origin(self, func: Any, operands: list[Tensor]) -> Origin | None:
        """Return the layer that a function's results come from; None if from no layer."""
        if func is F.linear:
            return Origin("linear", self.module_name, operands[0], operands[0]._version)
        weights = [t for t in operands if self._is_weight(t)]
        if func in PRODUCTS:
            rows = _rows_of_product(operands, weights)
            if rows is not None:
                return Origin("linear", self.module_name, rows, rows._version)
        if weights or func in PRODUCTS:
            return Origin(name_of(func), self.module_name)
        origins = [self.origins[t] for t in operands if t in self.origins]
        if not origins:
            return None
        if all(origin is origins[0] for origin in origins):
            return origins[0]
        names = {origin.name or "(model)" for origin in origins}
        return Origin(" and ".join(sorted(names)), "")


def _rows_of_product(operands: list[Tensor], weights: list[Tensor]) -> Tensor | None:
    """Return what a product multiplies by one matrix from the right, as a linear layer does."""
    others = [t for t in operands if t.ndim > 1 and all(t is not weight for weight in weights)]
    if len(weights) != 1 or len(others) != 1 or weights[0].ndim != 2:
        return None
    return None if operands[0] is weights[0] else others[0]


def name_of(func: Any) -> str:
    """Return the name of a function of torch."""
    return getattr(func, "__name__", str(func))


def _plain(name: str) -> str:
    """Turn the name of a class into a kind: ReLU -> relu, NewGELUActivation -> newgelu."""
    return name.lower().removesuffix("activation")


def _with_units_last(a: Tensor, axes: list[int]) -> Tensor:
    """Return a tensor with the axes of its units together as the last one."""
    last = list(range(-len(axes), 0))
    return a.movedim(axes, last).flatten(-len(axes)) if a.ndim else a
