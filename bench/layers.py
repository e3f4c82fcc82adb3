"""What every op is timed on: layers of MobileNetV3-Large, ResNet-50 and ViT-B/16, at 224x224.

These are the large layers of the first and a few of the others.

``CASES``: op -> its cases by label; every op of fastlr.ops.TABLE that has a kernel is in it. A case
draws the op's arguments and counts floating-point operations (of the cheaper of the known forms);
the bytes that must move are those of all tensors given and returned, once each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.convolution_cases import plain_block
from fastlr.inputs import ShapeImages
from fastlr.ops.activations import ACTIVATIONS, KEEPS_OUTPUT
from fastlr.ops.block import Block, Gradients, Loaded
from fastlr.ops.geometry import ConvGeometry


@dataclass
class Draw:
    """Where and how arguments are made: activations in ``dtype``, weights, statistics in float32.

    ``shrink`` divides heights, widths and numbers of rows, to test and to time on a CPU.
    """

    device: torch.device
    dtype: torch.dtype = torch.bfloat16
    batch: int = 256
    shrink: int = 1

    def __post_init__(self) -> None:
        self.generator = torch.Generator(self.device).manual_seed(0)

    def side(self, size: int) -> int:
        """A height, width or number of rows, made smaller where that is asked for."""
        return max(1, size // self.shrink)

    def normal(self, *shape: int, last: bool = False) -> Tensor:
        """Standard normal numbers; ``last``: in channels_last memory."""
        t = self.weights(*shape).to(self.dtype)
        return t.to(memory_format=torch.channels_last) if last else t

    def weights(self, *shape: int) -> Tensor:
        """Standard normal numbers in float32."""
        return torch.randn(shape, generator=self.generator, device=self.device)

    def images(self, channels: int, size: int) -> Tensor:
        """Activations [B, channels, side, side] in channels_last memory."""
        side = self.side(size)
        return self.normal(self.batch, channels, side, side, last=True)


class Call(NamedTuple):
    """Positional and keyword arguments of an op, and its floating-point operations."""

    args: tuple[Any, ...]
    operations: int
    options: dict[str, Any] = {}


# The label of a layer to what makes an op's arguments on it.
Cases = dict[str, Callable[[Draw], Call]]


# --------------------------------------------------------------------------------------------------
# convolutions
class Layer:
    """A convolution and what follows it, by label: ``1x1 16>64 @112 relu``, ``dw 3x3/2 64 @112``.

    That is: depthwise or not, window, stride, channels, side of its input, activation.
    """

    def __init__(self, label: str) -> None:
        match = re.fullmatch(r"(dw )?(\d)x\d(?:/(\d))? (\d+)(?:>(\d+))? @(\d+)(?: (\w+))?", label)
        assert match is not None, label
        depthwise, *numbers, act = match.groups()
        window, stride, inputs, outputs, self.side = (int(number or 0) for number in numbers)
        self.label, self.act, self.window, self.inputs = label, act or "none", window, inputs
        self.outputs, self.groups, self.stride = (
            outputs or inputs,
            inputs if depthwise else 1,
            stride or 1,
        )
        padding = (window - 1) // 2, (window - 1) // 2
        self.geometry = ConvGeometry(
            (self.stride, self.stride), padding, (1, 1), groups=self.groups
        )

    def tensors(self, draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
        """Input, gradient at the output, weight (float32)."""
        out = (draw.side(self.side) - 1) // self.stride + 1
        g = draw.normal(draw.batch, self.outputs, out, out, last=True)
        shape = self.outputs, self.inputs // self.groups, self.window, self.window
        fan = shape[1] * self.window**2
        return draw.images(self.inputs, self.side), g, draw.weights(*shape) / fan**0.5

    def operations(self, g: Tensor) -> int:
        """Of one product with the window: the forward pass's, or that of either gradient."""
        return 2 * g.numel() * (self.inputs // self.groups) * self.window**2


def _folded_conv(layer: Layer, residual: bool, draw: Draw) -> Call:
    x, g, weight = layer.tensors(draw)
    channels = draw.weights(4, layer.outputs)
    folded = weight.to(draw.dtype)  # in place of the unfolded weight too, which it does not read
    block = Block(folded, folded, channels, layer.act, layer.geometry)
    args = (Loaded(x), block, Loaded(g) if residual else None)
    return Call(args, layer.operations(g))


def _folded_conv_sq_norms(layer: Layer, draw: Draw) -> Call:
    x, g, weight = layer.tensors(draw)
    statistics = 1 + draw.weights(3, layer.outputs) / 10
    return Call((x, g, plain_block(weight, statistics, layer.geometry)), layer.operations(g))


def _folded_conv_backward(layer: Layer, draw: Draw) -> Call:
    x, grad, weight = layer.tensors(draw)
    channels = 1 + draw.weights(4, layer.outputs) / 10
    folded = (weight * channels[1].view(-1, 1, 1, 1)).to(draw.dtype)
    block = Block(weight, folded, channels, layer.act, layer.geometry)
    kept = 2 * draw.normal(*grad.shape, last=True)
    if layer.act in KEEPS_OUTPUT and layer.act != "none":
        kept = ACTIVATIONS[layer.act](kept)
    args = (Loaded(x), Gradients(grad), kept, block, True)
    return Call(args, 2 * layer.operations(grad))


def _conv_sq_norms(layer: Layer, draw: Draw) -> Call:
    x, g, weight = layer.tensors(draw)
    return Call((x[:, None], g[:, None], weight, layer.geometry), layer.operations(g))


def _fold_weights(outputs: int, inputs: int, draw: Draw) -> Call:
    gamma, beta, mean, var = (draw.weights(outputs) for _ in range(4))
    weight = draw.weights(outputs, inputs, 1, 1)
    return Call(
        (draw.dtype, 1e-3, weight, None, gamma, beta, mean, 0.5 + var.abs()), weight.numel()
    )


# ------------------------------------------------------------------------------------- products,
# small sums, cotangents
def _linear_sq_norms(rows: int, inputs: int, outputs: int, draw: Draw) -> Call:
    rows = draw.side(rows)
    a, g = draw.normal(draw.batch, 1, rows, inputs), draw.normal(draw.batch, 1, rows, outputs)
    return Call((a, g), 2 * draw.batch * rows * min(inputs * outputs, rows * (inputs + outputs)))


def _dense_sq_norms(parameters: int, draw: Draw) -> Call:
    grads = draw.normal(draw.batch, parameters)
    return Call((grads,), 2 * grads.numel())


def _one_row_sq_norms(inputs: int, outputs: int, draw: Draw) -> Call:
    a, g = draw.normal(draw.batch, inputs), draw.normal(draw.batch, outputs)
    return Call((a, g), 2 * (a.numel() + g.numel()))


def _channel_sums(channels: int, side: int, draw: Draw) -> Call:
    x, g = draw.images(channels, side)[:, None], draw.images(channels, side)[:, None]
    return Call((x, g), 3 * x.numel())


def _norm_sums(rows: int, width: int, centred: bool, draw: Draw) -> Call:
    x, g = (draw.normal(draw.batch, draw.side(rows), width) for _ in range(2))
    mean = x.float().mean(2, keepdim=True)
    scale = torch.rsqrt((x.float() - mean * centred).square().mean(2, keepdim=True) + 1e-5)
    return Call((x, g, mean, scale) if centred else (x, g, scale), 5 * x.numel())


def _broadcast_sums(rows: int, width: int, factor: bool, draw: Draw) -> Call:
    g, other = (draw.normal(draw.batch, draw.side(rows), width) for _ in range(2))
    return Call((g, other if factor else None, (1,)), (1 + factor) * g.numel())


def _embedding_sq_norms(rows: int, width: int, vocabulary: int, draw: Draw) -> Call:
    shape = draw.batch, draw.side(rows)
    ids = torch.randint(vocabulary, shape, generator=draw.generator, device=draw.device)
    return Call((ids, draw.normal(*shape, width)), 3 * ids.numel() * width)


def _cotangent(classes: int, draw: Draw) -> Call:
    z, index = 3 * draw.normal(draw.batch, 1, classes), torch.arange(draw.batch, device=draw.device)
    return Call((z, index, 7), 10 * z.numel())


def _shape_images(op: str, dtype: torch.dtype | None, draw: Draw) -> Call:
    size, index = (3, draw.side(224), draw.side(224)), torch.arange(draw.batch, device=draw.device)
    table = ShapeImages(size).table().to(draw.device)
    options = {
        "size": size,
        "table": table,
        "dtype": dtype or draw.dtype,
        "channels_last": True,
        "seed": 3,
    }
    return Call((index[:1], draw.batch) if op == "shape_images_from" else (index,), 0, options)


# --------------------------------------------------------------------------------------------------
# the table
MOBILE = (  # MobileNetV3-Large, pointwise and depthwise in turn, largest first
    "1x1 16>64 @112 relu",
    "dw 3x3/2 64 @112 relu",
    "1x1 24>72 @56 relu",
    "dw 3x3 72 @56 relu",
    "1x1 40>240 @28 hardswish",
    "dw 3x3 16 @112 relu",
    "1x1 64>24 @56",
    "dw 5x5/2 72 @56 relu",
    "1x1 72>24 @56",
    "dw 3x3/2 240 @28 hardswish",
    "1x1 112>672 @14 hardswish",
    "dw 5x5 672 @14 hardswish",
    "1x1 672>112 @14",
    "dw 5x5 960 @7 hardswish",
    "1x1 160>960 @7 hardswish",
)
DENSE = ("3x3/2 3>16 @224 hardswish", "3x3 64>64 @56 relu", "3x3 256>256 @14 relu")
RESNET = "1x1 64>256 @56"


def _layers(build: Callable[..., Call], labels: Sequence[str], *given: Any) -> Cases:
    return {label: partial(build, Layer(label), *given) for label in labels}


CASES: dict[str, Cases] = {
    "shape_images_from": {
        "224x224 as the run's dtype": partial(_shape_images, "shape_images_from", None),
        "224x224 float32": partial(_shape_images, "shape_images_from", torch.float32),
    },
    "shape_images_at": {
        "224x224 as the run's dtype": partial(_shape_images, "shape_images_at", None)
    },
    "folded_conv": {
        **_layers(_folded_conv, MOBILE, False),
        "1x1 72>24 @56, residual": partial(_folded_conv, Layer("1x1 72>24 @56"), True),
    },
    "folded_conv_backward": _layers(_folded_conv_backward, MOBILE),
    "folded_conv_sq_norms": _layers(
        _folded_conv_sq_norms, (*DENSE, *MOBILE[:2], MOBILE[3], MOBILE[10])
    ),
    "conv_sq_norms": _layers(
        _conv_sq_norms, (*MOBILE[:3], *DENSE, MOBILE[4], MOBILE[10], MOBILE[12], RESNET)
    ),
    "fold_weights": {"1x1 160>960": partial(_fold_weights, 960, 160)},
    "dense_sq_norms": {"1.2 M": partial(_dense_sq_norms, 960 * 1280)},
    "one_row_sq_norms": {
        "960>1280": partial(_one_row_sq_norms, 960, 1280),
        "240>960": partial(_one_row_sq_norms, 240, 960),
    },
    "linear_sq_norms": {
        "960>1280, one row": partial(_linear_sq_norms, 1, 960, 1280),
        "768>3072, 197 rows (ViT)": partial(_linear_sq_norms, 197, 768, 3072),
        "768>768, 197 rows (ViT)": partial(_linear_sq_norms, 197, 768, 768),
    },
    "channel_sums": {
        "64 @112": partial(_channel_sums, 64, 112),
        "240 @28": partial(_channel_sums, 240, 28),
        "960 @7": partial(_channel_sums, 960, 7),
    },
    "layer_norm_sums": {"768, 197 rows (ViT)": partial(_norm_sums, 197, 768, True)},
    "rms_norm_sums": {"768, 197 rows": partial(_norm_sums, 197, 768, False)},
    "broadcast_sums": {
        "bias of 768, 197 rows (ViT)": partial(_broadcast_sums, 197, 768, False),
        "scale of 768, 197 rows": partial(_broadcast_sums, 197, 768, True),
    },
    "embedding_sq_norms": {"768, 197 rows": partial(_embedding_sq_norms, 197, 768, 1000)},
    "categorical_root_cotangent": {
        "2 classes": partial(_cotangent, 2),
        "1000 classes": partial(_cotangent, 1000),
    },
}
