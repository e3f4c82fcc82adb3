"""One rule per kind of autograd node: from what the node saved and the gradient at its output to per-sample gradients.

A rule gets a `Site` and the slots (inputs of the node) that come from parameters, and returns one factor for each. It
raises `Unsupported` where the sample axis is not where it can use it; then the node's own backward formula is run sample
by sample (fastlr.ghost.fallback), which is exact and slower. Every rule is proven on three samples before it is trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from fastlr import ops
from fastlr.ghost.factors import Bilinear, Conv, Dense, Factor, Outer
from fastlr.ghost.layout import Layout


class Unsupported(Exception):
    """The rule does not cover this case."""


@dataclass
class Site:
    """A node at which per-sample gradients are taken."""

    node: Any
    gradients: tuple[Tensor | None, ...]
    layouts: dict[int, Layout]  # by output number
    count: int
    shapes: dict[int, torch.Size]  # shape of the tensor in each parameter slot

    @property
    def g(self) -> Tensor:
        """Gradient at the first output."""
        if self.gradients[0] is None:
            raise Unsupported("no gradient at the first output")
        return self.gradients[0]

    @property
    def layout(self) -> Layout:
        """Layout of the first output."""
        if 0 not in self.layouts:
            raise Unsupported("the sample axis of the first output was not found")
        return self.layouts[0]

    def split(self, t: Tensor, dim: int) -> Tensor:
        """Bring the samples first, from axis ``dim`` of ``t``: [B, rows, other axes]."""
        return self.layout.split(t, dim, self.count)

    def need_dim(self, dim: int) -> None:
        """Raise Unsupported unless the samples are along axis ``dim`` of the output."""
        if self.layout.dim != dim:
            raise Unsupported(f"samples along axis {self.layout.dim}, not {dim}")


Rule = Callable[[Site, Sequence[int]], dict[int, Factor]]
RULES: dict[str, Rule] = {}
DESCRIPTIONS: dict[str, str] = {}


def rule(*kinds: str, about: str) -> Callable[[Rule], Rule]:
    """Register a rule for autograd node kinds; ``about`` says what it covers (the table of supported operations)."""

    def add(function: Rule) -> Rule:
        for kind in kinds:
            RULES[kind], DESCRIPTIONS[kind] = function, about
        return function

    return add


def only(slots: Sequence[int], slot: int, factor: Callable[[], Factor]) -> dict[int, Factor]:
    """Return the factor of a node whose one parameter is in ``slot``."""
    if list(slots) != [slot]:
        raise Unsupported(f"parameters in slots {list(slots)}")
    return {slot: factor()}


@rule("ConvolutionBackward0", about="convolution 1d/2d/3d: stride, padding, dilation, groups, transposed; bias")
def convolution(site: Site, slots: Sequence[int]) -> dict[int, Factor]:
    """Weight: see reference.norms.conv_grads. Bias: sum over positions."""
    site.need_dim(0)
    n = site.node
    g = site.split(site.g, 0)
    found: dict[int, Factor] = {}
    for slot in slots:
        if slot == 1:
            options = (
                n._saved_stride,
                n._saved_padding,
                n._saved_dilation,
                n._saved_transposed,
                n._saved_output_padding,
                n._saved_groups,
            )
            found[1] = Conv(site.split(n._saved_input, 0), g, n._saved_weight, options)
        elif slot == 2:
            found[2] = Dense(ops.run("broadcast_sums", g, None, (1, *range(3, g.ndim))))
        else:
            raise Unsupported("a parameter as the input of a convolution")
    return found


def _wide(g: Tensor) -> torch.dtype:
    return torch.float64 if g.dtype == torch.float64 else torch.float32


def _matmul(
    site: Site, slot: int, left: Callable[[], Tensor], right: Callable[[], Tensor], g: Tensor, scale: float
) -> Factor:
    """Product of [N, n, k] and [N, k, m] with the parameter on the right (slot 1) or on the left (slot 0)."""
    dim = site.layout.dim + 3 - site.g.ndim
    shape = tuple(site.shapes[slot])
    if slot == 1:
        if dim != 1:
            raise Unsupported("the samples are not along the rows of the product")
        rows, out = left(), g
        a = _rows(site, rows if rows.ndim == 3 else rows[None], 1)
        return Outer(a, _scaled(_rows(site, out, 1), scale), shape, inputs_first=True)
    if dim != 2:
        raise Unsupported("the samples are not along the columns of the product")
    columns = right()
    a = _rows(site, (columns if columns.ndim == 3 else columns[None]).mT, 1)
    return Outer(a, _scaled(_rows(site, g.mT, 1), scale), shape)


def _rows(site: Site, t: Tensor, dim: int) -> Tensor:
    """[N, rows, D] -> [B, N, rows of a sample, D]."""
    return site.split(t, dim).movedim(1, 2)


def _scaled(g: Tensor, scale: float) -> Tensor:
    return g if scale == 1 else g * scale


@rule("MmBackward0", "BmmBackward0", about="matrix products mm, bmm, matmul, einsum, linear without bias")
def product(site: Site, slots: Sequence[int]) -> dict[int, Factor]:
    """One side is the parameter: the gradient is sum_t a_t g_t^T over the sample's rows."""
    n = site.node
    g = site.g if site.g.ndim == 3 else site.g[None]
    if len(slots) != 1:
        raise Unsupported("both sides are parameters")
    return {slots[0]: _matmul(site, slots[0], lambda: n._saved_self, lambda: n._saved_mat2, g, 1.0)}


