"""Exact routes for what no rule covers, and the truth that everything is held to.

`by_node` runs the backward formula of one node once for each sample, with the gradient of the other
samples set to zero: the formula is linear in that gradient, so this is that sample's gradient,
whatever the node computes. `SingleSamples` runs the model forward and backward for one sample at a
time, beside copies of itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from fastlr.errors import ModelError, one_line
from fastlr.ghost.factors import Dense
from fastlr.ghost.graph import call_node, dense, exact_grads
from fastlr.ghost.model_io import FAILURES
from fastlr.ghost.rules import Site, Unsupported
from fastlr.ghost.verification.agreement import norms_agree
from fastlr.ops.deferred_checks import out_of_memory
from fastlr.ops.recent import Recent
from fastlr.ops.torch_private import own_function

Forward = Callable[[Sequence[int]], Tensor]  # numbers of samples -> their outputs


def by_node(site: Site, slots: Sequence[int]) -> dict[int, Dense]:
    """Return the per-sample gradients of the parameter slots of any node.

    They are made by the node's own backward formula, sample by sample: each time on the whole
    batch, as its zeros cost what other numbers do.

    Args:
        site: the node.
        slots: of its parameters.
    """
    owners = [_owners(site, output) for output in range(len(site.gradients))]
    gradients: dict[int, list[Tensor]] = {slot: [] for slot in slots}
    for sample in range(site.count):
        own = tuple(
            None if g is None or of is None else g.where(of == sample, g.new_zeros(()))
            for g, of in zip(site.gradients, owners, strict=True)
        )
        with torch.no_grad():
            results = _formula(site.node, own)
        for slot in slots:
            grad, shape = results[slot], site.shapes[slot]
            if grad is None:
                device = next(g.device for g in own if g is not None)
                grad = torch.zeros(shape, device=device)
            # The engine sums over broadcast axes.
            gradients[slot].append(dense(grad).sum_to_size(shape))
    return {slot: Dense(torch.stack(grads)) for slot, grads in gradients.items()}


def _owners(site: Site, output: int) -> Tensor | None:
    """Return the sample of each row of the gradient at an output, to be broadcast along it.

    None where no gradient arrives.
    """
    gradient, layout = site.gradients[output], site.layouts.get(output)
    if gradient is None:
        return None
    if layout is None:
        raise Unsupported(f"the sample axis of output {output} is unknown")
    ids = layout.samples(gradient.shape[layout.dim], site.count, gradient.device)
    shape = [1] * gradient.ndim
    shape[layout.dim] = len(ids)
    return ids.view(shape)


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


@dataclass(eq=False)
class SingleSamples:
    """Runs a model on single samples.

    Attributes:
        forward: runs the model on samples of a batch.
        out_dim: the samples' axis of the output.
        parameters: by name.
    """

    forward: Forward
    out_dim: int
    parameters: Mapping[str, Tensor]

    def run(
        self, sample: int, cotangents: Sequence[Tensor], copies: Sequence[int] = (2, 1, 3, 4)
    ) -> Beside:
        """Run one sample beside a copy of itself, else alone, else as one of three or four.

        Args:
            sample: its number.
            cotangents: of the sample, each of size 1 along ``out_dim``.
            copies: how often it is run, itself included; the first number that the model takes.
        """
        failures: list[Exception] = []
        for number in copies:
            try:
                return self._run(sample, cotangents, number)
            except FAILURES as error:
                failures.append(error)
        raise failures[0]

    def _run(self, sample: int, cotangents: Sequence[Tensor], copies: int) -> Beside:
        """Run one sample so many times at once; the cotangents of its copies are zero.

        Torch's backward formulas may be wrong for a batch of one, where the strides of a transposed
        view pass for another memory format (batch norm on a CPU, flattened and transposed); beside
        a copy they are right.
        """
        z, shape = self.forward([sample] * copies), cotangents[0].shape
        row = z.detach().narrow(self.out_dim, 0, 1)
        if z.shape[self.out_dim] != copies or row.shape != shape:
            raise ModelError(
                f"sample {sample} gives an output of shape {tuple(z.shape)} where {copies} of it "
                f"are run, in the batch {tuple(shape)}; check in_dim= and out_dim="
            )
        if not z.requires_grad:
            zero = torch.zeros((), dtype=torch.float64, device=z.device)
            return Beside(row, [[zero] * len(self.parameters) for _ in cotangents], copies)
        norms = []
        for number, v in enumerate(cotangents, 1):
            beside = torch.zeros_like(z, memory_format=torch.contiguous_format)
            beside.narrow(self.out_dim, 0, 1).copy_(v)
            more = number < len(cotangents)
            norms.append(exact_grads(z, self.parameters, beside, retain=more))
        return Beside(row, norms, copies)


class RightCopies:
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
        self, samples: SingleSamples, sample: int, v: Tensor, key: tuple, close: float
    ) -> list[Tensor]:
        """Return the squared norms of one sample's gradients, in the order of the parameters.

        They are float64 scalars.

        Args:
            samples: runs the model.
            sample: its number.
            v: its cotangent, of size 1 along the output's axis of samples.
            key: shapes and strides of a single sample's inputs, and in what state the model is.
            close: relative difference of norms that is rounding.
        """
        known = self._copies.get(key)
        if known is not None:
            return samples.run(sample, [v], [known]).norms[0]
        by_copies: dict[int, list[Tensor]] = {}
        failures: list[Exception] = []
        for copies in (1, 2, 3, 4):
            if copies == 3 and len(by_copies) == 2 and _same(by_copies[1], by_copies[2], close):
                break
            if copies == 4 and by_copies:
                break
            try:
                by_copies[copies] = samples.run(sample, [v], [copies]).norms[0]
            except FAILURES as error:
                failures.append(error)
        if not by_copies:
            raise failures[-1]
        if 2 not in by_copies:
            self.notes.append(
                "the model takes one sample only: its gradients were not compared with any in a "
                "batch"
            )
        return by_copies[self._copies.put(key, _right_copies(by_copies, close))]


def _right_copies(by_copies: dict[int, list[Tensor]], close: float) -> int:
    """Return by how many copies, itself included, a sample has its own norms."""
    if 1 in by_copies:
        if 3 not in by_copies:
            return 1
        if 2 not in by_copies or not _same(by_copies[2], by_copies[3], close):
            return 1  # one copy more changes them again: alone is what is meant
    return 2 if 2 in by_copies else min(by_copies)


def _same(one: list[Tensor], other: list[Tensor], close: float) -> bool:
    total = torch.stack(other).sum()
    return all(norms_agree(a, b, total, close) for a, b in zip(one, other, strict=True))
