"""How a timed call of an op is made: where its arguments are drawn, what they are, what must be moved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

STORED = 1e-2  # deviation where results are rounded to bf16 or fp16, or come from rounded intermediate values
SUMMED = 1e-3  # where sums of exact products are accumulated in float32
FULL = 1e-4  # float32 throughout


class Draw:
    """Where and how a case's arguments are made.

    Args:
        device: on which device.
        dtype: of activations and gradients; weights and statistics are float32.
        batch: samples.
        shrink: divides heights, widths and numbers of rows, to test and to time on a CPU.
        seed: of the numbers.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
        batch: int = 256,
        shrink: int = 1,
        seed: int = 0,
    ) -> None:
        self.device, self.dtype, self.batch, self.shrink = device, dtype, batch, shrink
        self.generator = torch.Generator(device).manual_seed(seed)

    def side(self, size: int) -> int:
        """A height, width or number of rows, made smaller where that is asked for."""
        return max(1, size // self.shrink)

    def normal(self, *shape: int, dtype: torch.dtype | None = None, last: bool = False) -> Tensor:
        """Standard normal numbers; ``last``: in channels_last memory."""
        t = torch.randn(shape, generator=self.generator, device=self.device).to(dtype or self.dtype)
        return t.to(memory_format=torch.channels_last) if last else t

    def integers(self, high: int, *shape: int) -> Tensor:
        """Integers from 0 to ``high`` - 1."""
        return torch.randint(high, shape, generator=self.generator, device=self.device)

    def tolerance(self, low: float) -> float:
        """``low`` in bf16 and fp16, FULL in float32."""
        return FULL if self.dtype == torch.float32 else low


@dataclass
class Call:
    """An op's arguments, and what is known of the call.

    Attributes:
        args: positional arguments.
        batched: positions of those with a sample axis 0.
        bytes: that must be read and written.
        operations: on floating-point numbers; 0 where there are none to speak of.
        tolerance: of the deviation from the reference.
        options: keyword arguments.
        reference: samples -> what the op gives for them, by definition; default: the op's own reference on a cut.
    """

    args: tuple[Any, ...]
    batched: tuple[int, ...]
    bytes: int
    operations: int
    tolerance: float
    options: dict[str, Any] = field(default_factory=dict)
    reference: Callable[[list[int]], Any] | None = None

    def input_bytes(self) -> int:
        """Bytes of the tensors given."""
        return size(*[a for a in self.args if isinstance(a, Tensor)])


@dataclass(frozen=True)
class Case:
    """One op on one layer.

    Attributes:
        label: the layer, unique within the op.
        build: makes the arguments.
        target: share of the copy bandwidth to reach; None where the layer is small or the op has no norms.
        main: also part of a quick run.
    """

    label: str
    build: Callable[[Draw], Call]
    target: float | None = None
    main: bool = False


def size(*tensors: Tensor | None) -> int:
    """Bytes of all elements together."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


@dataclass(frozen=True)
class Layer:
    """A convolution with what follows it: channels, output channels, window, stride, side of its input, activation."""

    inputs: int
    outputs: int
    window: int
    stride: int
    side: int
    act: str = "none"
    depthwise: bool = False

    @property
    def groups(self) -> int:
        """Of the convolution."""
        return self.inputs if self.depthwise else 1

    @property
    def label(self) -> str:
        """Such as ``1x1 16>64 @112 relu`` or ``dw 3x3/2 64 @112``."""
        kind = "dw " if self.depthwise else ""
        step = f"/{self.stride}" if self.stride > 1 else ""
        channels = f"{self.inputs}" if self.depthwise else f"{self.inputs}>{self.outputs}"
        act = "" if self.act == "none" else f" {self.act}"
        return f"{kind}{self.window}x{self.window}{step} {channels} @{self.side}{act}"

    @property
    def options(self) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int], int]:
        """Stride, padding, dilation, groups."""
        padding = (self.window - 1) // 2
        return (self.stride, self.stride), (padding, padding), (1, 1), self.groups

    def tensors(self, draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
        """Input, gradient at the output, weight (float32)."""
        side = draw.side(self.side)
        out = (side - 1) // self.stride + 1
        x = draw.normal(draw.batch, self.inputs, side, side, last=True)
        g = draw.normal(draw.batch, self.outputs, out, out, last=True)
        fan = self.inputs // self.groups * self.window**2
        shape = self.outputs, self.inputs // self.groups, self.window, self.window
        return x, g, draw.normal(*shape, dtype=torch.float32) / fan**0.5

    def operations(self, g: Tensor) -> int:
        """Of one product with the window: the forward pass's, or that of either gradient."""
        return 2 * g.numel() * (self.inputs // self.groups) * self.window**2