@rule("AddmmBackward0", "BaddbmmBackward0", about="addmm, baddbmm: linear with bias, any number of leading dimensions")
def added_product(site: Site, slots: Sequence[int]) -> dict[int, Factor]:
    """Slot 0 is the added term (beta), slots 1 and 2 the product (alpha)."""
    n = site.node
    batched = site.g.ndim == 3
    left = (lambda: n._saved_batch1) if batched else (lambda: n._saved_mat1)
    right = (lambda: n._saved_batch2) if batched else (lambda: n._saved_mat2)
    g = site.g if batched else site.g[None]
    found: dict[int, Factor] = {}
    for slot in slots:
        if slot == 0:
            found[0] = Dense(_reduced(site, site.g, site.shapes[0]) * n._saved_beta)
        else:
            site_slot = slot - 1
            shaped = Site(site.node, site.gradients, site.layouts, site.count, {site_slot: site.shapes[slot]})
            found[slot] = _matmul(shaped, site_slot, left, right, g, float(n._saved_alpha))
    if 1 in slots and 2 in slots:
        raise Unsupported("both sides are parameters")
    return found


def _reduced(site: Site, g: Tensor, shape: torch.Size, other: Tensor | None = None) -> Tensor:
    """Sum an output-shaped tensor over the axes along which a tensor of ``shape`` was broadcast: [B, *shape].

    With ``other``, which broadcasts to the output, the sum is of ``g * other``.
    """
    dim = site.layout.dim
    lead = g.ndim - len(shape)
    kept = dim - lead
    if kept >= 0 and shape[kept] != 1:
        raise Unsupported("the parameter has the sample axis")
    full = site.split(g, dim)  # [B, rows, axes of g without dim]
    if other is not None and other.ndim:
        other = site.split(other.broadcast_to(g.shape), dim)
    axes = [1]
    for d in range(g.ndim):
        if d != dim and (d < lead or shape[d - lead] == 1) and g.shape[d] != 1:
            axes.append(2 + d - (d > dim))
    return ops.run("broadcast_sums", full, other, axes).reshape(site.count, *shape)


@rule("AddBackward0", "SubBackward0", "ExpandBackward0", about="additive parameters with broadcasting, expand")
def additive(site: Site, slots: Sequence[int]) -> dict[int, Factor]:
    """Sum of the output gradient over broadcast axes (times alpha, or -alpha for the second term of a difference)."""
    found: dict[int, Factor] = {}
    for slot in slots:
        grads = _reduced(site, site.g, site.shapes[slot])
        if slot == 1:
            sign = -1 if site.node.name().startswith("Sub") else 1
            grads = grads * (sign * site.node._saved_alpha)
        found[slot] = Dense(grads)
    return found


