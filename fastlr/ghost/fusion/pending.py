"""A block's result that has not been computed, so that what follows can be folded into it.

`fastlr.ghost.fusion.calls` decides what it takes in. A `Pending` begins as the result of a
convolution; each call that the block takes in makes the next one of it, which has *absorbed* the
one before. Whoever needs numbers computes it.

Steps left to the readers. By kernels a block may compute its activation's input alone; blocks that
read its result load that (`Lazy.loaded`) and apply the activation themselves. This is the one place
that says who applies the activation's derivative, so that it is applied once:

1. The first reader does. It hands back the gradient at the activation's input
   (``Loaded.gradient_at_output`` is False).
2. It passes the tensor on: its node returns its own input as one more output
   (``BlockOptions.passes_on_x``), and `Lazy.pass_on` gives that to the next readers.
3. The next readers do not (``gradient_at_output`` is True). They hand back the gradient at the
   activation's output, at what was passed on; so it reaches the first reader's node, as
   ``Gradients.loaded``, which adds it to its own before it applies the derivative.

Who cannot apply the activation on loading reads `Activated` of what was left, under the same rules.
A residual is only loaded under rule 3: no block passes its residual on. Where the activation is
"none" there is no derivative, and all readers are under rule 3.
"""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlr import ops
from fastlr.ghost.fusion.blocks import Blocks
from fastlr.ghost.fusion.checkpoints import before_checkpoints
from fastlr.ghost.fusion.conv_bn import BlockOptions, BlockTensors, FoldedConv
from fastlr.ops.activations import ACTIVATIONS
from fastlr.ops.autocast import autocast_dtype
from fastlr.ops.block import Loaded
from fastlr.ops.geometry import ConvGeometry, kind_of
from fastlr.ops.torch_private import (
    tree_leaves,
    tree_map_only,
    unsafe_view,
    wrapper_subclass,
)

_METHODS = (
    "dim ndimension size numel nelement is_floating_point is_complex element_size __len__".split()
)
_PROPERTIES = "shape ndim dtype device layout is_cuda is_sparse is_quantized is_meta".split()
# Calls that read no numbers of a tensor.
METADATA = {getattr(Tensor, name) for name in _METHODS}
METADATA |= {getattr(Tensor, name).__get__ for name in _PROPERTIES}


def result_dtype(x: Tensor) -> torch.dtype:
    """Dtype of a convolution of ``x`` here and now."""
    return autocast_dtype(x.device) or x.dtype


class Activated(torch.autograd.Function):
    """The activation of what a block has left before it, for those who cannot apply it on loading.

    The block's first reader may apply the derivative, once to the gradients of all readers.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, activation: str, first_reader_applies_derivative: bool
    ) -> Tensor:
        """Return the activation, and save what its derivative needs."""
        ctx.first_reader_applies_derivative = first_reader_applies_derivative
        if not first_reader_applies_derivative:
            ctx.save_for_backward(tensor)
        ctx.activation = activation
        return ACTIVATIONS[activation](tensor)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        """Apply the derivative, unless the block's first reader does."""
        if ctx.first_reader_applies_derivative:
            return g, None, None
        (tensor,) = ctx.saved_tensors
        return ops.run("activation_grad", g, tensor, ctx.activation), None, None


class Lazy(Tensor):
    """A result that has not been computed, or of which only a part has.

    Its metadata, which blocks read often, are attributes of its own: those of a tensor ask
    `__torch_function__` first.
    """

    blocks: Blocks  # of the model, to be told what forbids folding
    value: Tensor | None = None  # the result, once somebody has needed its numbers
    shape: Any = None
    ndim: Any = None
    dtype: Any = None
    device: Any = None

    @classmethod
    def standing_for(cls, shape: Any, dtype: torch.dtype, device: torch.device) -> Any:
        """Return a tensor of this class for a result of this kind."""
        self = wrapper_subclass(cls, shape, dtype, device)
        self.shape, self.ndim = torch.Size(shape), len(shape)
        self.dtype, self.device = dtype, device
        return self

    def compute(self) -> Tensor:
        """Return the tensor that the model would have here.

        It was begun before any checkpointed part, and is no part of one that reads it.
        """
        if self.value is None:
            with before_checkpoints():
                self.value = self.make()
        return self.value

    def make(self) -> Tensor:
        """Compute the tensor that the model would have here, for the first time."""
        raise NotImplementedError

    def loaded(self) -> Loaded:
        """Return what those load who can apply the last steps; it is computed now if need be."""
        return Loaded(self.compute())

    def try_to_leave_steps(self) -> bool:
        """Compute what readers load, where they can be left the last steps; True if they are."""
        return False

    def pass_on(self, tensor: Tensor) -> None:
        """Give the next reader this tensor: the same numbers, as an output of the last reader."""

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
            lazy.blocks.refuse_all(f"{func} got a result past torch's Python interface")
        return func(*computed(args), **computed(kwargs or {}))


