"""The folded path: blocks with a convolution run as one node of the autograd graph.

A block is a convolution, batch norm in eval mode and an activation.

While a `Folding` is active, a convolution's result is a `Pending` tensor that has not been
computed. If batch norm, and then perhaps an activation, is the only thing that happens to it, the
three run as one `FoldedConv` with folded weights (see fastlr.ops.reference.folded), whose rule
gives the norms of the *original* parameters from the pass that gives the input gradient. Anything
else computes what is pending as the model says. So blocks are found in whatever the forward pass
does, control flow and functional calls included, and nothing is remembered that could become stale.

A block is left as it is (its name and the reason go into `Folding.refused`) where its parts are
seen by anything else, where a parameter serves twice, and where a proof refutes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fastlr import ops
from fastlr.distributed import on_demand
from fastlr.ghost import recurrent
from fastlr.ghost.fusion import batch_norm as fixed_norm
from fastlr.ghost.fusion import conv_bn as folded
from fastlr.ghost.fusion.attention import ATTENTION, self_attention
from fastlr.ghost.fusion.batch_norm import FixedNorm, norm_arguments
from fastlr.ghost.fusion.pending import (
    METADATA,
    Lazy,
    Pending,
    Product,
    computed,
    result_dtype,
    stored_of,
)
from fastlr.ghost.fusion.squeeze_excitation import (
    MEANS,
    PRODUCTS,
    gate,
    is_gate,
    squeeze,
    whole_mean,
)
from fastlr.ops.geometry import ConvGeometry, kind_of
from fastlr.ops.torch_private import (
    no_torch_function_of_subclasses,
    saved_tensors_are_hooked,
    tree_leaves,
)

_enabled: ContextVar[bool] = ContextVar("fastlr_folding", default=True)


@contextmanager
def unfolded() -> Iterator[None]:
    """Run models as they are within this context: no convolution is folded with its batch norm."""
    token = _enabled.set(False)
    try:
        yield
    finally:
        _enabled.reset(token)


def enabled() -> bool:
    """Return True if models are folded where they can be."""
    return _enabled.get()


# Kinds of nodes that a folded forward pass has and the model has not.
OURS = frozenset({folded.NODE, fixed_norm.NODE})
_DTYPE: Any = Tensor.dtype
_ALONE = "no batch norm follows"
_ADDITIONS = {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__}
_CONVOLUTIONS = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}
# Calls that may run in another way: kind, and what gives the result of such a call, or None if it
# does not apply.
_REPLACEMENTS: dict[Callable, tuple[str, Callable[[Callable, tuple, dict], Any]]] = {
    **dict.fromkeys(PRODUCTS, ("gate", gate)),
    **dict.fromkeys(MEANS, ("squeeze", squeeze)),
    **dict.fromkeys(recurrent.CALLS, ("recurrent", recurrent.scanned)),
    ATTENTION: ("attention", self_attention),
}
# Calls of interest where nothing is pending.
_FIRST = frozenset({F.batch_norm, *_CONVOLUTIONS, *_REPLACEMENTS})


def _activation(func: Callable, args: tuple, kwargs: dict) -> tuple[str, bool] | None:
    """Return (the name of the activation that a call is, whether it works in place).

    None if the call is none of ours.
    """
    rest = args[1:]
    if func in (torch.relu, Tensor.relu) and not rest:
        return "relu", False
    if func in (torch.relu_, Tensor.relu_) and not rest:
        return "relu", True
    if func is F.gelu and not rest:
        name = {"none": "gelu", "tanh": "gelu_tanh"}.get(kwargs.get("approximate", "none"))
        return (name, False) if name else None
    if func is F.hardtanh:
        given = {"min_val": -1.0, "max_val": 1.0, "inplace": False}
        given |= dict(zip(given, rest, strict=False)) | kwargs
        return (
            ("relu6", bool(given["inplace"]))
            if (given["min_val"], given["max_val"]) == (0, 6)
            else None
        )
    name = {F.relu: "relu", F.relu6: "relu6", F.hardswish: "hardswish", F.silu: "silu"}.get(func)
    return (name, bool(rest[0] if rest else kwargs.get("inplace", False))) if name else None


class Folding(TorchFunctionMode):
    """Finds the blocks of one model and folds them; used as a context around its forward pass.

    Attributes:
        folded: name of a convolution's weight -> what follows it in its block, in the last forward
            pass.
        plain: name of a convolution's weight -> why it had no block there.
        fixed: names of the weights of batch norms that ran by themselves as a scaling and a shift
            there.
        replaced: how many calls of a kind ran in another way there: "gate", "squeeze"
            (squeeze_excitation.py), "attention", "recurrent".
        unfused: runs recurrent layers step by step where they cannot be replaced.
        refused: name of a weight -> why it runs as the model says from now on; grows.
        literal: why calls of those kinds run as the model says from now on.
        disabled: why nothing is folded any more.
        casts_inputs: True if convolutions that autocast converts the inputs for were all that read
            them, by kernels.
    """

    def __init__(self) -> None:
        super().__init__()
        self.refused: dict[str, str] = {}
        self.literal: str | None = None
        self.disabled: str | None = None
        self.names: dict[int, str] = {}
        self.idle = False
        self.inputs: Any = None
        self.casts_inputs: bool | None = None
        self.unfused = recurrent.Unfused()
        self.weights = folded.FoldedWeights()
        self._forget()

    def run(
        self, tensors: Mapping[str, Tensor], forward: Callable[[], Any], inputs: Any = None
    ) -> Any:
        """Run ``forward`` with its blocks folded.

        Once more where something turned out that forbids folding one.

        Args:
            tensors: the model's parameters by name, as this forward pass uses them.
            forward: the forward pass.
            inputs: of which it is.
        """
        by_kernels = isinstance(inputs, Tensor) and ops.backend_for(inputs) == "triton"
        self.inputs = inputs if by_kernels else None
        self.casts_inputs = None if by_kernels else self.casts_inputs
        has_steps = recurrent.expected(tensors)
        self.names = {id(t): name for name, t in tensors.items()}
        for _ in range(3):
            self._forget()
            if self.disabled or self.idle or not enabled():
                break
            with self:
                result = forward()
            result = computed(result)
            self.weights.begin()
            if not self.again and not self.disabled:
                # Look no more.
                self.idle = not (self.active or has_steps) and set(self.plain.values()) <= {_ALONE}
                return result
        else:
            self.disabled = self.disabled or "its blocks change from one forward pass to the next"
        self._forget()
        with self.unfused if has_steps else nullcontext():
            return forward()

    def _forget(self) -> None:
        """Begin a forward pass."""
        self.again = False
        self.folded: dict[str, str] = {}
        self.plain: dict[str, str] = {}
        self.fixed: set[str] = set()
        self.replaced: Counter[str] = Counter()
        self.unfused.calls = 0
        self.weights.begin()
        self.seen: set[int] = set()

    @property
    def active(self) -> bool:
        """True if the last forward pass differed from the model's own."""
        return bool(self.folded or self.fixed or self.replaced)

    def refuse(self, weight: Tensor, reason: str) -> None:
        """Leave a convolution unfolded from now on."""
        self.refused[self.names.get(id(weight), "?")] = reason
        self.again = True

    def refuse_all(self, reason: str) -> None:
        """Fold nothing from now on."""
        self.disabled, self.again = reason, True

    def give_up(self, names: list[str], reason: str) -> None:
        """Leave these convolutions unfolded from now on.

        If none is named, leave all of them, but first the replaced calls.
        """
        self.refused.update(dict.fromkeys(names, reason))
        if not names and self.replaced:
            self.literal = reason
        elif not names:
            self.disable(reason)

    def disable(self, reason: str) -> None:
        """Run the model as it is from now on."""
        self.disabled = reason
        self._forget()

    def __torch_function__(
        self, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # noqa: D105
        kwargs = kwargs or {}
        if self.inputs is not None and any(t is self.inputs for t in tree_leaves((args, kwargs))):
            known = func in METADATA and func != _DTYPE.__get__
            by_convolution = func in _CONVOLUTIONS and torch.is_autocast_enabled(
                self.inputs.device.type
            )
            self.casts_inputs = (
                self.casts_inputs if known else by_convolution and self.casts_inputs is not False
            )
        if not self.seen and func not in _FIRST:
            return func(*args, **kwargs)
        operand = args[0] if args else kwargs.get("input")
        if func not in METADATA and saved_tensors_are_hooked(on_demand.hooks()):
            # Checkpointing: the part is run again, as the model says.
            return func(*computed(args), **computed(kwargs))
        if func in _CONVOLUTIONS:
            first, rest = args[:1], computed(args[1:])
            first = first if first and isinstance(first[0], Lazy) else computed(first)
            pending = self._convolution(func, *first, *rest, **computed(kwargs))
            return pending if pending is not None else func(*computed(args), **computed(kwargs))
        if isinstance(operand, Lazy) and func in METADATA:
            with no_torch_function_of_subclasses():
                return func(*args, **kwargs)
        if isinstance(operand, Pending):
            normed = operand.normed is not None
            following = (
                self._act(func, operand, args, kwargs) if normed else self._norm(func, args, kwargs)
            )
            if following is not None:
                return following
        if func is F.batch_norm:
            fixed = self._fixed(norm_arguments(computed(args), computed(kwargs)))
            if fixed is not None:
                return fixed
        if func in _REPLACEMENTS and self.literal is None and torch.is_grad_enabled():
            kind, replacement = _REPLACEMENTS[func]
            result = self._left_open(func, args, kwargs)
            if result is None:
                result = replacement(func, computed(args), computed(kwargs))
            if result is not None:
                self.replaced[kind] += 1
                return result
        if func in recurrent.CALLS and torch.is_grad_enabled():
            return self.unfused.call(func, computed(args), computed(kwargs))
        if func in _ADDITIONS:
            following = self._add(func, args, kwargs)
            if following is not None:
                return following
        return func(*computed(args), **computed(kwargs))

    def _convolution(
        self,
        func: Callable,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Pending | None:
        name = self.names.get(id(weight))
        axes = _CONVOLUTIONS[func]
        if name is None or name in self.refused or not torch.is_grad_enabled():
            return None
        if id(weight) in self.seen:
            self.refuse(weight, "it is used more than once")
            return None
        self.seen.add(id(weight))
        usable = (
            weight.is_leaf
            and (bias is None or id(bias) in self.names)
            and weight.is_floating_point()
        )
        if not usable or input.ndim != axes + 2 or input.shape[1] != weight.shape[1] * groups:
            return None
        if not torch.is_autocast_enabled(input.device.type) and input.dtype != weight.dtype:
            return None  # an error that the model is to raise itself
        geometry = ConvGeometry.of(weight.shape[2:], stride, padding, dilation, groups=groups)
        if geometry is None:
            return None
        shape = geometry.output_size(input.shape[2:], weight.shape[2:])
        if min(shape) < 1:
            return None
        self.plain[name] = _ALONE
        if isinstance(input, Lazy):  # is what follows it in its block left to this one?
            fits = kind_of(weight, geometry) is not None and input.dtype == result_dtype(input)
            input = input if fits and input.left_open() else input.compute()
        call = (input, weight, bias, geometry)
        return Pending(self, call, [len(input), len(weight), *shape])

    @staticmethod
    def _left_open(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
        """Return a mean over all positions of a block's result, or a product, by kernels.

        The product is that of a block's result with one number a channel. None if the call is
        neither.
        """
        if func in MEANS and isinstance(args[0] if args else None, Pending):
            keeps = whole_mean(func, args, kwargs)
            mean = None if keeps is None else args[0].squeezed()
            return mean if mean is None or keeps else mean.flatten(1)
        if func in PRODUCTS and len(args) == 2 and not kwargs:
            numbers, x = args if isinstance(args[1], Pending) else args[::-1]
            if (
                isinstance(x, Pending)
                and not isinstance(numbers, Lazy)
                and is_gate(numbers, x)
                and x.left_open()
            ):
                return Product(x, numbers)
        return None

    def _norm(self, func: Callable, args: tuple, kwargs: dict) -> Pending | None:
        if func is not F.batch_norm:
            return None
        given = norm_arguments(args, kwargs)
        pending, mean, var = given["input"], given["running_mean"], given["running_var"]
        gamma, beta = given["weight"], given["bias"]
        name = self.names[id(pending.source[1])]
        if given["training"] or mean is None or var is None:
            self.plain[name] = "batch norm uses the batch's statistics"
            return None
        if any(
            t is not None and (t.requires_grad and id(t) not in self.names)
            for t in (mean, var, gamma, beta)
        ):
            self.plain[name] = "batch norm's parameters are computed"
            return None
        again = [
            t for t in (gamma, beta, pending.source[2]) if t is not None and id(t) in self.seen
        ]
        if again or pending.taken or pending.value is not None or not torch.is_grad_enabled():
            self.plain[name] = (
                "a parameter is used more than once" if again else "something else uses its result"
            )
            return None
        if pending.dtype != result_dtype(pending.source[0]):
            return None
        self.seen.update(id(t) for t in (gamma, beta, pending.source[2]) if t is not None)
        del self.plain[name]
        self.folded[name] = "none"
        norm = (mean, var, gamma, beta, float(given["eps"]))
        return pending.followed(norm)

    def _fixed(self, given: dict[str, Any]) -> Tensor | None:
        """Run a batch norm after something else than a convolution as a scaling and a shift.

        This pays on a CPU; None where it is not possible.
        """
        x, gamma, beta = given["input"], given["weight"], given["bias"]
        affine = [t for t in (gamma, beta) if t is not None]
        statistics = [given["running_mean"], given["running_var"]]
        if (
            given["training"]
            or not affine
            or any(t is None for t in statistics)
            or not torch.is_grad_enabled()
        ):
            return None
        name = self.names.get(id(affine[0]))
        tensors = affine + statistics
        plain = (
            x.device.type == "cpu"
            and x.ndim >= 2
            and x.shape[1] == len(affine[0])
            and not any(
                t.dtype != x.dtype or (t.requires_grad and id(t) not in self.names) for t in tensors
            )
        )
        if (
            name is None
            or name in self.refused
            or not plain
            or x.dtype not in (torch.float32, torch.float64)
        ):
            return None
        self.fixed.add(name)
        return FixedNorm.apply(x, gamma, beta, *statistics, float(given["eps"]))

    def _add(self, func: Callable, args: tuple, kwargs: dict) -> Pending | None:
        """A sum of a block's result before its activation with another tensor of its shape."""
        if len(args) != 2 or kwargs or not torch.is_grad_enabled():
            return None
        pending, other = args
        inplace = func is Tensor.add_
        if not self._open(pending) and not inplace:
            pending, other = other, pending
        if not self._open(pending) or not isinstance(other, Tensor):
            return None
        how = stored_of(other) if pending.lazy else None
        if how is None or not how.settled or how.gate is not None:
            other = computed((other,))[0]
        fits = (
            other.shape == pending.shape
            and other.dtype == pending.dtype
            and other.device == pending.device
        )
        if not fits or not self._open(pending) or id(other) in self.names:
            return None
        self.folded[self.names[id(pending.source[1])]] = "add"
        result = pending if inplace else pending.followed(pending.normed)
        result.residual, result.residual_version = other, stored_of(other).versions()
        return result

    @staticmethod
    def _open(pending: Any) -> bool:
        """Return True if something can still be added to a result."""
        return (
            isinstance(pending, Pending)
            and pending.normed is not None
            and pending.act == "none"
            and pending.residual is None
            and pending.value is None
            and pending.before is None
            and not pending.taken
        )

    def _act(self, func: Callable, pending: Pending, args: tuple, kwargs: dict) -> Any:
        activation = _activation(func, args, kwargs)
        if activation is None or pending.act != "none" or not torch.is_grad_enabled():
            return None
        if pending.value is not None or pending.before is not None:
            return None
        act, inplace = activation
        if pending.taken:
            return None  # computing it refuses the block
        self.folded[self.names[id(pending.source[1])]] = (
            act if pending.residual is None else f"add, {act}"
        )
        # In place: whoever holds it sees the change.
        result = pending if inplace else pending.followed(pending.normed)
        result.act = act
        return result
