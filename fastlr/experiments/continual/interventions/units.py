"""The units of a network, and the layers that read them.

A *unit* is a channel of a convolution or a feature of a linear layer, with all that acts on this
channel alone: its row of the weight, its bias, its scale, shift and statistics in a batch norm, its
filter of a depthwise convolution that follows, and its row of the layer that makes a factor for it
(squeeze-and-excitation). Its *outgoing weights* are its columns of the convolutions and linear
layers that read it; between the two there may be activations, pooling, dropout and flattening. It
can be replaced if nothing else reads it: with its outgoing weights at zero it has no influence at
all.

Left alone, with a reason, are units that reach anything else: channels of a residual sum (several
layers write them, and resetting one would change what all of them have learned), the model's
outputs, whatever goes through a norm over channels (where each unit changes the others) or an
operation that is not known to `fastlr.experiments.continual.interventions.find_units`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass(eq=False)
class ReadingLayer:
    """A layer that reads units.

    Unit i is its input features ``repeat * i`` to ``repeat * i + repeat - 1``.

    Attributes:
        name: Name of the module.
        layer: A linear layer or a convolution.
        repeat: Features a unit: 1, or the positions of a channel that were flattened.
        norm: The batch norm that reads the layer's output, if nothing else does.
    """

    name: str
    layer: Any
    repeat: int
    norm: Any = None

    @property
    def groups(self) -> int:
        """Of the convolution; 1 for a linear layer."""
        return getattr(self.layer, "groups", 1)

    def outgoing_columns(self, t: Tensor, features: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
        """Return a view of ``t`` and the index there of some features' outgoing weights.

        ``t`` is the layer's weight or a tensor of its shape.
        """
        width = t.shape[1]
        return t.unflatten(0, (self.groups, -1)), (features // width, slice(None), features % width)

    def by_feature(self, t: Tensor) -> Tensor:
        """Sum a tensor of the weight's shape over positions, and part it by the layer's groups.

        The shape is ``[groups, outputs of a group, features of a group]``.
        """
        return t.reshape(*t.shape[:2], -1).sum(2).unflatten(0, (self.groups, -1))

    def features(self, units: Tensor) -> Tensor:
        """Return the features of some units."""
        return (
            units[:, None] * self.repeat + torch.arange(self.repeat, device=units.device)
        ).flatten()


@dataclasses.dataclass(eq=False)
class Units:
    """The units that some layers make together.

    Attributes:
        name: Name of the module that makes them.
        count: How many.
        layers: By name, those whose row i makes unit i: one, and depthwise convolutions and layers
            that make factors.
        norms: By name, the batch norms that act on them.
        readers: The layers that read them.
        reason: Why they are left alone; empty if they can be replaced.
    """

    name: str
    count: int
    layers: dict[str, Any] = dataclasses.field(default_factory=dict)
    norms: dict[str, Any] = dataclasses.field(default_factory=dict)
    readers: list[ReadingLayer] = dataclasses.field(default_factory=list)
    reason: str = ""
    _into: Units | None = None

    def root(self) -> Units:
        """Return the units that these were joined to, themselves if to none."""
        return self if self._into is None else self._into.root()

    def exclude(self, reason: str) -> None:
        """Leave them alone, and those that they were joined to; the first reason counts."""
        root = self.root()
        root.reason = root.reason or reason

    def join(self, other: Units) -> None:
        """Make the units of ``other`` parts of these, one by one."""
        self.layers |= other.layers
        self.norms |= other.norms
        self.readers += other.readers
        self.reason = self.reason or other.reason
        other._into = self