@rule("MulBackward0", "DivBackward0", about="scale parameters with broadcasting: products and quotients")
def scale(site: Site, slots: Sequence[int]) -> dict[int, Factor]:
    """Output gradient times the other factor, summed over broadcast axes."""
    n = site.node
    divide = n.name().startswith("Div")
    found: dict[int, Factor] = {}
    for slot in slots:
        other = n._saved_other if slot == 0 or divide else n._saved_self
        if other is None:
            raise Unsupported("the other factor was not saved")
        other = torch.as_tensor(other, device=site.g.device)
        if divide:
            wide = other.to(_wide(other))
            other = wide.reciprocal() if slot == 0 else -n._saved_self / (wide * wide)
        found[slot] = Dense(_reduced(site, site.g, site.shapes[slot], other))
    return found


@rule("TrilinearBackward0", about="bilinear")
def bilinear(site: Site, slots: Sequence[int]) -> dict[int, Factor]:
    """Weight [O, I, J] of torch.nn.functional.bilinear: the sum over rows of g x y^T."""
    n = site.node
    axes = tuple(map(tuple, (n._saved_expand1, n._saved_expand2, n._saved_expand3, n._saved_sumdim)))
    if axes != ((1, 3), (0,), (1, 2), (2, 3)):
        raise Unsupported("another product of three factors than that of bilinear")
    site.need_dim(0)
    x, y, g = (site.split(t, 0) for t in (n._saved_i1, n._saved_i3, site.g))
    return only(slots, 1, lambda: Bilinear(x, y, g, tuple(site.shapes[1])))


@rule("PreluKernelBackward0", about="PReLU")
def prelu(site: Site, slots: Sequence[int]) -> dict[int, Factor]:
    """Output gradient times the negative part of the input."""
    return only(slots, 1, lambda: Dense(_reduced(site, site.g, site.shapes[1], site.node._saved_self.clamp_max(0))))


