"""Convolution, batch norm in eval mode and activation as one node, with its rule.

The node is one of the autograd graph.

The definitions and identities are in fastlr.ops.reference.folded; which blocks of a model run so is
decided in fastlr.ghost.fusion.mode.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn
from weakref import ref

import torch
from torch import Tensor

from fastlr import ops
from fastlr.ghost.factors import Factor, Norms
from fastlr.ghost.graph import Graph, Place
from fastlr.ghost.rules import Site, Unsupported, rule
from fastlr.ghost.sample_axis import Regular
from fastlr.ghost.tokens import version
from fastlr.ops.deferred_checks import waiting
from fastlr.ops.folded import arriving, conv_and_product, entering, keeps_product, leaving
from fastlr.ops.geometry import ConvGeometry

NODE = "FoldedConvBackward"
ONE_IMAGE = Regular(0, 1, 1)
SEVERAL = "a sample owns several images"
PASSES = 8  # kept in mind


class FoldRefuted(Exception):
    """A folded block did not give the exact norms: these weights must run unfolded."""

    def __init__(self, names: list[str], reason: str) -> None:
        super().__init__(reason)
        self.names, self.reason = names, reason


class FoldedWeights:
    """The folded weights of a forward pass.

    By kernels all are made at once, if an earlier pass has asked for the same.
    """

    def __init__(self) -> None:
        self._passes: dict[
            tuple, list[tuple]
        ] = {}  # first weight -> what was asked for, by weak references
        self._asked: list[tuple] = []
        self._made: dict[tuple, tuple[tuple, tuple[Tensor, Tensor]]] = {}
        self._alone = False  # some were made one by one

    def begin(self) -> None:
        """Begin a forward pass, or end one.

        What was not made at once in the pass is now, so that a CUDA graph finds it compared.
        """
        if self._asked:
            if len(self._passes) >= PASSES:
                self._passes.clear()
            self._passes[self._first], self._asked = self._asked, []
            if self._alone and len(self._passes[self._first]) > 1 and waiting():
                self._make(self._before())
        self._made.clear()
        self._alone = False

    def get(
        self, dtype: torch.dtype, eps: float, tensors: tuple[Tensor | None, ...]
    ) -> tuple[Tensor, Tensor]:
        """What fastlr.ops.reference.folded.fold_weights returns for one convolution."""
        if ops.backend_for(tensors[0]) != "triton":
            return ops.run("fold_weights", dtype, (eps,), *tensors)[0]
        if not self._asked:
            self._first = dtype, id(tensors[0])
        self._asked.append((dtype, eps, tuple(t if t is None else ref(t) for t in tensors)))
        key = _identity(dtype, eps, tensors)
        if key not in self._made:
            calls = [(dtype, eps, tensors)]
            if not self._made:
                before = self._before()
                if key in (_identity(*call) for call in before):
                    calls = before
            self._alone |= len(calls) == 1
            self._make(calls)
        return self._made[key][1]

    def _before(self) -> list[tuple]:
        """Return what the last pass that began like this one has asked for.

        It holds None for tensors that are gone.
        """
        return [
            (*call[:2], tuple(t and t() for t in call[2]))
            for call in self._passes.get(self._first, [])
        ]

    @torch.no_grad()
    def _make(self, calls: list[tuple]) -> None:
        """Fold these, those of the same dtypes together."""
        alike: dict[tuple, list[tuple]] = {}
        for dtype, eps, tensors in calls:
            if tensors[0] is not None and tensors[4] is not None and tensors[5] is not None:
                # Else they are gone.
                dtypes = [t if t is None else t.dtype for t in tensors]
                one = {*dtypes} - {None}
                alike.setdefault((dtype, *(one if len(one) == 1 else dtypes)), []).append(
                    (eps, tensors)
                )
        for (dtype, *_), group in alike.items():
            results = ops.run(
                "fold_weights",
                dtype,
                tuple(eps for eps, _ in group),
                *(t for _, ts in group for t in ts),
            )
            for (eps, tensors), result in zip(group, results, strict=True):
                self._made[_identity(dtype, eps, tensors)] = tensors, result


def _identity(dtype: torch.dtype, eps: float, tensors: tuple[Tensor | None, ...]) -> tuple:
    """Which tensors these are, where they are and how often they were written to."""
    return dtype, eps, *(None if t is None else (id(t), t.data_ptr(), version(t)) for t in tensors)


class Entry(NamedTuple):
    """How a folded convolution takes its inputs, and what it gives beside its output.

    This is for convolutions that work by a kernel.

    Attributes:
        act: applied to ``x`` as it is loaded: what is stored is the activation's input.
        settled: the gradient for ``x`` is that of ``act(x)``: the derivative is another node's to
            apply.
        gate: factors of ``act(x)`` [B, C, 1, ...].
        passes: ``x`` is an output too: ``act(x)`` for who takes it from there, whose gradient is
            added here.
        residual: applied to the residual as it is loaded.
        mean: the mean of the activation over all positions is an output too, and the first output
            the activation's input.
    """

    act: str = "none"
    settled: bool = False
    gate: bool = False
    passes: bool = False
    residual: str = "none"
    mean: bool = False


class FoldedConv(torch.autograd.Function):
    """Activation of batch norm (running statistics) of a convolution, as one node.

    A residual may be added before the activation. The node has correct gradients.

    With an `Entry` there are three outputs, of which the second and third may be None.

    Attributes of a node: ``roles`` names its inputs; ``ready`` hands over what the rule has
    computed before the backward pass reaches the node (the output gradient and the input gradient
    for it); ``norms_only`` says that the gradients of the parameters will not be looked at.
    """

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gamma: Tensor | None,
        beta: Tensor | None,
        residual: Tensor | None,
        mean: Tensor,
        var: Tensor,
        eps: float,
        act: str,
        dtype: torch.dtype,
        geometry: ConvGeometry,
        weights: FoldedWeights,
        entry: Entry | None = None,
        gate: Tensor | None = None,
    ) -> Tensor | tuple[Tensor | None, ...]:
        given, mean_out = x, None
        # The faster order for convolutions, on CPUs too.
        last = x.ndim == 4 and dtype != torch.float64
        x = x.to(dtype, memory_format=torch.channels_last if last else torch.preserve_format)
        folded, numbers = weights.get(dtype, eps, (weight, bias, gamma, beta, mean, var))
        folded_bias, statistics = numbers[0], numbers[1:]
        if entry is not None:
            how = (entry.act, gate, entry.residual, entry.mean)
            product = None
            out, kept = ops.run(
                "folded_conv", x, folded, folded_bias, act, geometry, residual, *how
            )
            if entry.mean:
                kept, mean_out = out, kept
            ctx.set_materialize_grads(False)
        elif ops.backend_for(x) == "torch" and keeps_product(x, weight, geometry):
            out, kept, product = conv_and_product(
                x, weight, statistics[0], folded_bias, act, geometry, residual
            )
        else:
            product = None
            out, kept = ops.run("folded_conv", x, folded, folded_bias, act, geometry, residual)
        needed = None if act == "none" else kept  # the model may add to the output in place
        ctx.save_for_backward(x, product, needed, weight, folded, statistics, gate)
        ctx.act, ctx.geometry, ctx.ready, ctx.norms_only = act, geometry, None, False
        ctx.adds, ctx.entry = residual is not None, entry
        tensors = {
            "x": x,
            "weight": weight,
            "bias": bias,
            "gamma": gamma,
            "beta": beta,
            "residual": residual,
        }
        tensors |= {"mean": mean, "var": var, "gate": gate}
        ctx.roles = tuple(role for role, t in tensors.items() if t is not None)
        return out if entry is None else (out, given if entry.passes else None, mean_out)

    @staticmethod
    def sq_norms(
        ctx: Any, grad: Tensor | None, more: Tensor | None = None, of_mean: Tensor | None = None
    ) -> tuple[Any, ...]:
        """Return the gradients and the squared norms of a folded convolution.

        First the gradient handed to the residual, then what
        fastlr.ops.reference.folded.folded_conv_backward returns.
        """
        x, product, kept, weight, folded, statistics, gate = ctx.saved_tensors
        want, entry = ctx.needs_input_grad[0], ctx.entry
        act = "none" if entry is not None and entry.mean and of_mean is None else ctx.act
        if grad is None:  # nothing but the mean was used
            grad = kept.new_zeros(()).expand(kept.shape)
        if ctx.adds and kept is not None:
            # The gradient before the activation has to be made anyway.
            grad, kept, act = ops.run("activation_grad", grad, kept, act), None, "none"
        kept = grad if kept is None else kept
        given = (x, grad, kept, act, folded, weight, statistics, ctx.geometry, want)
        rest: tuple[Any, ...] = () if product is None else (product,)
        if entry is not None:
            rest = (product, entry.act, entry.settled, gate, more, of_mean)
        return grad, *ops.run("folded_conv_backward", *given, *rest)

    @staticmethod
    def backward(  # noqa: D102
        ctx: Any, grad: Tensor | None, more: Tensor | None = None, of_mean: Tensor | None = None
    ) -> tuple:
        ready, ctx.ready = ctx.ready, None
        if ready is not None and all(
            a is b for a, b in zip(ready[0], (grad, more, of_mean), strict=False)
        ):
            return (ready[1], *[None] * 4, ready[2] if ctx.adds else None, *[None] * 8, ready[3])
        stored, _, kept, weight, folded, (scale, rstd, shift), gate = ctx.saved_tensors
        entry = ctx.entry or Entry()
        x = entering(stored, entry.act, gate)
        if grad is None:  # only another output was used
            size = ctx.geometry.output_size(x.shape[2:], weight.shape[2:])
            grad = x.new_zeros(len(x), len(weight), *size)
        act = "none" if kept is None or (entry.mean and of_mean is None) else ctx.act
        g = arriving(grad, grad if kept is None else kept, act, of_mean)
        mask = [
            ctx.needs_input_grad[0],
            any(ctx.needs_input_grad[1:5]) and not ctx.norms_only,
            False,
        ]
        gx, gw, _ = torch.ops.aten.convolution_backward(g, x, folded, None, *ctx.geometry, mask)
        gx, of_gate = (
            (gx, None) if gx is None else leaving(gx, stored, entry.act, entry.settled, gate, more)
        )
        through = g if ctx.needs_input_grad[5] else None
        if gw is None:
            return (gx, *[None] * 4, through, *[None] * 8, of_gate)
        gw, sums = gw.to(scale.dtype), g.to(scale.dtype).sum([0, *range(2, g.ndim)])
        per_channel = [-1, *[1] * (weight.ndim - 1)]
        inner = (gw * weight).flatten(1).sum(1)
        grads = (gw * scale.view(per_channel), sums * scale, (inner + shift * sums) * rstd, sums)
        wanted = zip(grads, ctx.needs_input_grad[1:5], strict=True)
        return (
            gx,
            *(t.to(weight.dtype) if needed else None for t, needed in wanted),
            through,
            *[None] * 8,
            of_gate,
        )


@rule(NODE, about="convolution folded with batch norm in eval mode and an activation")
def folded(site: Site, slots: Sequence[int]) -> dict[int, Factor]:
    """Return the norms of weight, bias, gamma and beta of a folded convolution.

    The input gradient comes with their norms and is kept for the node.
    """
    node = site.node
    reached = [o for o, g in enumerate(site.gradients) if g is not None]
    if 0 not in reached and not (node.entry and node.entry.mean):
        raise Unsupported("no gradient at the first output")
    if any(site.layouts.get(o) != ONE_IMAGE for o in reached):
        raise Unsupported(SEVERAL)
    if any(node.roles[slot] == "residual" for slot in slots):
        raise Unsupported("what is added is computed of parameters alone")
    through, gx, *norms = FoldedConv.sq_norms(node, *site.gradients)
    node.ready = (site.gradients, gx, through, norms[4] if len(norms) > 4 else None)
    factors = dict(zip(("weight", "bias", "gamma", "beta"), map(Norms, norms), strict=False))
    return {slot: factors[node.roles[slot]] for slot in slots}


def weight_of(graph: Graph, node: int) -> list[str]:
    """Return the name by which a node of ours is known to the folding, in a list.

    It is that of its first parameter; the list is empty if that is frozen.
    """
    child, _ = graph.children[node][1]  # after x
    return [graph.parameters[child]] if child in graph.parameters else []


def parameters_of(graph: Graph, node: int) -> list[str]:
    """Return the names of all parameters of a node of ours.

    First the one that the folding knows it by; none if that is frozen.
    """
    names = [
        graph.parameters[child]
        for child, _ in graph.children[node][1:]
        if child in graph.parameters
    ]
    return names if weight_of(graph, node) else []


def refuse_blocks(blocks: Iterable[list[str]], reason: str) -> NoReturn:
    """Raise FoldRefuted with the names of the parameters of these blocks.

    Without any names if one block has none, or if there is no block.
    """
    names = list(blocks)
    raise FoldRefuted([] if [] in names else [name for block in names for name in block], reason)


def refuse_parts_of_samples(graph: Graph, layouts: Mapping[Place, Regular]) -> None:
    """Raise FoldRefuted where a sample is known to own several images.

    It names all folded convolutions of which that is so: they have no rule.
    """
    nodes = [
        i
        for i, kind in enumerate(graph.names)
        if kind == NODE and layouts.get((i, 0), ONE_IMAGE) != ONE_IMAGE
    ]
    if nodes:
        refuse_blocks((weight_of(graph, i) for i in nodes), SEVERAL)
