"""A convolution's result that has not been computed, so that what follows can be folded into it.

See fastlr.ghost.fusion.mode, which makes these and decides what they may take in.
"""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlr import ops
from fastlr.ghost.fusion.conv_bn import Entry, FoldedConv, FoldedWeights
from fastlr.ghost.fusion.squeeze_excitation import Gate
from fastlr.ops.geometry import kind_of
from fastlr.ops.reference.folded import ACTIVATIONS
from fastlr.ops.torch_private import tree_leaves, tree_map_only, wrapper_subclass

_METHODS = (
    "dim ndimension size numel nelement is_floating_point is_complex element_size __len__".split()
)
_PROPERTIES = "shape ndim dtype device layout is_cuda is_sparse is_quantized is_meta".split()
METADATA = {getattr(Tensor, name) for name in _METHODS} | {
    getattr(Tensor, name).__get__ for name in _PROPERTIES
}


def result_dtype(x: Tensor) -> torch.dtype:
    """Dtype of a convolution of ``x`` here and now."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class Folds(Protocol):
    """The mode that made a pending result, to be told what forbids folding.

    It is a fastlr.ghost.fusion.mode.Folding.
    """

    weights: FoldedWeights

    def refuse(self, weight: Tensor, why: str) -> None: ...  # noqa: D102
    def refuse_all(self, why: str) -> None: ...  # noqa: D102


class Stored(NamedTuple):
    """What lies in memory of a result whose next step is left to those who load it.

    Attributes:
        tensor: the activation's input.
        act: the activation.
        settled: whoever loads it hands back the gradient of ``act(tensor)``; one before applies the
            derivative.
        gate: factors of ``act(tensor)`` [B, C, 1, ...].
    """

    tensor: Tensor
    act: str = "none"
    settled: bool = True
    gate: Tensor | None = None

    def versions(self) -> tuple[int, ...]:
        """Those of the tensors: whether they were changed in place."""
        return self.tensor._version, 0 if self.gate is None else self.gate._version


class Activated(torch.autograd.Function):
    """What a `Stored` stands for, for who cannot apply the activation itself."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, act: str, settled: bool) -> Tensor:  # noqa: D102
        ctx.save_for_backward(*(() if settled else (tensor,)))
        ctx.act = act
        return ACTIVATIONS[act](tensor)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:  # noqa: D102
        return (
            (
                ops.run("activation_grad", g, *ctx.saved_tensors, ctx.act)
                if ctx.saved_tensors
                else g
            ),
            None,
            None,
        )