@rule("RepeatBackward0", about="repeated parameters (instance norm repeats its weight for every sample)")
def repeat(site: Site, slots: Sequence[int]) -> dict[int, Factor]:
    """The copies that belong to a sample are added."""
    shape = site.shapes[0]
    dim, g = site.layout.dim, site.g
    lead = g.ndim - len(shape)
    own = shape[dim - lead] if dim >= lead else 1
    rows = site.split(g, dim)  # [B, copies * own, other axes]
    if rows.shape[1] % own:
        raise Unsupported("a sample owns a part of a copy")
    rows = (
        rows.reshape(site.count, rows.shape[1] // own, own, *rows.shape[2:]).sum(1, dtype=_wide(g)).movedim(1, 1 + dim)
    )
    sizes, axes = [site.count], []
    for d in range(g.ndim):
        size = shape[d - lead] if d >= lead else 1
        axes.append(len(sizes))
        sizes += [rows.shape[1 + d] // size, size]
    return only(slots, 0, lambda: Dense(rows.reshape(sizes).sum(axes).reshape(site.count, *shape)))


@rule(
    "NativeBatchNormBackward0", "CudnnBatchNormBackward0", "MiopenBatchNormBackward0", about="batch norm in eval mode"
)
def batch_norm(site: Site, slots: Sequence[int]) -> dict[int, Factor]:
    """Weight: sum g (x - mean) / sigma; bias: sum g; running statistics."""
    n = site.node
    site.need_dim(0)
    if getattr(n, "_saved_training", True):
        raise Unsupported("batch statistics")
    eps = n._saved_eps if hasattr(n, "_saved_eps") else n._saved_epsilon  # cuDNN's node has another name for it
    grads = batch_norm_grads(site, n._saved_input, n._saved_running_mean, n._saved_running_var, eps)
    return {slot: Dense(grads[slot - 1]) for slot in slots}


def batch_norm_grads(site: Site, x: Tensor, mean: Tensor, var: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients [B, C] of weight and bias of a batch norm with running statistics, channels along axis 1 of ``x``."""
    gx, g = ops.run("channel_sums", site.split(x, 0), site.split(site.g, 0), mean[None])
    wide = torch.promote_types(gx.dtype, mean.dtype)
    return gx.to(wide) * torch.rsqrt(var.to(wide) + eps), g


LARGE_MEAN = 64.0  # standard deviations from which the rounding of a saved mean shows in float32


@rule("NativeGroupNormBackward0", about="group norm")
def group_norm(site: Site, slots: Sequence[int]) -> dict[int, Factor]:
    """Weight: sum g (x - mean) / sigma with the sample's own group statistics; bias: sum g."""
    n = site.node
    site.need_dim(0)
    x, g, channels = n._saved_input, site.g, n._saved_C

    def wide(t: Tensor) -> Tensor:
        return t.expand(-1, -1, channels // n._saved_group).reshape(len(x), channels)

    mean, rstd = (t.reshape(len(x), n._saved_group, 1) for t in (n._saved_result1, n._saved_result2))
    # centred first: sum g x - mean sum g would lose the digits where the mean is large
    gx, gs = ops.run("channel_sums", x.reshape(len(x), 1, channels, -1), g.reshape(len(x), 1, channels, -1), wide(mean))
    if x.device.type == "cpu" and float(torch.linalg.vector_norm(mean * rstd, torch.inf)) > LARGE_MEAN:
        rest = (x.reshape(*mean.shape[:2], -1) - mean).to(gx.dtype)  # the statistics themselves have lost digits
        var, off = torch.var_mean(rest, 2, correction=0, keepdim=True)
        gx, rstd = gx - wide(off) * gs, torch.rsqrt(var + n._saved_eps)
    grads = {1: gx * wide(rstd), 2: gs}
    return {slot: Dense(site.split(grads[slot], 0).sum(1)) for slot in slots}


@rule("NativeLayerNormBackward0", about="layer norm, with or without bias")
def layer_norm(site: Site, slots: Sequence[int]) -> dict[int, Factor]:
    """Weight: sum over rows of g x-hat; bias: sum of g."""
    n = site.node
    shape = tuple(n._saved_normalized_shape)
    rows = _normalised_rows(site, shape)
    size = prod(shape)
    weight, bias = ops.run(
        "layer_norm_sums",
        rows(n._saved_input, size),
        rows(site.g, size),
        rows(n._saved_result1, 1),
        rows(n._saved_result2, 1),
    )
    grads = {1: weight, 2: bias}
    return {slot: Dense(grads[slot].reshape(site.count, *shape)) for slot in slots}


def _normalised_rows(site: Site, shape: tuple[int, ...]) -> Callable[[Tensor, int], Tensor]:
    """What brings a tensor [*leading axes, ...] of a norm over the trailing axes ``shape`` to [B, rows, size]."""
    if site.layout.dim >= site.g.ndim - len(shape):
        raise Unsupported("the sample axis is normalised")

    def rows(t: Tensor, size: int) -> Tensor:
        lead = t.reshape(*site.g.shape[: site.g.ndim - len(shape)], size)
        return site.split(lead, site.layout.dim).reshape(site.count, -1, size)

    return rows


@rule("FusedRmsNormBackward0", about="fused RMS norm")
def rms_norm(site: Site, slots: Sequence[int]) -> dict[int, Factor]:
    """Weight: sum over rows of g x / rms."""
    n = site.node
    shape = tuple(n._saved_normalized_shape)
    rows, size = _normalised_rows(site, shape), prod(shape)
    tensors = (rows(n._saved_input, size), rows(site.g, size), rows(n._saved_result1, 1))
    return only(slots, 1, lambda: Dense(ops.run("rms_norm_sums", *tensors).reshape(site.count, *shape)))
