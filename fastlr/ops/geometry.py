"""How a convolution's output positions meet its inputs: one argument of every op on convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class ConvGeometry(NamedTuple):
    """Options of a convolution, in the order in which ``torch.ops.aten.convolution`` takes them: unpack it there.

    Attributes:
        stride: one number for each spatial axis, as in torch.nn.functional.conv2d; likewise padding and dilation.
        padding: zeros on either side.
        dilation: steps between the taps of the kernel.
        transposed: it is a transposed convolution.
        output_padding: as in conv_transpose2d; a single number is that of all axes.
        groups: of channels that are convolved apart.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool = False
    output_padding: tuple[int, ...] = (0,)
    groups: int = 1

    def output_size(self, size: Sequence[int], kernel: Sequence[int]) -> list[int]:
        """Size of the output along each spatial axis (not transposed); below 1 where the kernel does not fit."""
        axes = zip(size, kernel, self.stride, self.padding, self.dilation, strict=True)
        return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in axes]

    def forward(self) -> ConvGeometry:
        """The same without the transposition: its weight has the same gradient, with inputs and gradients exchanged."""
        return self._replace(transposed=False, output_padding=(0,))

    def with_rows(self) -> ConvGeometry:
        """A convolution of one spatial axis as one of two, of which the first (rows) has size 1."""
        return self._replace(stride=(1, *self.stride), padding=(0, *self.padding), dilation=(1, *self.dilation))


def kind_of(weight: Tensor, geometry: ConvGeometry) -> str | None:
    """``"pointwise"``, ``"depthwise"`` or None: which kernels serve a folded convolution with this weight."""
    if not 3 <= weight.ndim <= 4:
        return None
    if geometry.groups == 1 and max(weight.shape[2:]) == 1 and max(geometry.padding) == 0:
        return "pointwise"
    return "depthwise" if geometry.groups == len(weight) and weight.shape[1] == 1 else None
