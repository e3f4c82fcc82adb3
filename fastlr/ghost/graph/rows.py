"""Which rows of a gradient belong to which sample, whatever the data.

They are followed from the output down, node by node.

In: a classified graph and the samples' axis of the output. Out: a layout for every output whose
rows are known (`trace`). A sample owns rows of the output. A node *keeps rows* if the gradient that
it hands to an input has, in the rows of a sample, only what came from that sample's rows of the
gradient at its output, for any values of its operands. That depends on the node's kind and on the
axes that it works along, never on sizes that happen to equal the number of samples. Kinds that are
not listed here, and listed ones that sum, contract or permute along the samples' axis, are not
trusted: below them, marks find the rows in every batch (fastlr.ghost.graph.marks).

A kind that has a rule says there how it keeps rows (`rows=` of fastlr.ghost.norms.rules.rule, which
calls `register`). The kinds below are those without a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastlr.ghost.graph.layouts import Regular
from fastlr.ghost.graph.walk import RAGGED, SAMPLE, Graph, Place, kinds


@dataclass
class Step:
    """One edge of the graph, from an output of a node to one of the node's inputs.

    The rows of the output are known.
    """

    node: Any
    name: str
    layout: Regular
    output: int
    slot: int
    out_shape: torch.Size  # shape of the output
    in_shape: torch.Size  # shape of the input

    @property
    def role(self) -> str:
        """What the input is to one of fastlr's own nodes; "" for none."""
        return self.node.roles[self.slot] if self.slot < len(self.node.roles) else ""

    def at(self, dim: int) -> Regular | None:
        """The same rows along axis ``dim`` of the input, if it is as long as the output's."""
        fits = (
            0 <= dim < len(self.in_shape) and self.in_shape[dim] == self.out_shape[self.layout.dim]
        )
        return Regular(dim, self.layout.outer, self.layout.inner) if fits else None


Keeps = Callable[[Step], Regular | None]
KEEPS: dict[str, Keeps] = {}
SAVED_AXES: dict[str, tuple[str, ...]] = {}  # kind -> attributes that hold the axes it works on


def axes_of_nodes(graph: Graph) -> tuple:
    """Return the axes along which nodes of the graph work, as far as they have saved them.

    They are part of what a plan is kept by.
    """
    return tuple(
        tuple(getattr(graph.nodes[i], attribute, None) for attribute in SAVED_AXES[name])
        for i, name in enumerate(graph.names)
        if name in SAVED_AXES
    )


def register(names: Iterable[str], rows: Keeps, *read: str) -> None:
    """Enter kinds of nodes that keep rows.

    Args:
        names: names of autograd's nodes.
        rows: Function of a step that returns where a sample's rows are in the input's gradient;
            None if that is unknown.
        read: what the nodes have saved of the axes along which they work.
    """
    for kind in names:
        KEEPS[kind] = rows
        if read:
            SAVED_AXES[kind] = tuple(f"_saved_{attribute}" for attribute in read)


def _register(names: str, rows: Keeps, *read: str) -> None:
    """Enter kinds of nodes that have no rule."""
    register(kinds(names), rows, *read)


# -- elementwise, with broadcasting
# ------------------------------------------------------------------------------------


def elementwise(s: Step) -> Regular | None:
    """Follow rows through an elementwise node: axes correspond from the last on.

    An input that is broadcast along the samples would get the sum over them.
    """
    return s.at(s.layout.dim - (len(s.out_shape) - len(s.in_shape)))


_register(
    "Abs Acos Acosh Addcdiv Addcmul Alias Asin Asinh Atan Atan2 Atanh Ceil Celu Clamp "
    "ClampBackward1 ClampMax ClampMaxBackward1 ClampMin ClampMinBackward1 Clone Copysign Cos Cosh "
    "DivBackward1 DivBackward2 Elu Erf Erfc Erfinv Exp Exp2 Expm1 Floor Fmax Fmin Frac Gelu "
    "Hardshrink Hardsigmoid Hardswish Hardtanh Hypot LeakyRelu Lerp LerpBackward1 Lgamma Log "
    "Log10 Log1P Log2 LogSigmoid Logaddexp Logaddexp2 Logit MaskedFill MaskedFillBackward1 "
    "Maximum Minimum Mish MulBackward1 NanToNum NativeDropout Neg Pow PowBackward1 PowBackward2 "
    "Reciprocal Relu Remainder Round Rsqrt Rsub RsubBackward1 Sgn Sigmoid Sign Silu Sin Sinc Sinh "
    "Softplus Softshrink SpecialNdtri Sqrt SubBackward1 Tan Tanh Threshold ToCopy Tril Triu Trunc "
    "Where Xlogy ActivatedBackward torch::autograd::CopyBackwards "
    "Angle Complex Conj ConjPhysical Polar "
    "Deg2Rad Digamma Fmod FmodBackward1 I0 Igamma Igammac Mvlgamma Polygamma Rad2Deg SpecialEntr "
    "SpecialErfcx SpecialI0E SpecialI1 SpecialI1E SpecialLogNdtr SpecialZeta",
    elementwise,
)


