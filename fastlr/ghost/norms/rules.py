"""Rules that give per-sample gradients, one for each kind of autograd node.

A rule starts from what the node saved and the gradient at its output.

In: a `Site` (a node, the gradients g at its outputs, where the samples are in them) and the slots,
those inputs of the node that come from parameters. Out: for each slot a `Factor`
(fastlr.ghost.norms.factors), which stands for the gradients [B, *shape].

For a linear layer with input a, the gradient of sample b is sum_t g_bt a_bt^T over its rows t, so
that the norm of one row is
|g|^2 |a|^2 without the gradient (Goodfellow 2015, arXiv:1510.01799),
and that of several the sum of <a_t, a_s> <g_t, g_s>
(Li et al. 2022, arXiv:2110.05679; Bu et al. 2022, arXiv:2205.10683). Convolutions: Rochette et al.
2019, arXiv:1912.06015.

A rule raises `Unsupported` if the sample axis is not where it can use it. Then the node's own
backward formula runs sample by sample (fastlr.ghost.norms.by_node), exact and slower. Every rule is
compared with plain autograd on random samples of every measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from fastlr import ops
from fastlr.ghost.graph.layouts import SAMPLES_FIRST, Layout, Unsupported
from fastlr.ghost.graph.rows import (
    Keeps,
    batch_norm_rows,
    before_normalized_axes,
    elementwise,
    first_axis,
    product_rows,
    register,
)
from fastlr.ghost.norms.factors import Conv, Dense, Factor, NormsOnly, Outer
from fastlr.ops.geometry import ConvGeometry
from fastlr.ops.linear import raised


@dataclass
class Site:
    """A node at which per-sample gradients are taken.

    Attributes:
        node: the autograd node.
        gradients: at its outputs.
        layouts: where the samples are in them, by number of the output.
        count: number of samples B.
        shapes: Shapes of the tensor in each parameter slot.
    """

    node: Any
    gradients: tuple[Tensor | None, ...]
    layouts: dict[int, Layout]
    count: int
    shapes: dict[int, torch.Size]

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

    def require_slot(self, slots: Sequence[int], slot: int) -> None:
        """Raise Unsupported unless ``slot`` is the only one that a parameter is in."""
        if list(slots) != [slot]:
            raise Unsupported(f"parameters in slots {list(slots)}")

    def require_axis(self, dim: int) -> None:
        """Raise Unsupported unless the samples are along axis ``dim`` of the output."""
        if self.layout.dim != dim:
            raise Unsupported(f"samples along axis {self.layout.dim}, not {dim}")


Rule = Callable[[Site, Sequence[int]], dict[int, Factor]]
RULES: dict[str, Rule] = {}
COMPLEX: set[str] = set()  # kinds whose rule takes complex numbers, too
DESCRIPTIONS: dict[str, str] = {}


def rule(
    *kinds: str,
    about: str,
    rows: Keeps | None = None,
    read: Sequence[str] = (),
    on_complex: bool = False,
) -> Callable[[Rule], Rule]:
    """Register a rule for autograd node kinds: all that fastlr knows of them is said here.

    Args:
        kinds: names of autograd's nodes, as ``support_report`` shows them.
        about: what the rule covers (the table of supported operations).
        rows: how the node keeps the rows of a sample apart (fastlr.ghost.graph.rows), such as
            `elementwise`; None: it is not known, so that below such nodes the samples' rows are
            found in every batch, by three to five more backward passes at 3 to 300 samples,
            and no CUDA graph is made.
        read: what ``rows`` reads of the node without "_saved_": batches in which it differs are
            different ones.
        on_complex: it takes complex numbers. Their gradients are those of the conjugates, as
            torch's are.
    """

    def add(function: Rule) -> Rule:
        if rows is not None:
            register(kinds, rows, *read)
        if on_complex:
            COMPLEX.update(kinds)
        for kind in kinds:
            RULES[kind], DESCRIPTIONS[kind] = function, about
        return function

    return add


@rule(
    "ConvolutionBackward0",
    about="convolution 1d/2d/3d: stride, padding, dilation, groups, transposed; bias",
    rows=first_axis,
)
def convolution(site: Site, slots: Sequence[int]) -> dict[int, Factor]:
    """Weight: see fastlr.ops.convolution.conv_grads. Bias: sum of g over positions."""
    site.require_axis(0)
    n = site.node
    g = site.split(site.g, 0)
    factors: dict[int, Factor] = {}
    for slot in slots:
        if slot == 1:
            geometry = ConvGeometry.of(
                n._saved_weight.shape[2:],
                *[getattr(n, f"_saved_{option}") for option in ConvGeometry._fields],
            )
            if geometry is None:
                raise Unsupported("a convolution whose options are not one number for each axis")
            factors[1] = Conv(site.split(n._saved_input, 0), g, n._saved_weight, geometry)
        elif slot == 2:
            factors[2] = Dense(_summed(g, None, [1, *range(3, g.ndim)]))
        else:
            raise Unsupported("a parameter as the input of a convolution")
    return factors


def _product(
    site: Site, slot: int, left: str, right: str, shape: torch.Size, scale: float = 1.0
) -> Factor:
    """Return the factor of the left (``slot`` 0) or right (1) operand of a product.

    The product is [N, n, k] @ [N, k, m] or [n, k] @ [k, m].

    The gradient of the right operand is sum_t a_t g_t^T over the sample's rows t of the left one
    and of g; that of the left operand is the transposed, over columns. ``left``, ``right``: names
    under which the node has saved the operands.
    """
    dim = site.layout.dim + 3 - site.g.ndim
    if dim != (1 if slot == 1 else 2):
        raise Unsupported(
            f"the samples are not along the {'rows' if slot == 1 else 'columns'} of the product"
        )
    saved = getattr(site.node, f"_saved_{left if slot == 1 else right}")
    g = site.g
    a, g = (saved, g) if slot == 1 else (saved.mT, g.mT)
    a, g = _rows_of_groups(site, a), _rows_of_groups(site, g)
    return Outer(a.conj(), g if scale == 1 else g * scale, tuple(shape), inputs_first=slot == 1)


def _rows_of_groups(site: Site, t: Tensor) -> Tensor:
    """The rows of each sample: [rows, k] or [N, rows, k] -> [B, N, rows of a sample, k]."""
    if t.ndim == 2:
        return site.split(t, 0).unsqueeze(1)
    return site.split(t, 1).movedim(1, 2)


@rule(
    "MmBackward0",
    "BmmBackward0",
    about="matrix products mm, bmm, matmul, einsum, linear without bias",
    rows=product_rows(0),
    on_complex=True,
)
def product(site: Site, slots: Sequence[int]) -> dict[int, Factor]:
    """One operand is the parameter."""
    if len(slots) != 1:
        raise Unsupported("both sides are parameters")
    return {slot: _product(site, slot, "self", "mat2", site.shapes[slot]) for slot in slots}


@rule(
    "AddmmBackward0",
    "BaddbmmBackward0",
    about="addmm, baddbmm: linear with bias, any number of leading dimensions",
    rows=product_rows(1),
)
def added_product(site: Site, slots: Sequence[int]) -> dict[int, Factor]:
    """Return the factors of an added term and of the operands of a product.

    Slot 0 is the added term (times beta), slots 1 and 2 the operands (times alpha).
    """
    if 1 in slots and 2 in slots:
        raise Unsupported("both sides are parameters")
    n, g = site.node, site.g
    beta, alpha = n._saved_beta, n._saved_alpha
    if list(slots) == [0, 2] and g.ndim == 2 and beta == alpha == 1:
        # A row of the product for each sample, and an element of the bias for each column.
        if site.layout == SAMPLES_FIRST and site.shapes[0] == g.shape[1:]:
            return _of_one_row(site)
    names = ("batch1", "batch2") if g.ndim == 3 else ("mat1", "mat2")
    factors: dict[int, Factor] = {}
    for slot in slots:
        shape = site.shapes[slot]
        if slot == 0:
            factors[0] = Dense(_times(_reduced(site, g, shape), beta))
        else:
            factors[slot] = _product(site, slot - 1, *names, shape, float(alpha))
    return factors


def _of_one_row(site: Site) -> dict[int, Factor]:
    """The norms of a bias and a weight of which each sample uses one row: |g|^2, |g|^2 |a|^2."""
    a, g, shape = site.node._saved_mat1, site.g, tuple(site.shapes[2])
    of_weight, of_bias = ops.run("one_row_sq_norms", a, g)

    def weight() -> Outer:
        return Outer(a[:, None, None], g[:, None, None], shape, inputs_first=True)

    return {0: NormsOnly(of_bias, lambda: Dense(g)), 2: NormsOnly(of_weight, weight)}


def _reduced(
    site: Site,
    g: Tensor,  # [*output]
    shape: torch.Size,
    other: Tensor | None = None,  # broadcasts to the output
) -> Tensor:
    """Sum ``g``, or ``g * other``, over the axes along which a tensor was broadcast.

    The tensor is of ``shape``; the result is [B, *shape].
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
    return _summed(full, other, axes).reshape(site.count, *shape)


