"""What each op is timed on: the large layers of MobileNetV3-Large, a few of ResNet-50 and ViT-B/16, all at 224x224.

One table, ``CASES``: op -> its cases. Every op of fastlr.ops.TABLE that has a kernel must be in it (a test holds it to
that). A case builds its arguments (random numbers) and counts its traffic: the bytes that must be read and written, every
input and every output once, whatever the kernel does in between; and its operations, for the roofline: those of the
cheaper of the known forms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from fastlr import ops
from fastlr.inputs import ShapeImages
from fastlr.reference.folded import ACTIVATIONS, KEEPS_OUTPUT
from fastlr.speed.layers import STORED, SUMMED, Call, Case, Draw, Layer, size

NORM_TARGET, IMAGE_TARGET = 0.7, 0.8  # share of the copy bandwidth that the kernels of large layers are to reach
_FLOAT32, _FLOAT64 = 4, 8

# MobileNetV3-Large, largest first; then ResNet-50. ViT-B/16 is in the cases of linear layers and layer norms.
POINTWISE = (
    Layer(16, 64, 1, 1, 112, "relu"),
    Layer(24, 72, 1, 1, 56, "relu"),
    Layer(40, 240, 1, 1, 28, "hardswish"),
    Layer(64, 24, 1, 1, 56),
    Layer(72, 24, 1, 1, 56),
    Layer(112, 672, 1, 1, 14, "hardswish"),
    Layer(672, 112, 1, 1, 14),
    Layer(160, 960, 1, 1, 7, "hardswish"),
)
DEPTHWISE = (
    Layer(64, 64, 3, 2, 112, "relu", depthwise=True),
    Layer(72, 72, 3, 1, 56, "relu", depthwise=True),
    Layer(16, 16, 3, 1, 112, "relu", depthwise=True),
    Layer(72, 72, 5, 2, 56, "relu", depthwise=True),
    Layer(240, 240, 3, 2, 28, "hardswish", depthwise=True),
    Layer(672, 672, 5, 1, 14, "hardswish", depthwise=True),
    Layer(960, 960, 5, 1, 7, "hardswish", depthwise=True),
)
DENSE = (Layer(3, 16, 3, 2, 224, "hardswish"), Layer(64, 64, 3, 1, 56, "relu"), Layer(256, 256, 3, 1, 14, "relu"))
RESNET = (Layer(64, 256, 1, 1, 56),)
LARGE = 28  # sides from which a layer of MobileNetV3-Large counts as large


def _target(layer: Layer) -> float | None:
    return NORM_TARGET if layer.side >= LARGE and layer not in (*DENSE[1:], *RESNET) else None


# --------------------------------------------------------------------------------------------------------- convolutions
def folded_conv(layer: Layer, draw: Draw) -> Call:
    """Forward pass: input and weights in; output, and where it differs what the backward pass keeps, out."""
    x, g, weight = layer.tensors(draw)
    bias = draw.normal(layer.outputs, dtype=torch.float32)
    copies = 1 if layer.act in KEEPS_OUTPUT else 2
    args = (x, weight.to(draw.dtype), bias, layer.act, *layer.options)
    moved = size(x, args[1], bias) + copies * size(g)
    return Call(args, (0,), moved, layer.operations(g), draw.tolerance(STORED))


def folded_conv_residual(layer: Layer, draw: Draw) -> Call:
    """The same with a residual added before the activation."""
    call = folded_conv(layer, draw)
    out = (draw.side(layer.side) - 1) // layer.stride + 1
    residual = draw.normal(draw.batch, layer.outputs, out, out, last=True)
    call.args, call.batched = (*call.args, residual), (0, len(call.args))
    call.bytes += size(residual)
    return call


def fold_weights(outputs: int, inputs: int, window: int, draw: Draw) -> Call:
    """Weight and four statistics in, folded weight and four numbers a channel out. Small: its launch counts, not this."""
    weight = draw.normal(outputs, inputs, window, window, dtype=torch.float32)
    gamma, beta, mean = (draw.normal(outputs, dtype=torch.float32) for _ in range(3))
    var = 0.5 + draw.normal(outputs, dtype=torch.float32).abs()
    moved = size(weight, gamma, beta, mean, var, gamma, beta, mean, var) + weight.numel() * draw.dtype.itemsize
    args = (weight, None, gamma, beta, mean, var, 1e-3, draw.dtype)
    return Call(args, (), moved, weight.numel(), draw.tolerance(STORED))


def folded_conv_moments(layer: Layer, draw: Draw) -> Call:
    """Input, gradient and weight in; one number a sample and two a sample and channel out."""
    x, g, weight = layer.tensors(draw)
    scale = 1 + draw.normal(layer.outputs, dtype=torch.float32) / 10
    moved = size(x, g, weight, scale) + _moments(layer, draw)
    return Call((x, g, weight, scale, *layer.options), (0, 1), moved, layer.operations(g), draw.tolerance(SUMMED))


def folded_conv_backward(layer: Layer, draw: Draw) -> Call:
    """Input, gradient, what was kept and both weights in; input gradient and moments out."""
    x, grad, weight = layer.tensors(draw)
    scale = 1 + draw.normal(layer.outputs, dtype=torch.float32) / 10
    folded = (weight * scale.view(-1, 1, 1, 1)).to(draw.dtype)
    kept = draw.normal(*grad.shape, last=True) * 2
    if layer.act in KEEPS_OUTPUT and layer.act != "none":
        kept = ACTIVATIONS[layer.act](kept)
    moved = size(x, grad, None if layer.act == "none" else kept, folded, weight, scale, x) + _moments(layer, draw)
    args = (x, grad, kept, layer.act, folded, weight, scale, *layer.options, True)
    return Call(args, (0, 1, 2), moved, 2 * layer.operations(grad), draw.tolerance(STORED))


def _moments(layer: Layer, draw: Draw) -> int:
    return draw.batch * (_FLOAT64 + 2 * _FLOAT32 * layer.outputs)


def conv_sq_norms(layer: Layer, draw: Draw) -> Call:
    """Input and gradient in, one number a sample out."""
    x, g, weight = layer.tensors(draw)
    stride, padding, dilation, groups = layer.options
    args = (x[:, None], g[:, None], weight, stride, padding, dilation, False, (0, 0), groups)
    return Call(args, (0, 1), size(x, g) + _FLOAT64 * draw.batch, layer.operations(g), draw.tolerance(SUMMED))


def activation_grad(channels: int, side: int, act: str, draw: Draw) -> Call:
    """Gradient and what was kept in, gradient out."""
    side = draw.side(side)
    grad, kept = (draw.normal(draw.batch, channels, side, side, last=True) for _ in range(2))
    kept = ACTIVATIONS[act](2 * kept) if act in KEEPS_OUTPUT else 2 * kept
    return Call((grad, kept, act), (0, 1), size(grad, kept, grad), 2 * grad.numel(), draw.tolerance(STORED))


def gate_grad(channels: int, side: int, draw: Draw) -> Call:
    """Gradient and input in, input gradient out; the gates and their gradients are small."""
    side = draw.side(side)
    g, x = (draw.normal(draw.batch, channels, side, side, last=True) for _ in range(2))
    gate = draw.normal(draw.batch, channels, 1, 1)
    return Call((g, x, gate), (0, 1, 2), size(g, x, x, gate, gate), 3 * x.numel(), draw.tolerance(STORED))


# ------------------------------------------------------------------------------------------------------ matrix products
def linear_sq_norms(rows: int, inputs: int, outputs: int, draw: Draw) -> Call:
    """Inputs and gradients in, one number a sample out; the Gram form's operations where they are fewer."""
    rows = draw.side(rows)
    a, g = draw.normal(draw.batch, 1, rows, inputs), draw.normal(draw.batch, 1, rows, outputs)
    operations = 2 * draw.batch * rows * min(inputs * outputs, rows * (inputs + outputs))
    return Call((a, g), (0, 1), size(a, g) + _FLOAT64 * draw.batch, operations, draw.tolerance(SUMMED))


