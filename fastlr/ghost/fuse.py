"""The folded path: convolution, batch norm in eval mode and activation run as one node of the autograd graph.

While a `Folding` is active, a convolution's result is a `Pending` tensor that has not been computed. If batch norm, and
then perhaps an activation, is the only thing that happens to it, the three run as one `FoldedConv` with folded weights
(see fastlr.reference.folded), whose rule gives the norms of the *original* parameters from the pass that gives the input
gradient. Anything else computes what is pending as the model says. So blocks are found in whatever the forward pass does,
control flow and functional calls included, and nothing is remembered that could become stale.

A block is left as it is (its name and the reason go into `Folding.refused`) where its parts are seen by anything else,
where a parameter serves twice, and where a proof refutes it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fastlr.ghost import fixed_norm, folded, recurrent
from fastlr.ghost.attention import ATTENTION, self_attention
from fastlr.ghost.fixed_norm import FixedNorm
from fastlr.ghost.gate import MEANS, Gate, Squeeze, gated, squeezed
from fastlr.ghost.pending import METADATA, Pending, computed
from fastlr.reference.folded import output_size

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
    """Whether models are folded where they can be."""
    return _enabled.get()


def uncompiled() -> AbstractContextManager:
    """Let compiled parts of the model run as they were written."""
    if "torch._dynamo" not in sys.modules:  # then there are none
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


OURS = frozenset({folded.NODE, fixed_norm.NODE})  # kinds of nodes that a folded forward pass has and the model has not
_ALONE = "no batch norm follows"
_ADDITIONS = {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__}
_PRODUCTS = {torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__}
_CONVOLUTIONS = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}


def _norm_call(args: tuple, kwargs: dict) -> dict[str, Any]:
    """The arguments of a call of F.batch_norm by name."""
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    defaults = {"weight": None, "bias": None, "training": False, "eps": 1e-5}
    return defaults | dict(zip(names, args, strict=False)) | kwargs


def _activation(func: Callable, args: tuple, kwargs: dict) -> tuple[str, bool] | None:
    """Name of the activation that a call is, and whether it works in place; None if it is none of ours."""
    rest = args[1:]
    if func in (torch.relu, Tensor.relu) and not rest:
        return "relu", False
    if func in (torch.relu_, Tensor.relu_) and not rest:
        return "relu", True
    if func is F.gelu and not rest:
        name = {"none": "gelu", "tanh": "gelu_tanh"}.get(kwargs.get("approximate", "none"))
        return (name, False) if name else None
    if func is F.hardtanh:
        bounds = [
            *rest,
            *[kwargs.get(k, d) for k, d in (("min_val", -1.0), ("max_val", 1.0), ("inplace", False))][len(rest) :],
        ]
        return ("relu6", bool(bounds[2])) if tuple(bounds[:2]) == (0, 6) else None
    name = {F.relu: "relu", F.relu6: "relu6", F.hardswish: "hardswish", F.silu: "silu"}.get(func)
    return (name, bool(rest[0] if rest else kwargs.get("inplace", False))) if name else None


class Folding(TorchFunctionMode):
    """Finds the blocks of one model and folds them; used as a context around its forward pass.

    Attributes:
        folded: name of a convolution's weight -> what follows it in its block, in the last forward pass.
        plain: name of a convolution's weight -> why it had no block there.
        fixed: names of the weights of batch norms that ran by themselves as a scaling and a shift there.
        replaced: how many calls of a kind ran in another way there: "gate", "squeeze" (fastlr.ghost.gate), "attention",
            "recurrent".
        unfused: runs recurrent layers step by step where they cannot be replaced.
        refused: name of a weight -> why it runs as the model says from now on; grows.
        literal: why calls of those kinds run as the model says from now on.
        disabled: why nothing is folded any more.
    """

    def __init__(self) -> None:
        super().__init__()
        self.refused: dict[str, str] = {}
        self.literal: str | None = None
        self.disabled: str | None = None
        self.names: dict[int, str] = {}
        self.idle = False
        self.unfused = recurrent.Unfused()
        self._forget()

    def run(self, tensors: Mapping[str, Tensor], forward: Callable[[], Any]) -> Any:
        """Run ``forward`` with its blocks folded; once more where something turned out that forbids one.

        Args:
            tensors: the model's parameters by name, as this forward pass uses them.
            forward: the forward pass.
        """
        steps = recurrent.expected(tensors)
        if self.disabled or self.idle or not enabled():
            self._forget()
            with self.unfused if steps else nullcontext():
                return forward()
        self.names = {id(t): name for name, t in tensors.items()}
        for _ in range(3):
            self._forget()
            with self, uncompiled():
                result = forward()
            result = computed(result)
            if self.disabled:
                break
            if not self.again:
                self.idle = not (self.active or steps) and set(self.plain.values()) <= {_ALONE}  # do not look again
                return result
        self.disabled = self.disabled or "its blocks change from one forward pass to the next"
        self._forget()
        with self.unfused if steps else nullcontext():
            return forward()

    def _forget(self) -> None:
        """Begin a forward pass."""
        self.again = False
        self.folded: dict[str, str] = {}
        self.plain: dict[str, str] = {}
        self.fixed: set[str] = set()
        self.replaced: Counter[str] = Counter()
        self.unfused.calls = 0
        self.seen: set[int] = set()

    @property
    def active(self) -> bool:
        """Whether the last forward pass differed from the model's own."""
        return bool(self.folded or self.fixed or self.replaced)

    def refuse(self, weight: Tensor, reason: str) -> None:
        """Leave a convolution unfolded from now on."""
        self.refused[self.names.get(id(weight), "?")] = reason
        self.again = True

    def refuse_all(self, reason: str) -> None:
        """Fold nothing from now on."""
        self.disabled, self.again = reason, True

    def give_up(self, names: list[str], reason: str) -> None:
        """Leave these convolutions unfolded from now on; if none is named all of them, but first the replaced calls."""
        self.refused.update(dict.fromkeys(names, reason))
        if not names and self.replaced:
            self.literal = reason
        elif not names:
            self.disable(reason)

    def disable(self, reason: str) -> None:
        """Run the model as it is from now on."""
        self.disabled = reason
        self._forget()

    def dtype_of(self, x: Tensor) -> torch.dtype:
        """Dtype of a convolution's result here and now."""
        kind = x.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, options: tuple) -> Tensor:
        """The convolution as the model would run it."""
        return (F.conv1d, F.conv2d, F.conv3d)[len(options[0]) - 1](x, weight, bias, *options)

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: D105
        kwargs = kwargs or {}
        first = args[0] if args else kwargs.get("input")
        if func not in METADATA and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return func(*computed(args), **computed(kwargs))  # checkpointing: the part is run again, as the model says
        if func in _CONVOLUTIONS:
            found = self._convolution(func, *computed(args), **computed(kwargs))
            return found if found is not None else func(*computed(args), **computed(kwargs))
        if isinstance(first, Pending):
            if func in METADATA:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            following = self._norm(func, args, kwargs) if first.normed is None else self._act(func, first, args, kwargs)
            if following is not None:
                return following
        if func is F.batch_norm:
            fixed = self._fixed(_norm_call(computed(args), computed(kwargs)))
            if fixed is not None:
                return fixed
        if self.literal is None and torch.is_grad_enabled():
            replaced, result = self._replaced(func, args, kwargs)
            if replaced:
                return result
        if func in recurrent.CALLS and torch.is_grad_enabled():
            return self.unfused.call(func, computed(args), computed(kwargs))
        if func in _ADDITIONS:
            following = self._add(func, args, kwargs)
            if following is not None:
                return following
        return func(*computed(args), **computed(kwargs))

    def _replaced(self, func: Callable, args: tuple, kwargs: dict) -> tuple[bool, Any]:
        """Whether a call runs in another way than the model's, and its result if so."""
        if func in _PRODUCTS and not kwargs:
            factors = gated(computed(args))
            if factors is not None:
                self.replaced["gate"] += 1
                return True, Gate.apply(*factors)
        if func in MEANS:
            x = squeezed(func, computed(args), kwargs)
            if x is not None:
                self.replaced["squeeze"] += 1
                return True, Squeeze.apply(x, lambda t: func(t, *args[1:], **kwargs))
        if func is ATTENTION:
            attended = self_attention(computed(args), computed(kwargs))
            if attended is not None:
                self.replaced["attention"] += 1
                return True, attended
        if func in recurrent.CALLS:
            scanned = recurrent.scanned(func, computed(args), computed(kwargs))
            if scanned is not None:
                self.replaced["recurrent"] += 1
                return True, scanned
        return False, None

    def _convolution(
        self, func: Callable, input: Tensor, weight: Tensor, bias: Tensor | None = None,
        stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
    ) -> Pending | None:  # fmt: skip
        name = self.names.get(id(weight))
        axes = _CONVOLUTIONS[func]
        if name is None or name in self.refused or not torch.is_grad_enabled() or isinstance(padding, str):
            return None
        if id(weight) in self.seen:
            self.refuse(weight, "it is used more than once")
            return None
        self.seen.add(id(weight))
        usable = weight.is_leaf and (bias is None or id(bias) in self.names) and weight.is_floating_point()
        if not usable or input.ndim != axes + 2 or input.shape[1] != weight.shape[1] * groups:
            return None
        if not torch.is_autocast_enabled(input.device.type) and input.dtype != weight.dtype:
            return None  # an error that the model is to raise itself
        options = [
            tuple(int(v) for v in (o if isinstance(o, (tuple, list)) else (o,) * axes))
            for o in (stride, padding, dilation)
        ]
        options = [o * axes if len(o) == 1 else o for o in options]
        shape = output_size(input.shape[2:], weight.shape[2:], *options)
        if min(shape) < 1:
            return None
        self.plain[name] = _ALONE
        call = (input, weight, bias, (*options, groups))
        return Pending(self, call, [len(input), len(weight), *shape])

    def _norm(self, func: Callable, args: tuple, kwargs: dict) -> Pending | None:
        if func is not F.batch_norm:
            return None
        given = _norm_call(args, kwargs)
        pending, mean, var = given["input"], given["running_mean"], given["running_var"]
        gamma, beta = given["weight"], given["bias"]
        name = self.names[id(pending.source[1])]
        if given["training"] or mean is None or var is None:
            self.plain[name] = "batch norm uses the batch's statistics"
            return None
        if any(t is not None and (t.requires_grad and id(t) not in self.names) for t in (mean, var, gamma, beta)):
            self.plain[name] = "batch norm's parameters are computed"
            return None
        again = [t for t in (gamma, beta, pending.source[2]) if t is not None and id(t) in self.seen]
        if again or pending.taken or pending.value is not None or not torch.is_grad_enabled():
            self.plain[name] = "a parameter is used more than once" if again else "something else uses its result"
            return None
        if pending.dtype != self.dtype_of(pending.source[0]):
            return None
        self.seen.update(id(t) for t in (gamma, beta, pending.source[2]) if t is not None)
        del self.plain[name]
        self.folded[name] = "none"
        norm = (mean, var, gamma, beta, float(given["eps"]))
        return pending.followed(norm)

    def _fixed(self, given: dict[str, Any]) -> Tensor | None:
        """A batch norm after something else than a convolution, as a scaling and a shift: pays on a CPU."""
        x, gamma, beta = given["input"], given["weight"], given["bias"]
        own = [t for t in (gamma, beta) if t is not None]
        others = [given["running_mean"], given["running_var"]]
        if given["training"] or not own or any(t is None for t in others) or not torch.is_grad_enabled():
            return None
        name = self.names.get(id(own[0]))
        plain = (
            x.device.type == "cpu"
            and x.ndim >= 2
            and x.shape[1] == len(own[0])
            and not any(t.dtype != x.dtype or (t.requires_grad and id(t) not in self.names) for t in own + others)
        )
        if name is None or name in self.refused or not plain or x.dtype not in (torch.float32, torch.float64):
            return None
        self.fixed.add(name)
        return FixedNorm.apply(x, gamma, beta, *others, float(given["eps"]))

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
        other = computed((other,))[0]
        fits = other.shape == pending.shape and other.dtype == pending.dtype and other.device == pending.device
        if not fits or not self._open(pending) or id(other) in self.names:
            return None
        self.folded[self.names[id(pending.source[1])]] = "add"
        result = pending if inplace else pending.followed(pending.normed)
        result.residual, result.residual_version = other, other._version
        return result

    @staticmethod
    def _open(pending: Any) -> bool:
        """Whether something can still be added to a result."""
        return (
            isinstance(pending, Pending)
            and pending.normed is not None
            and pending.act == "none"
            and pending.residual is None
            and pending.value is None
            and not pending.taken
        )

    def _act(self, func: Callable, pending: Pending, args: tuple, kwargs: dict) -> Any:
        found = _activation(func, args, kwargs)
        if found is None or pending.act != "none" or pending.value is not None or not torch.is_grad_enabled():
            return None
        act, inplace = found
        if pending.taken:
            return None  # computing it refuses the block
        self.folded[self.names[id(pending.source[1])]] = act if pending.residual is None else f"add, {act}"
        result = pending  # in place: whoever holds it sees the change
        if not inplace:
            result = pending.followed(pending.normed)
        result.act = act
        return result