def _summed(g: Tensor, other: Tensor | None, axes: Sequence[int]) -> Tensor:
    """Sum ``g``, or ``g * other``, over axes.

    Where nothing is added up or multiplied, return ``g`` itself in its dtype.
    """
    if other is None and all(g.shape[axis] == 1 for axis in axes):
        return g.squeeze(tuple(axes))
    if g.is_complex():
        g = g if other is None else g * other.conj()
        return g.sum(list(axes)) if axes else g
    return ops.run("broadcast_sums", g, other, axes)


def _times(t: Tensor, factor: float) -> Tensor:
    return t if factor == 1 else raised(t) * factor


@rule(
    "AddBackward0",
    "SubBackward0",
    "ExpandBackward0",
    about="additive parameters with broadcasting, expand",
    rows=elementwise,
    on_complex=True,
)
def additive(site: Site, slots: Sequence[int]) -> dict[int, Factor]:
    """Return the factors of terms of a sum: the output gradient over broadcast axes.

    It is summed over these axes, times alpha (-alpha for the second term of a difference).
    """
    factors: dict[int, Factor] = {}
    for slot in slots:
        grads = _reduced(site, site.g, site.shapes[slot])
        if slot == 1:
            sign = -1 if site.node.name().startswith("Sub") else 1
            grads = _times(grads, sign * site.node._saved_alpha)
        factors[slot] = Dense(grads)
    return factors