# ----------------------------------------------------------------------------------------------------- small reductions
def channel_sums(channels: int, side: int, draw: Draw) -> Call:
    """Input and gradient in, two numbers a sample and channel out."""
    side = draw.side(side)
    x, g = (draw.normal(draw.batch, channels, side, side, last=True)[:, None] for _ in range(2))
    written = 2 * _FLOAT32 * draw.batch * channels
    return Call((x, g), (0, 1), size(x, g) + written, 3 * x.numel(), draw.tolerance(SUMMED))


def layer_norm_sums(rows: int, width: int, draw: Draw) -> Call:
    """Input, gradient and statistics in, two numbers a sample and feature out."""
    rows = draw.side(rows)
    x, g = (draw.normal(draw.batch, rows, width) for _ in range(2))
    mean = x.float().mean(2, keepdim=True)
    rstd = torch.rsqrt(x.float().var(2, correction=0, keepdim=True) + 1e-5)
    written = 2 * _FLOAT32 * draw.batch * width
    tolerance = draw.tolerance(SUMMED)
    return Call((x, g, mean, rstd), (0, 1, 2, 3), size(x, g, mean, rstd) + written, 5 * x.numel(), tolerance)


def rms_norm_sums(rows: int, width: int, draw: Draw) -> Call:
    """Input, gradient and root mean squares in, a number a sample and feature out."""
    rows = draw.side(rows)
    x, g = (draw.normal(draw.batch, rows, width) for _ in range(2))
    rrms = torch.rsqrt(x.float().square().mean(2, keepdim=True) + 1e-5)
    written = _FLOAT32 * draw.batch * width
    return Call((x, g, rrms), (0, 1, 2), size(x, g, rrms) + written, 3 * x.numel(), draw.tolerance(SUMMED))


