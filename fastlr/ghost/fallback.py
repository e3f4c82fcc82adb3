"""Exact routes for what no rule covers, and the truth that everything is held to.

`by_node` runs the backward formula of one node once for each sample, with the gradient of the other
samples set to zero: the formula is linear in that gradient, so this is that sample's gradient,
whatever the node computes. `Singles` slices the inputs and runs the model forward and backward for
one sample at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from fastlr.errors import ModelError, one_line
from fastlr.ghost.factors import Dense
from fastlr.ghost.graph import call_node, dense, exact_grads
from fastlr.ghost.model_io import FAILURES
from fastlr.ghost.rules import Site, Unsupported
from fastlr.ghost.sample_axis import Ragged
from fastlr.ghost.verification.agreement import norms_agree
from fastlr.ops.deferred_checks import out_of_memory
from fastlr.ops.recent import Recent
from fastlr.ops.torch_private import own_function

Forward = Callable[[Sequence[int]], Tensor]  # numbers of samples -> their outputs


def by_node(site: Site, slots: Sequence[int]) -> dict[int, Dense]:
    """Return the per-sample gradients of the parameter slots of any node.

    They are made by the node's own backward formula, sample by sample.
    """
    masks: list[Tensor | None] = []
    for output, gradient in enumerate(site.gradients):
        if gradient is None:
            masks.append(None)
            continue
        layout = site.layouts.get(output)
        if layout is None:
            raise Unsupported(f"the sample axis of output {output} is unknown")
        if isinstance(layout, Ragged):
            if layout.ids is None:
                raise Unsupported("the rows of the samples are unknown")
            ids = layout.ids
        else:
            ids = layout.samples(gradient.shape[layout.dim], site.count, gradient.device)
        shape = [1] * gradient.ndim
        shape[layout.dim] = len(ids)
        masks.append(ids.view(shape))
    gradients: dict[int, list[Tensor]] = {slot: [] for slot in slots}
    for j in range(site.count):
        only = tuple(
            None
            if g is None or m is None
            else torch.where(m == j, g, torch.zeros((), dtype=g.dtype, device=g.device))
            for g, m in zip(site.gradients, masks, strict=True)
        )
        with torch.no_grad():
            results = _formula(site.node, only)
        for slot in slots:
            grad = results[slot]
            if grad is None:
                grad = torch.zeros(
                    site.shapes[slot], device=next(g for g in only if g is not None).device
                )
            # The engine sums over broadcast axes.
            gradients[slot].append(dense(grad).sum_to_size(site.shapes[slot]))
    return {slot: Dense(torch.stack(grads)) for slot, grads in gradients.items()}


def _formula(node: Any, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """`call_node`, or Unsupported where a user's own formula does not run here.

    Some take what they are given only within autograd's engine.
    """
    try:
        return call_node(node, gradients)
    except FAILURES as error:
        foreign = own_function(node) is not None
        if not foreign or isinstance(error, CheckpointError) or out_of_memory(error):
            raise
        raise Unsupported(
            f"the backward formula of {node.name()} fails by itself: {one_line(error)[:200]}"
        ) from error


class Beside(NamedTuple):
    """One sample, run beside copies of itself.

    Attributes:
        row: its output.
        norms: for each cotangent the squared norms of its gradients, float64 scalars.
        copies: how often it was run, itself included; 1 is alone.
    """

    row: Tensor
    norms: list[list[Tensor]]
    copies: int


def beside_copies(
    forward: Forward,
    sample: int,
    cotangents: Sequence[Tensor],
    out_dim: int,
    parameters: Mapping[str, Tensor],
    copies: Sequence[int] = (2, 1, 3, 4),
) -> Beside:
    """Run one sample beside a copy of itself, else alone, else as one of three or four.

    Args:
        forward: runs the model.
        sample: its number.
        cotangents: of the sample, each of size 1 along ``out_dim``.
        out_dim: the samples' axis of the output.
        parameters: by name.
        copies: how often it is run, itself included; the first number that the model takes.
    """
    failure: Exception | None = None
    for number in copies:
        try:
            return _beside(forward, sample, cotangents, out_dim, parameters, number)
        except FAILURES as error:
            failure = failure or error
    assert failure is not None
    raise failure


def _beside(
    forward: Forward,
    sample: int,
    cotangents: Sequence[Tensor],
    out_dim: int,
    parameters: Mapping[str, Tensor],
    copies: int,
) -> Beside:
    """Run one sample so many times at once; the cotangents of its copies are zero.

    Torch's backward formulas may be wrong for a batch of one, where the strides of a transposed
    view pass for another memory format (batch norm on a CPU, flattened and transposed); beside a
    copy they are right.
    """
    z = forward([sample] * copies)
    v, *_ = cotangents
    if z.shape[out_dim] != copies or z.narrow(out_dim, 0, 1).shape != v.shape:
        raise ModelError(
            f"sample {sample} gives an output of shape {tuple(z.shape)} where {copies} of it are "
            f"run, in the batch {tuple(v.shape)}; check in_dim= and out_dim="
        )
    row = z.detach().narrow(out_dim, 0, 1)
    if not z.requires_grad:
        zero = torch.zeros((), dtype=torch.float64, device=z.device)
        return Beside(row, [[zero] * len(parameters) for _ in cotangents], copies)
    norms = []
    for k, v in enumerate(cotangents, 1):
        beside = torch.zeros_like(z, memory_format=torch.contiguous_format)
        beside.narrow(out_dim, 0, 1).copy_(v)
        norms.append(exact_grads(z, parameters, beside, retain=k < len(cotangents)))
    return Beside(row, norms, copies)


class Singles:
    """Exact squared norms of single samples: alone where that is right, else beside a copy.

    Whether it is depends on shapes and strides, not on values, so both are compared once for each
    and the outcome kept.
    """

    def __init__(self) -> None:
        self._copies = Recent[tuple, int]()
        self.notes: list[str] = []

    def alone(self, key: tuple) -> bool:
        """Return True if for these shapes a sample has its gradients where it is run alone."""
        return self._copies.get(key) == 1

    def sq_norms(
        self,
        forward: Forward,
        sample: int,
        v: Tensor,
        out_dim: int,
        parameters: Mapping[str, Tensor],
        key: tuple,
        close: float,
    ) -> list[Tensor]:
        """Return the squared norms of one sample's gradients, in the order of ``parameters``.

        They are float64 scalars.

        Args:
            forward: runs the model.
            sample: its number.
            v: its cotangent, of size 1 along ``out_dim``.
            out_dim: the samples' axis of the output.
            parameters: by name.
            key: shapes and strides of a single sample's inputs, and in what state the model is.
            close: relative difference of norms that is rounding.
        """
        known = self._copies.get(key)
        if known is not None:
            return beside_copies(forward, sample, [v], out_dim, parameters, [known]).norms[0]
        tried: dict[int, list[Tensor]] = {}
        failure: Exception | None = None
        for copies in (1, 2, 3):
            if copies == 3 and len(tried) == 2 and self._same(tried[1], tried[2], close):
                break
            try:
                own = beside_copies(forward, sample, [v], out_dim, parameters, [copies])
                tried[copies] = own.norms[0]
            except FAILURES as error:
                failure = error
        if not tried:
            assert failure is not None
            raise failure
        if 2 not in tried:
            self.notes.append(
                "the model takes one sample only: its gradients were not compared with any in a "
                "batch"
            )
        # gradients that one copy more changes again depend on the company itself: then alone is
        # what is meant
        settled = 2 in tried and (3 not in tried or self._same(tried[2], tried[3], close))
        right = 1 in tried and (3 not in tried or not settled)
        if right:
            chosen = 1
        else:
            chosen = 2 if 2 in tried else 3
        return tried[self._copies.put(key, chosen)]

    @staticmethod
    def _same(one: list[Tensor], other: list[Tensor], close: float) -> bool:
        total = torch.stack(other).sum()
        return all(norms_agree(a, b, total, close) for a, b in zip(one, other, strict=True))