@rule(
    "MulBackward0",
    "DivBackward0",
    about="scale parameters with broadcasting: products and quotients",
    rows=elementwise,
    on_complex=True,
)
def scale(site: Site, slots: Sequence[int]) -> dict[int, Factor]:
    """Output gradient times the other factor, summed over broadcast axes."""
    n = site.node
    divide = n.name().startswith("Div")
    factors: dict[int, Factor] = {}
    for slot in slots:
        other = n._saved_other if slot == 0 or divide else n._saved_self
        if other is None:
            raise Unsupported("the other factor was not saved")
        other = torch.as_tensor(other, device=site.g.device)
        if divide:
            wide = raised(other)
            other = wide.reciprocal() if slot == 0 else -n._saved_self / (wide * wide)
        factors[slot] = Dense(_reduced(site, site.g, site.shapes[slot], other))
    return factors


@rule("TrilinearBackward0", about="bilinear")
def bilinear(site: Site, slots: Sequence[int]) -> dict[int, Factor]:
    """Weight [O, I, J] of torch.nn.functional.bilinear: the sum over rows of g x y^T."""
    n = site.node
    axes = tuple(
        map(tuple, (n._saved_expand1, n._saved_expand2, n._saved_expand3, n._saved_sumdim))
    )
    if axes != ((1, 3), (0,), (1, 2), (2, 3)):
        raise Unsupported("a product of three factors other than bilinear")
    site.require_slot(slots, 1)
    site.require_axis(0)
    x, y, g = (site.split(t, 0) for t in (n._saved_i1, n._saved_i3, site.g))
    products = raised(x[:, :, :, None]) * raised(y[:, :, None])  # [B, T, I, J]
    return {1: Outer(products.flatten(2)[:, None], g[:, None], tuple(site.shapes[1]))}


@rule("PreluKernelBackward0", about="PReLU", rows=elementwise)
def prelu(site: Site, slots: Sequence[int]) -> dict[int, Factor]:
    """Output gradient times the negative part of the input."""
    site.require_slot(slots, 1)
    return {1: Dense(_reduced(site, site.g, site.shapes[1], site.node._saved_self.clamp_max(0)))}


