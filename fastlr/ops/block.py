"""What the ops on folded blocks take: the records that go whole through all of their twins.

A block is a convolution, batch norm in eval mode, perhaps the sum with a residual, and an
activation (fastlr.ops.folded). Three records divide its arguments by when they exist:

- `Loaded`: a tensor that the block reads, different for every batch.
- `Block`: what the model has made of the block, the same for every batch.
- `Gradients`: what reaches the block in the backward pass.

All tensors of the first and the third have samples, along axis 0, those of a block have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fastlr.ops.geometry import ConvGeometry


class Loaded(NamedTuple):
    """A tensor as it lies in memory, and what is applied to it as it is loaded.

    It stands for ``activation(tensor) * gate``: the block that made the tensor has left these two
    steps to those who read it.

    Attributes:
        tensor: [B, C, *spatial].
        activation: a key of fastlr.ops.activations.ACTIVATIONS.
        gate: one factor a sample and channel [B, C, 1, ...]; None for one.
        gradient_at_output: who reads it hands back the gradient at the activation's output, and
            somebody else applies the derivative; else the gradient at ``tensor``.
    """

    tensor: Tensor
    activation: str = "none"
    gate: Tensor | None = None
    gradient_at_output: bool = False

    @property
    def is_cuda(self) -> bool:
        """True if it is on a GPU, as of tensors."""
        return self.tensor.is_cuda


class Block(NamedTuple):
    """A convolution with its batch norm folded into it, and the activation that follows.

    Attributes:
        weight: the model's own, W [O, C / groups, *kernel].
        folded: s W, of the same shape, in the dtype of the inputs.
        channels: numbers of the output channels [4, O]: folded bias, s, 1/sigma, bias - mean
            (`fastlr.ops.folded.fold_weights` gives both).
        activation: a key of fastlr.ops.activations.ACTIVATIONS.
        geometry: Geometry of the convolution, not transposed.
    """

    weight: Tensor
    folded: Tensor
    channels: Tensor
    activation: str
    geometry: ConvGeometry

    @property
    def bias(self) -> Tensor:
        """The folded bias [O]."""
        return self.channels[0]

    @property
    def statistics(self) -> Tensor:
        """Scale, 1/sigma and shift [3, O], as `folded_conv_sq_norms` takes them."""
        return self.channels[1:]


class Gradients(NamedTuple):
    """The gradients at all that a block has given out.

    Attributes:
        output: at its output [B, O, *spatial']; where it has given out the mean of its activation,
            at the activation's input.
        loaded: at what it has loaded, from those who took it from there [B, C, *spatial]: at the
            output of the activation that is applied on loading.
        mean: at the mean of its activation over all positions [B, O, 1, ...].
    """

    output: Tensor
    loaded: Tensor | None = None
    mean: Tensor | None = None


RECORDS = (Loaded, Block, Gradients)


def leaves(args: Sequence[Any]) -> Iterator[Any]:
    """Yield the arguments of an op, those that are records field by field."""
    for a in args:
        if isinstance(a, RECORDS):
            yield from a
        else:
            yield a


def changed(
    change: Callable[[Any, bool], Any], args: Sequence[Any], samples: Sequence[int] = ()
) -> list[Any]:
    """Return the arguments of an op with other leaves.

    Args:
        change: takes a leaf and whether it has samples.
        args: Arguments of the op.
        samples: numbers of the arguments that have samples; in records all tensors have.
    """
    given: list[Any] = []
    for i, a in enumerate(args):
        if isinstance(a, RECORDS):
            given.append(type(a)(*(change(field, i in samples) for field in a)))
        else:
            given.append(change(a, i in samples))
    return given