def broadcast_sums(rows: int, width: int, factor: bool, draw: Draw) -> Call:
    """Gradient, and the factor where there is one, in; a number a sample and feature out."""
    rows = draw.side(rows)
    g = draw.normal(draw.batch, rows, width)
    other = draw.normal(draw.batch, rows, width) if factor else None
    written = _FLOAT32 * draw.batch * width
    batched = (0, 1) if factor else (0,)
    operations = (1 + factor) * g.numel()
    return Call((g, other, (1,)), batched, size(g, other) + written, operations, draw.tolerance(SUMMED))


def embedding_sq_norms(rows: int, width: int, vocabulary: int, draw: Draw) -> Call:
    """Row numbers and gradients in, one number a sample out."""
    rows = draw.side(rows)
    ids, g = draw.integers(vocabulary, draw.batch, rows), draw.normal(draw.batch, rows, width)
    moved = size(ids, g) + _FLOAT64 * draw.batch
    return Call((ids, g), (0, 1), moved, 3 * g.numel(), draw.tolerance(SUMMED))


# ------------------------------------------------------------------------------------------------- cotangents and images
def categorical_root_cotangent(positions: int, classes: int, draw: Draw) -> Call:
    """Logits and sample numbers in, float64 cotangents out; about ten operations an element."""
    positions = draw.side(positions)
    z, index = 3 * draw.normal(draw.batch, positions, classes), torch.arange(draw.batch, device=draw.device)
    moved = size(z, index) + _FLOAT64 * z.numel()
    return Call((z, index, 7), (0, 1), moved, 10 * z.numel(), 1e-9)


def shape_images(dtype: torch.dtype | None, draw: Draw) -> Call:
    """Nothing in, pixels out; every bit must be that of the definition."""
    side = draw.side(224)
    options = _images(side, dtype or draw.dtype, draw)
    moved = draw.batch * 3 * side * side * options["dtype"].itemsize
    given = {**options, "device": draw.device}
    return Call((11, 11 + draw.batch), (), moved, 0, 0.0, given, lambda samples: _pixels(samples, options, draw))


def shape_images_from(dtype: torch.dtype | None, draw: Draw) -> Call:
    """As `shape_images`, with the first image's number on the device."""
    call = shape_images(dtype, draw)
    call.args = (torch.full((1,), 11, dtype=torch.int64, device=draw.device), draw.batch)
    call.options.pop("device")
    return call


def shape_images_at(dtype: torch.dtype | None, draw: Draw) -> Call:
    """As `shape_images`, with each image's number on the device."""
    call = shape_images(dtype, draw)
    call.args = (torch.arange(11, 11 + draw.batch, device=draw.device),)
    call.options.pop("device")
    return call