@rule(
    "RepeatBackward0",
    about="repeated parameters (instance norm repeats its weight for every sample)",
    rows=elementwise,
)
def repeat(site: Site, slots: Sequence[int]) -> dict[int, Factor]:
    """The copies that belong to a sample are added."""
    site.require_slot(slots, 0)
    shape = site.shapes[0]
    dim, g = site.layout.dim, site.g
    lead = g.ndim - len(shape)
    rows = site.split(g, dim).movedim(1, 1 + dim)  # [B, *axes of g, the samples' one shorter]
    sizes = [site.count]
    for length, size in zip(rows.shape[1:], [1] * lead + [*shape], strict=True):
        if length % size:
            raise Unsupported("a sample owns a part of a copy")
        sizes += [length // size, size]
    wide = torch.promote_types(g.dtype, torch.float32)
    copies = range(1, len(sizes), 2)
    return {0: Dense(rows.reshape(sizes).sum([*copies], dtype=wide).reshape(site.count, *shape))}


@rule(
    "NativeBatchNormBackward0",
    "CudnnBatchNormBackward0",
    "MiopenBatchNormBackward0",
    about="batch norm in eval mode",
    rows=batch_norm_rows,
    read=["training"],
)
def batch_norm(site: Site, slots: Sequence[int]) -> dict[int, Factor]:
    """Weight: sum g (x - mean) / sigma; bias: sum g; running statistics."""
    n = site.node
    site.require_axis(0)
    if getattr(n, "_saved_training", True):
        raise Unsupported("batch statistics")
    # CuDNN's node has another name for it.
    eps = n._saved_eps if hasattr(n, "_saved_eps") else n._saved_epsilon
    grads = batch_norm_grads(site, n._saved_input, n._saved_running_mean, n._saved_running_var, eps)
    return {slot: Dense(grads[slot - 1]) for slot in slots}


def batch_norm_grads(
    site: Site,
    x: Tensor,  # [rows, C, *spatial]
    mean: Tensor,  # [C]
    var: Tensor,  # [C]
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Gradients [B, C] of weight and bias of a batch norm with running statistics."""
    gx, g = ops.run("channel_sums", site.split(x, 0), site.split(site.g, 0), mean[None])
    wide = torch.promote_types(gx.dtype, mean.dtype)
    return gx.to(wide) * torch.rsqrt(var.to(wide) + eps), g


LARGE_MEAN = 64.0  # standard deviations from which the rounding of a saved mean shows in float32


@rule("NativeGroupNormBackward0", about="group norm", rows=first_axis)
def group_norm(site: Site, slots: Sequence[int]) -> dict[int, Factor]:
    """Weight: sum g (x - mean) / sigma with the sample's own group statistics; bias: sum g."""
    n = site.node
    site.require_axis(0)
    x, g, channels = n._saved_input, site.g, n._saved_C

    def wide(t: Tensor) -> Tensor:
        return t.expand(-1, -1, channels // n._saved_group).reshape(len(x), channels)

    mean, rstd = (
        t.reshape(len(x), n._saved_group, 1) for t in (n._saved_result1, n._saved_result2)
    )
    # centred first: sum g x - mean sum g would lose the digits where the mean is large
    gx, gs = ops.run(
        "channel_sums",
        x.reshape(len(x), 1, channels, -1),
        g.reshape(len(x), 1, channels, -1),
        wide(mean),
    )
    in_deviations = torch.linalg.vector_norm(mean * rstd, torch.inf)
    statistics_have_lost_digits = x.device.type == "cpu" and float(in_deviations) > LARGE_MEAN
    if statistics_have_lost_digits:
        if not hasattr(n, "_saved_eps"):
            raise Unsupported(
                "means of many standard deviations, and this torch's node (as of 2.15) does not "
                "have eps"
            )
        rest = (x.reshape(*mean.shape[:2], -1) - mean).to(gx.dtype)
        var, off = torch.var_mean(rest, 2, correction=0, keepdim=True)
        gx, rstd = gx - wide(off) * gs, torch.rsqrt(var + n._saved_eps)
    grads = {1: gx * wide(rstd), 2: gs}
    return {slot: Dense(site.split(grads[slot], 0).sum(1)) for slot in slots}


def _by_row(site: Site, op: str, names: Sequence[str]) -> list[Tensor]:
    """Return sums over the rows of each sample, for a norm over the trailing axes.

    They are made by an op: [B, *normalised shape] each.

    The op gets [B, rows, size]: the node's input, the gradient, and the statistics of each row
    saved under ``names``.
    """
    n = site.node
    shape = tuple(n._saved_normalized_shape)
    lead = site.g.shape[: site.g.ndim - len(shape)]
    if site.layout.dim >= len(lead):
        raise Unsupported("the sample axis is normalised")

    def rows(t: Tensor, size: int) -> Tensor:
        return site.split(t.reshape(*lead, size), site.layout.dim).reshape(site.count, -1, size)

    size = prod(shape)
    statistics = [rows(getattr(n, f"_saved_{name}"), 1) for name in names]
    sums = ops.run(op, rows(n._saved_input, size), rows(site.g, size), *statistics)
    return [t.reshape(site.count, *shape) for t in (sums if isinstance(sums, tuple) else [sums])]


@rule(
    "NativeLayerNormBackward0",
    about="layer norm, with or without bias",
    rows=before_normalized_axes,
    read=["normalized_shape"],
)
def layer_norm(site: Site, slots: Sequence[int]) -> dict[int, Factor]:
    """Weight: sum over rows of g (x - mean) / sigma; bias: sum of g."""
    grads = _by_row(site, "layer_norm_sums", ("result1", "result2"))
    return {slot: Dense(grads[slot - 1]) for slot in slots}


@rule(
    "FusedRmsNormBackward0",
    about="fused RMS norm",
    rows=before_normalized_axes,
    read=["normalized_shape"],
)
def rms_norm(site: Site, slots: Sequence[int]) -> dict[int, Factor]:
    """Weight: sum over rows of g x / rms."""
    site.require_slot(slots, 1)
    return {1: Dense(*_by_row(site, "rms_norm_sums", ("result1",)))}