# -- other orders and shapes of the same elements
# -----------------------------------------------------------------------


def _reshaped(s: Step) -> Regular | None:
    """Follow rows through a reshape, by the flat index of an element.

    Sample b owns the elements whose flat index, divided by its stride, is b modulo the number of
    samples.
    """
    count = s.out_shape[s.layout.dim] // (s.layout.outer * s.layout.inner)
    stride = s.layout.inner * prod(s.out_shape[s.layout.dim + 1 :])  # elements of one sample
    period = stride * count  # elements after which the samples begin again
    step = prod(s.in_shape)  # elements from one index of an axis to the next
    if not step:
        return None
    for dim, size in enumerate(s.in_shape):
        axis, step = step, step // size
        holds_whole_samples = stride % step == 0 and axis % period == 0
        if size > 1 and holds_whole_samples:
            return Regular(dim, axis // period, stride // step)
    return None


_register(
    "View UnsafeView ReshapeCopy Squeeze SqueezeBackward1 SqueezeBackward2 SqueezeBackward3 "
    "Unsqueeze UnsqueezeBackward1",
    _reshaped,
)


def _axes(s: Step, ndim: int) -> list[int]:
    """The axes along which a node works, counted from 0, as it has saved them: none for all."""
    axes: list[Any] = []
    for attribute in SAVED_AXES[s.name]:
        saved = getattr(s.node, attribute)
        axes += saved if isinstance(saved, Sequence) else [saved]
    # Autograd saves negative ones as unsigned numbers.
    return [(d - (1 << 64) if d >= 1 << 63 else d) % max(1, ndim) for d in axes if d is not None]


def _transposed(s: Step) -> Regular | None:
    a, b = _axes(s, len(s.in_shape))
    return s.at({a: b, b: a}.get(s.layout.dim, s.layout.dim))


def _permuted(s: Step) -> Regular | None:
    return s.at(_axes(s, len(s.in_shape))[s.layout.dim])


def _restrided(s: Step) -> Regular | None:
    """All elements, in the order of the memory.

    So are views of a tensor that was written to, and what adaptive pooling gives the strides of
    channels_last. The input's own strides are not to be seen; marks hold this to the first batch.
    """
    stride = 1
    for size, step in reversed(list(zip(s.out_shape, s.node._saved_stride, strict=True))):
        if size > 1 and step != stride:
            return None
        stride *= size
    return _reshaped(s) if stride == prod(s.in_shape) and not s.node._saved_storage_offset else None


_register("T", lambda s: s.at(len(s.out_shape) - 1 - s.layout.dim))
_register("ViewAsComplex ViewAsReal", lambda s: s.at(s.layout.dim))  # the last axis is beside
_register("AsStrided AsStridedBackward1", _restrided, "size", "stride", "storage_offset")
_register("Transpose", _transposed, "dim0", "dim1")
_register("Permute", _permuted, "dims")


# -- along some axes, which must not be the samples'
# --------------------------------------------------------------------


def _beside(s: Step) -> Regular | None:
    """Works along its own axes only. Axes stay where they are; windows are along a new last one."""
    axes = _axes(s, len(s.in_shape))
    return s.at(s.layout.dim) if axes and s.layout.dim not in axes else None


def _same_axis(s: Step) -> Regular | None:
    """Axes stay where they are; a slice of all samples is all of them."""
    return s.at(s.layout.dim)


def _without(s: Step) -> Regular | None:
    """Some axes of the input are not in the output, or of size 1 there."""
    axes = _axes(s, len(s.in_shape))
    if len(s.out_shape) == len(s.in_shape) or not axes:
        return _beside(s)
    return s.at([d for d in range(len(s.in_shape)) if d not in axes][s.layout.dim])


def _stacked(s: Step) -> Regular | None:
    (new,) = _axes(s, len(s.out_shape))
    return None if s.layout.dim == new else s.at(s.layout.dim - (s.layout.dim > new))


def _padded(s: Step) -> Regular | None:
    pad = s.node._saved_pad
    start = 2 * (len(s.out_shape) - 1 - s.layout.dim)  # from the last axis on, two numbers each
    return s.at(s.layout.dim) if not any(pad[start : start + 2]) else None


_register("Slice", _same_axis)
_register("Unfold", _beside, "dimension")
_register("Flip Roll", _beside, "dims")
_register(
    "Cat Cummax Cummin Cumprod Cumsum FftC2C FftC2R FftR2C Gather Glu IndexSelect LogSoftmax "
    "Logcumsumexp SafeSoftmax Scatter ScatterAdd ScatterBackward1 Softmax Sort SortBackward1 Split "
    "SplitWithSizes Topk UnsafeSplit UnsafeSplitWithSizes",
    _beside,
    "dim",
)
_register(
    "Amax Amin Kthvalue LinalgVectorNorm Logsumexp Max MeanBackward1 MedianBackward1 Min Mode "
    "Nansum NormBackward1 NormBackward3 ProdBackward1 Select Std StdMean SumBackward1 Unbind Var "
    "VarMean",
    _without,
    "dim",
)
_register("Stack", _stacked, "dim")
_register("ConstantPadNd", _padded, "pad")


# -- over the last axes, whose number is the kind's
# ---------------------------------------------------------------------


def _leading(last: int, *, any_slot: bool = False) -> Keeps:
    """Works on the last axes, alike for every index of the others."""

    def keeps(s: Step) -> Regular | None:
        same = len(s.in_shape) == len(s.out_shape) and s.layout.dim < len(s.out_shape) - last
        return s.at(s.layout.dim) if same and s.output == 0 and (s.slot == 0 or any_slot) else None

    return keeps


for _k in (1, 2, 3):
    _register(
        f"ReflectionPad{_k}D ReplicationPad{_k}D UpsampleNearest{_k}D UpsampleNearestExact{_k}D",
        _leading(_k),
    )
for _k in (2, 3):
    _register(
        f"AdaptiveAvgPool{_k}D AdaptiveMaxPool{_k}D AvgPool{_k}D MaxPool{_k}DWithIndices",
        _leading(_k),
    )
_register("UpsampleLinear1D", _leading(1))
_register(
    "UpsampleBilinear2D UpsampleBilinear2DAa UpsampleBicubic2D UpsampleBicubic2DAa", _leading(2)
)
_register("UpsampleTrilinear3D PixelShuffle PixelUnshuffle", _leading(3))


def _matrices(s: Step) -> Regular | None:
    """Each matrix alone: the axes before those of a matrix stay, whatever comes of it."""
    return s.at(s.layout.dim) if s.slot == 0 and s.layout.dim < len(s.in_shape) - 2 else None


_register(
    "LinalgCholeskyEx LinalgDet LinalgEigh LinalgInvEx LinalgMatrixExp LinalgPinv LinalgQr "
    "LinalgSlogdet LinalgSvd",
    _matrices,
)


_alike = _leading(2, any_slot=True)  # for every matrix of every input
_register("LinalgSolveEx LinalgSolveTriangular", _alike)
_register("ChannelShuffle", lambda s: _same_axis(s) if s.layout.dim != 1 else None)


def first_axis(s: Step) -> Regular | None:
    """Alike for every index of the first axis."""
    return _leading(len(s.out_shape) - 1)(s)


def _columns(s: Step) -> Regular | None:
    """F.unfold and F.fold of a batch: [B, C, H, W] and [B, C k k, positions]."""
    return s.at(0) if s.layout.dim == 0 and {len(s.in_shape), len(s.out_shape)} == {3, 4} else None


_register("Im2Col Col2Im", _columns)


def before_normalized_axes(s: Step) -> Regular | None:
    """Follow rows through a norm over the last axes, as many as its normalized_shape has."""
    return _leading(len(s.node._saved_normalized_shape))(s)


def batch_norm_rows(s: Step) -> Regular | None:
    """Follow rows through a batch norm.

    With running statistics it scales every element; with the batch's (instance norm) it works alike
    for every channel.
    """
    uses_batch_statistics = getattr(s.node, "_saved_training", True)
    samples_are_among_channels = s.layout.dim == 1
    keeps = samples_are_among_channels or not uses_batch_statistics
    return s.at(s.layout.dim) if keeps and s.slot == 0 and s.output == 0 else None


# -- products
# --------------------------------------------------------------------------------------------------


def product_rows(first: int) -> Keeps:
    """Return the keeper of rows for ``left @ right``, in slots ``first`` and ``first + 1``.

    Before the factors is what is added to the product.

    Rows of the product are rows of the left factor, its columns are those of the right one; an axis
    before these two is one of both. The other factor of rows or columns gets the sum over them.
    """

    def keeps(s: Step) -> Regular | None:
        if s.slot < first:
            return elementwise(s)
        from_end = len(s.out_shape) - s.layout.dim
        own = 2 if s.slot == first else 1  # of this factor
        return s.at(len(s.in_shape) - from_end) if from_end in (own, 3) else None

    return keeps


def _matrix_vector(first: int) -> Keeps:
    def follow(s: Step) -> Regular | None:
        if s.slot < first:
            return elementwise(s)
        return s.at(0) if s.slot == first else None

    return follow


_register("Mv", _matrix_vector(0))
_register("Addmv", _matrix_vector(1))


# queries, keys, values and what is added to the scores are [B, heads, ., .]
for _kind in ("FlashAttention", "FlashAttentionForCpu", "EfficientAttention", "CudnnAttention"):
    _register(f"ScaledDotProduct{_kind}", _alike)


# -- fastlr's own nodes
# -------------------------------------------------------------------------------------------------


def _first_two_axes(s: Step) -> Regular | None:
    return s.at(s.layout.dim) if s.layout.dim < 2 else None


def _folded_conv(s: Step) -> Regular | None:
    return s.at(0) if s.role in ("x", "residual", "gate") and s.layout.dim == 0 else None


_register("FoldedConvBackward", _folded_conv)
_register("FixedNormBackward", lambda s: _same_axis(s) if s.slot == 0 else None)
_register("ChannelMeansBackward", _first_two_axes)


# -- the whole graph
# --------------------------------------------------------------------------------------------------


class TracedRows(NamedTuple):
    """Rows of the samples in the gradients of a graph, for any data.

    Attributes:
        layouts: Layout of every sample-side output whose rows are known.
        lost_at: Kind of the first node below which they are unknown; "" if all are known.
    """

    layouts: dict[Place, Regular]
    lost_at: str = ""


def trace(graph: Graph, z: Tensor, out_dim: int) -> TracedRows:
    """Follow the samples from the output ``z`` through a classified graph."""
    last = len(graph.nodes) - 1, z.output_nr
    layouts: dict[Place, Regular | None] = {last: Regular(out_dim % z.ndim, 1, 1)}
    lost_at = ""
    for i in reversed(range(len(graph.nodes))):
        if graph.side[i] != SAMPLE:
            continue
        outputs = [(place[1], layouts[place]) for place in graph.outputs(i) if place in layouts]
        for slot, (child, number) in enumerate(graph.children[i]):
            if child < 0 or graph.side[child] != SAMPLE:
                continue
            place, shape = (child, number), graph.shape(child, number)
            for output, layout in outputs:
                below = None if layout is None else _through(graph, i, layout, output, slot, shape)
                if layout is not None and below is None:
                    lost_at = lost_at or graph.names[i]
                if place in layouts and layouts[place] != below:
                    lost_at, below = lost_at or graph.names[child], None
                layouts[place] = below
    return TracedRows(
        {place: layout for place, layout in layouts.items() if layout is not None}, lost_at
    )


def _through(
    graph: Graph, i: int, layout: Regular, output: int, slot: int, in_shape: torch.Size
) -> Regular | None:
    """Return the rows in the gradient that a node gives to an input; None if they are unknown."""
    name, out_shape = graph.names[i], graph.shape(i, output)
    if name not in KEEPS or RAGGED in (out_shape, in_shape):
        return None
    step = Step(graph.nodes[i], name, layout, output, slot, out_shape, in_shape)
    try:
        return KEEPS[name](step)
    except (AttributeError, RuntimeError, IndexError, TypeError):
        return None  # what the node has saved cannot be read


def uncovered(graph: Graph) -> frozenset[str]:
    """Return the kinds of nodes that are not listed here, though samples pass through them.

    Below such a node, rows are unknown: marks find them in every batch, and no CUDA graph is made.
    """
    through = zip(graph.names, graph.side, graph.children, strict=True)
    return frozenset(
        name
        for name, side, children in through
        if side == SAMPLE
        and name not in KEEPS
        and any(child >= 0 and graph.side[child] == SAMPLE for child, _ in children)
    )