def _images(side: int, dtype: torch.dtype, draw: Draw) -> dict[str, Any]:
    table = ShapeImages((3, side, side)).table().to(draw.device)
    return {"size": (3, side, side), "table": table, "dtype": dtype, "channels_last": True, "seed": 3}


def _pixels(samples: list[int], options: dict[str, Any], draw: Draw) -> torch.Tensor:
    define = ops.get("shape_images", "reference")
    return torch.cat([define(11 + i, 12 + i, device=draw.device, **options) for i in samples])


# ------------------------------------------------------------------------------------------------------------ the table
def _layers(build: Callable[[Layer, Draw], Call], layers: Iterable[Layer], main: int) -> list[Case]:
    return [
        Case(layer.label, partial(build, layer), _target(layer), place < main) for place, layer in enumerate(layers)
    ]


def _case(
    label: str, build: Callable[..., Call], *given: Any, target: float | None = NORM_TARGET, main: bool = False
) -> Case:
    return Case(label, partial(build, *given), target, main)


CASES: dict[str, list[Case]] = {
    "shape_images_from": [
        _case("224x224 as the run's dtype", shape_images_from, None, target=IMAGE_TARGET, main=True),
        _case("224x224 float32", shape_images_from, torch.float32, target=IMAGE_TARGET, main=True),
    ],
    "shape_images": [_case("224x224 as the run's dtype", shape_images, None, target=IMAGE_TARGET)],
    "shape_images_at": [_case("224x224 as the run's dtype", shape_images_at, None, target=IMAGE_TARGET)],
    "folded_conv": [
        *_layers(folded_conv, POINTWISE, 3),
        *_layers(folded_conv, DEPTHWISE, 3),
        _case("1x1 72>24 @56, residual", folded_conv_residual, POINTWISE[4]),
    ],
    "folded_conv_backward": [*_layers(folded_conv_backward, POINTWISE, 3), *_layers(folded_conv_backward, DEPTHWISE, 3)],
    "folded_conv_moments": _layers(
        folded_conv_moments, (*DENSE, POINTWISE[0], POINTWISE[5], DEPTHWISE[0], DEPTHWISE[1]), 2
    ),
    "conv_sq_norms": _layers(conv_sq_norms, (*POINTWISE[:3], *DENSE, DEPTHWISE[0], *POINTWISE[5:7], *RESNET), 2),
    "fold_weights": [_case("1x1 160>960", fold_weights, 960, 160, 1, target=None, main=True)],
    "activation_grad": [
        _case("64 @112 relu", activation_grad, 64, 112, "relu", main=True),
        _case("240 @28 hardswish", activation_grad, 240, 28, "hardswish"),
        _case("768 @28 gelu", activation_grad, 768, 28, "gelu"),
    ],
    "gate_grad": [
        _case("120 @28", gate_grad, 120, 28, main=True),
        _case("960 @7", gate_grad, 960, 7),
    ],
    "linear_sq_norms": [
        _case("960>1280, one row", linear_sq_norms, 1, 960, 1280, target=None, main=True),
        _case("768>3072, 197 rows (ViT)", linear_sq_norms, 197, 768, 3072, target=None, main=True),
        _case("768>768, 197 rows (ViT)", linear_sq_norms, 197, 768, 768, target=None),
    ],
    "channel_sums": [
        _case("64 @112", channel_sums, 64, 112, main=True),
        _case("240 @28", channel_sums, 240, 28),
        _case("960 @7", channel_sums, 960, 7, target=None),
    ],
    "layer_norm_sums": [_case("768, 197 rows (ViT)", layer_norm_sums, 197, 768, main=True)],
    "rms_norm_sums": [_case("768, 197 rows", rms_norm_sums, 197, 768)],
    "broadcast_sums": [
        _case("bias of 768, 197 rows (ViT)", broadcast_sums, 197, 768, False, main=True),
        _case("scale of 768, 197 rows", broadcast_sums, 197, 768, True),
    ],
    "embedding_sq_norms": [_case("768, 197 rows", embedding_sq_norms, 197, 768, 1000, main=True)],
    "categorical_root_cotangent": [
        _case("2 classes", categorical_root_cotangent, 1, 2, target=None, main=True),
        _case("1000 classes", categorical_root_cotangent, 1, 1000, target=None),
    ],
}  # fmt: skip