class Lazy(Tensor):
    """A result that has not been computed, or of which only a part has."""

    folding: Folds
    value: Tensor | None

    def compute(self) -> Tensor:
        """The tensor that the model would have here."""
        raise NotImplementedError

    def stored(self) -> Stored:
        """What those load who apply the rest themselves; computed now if it was not."""
        return Stored(self.compute())

    def left_open(self) -> bool:
        """Return True if something is left to those who load the result.

        They have something to apply, or may add to its gradient.
        """
        return False

    def passed(self, tensor: Tensor) -> None:
        """The same tensor as an output of who has loaded it last, for the next."""

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # noqa: D105
        if func in METADATA:
            return super().__torch_function__(func, types, args, kwargs or {})
        return func(*computed(args), **computed(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # noqa: D105
        cls, func, types, args=(), kwargs=None
    ):
        for lazy in [a for a in tree_leaves((args, kwargs)) if isinstance(a, Lazy)]:
            # reached without torch's Python interface: autograd has not seen it
            lazy.folding.refuse_all(f"{func} got a result past torch's Python interface")
        return func(*computed(args), **computed(kwargs or {}))

    def __repr__(self) -> str:  # type: ignore[override] # noqa: D105
        return repr(self.compute())


class Product(Lazy):
    """A product with one number a sample and channel.

    Whoever loads the other factor may apply it.
    """

    origin: Lazy
    numbers: Tensor
    version: int

    @staticmethod
    def __new__(cls, origin: Lazy, numbers: Tensor) -> Product:
        """Stand for ``origin * numbers``."""
        self: Product = wrapper_subclass(cls, list(origin.shape), origin.dtype, origin.device)
        self.origin, self.numbers, self.value, self.version = (
            origin,
            numbers,
            None,
            numbers._version,
        )
        self.folding = origin.folding
        return self

    def compute(self) -> Tensor:  # noqa: D102
        if self.value is None:
            if self.numbers._version != self.version:
                # Then nothing is folded.
                raise RuntimeError("the factor of a product was changed in place")
            self.value = Gate.apply(self.origin.compute(), self.numbers)
        return self.value

    def stored(self) -> Stored:  # noqa: D102
        if self.value is not None or self.numbers._version != self.version:
            return Stored(self.compute())
        return self.origin.stored()._replace(gate=self.numbers)

    def left_open(self) -> bool:  # noqa: D102
        return self.value is None and self.origin.left_open()

    def passed(self, tensor: Tensor) -> None:  # noqa: D102
        self.origin.passed(tensor)


class Pending(Lazy):
    """The result of a convolution, or of batch norm after it, that has not been computed.

    By kernels (``lazy``) the activation is left to those who load the result, if they are such
    blocks too: it is stored once, before the activation, and the derivative is applied where the
    activation is.
    """

    source: (
        tuple  # the convolution: input (a `Lazy` is loaded as it is stored), weight, bias, geometry
    )
    normed: tuple | None  # the batch norm: statistics, gamma, beta, eps
    act: str
    before: Stored | None  # what was computed for who applies the activation
    taken: bool  # went into a later Pending
    version: tuple[int, ...]  # of the convolution's input
    autocast: bool
    residual: Tensor | None  # added to the batch norm's result
    residual_version: tuple[int, ...]

    @staticmethod
    def __new__(
        cls, folding: Folds, source: tuple, shape: list[int], norm: tuple | None = None
    ) -> Pending:
        """Stand for a result of this shape."""
        x = source[0]
        self: Pending = wrapper_subclass(cls, shape, result_dtype(x), x.device)
        self.folding, self.source, self.normed, self.act = folding, source, norm, "none"
        self.value, self.before, self.taken, self.version = (
            None,
            None,
            False,
            stored_of(x).versions(),
        )
        self.residual, self.residual_version = None, (0, 0)
        self.autocast = torch.is_autocast_enabled(x.device.type)
        return self

    def followed(self, normed: tuple | None) -> Pending:
        """The next step, which takes this one in."""
        result = Pending(self.folding, self.source, list(self.shape), normed)
        result.version, self.taken = self.version, True
        result.residual, result.residual_version = self.residual, self.residual_version
        return result

    def _as_written(self) -> Tensor:
        """The convolution, and what has followed it, one after another."""
        x, weight, bias, geometry = computed(self.source[0]), *self.source[1:]
        convolve: Any = (F.conv1d, F.conv2d, F.conv3d)[len(geometry.stride) - 1]
        result = convolve(x, weight, bias, *geometry[:3], geometry.groups)
        if self.normed is None:
            return result
        mean, var, gamma, beta, eps = self.normed
        result = F.batch_norm(result, mean, var, gamma, beta, False, 0.0, eps)
        return ACTIVATIONS[self.act](
            result if self.residual is None else result + computed(self.residual)
        )

    def compute(self) -> Tensor:  # noqa: D102
        if self.value is None and self.before is not None:
            tensor, act, settled, _ = self.before
            self.value = tensor if act == "none" else Activated.apply(tensor, act, settled)
        elif self.value is None:
            weight = self.source[1]
            spoiled = self._spoiled()
            if self.taken or spoiled:
                self.folding.refuse(
                    weight, spoiled or "something else uses the result before the activation"
                )
            kind = self.device.type
            with (
                torch.enable_grad(),
                torch.autocast(kind, enabled=self.autocast, dtype=torch.get_autocast_dtype(kind)),
            ):
                if self.normed is None or self.taken or spoiled:
                    self.value = self._as_written()
                else:
                    self.value = self._folded(self.act)[0]
        assert self.value is not None
        return self.value

    def _spoiled(self) -> str | None:
        """Why this is not what the model would compute now."""
        if stored_of(self.source[0]).versions() != self.version:
            return "the convolution's input was changed in place"
        if (
            self.residual is not None
            and stored_of(self.residual).versions() != self.residual_version
        ):
            return "what is added was changed in place"
        return None

    def _folded(self, act: str, *, mean: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return the block as one node with this activation.

        With ``mean``: (before the activation, mean after it).
        """
        x, weight, bias, geometry = self.source
        running_mean, var, gamma, beta, eps = self.normed or ()
        how, added = stored_of(x), None if self.residual is None else stored_of(self.residual)
        tensors = (how.tensor, weight, bias, gamma, beta, added and added.tensor, running_mean, var)
        options = (eps, act, self.dtype, geometry, self.folding.weights)
        with torch.autocast(self.device.type, enabled=False):
            if not (mean or isinstance(x, Lazy) or isinstance(self.residual, Lazy)):
                return FoldedConv.apply(*tensors, *options), None
            passes = isinstance(x, Lazy) and how.tensor.requires_grad
            of_residual = "none" if added is None else added.act
            entry = Entry(how.act, how.settled, how.gate is not None, passes, of_residual, mean)
            out, alias, means = FoldedConv.apply(*tensors, *options, entry, how.gate)
        if passes:
            x.passed(alias)
        return out, means

    @property
    def lazy(self) -> bool:
        """True if those who load the result may apply the activation."""
        free = (
            self.value is None
            and self.before is None
            and self.normed is not None
            and not self.taken
        )
        return (
            free
            and ops.backend_for(stored_of(self.source[0]).tensor) == "triton"
            and self._spoiled() is None
        )

    def stored(self) -> Stored:  # noqa: D102
        if self.before is None and self.lazy:
            self.before = Stored(self._folded("none")[0], self.act, settled=self.act == "none")
        return self.before or Stored(self.compute())

    def left_open(self) -> bool:  # noqa: D102
        self.stored()
        return self.before is not None

    def squeezed(self) -> Tensor | None:
        """Return the mean over all positions [B, C, 1, ...], or None.

        There is one if it can be had from where the result is computed.
        """
        of_images = self.ndim == 4 and kind_of(self.source[1], self.source[3]) == "depthwise"
        if self.residual is not None or not of_images or not self.lazy:
            return None
        pre, mean = self._folded(self.act, mean=True)
        self.before = Stored(pre, self.act, settled=self.act == "none")
        return mean

    def passed(self, tensor: Tensor) -> None:  # noqa: D102
        assert self.before is not None
        self.before = self.before._replace(tensor=tensor, settled=True)


def stored_of(t: Tensor) -> Stored:
    """What is loaded of a tensor, computed or not."""
    return t.stored() if isinstance(t, Lazy) else Stored(t)


def computed(tree: Any) -> Any:
    """Replace what is pending in arguments or results by its value.

    The usual kinds go without pytree, which is slow.
    """
    if isinstance(tree, Lazy):
        return tree.compute()
    if isinstance(tree, (Tensor, int, float, str, NoneType)):
        return tree
    if type(tree) is dict:
        return {key: computed(value) for key, value in tree.items()}
    if type(tree) in (tuple, list):
        return type(tree)(map(computed, tree))
    return tree_map_only(Lazy, lambda lazy: lazy.compute(), tree)
