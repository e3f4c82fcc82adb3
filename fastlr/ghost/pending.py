"""A convolution's result that has not been computed, so that what follows can be folded into it.

See fastlr.ghost.fuse, which makes these and decides what they may take in.
"""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from fastlr.ghost.folded import FoldedConv
from fastlr.reference.folded import ACTIVATIONS

if TYPE_CHECKING:
    from fastlr.ghost.fuse import Folding

_METHODS = "dim ndimension size numel nelement is_floating_point is_complex element_size __len__".split()
_PROPERTIES = "shape ndim dtype device layout is_cuda is_sparse is_quantized is_meta".split()
METADATA = {getattr(Tensor, name) for name in _METHODS} | {getattr(Tensor, name).__get__ for name in _PROPERTIES}


class Pending(Tensor):
    """The result of a convolution, or of batch norm after it, that has not been computed."""

    folding: Folding
    source: tuple  # the convolution: input, weight, bias, options
    normed: tuple | None  # the batch norm: statistics, gamma, beta, eps
    act: str
    value: Tensor | None
    taken: bool  # went into a later Pending
    version: int  # of the convolution's input
    autocast: bool
    residual: Tensor | None  # added to the batch norm's result
    residual_version: int

    @staticmethod
    def __new__(cls, folding: Folding, source: tuple, shape: list[int], norm: tuple | None = None) -> Pending:
        """Stand for a result of this shape."""
        x = source[0]
        self: Pending = Tensor._make_wrapper_subclass(cls, shape, dtype=folding.dtype_of(x), device=x.device)
        self.folding, self.source, self.normed, self.act = folding, source, norm, "none"
        self.value, self.taken, self.version = None, False, x._version
        self.residual, self.residual_version = None, 0
        self.autocast = torch.is_autocast_enabled(x.device.type)
        return self

    def followed(self, normed: tuple | None) -> Pending:
        """The next step, which takes this one in."""
        result = Pending(self.folding, self.source, list(self.shape), normed)
        result.version, self.taken = self.version, True
        result.residual, result.residual_version = self.residual, self.residual_version
        return result

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: D105
        if func in METADATA:
            return super().__torch_function__(func, types, args, kwargs or {})
        return func(*computed(args), **computed(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override] # noqa: D105
        pending = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Pending)]
        for p in pending:  # reached without torch's Python interface: autograd has not seen it
            p.folding.refuse_all(f"{func} got a result past torch's Python interface")
        return func(*computed(args), **computed(kwargs or {}))

    def __repr__(self) -> str:  # type: ignore[override] # noqa: D105
        return repr(self.compute())

    def compute(self) -> Tensor:
        """The tensor that the model would have here."""
        if self.value is None:
            x, weight, bias, options = self.source
            spoiled = "the convolution's input was changed in place" if x._version != self.version else None
            if self.residual is not None and self.residual._version != self.residual_version:
                spoiled = "what is added was changed in place"
            if self.taken or spoiled:
                self.folding.refuse(weight, spoiled or "something else uses the result before the activation")
            kind = x.device.type
            with torch.enable_grad(), torch.autocast(kind, enabled=self.autocast, dtype=torch.get_autocast_dtype(kind)):
                if self.normed is None or self.taken or spoiled:
                    self.value = self.folding.convolve(x, weight, bias, options)
                    if self.normed is not None:
                        mean, var, gamma, beta, eps = self.normed
                        self.value = F.batch_norm(self.value, mean, var, gamma, beta, False, 0.0, eps)
                        self.value = self.value if self.residual is None else self.value + self.residual
                        self.value = ACTIVATIONS[self.act](self.value)
                else:
                    mean, var, gamma, beta, eps = self.normed
                    with torch.autocast(kind, enabled=False):
                        self.value = FoldedConv.apply(
                            x, weight, bias, gamma, beta, self.residual, mean, var, eps, self.act, self.dtype, options
                        )
        assert self.value is not None
        return self.value


def computed(tree: Any) -> Any:
    """Replace what is pending in arguments or results by its value; the usual kinds without pytree, which is slow."""
    if isinstance(tree, Pending):
        return tree.compute()
    if isinstance(tree, (Tensor, int, float, str, NoneType)):
        return tree
    if type(tree) is dict:
        return {key: computed(value) for key, value in tree.items()}
    if type(tree) in (tuple, list):
        return type(tree)(map(computed, tree))
    return tree_map_only(Pending, Pending.compute, tree)