class Product(Lazy):
    """A pending result times one factor a sample and channel, which its readers may apply."""

    factored: Lazy
    factors: Tensor

    @staticmethod
    def __new__(cls, factored: Lazy, factors: Tensor) -> Product:
        """Stand for ``factored * factors``."""
        self: Product = cls.standing_for(factored.shape, factored.dtype, factored.device)
        self.blocks, self.factored, self.factors = factored.blocks, factored, factors
        return self

    def make(self) -> Tensor:  # noqa: D102
        return self.factored.compute() * self.factors

    def loaded(self) -> Loaded:  # noqa: D102
        return self.factored.loaded()._replace(gate=self.factors)

    def try_to_leave_steps(self) -> bool:  # noqa: D102
        return self.value is None and self.factored.try_to_leave_steps()

    def pass_on(self, tensor: Tensor) -> None:  # noqa: D102
        self.factored.pass_on(tensor)


class Convolution(NamedTuple):
    """A call of a convolution; its input may be `Lazy`.

    Attributes:
        x: Input.
        weight: Weight.
        bias: Bias.
        geometry: Stride, padding and so on.
        run: Function that returns the result as torch computes it.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    geometry: ConvGeometry
    run: Callable[[], Tensor]

    @property
    def maps_one_pixel(self) -> bool:
        """True if it maps one pixel to one pixel, as in squeeze-and-excitation."""
        one_pixel = max(self.x.shape[2:]) == max(self.weight.shape[2:]) == 1
        return one_pixel and max(self.geometry.padding) == 0 and self.geometry.groups == 1

    def run_as_linear(self) -> Tensor:
        """Return the result of a convolution that `maps_one_pixel`, by a linear layer.

        This takes half the time on a CPU. On a GPU cuDNN would plan each shape and direction.
        """
        result = F.linear(computed(self.x).flatten(1), self.weight.flatten(1), self.bias)
        shape = *result.shape, *self.x.shape[2:]
        return unsafe_view(result, shape)  # no view: it may be changed in place


class Pending(Lazy):
    """The result of a block that has not been computed, as far as the block has come.

    A block is a convolution; then perhaps batch norm; then perhaps the addition of a residual and
    an activation, either or both.
    """

    convolution: Convolution
    batch_norm: dict[str, Any] | None = None  # arguments of its call
    residual: Tensor | None = None
    activation: str = "none"
    autocast: bool  # as it was at the convolution
    versions: list[int]  # of the input and of the residual, when the block took them in
    absorbed: bool = False  # a later step of the block exists, which stands for this one too
    # Computed but for the activation, which is left to the readers.
    unactivated: Loaded | None = None

    @staticmethod
    def __new__(cls, blocks: Blocks, convolution: Convolution, shape: list[int]) -> Pending:
        """Stand for a result of this shape."""
        x = convolution.x
        self: Pending = cls.standing_for(shape, result_dtype(x), x.device)
        self.blocks, self.convolution = blocks, convolution
        self.autocast = torch.is_autocast_enabled(x.device.type)
        self.versions = [version_of(x)]
        return self

    def next_step(self, *, in_place: bool = False, **taken_in: Any) -> Pending:
        """Return the block with one more call, whose effect is given by attributes.

        In place it is this object: whoever holds it sees the change. Otherwise it is a new one,
        and this one is absorbed.
        """
        result = self
        if not in_place:
            result = self.standing_for(self.shape, self.dtype, self.device)
            vars(result).update(vars(self))
            self.absorbed = True
        vars(result).update(taken_in)
        return result

    @property
    def weight_name(self) -> str:
        """Name of the convolution's weight."""
        return self.blocks.names[id(self.convolution.weight)]

    @property
    def can_be_folded(self) -> bool:
        """True if it has batch norm, and nobody has needed any of its numbers yet."""
        untouched = self.value is None and self.unactivated is None
        return self.batch_norm is not None and untouched and not self.absorbed

    @property
    def takes_addition(self) -> bool:
        """True if a residual can still be added to it."""
        return self.can_be_folded and self.residual is None and self.activation == "none"

    def make(self) -> Tensor:  # noqa: D102
        if self.unactivated is None:
            return self._computed()
        if self.unactivated.activation == "none":
            return self.unactivated.tensor
        tensor, activation, _, first_reader_applies_derivative = self.unactivated
        return Activated.apply(tensor, activation, first_reader_applies_derivative)

    def _computed(self) -> Tensor:
        """Return the result, folded if that is still what the model computes."""
        if self.absorbed:
            why = "something else uses the result before the activation"
            self.blocks.refuse(self.convolution.weight, why)
        if self._is_changed:
            why = "the convolution's input or what is added was changed in place"
            self.blocks.refuse(self.convolution.weight, why)
        kind = self.device.type
        dtype = torch.get_autocast_dtype(kind)
        with torch.enable_grad(), torch.autocast(kind, enabled=self.autocast, dtype=dtype):
            if self.batch_norm is None or self.absorbed or self._is_changed:
                return self._as_written()
            return self._folded(self.activation)[0]

    def _as_written(self) -> Tensor:
        """Return the result of the convolution, and of what has followed it, one by one."""
        if self.batch_norm is None and self.convolution.maps_one_pixel:
            self.blocks.replaced["pixel"] += 1
            return self.convolution.run_as_linear()
        result = self.convolution.run()
        if self.batch_norm is not None:
            result = F.batch_norm(**self.batch_norm | {"input": result})
        if self.residual is not None:
            result = result + computed(self.residual)
        return ACTIVATIONS[self.activation](result)

    @property
    def _is_changed(self) -> bool:
        """True if what the block took in was changed in place since."""
        taken_in = [t for t in (self.convolution.x, self.residual) if t is not None]
        return self.versions != [version_of(t) for t in taken_in]

    def _folded(self, activation: str, *, mean: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return the block as one node with this activation.

        With ``mean``: (before the activation, mean after it).
        """
        assert self.batch_norm is not None
        loaded, residual = loaded_of(self.convolution.x), None
        if self.residual is not None:
            residual = loaded_of(self.residual)
        x, weight, bias, geometry, _ = self.convolution
        norm = self.batch_norm
        options = BlockOptions(
            self.weight_name,
            float(norm["eps"]),
            activation,
            self.dtype,
            geometry,
            loaded.activation,
            loaded.gradient_at_output,
            residual_activation=residual.activation if residual else "none",
            passes_on_x=isinstance(x, Lazy) and loaded.tensor.requires_grad,
            mean=mean,
        )
        tensors = BlockTensors(
            loaded.tensor,
            weight,
            bias,
            norm["weight"],
            norm["bias"],
            residual and residual.tensor,
            norm["running_mean"],
            norm["running_var"],
            loaded.gate,
        )
        with torch.autocast(self.device.type, enabled=False):
            out, *others = FoldedConv.apply(options, *tensors)
        passed_on, means = (*others, None, None)[:2]
        if passed_on is not None:
            x.pass_on(passed_on)  # type: ignore[attr-defined]
        return out, means

    @property
    def runs_by_kernel(self) -> bool:
        """True if kernels serve the block as it is: it can leave its activation to the readers."""
        if not self.can_be_folded:
            return False
        x = loaded_of(self.convolution.x).tensor  # was loaded when the block began
        return ops.backend_for(x) == "triton" and not self._is_changed

    def _leave_activation(self, unactivated: Tensor) -> None:
        """Leave the activation of this tensor to the readers: the next one is the first."""
        no_derivative = self.activation == "none"
        self.unactivated = Loaded(unactivated, self.activation, gradient_at_output=no_derivative)

    def loaded(self) -> Loaded:  # noqa: D102
        if self.unactivated is None and self.runs_by_kernel:
            self._leave_activation(self._folded("none")[0])
        return self.unactivated or Loaded(self.compute())

    def try_to_leave_steps(self) -> bool:  # noqa: D102
        self.loaded()
        return self.unactivated is not None

    def mean_over_positions(self) -> Tensor | None:
        """Return the mean [B, C, 1, ...] as it can be had from where the result is computed.

        None if it cannot.
        """
        kind = kind_of(self.convolution.weight, self.convolution.geometry)
        if self.residual is not None or self.ndim != 4 or kind != "depthwise":
            return None
        if not self.runs_by_kernel:
            return None
        unactivated, mean = self._folded(self.activation, mean=True)
        self._leave_activation(unactivated)
        return mean

    def pass_on(self, tensor: Tensor) -> None:  # noqa: D102
        assert self.unactivated is not None
        # The gradients of the later readers reach the first one through this output of its.
        first_reader_applies_derivative = True
        self.unactivated = self.unactivated._replace(
            tensor=tensor, gradient_at_output=first_reader_applies_derivative
        )


def loaded_of(t: Tensor) -> Loaded:
    """Return what is loaded of a tensor, computed or not."""
    return t.loaded() if isinstance(t, Lazy) else Loaded(t)


def version_of(t: Tensor) -> int:
    """Return how often what is loaded of a tensor was written to."""
    return loaded_of(t).tensor._version


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
