"""The geometry of a convolution: how its output positions meet its inputs.

It is one argument of every op on convolutions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

Option = int | tuple[int, ...] | list[int]  # a number for all axes, or one for each


class ConvGeometry(NamedTuple):
    """Options of a convolution, in the order of ``torch.ops.aten.convolution``.

    They can be unpacked as its arguments.

    Attributes:
        stride: one number for each spatial axis, as in torch.nn.functional.conv2d; likewise padding
            and dilation.
        padding: zeros on either side.
        dilation: steps between the taps of the kernel.
        transposed: it is a transposed convolution.
        output_padding: as in conv_transpose2d; a single number is that of all axes.
        groups: Number of groups of channels that are convolved apart.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool = False
    output_padding: tuple[int, ...] = (0,)
    groups: int = 1

    @classmethod
    def of(
        cls,
        kernel: Sequence[int],
        stride: Option,
        padding: Option | str,
        dilation: Option,
        transposed: bool = False,
        output_padding: Option = 0,
        groups: int = 1,
    ) -> ConvGeometry | None:
        """The geometry as callers and autograd's nodes give it.

        It has one number for each axis of the kernel.

        Torch takes one number, or a sequence of one, for all axes, and its nodes save some as they
        were given. ``padding`` may be "valid" or "same". Returns None for what torch refuses, and
        for more zeros on one side than on the other.
        """
        axes = len(kernel)
        stride, dilation = _each_axis(stride, axes), _each_axis(dilation, axes)
        if isinstance(padding, str):
            zeros = _padding_by_name(padding, kernel, stride, dilation)
        else:
            zeros = _each_axis(padding, axes)
        output_padding = _each_axis(output_padding, axes)
        if (
            zeros is None
            or not len(stride) == len(zeros) == len(dilation) == len(output_padding) == axes
        ):
            return None
        return cls(stride, zeros, dilation, transposed, output_padding, groups)

    def output_size(self, size: Sequence[int], kernel: Sequence[int]) -> list[int]:
        """Return the size of the output along each spatial axis (not transposed).

        A size is below 1 where the kernel does not fit.
        """
        axes = zip(size, kernel, self.stride, self.padding, self.dilation, strict=True)
        return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in axes]

    def forward(self) -> ConvGeometry:
        """Return the same geometry without the transposition.

        Its weight has the same gradient, with inputs and output gradients exchanged.
        """
        return self._replace(transposed=False, output_padding=(0,))

    def with_rows(self) -> ConvGeometry:
        """A convolution of one spatial axis as one of two, of which the first (rows) has size 1."""
        return self._replace(
            stride=(1, *self.stride), padding=(0, *self.padding), dilation=(1, *self.dilation)
        )


def _each_axis(option: Option, axes: int) -> tuple[int, ...]:
    """One number for each axis, where one is given for all."""
    if not isinstance(option, (tuple, list)):
        return (int(option),) * axes
    numbers = tuple(map(int, option))
    return numbers * axes if len(numbers) == 1 else numbers


def _padding_by_name(
    name: str, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> tuple[int, ...] | None:
    """Zeros on either side for "valid" or "same".

    None if they differ between the sides, or torch refuses.
    """
    if name == "valid":
        return (0,) * len(kernel)
    if name != "same" or max(stride) > 1:
        return None
    totals = [step * (size - 1) for step, size in zip(dilation, kernel, strict=False)]
    if any(total % 2 for total in totals):
        return None
    return tuple(total // 2 for total in totals)


def kind_of(weight: Tensor, geometry: ConvGeometry) -> str | None:
    """Return which kernels serve a folded convolution with this weight.

    One of ``"pointwise"`` and ``"depthwise"``, or None.
    """
    if not 3 <= weight.ndim <= 4:
        return None
    if geometry.groups == 1 and max(weight.shape[2:]) == 1 and max(geometry.padding) == 0:
        return "pointwise"
    return "depthwise" if geometry.groups == len(weight) and weight.shape[1] == 1 else None
