"""Time of a shape's first convolution, with cuDNN and with torch's own kernels.

``python -m bench.gpu_run.planning``. cuDNN plans a convolution for each shape, dtype and direction
in every process. fastlr verifies without cuDNN, so it plans for the measured pass alone: this shows
what that saves. On a CPU the shapes are small, and both ways are torch's own.
"""

from __future__ import annotations

import statistics
from typing import NamedTuple

import torch
import torch.nn.functional as F

from bench.paired import seconds_of


class Shape(NamedTuple):
    """A convolution with "same" padding on square maps."""

    inputs: int
    outputs: int
    size: int
    kernel: int = 1
    groups: int = 1


# Shapes of MobileNetV3-Large, and one of ResNet-50. The first two load the libraries.
SHAPES = (
    Shape(16, 64, 112),
    Shape(24, 72, 56),
    Shape(40, 120, 28),
    Shape(72, 72, 56, 5, 72),
    Shape(120, 120, 28, 5, 120),
    Shape(200, 80, 14),
    Shape(184, 184, 14, 3, 184),
    Shape(112, 672, 14),
    Shape(3, 16, 224, 3),
    Shape(64, 64, 28, 3),
)
WARM_UP = 2
CALLS = 3
DTYPES = (torch.float64, torch.bfloat16)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def operands(shape: Shape, samples: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a convolution's random input and weight."""
    size = shape.size if DEVICE.type == "cuda" else min(shape.size, 14)
    x = torch.randn(samples, shape.inputs, size, size, device=DEVICE, dtype=dtype)
    weight_shape = shape.outputs, shape.inputs // shape.groups, shape.kernel, shape.kernel
    weight = torch.randn(weight_shape, device=DEVICE, dtype=dtype)
    x = x.to(memory_format=torch.channels_last)
    return x.requires_grad_(), weight.requires_grad_()


def times_of_calls(shape: Shape, samples: int, dtype: torch.dtype) -> list[float]:
    """Return the milliseconds of several forward and backward passes of a convolution."""
    x, weight = operands(shape, samples, dtype)

    def both_passes() -> None:
        z = F.conv2d(x, weight, padding=shape.kernel // 2, groups=shape.groups)
        torch.autograd.grad(z, (x, weight), torch.ones_like(z))

    return [1e3 * seconds_of(both_passes, DEVICE) for _ in range(CALLS)]


def show_planning(dtype: torch.dtype, cudnn: bool) -> None:
    """Print the mean time of first and later calls over the shapes."""
    samples = 4 if cudnn else 3  # so that neither way finds what the other has loaded
    with torch.backends.cudnn.flags(enabled=cudnn, deterministic=True):
        times = [times_of_calls(shape, samples, dtype) for shape in SHAPES][WARM_UP:]
    first = statistics.mean(calls[0] for calls in times)
    later = statistics.mean(calls[-1] for calls in times)
    print(
        f"{dtype}, cuDNN {'on' if cudnn else 'off'}: first forward and backward pass "
        f"{first:.1f} ms per shape, later passes {later:.2f} ms",
        flush=True,
    )


def show_large_batch(shape: Shape) -> None:
    """Print the time without cuDNN for half a chunk: torch loops over the samples on the host."""
    samples = 250 if DEVICE.type == "cuda" else 10
    x, weight = operands(shape, samples, torch.bfloat16)
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=False, deterministic=True):
        for _ in range(2):
            took = seconds_of(lambda: F.conv2d(x, weight, padding=shape.kernel // 2), DEVICE)
    print(f"cuDNN off, {samples} samples, {shape}: {1e3 * took:.2f} ms", flush=True)


def main() -> None:
    """Measure, and print."""
    for dtype in DTYPES:
        for cudnn in (True, False):
            show_planning(dtype, cudnn)
    for shape in (Shape(112, 672, 14), Shape(64, 64, 28, 3)):
        show_large_batch(shape)


if __name__ == "__main__":
    main()
