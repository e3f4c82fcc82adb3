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
from fastlr.ops.deferred_checks import out_of_memory
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
    """

    row: Tensor
    norms: list[list[Tensor]]


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

    def run(self, sample: int, cotangents: Sequence[Tensor], *, alone: bool = False) -> Beside:
        """Run one sample beside a copy of itself, or alone; the other way if the model fails so."""
        failures = []
        for copies in (1, 2) if alone else (2, 1):
            try:
                return self.run_copies(sample, cotangents, copies)
            except FAILURES as error:
                failures.append(error)
        raise failures[0]

    def run_copies(self, sample: int, cotangents: Sequence[Tensor], copies: int) -> Beside:
        """Run one sample several times at once; the cotangents of its copies are zero.

        Torch's backward formulas may be wrong for a batch of one, where the strides of a transposed
        view pass for another memory format (batch norm on a CPU, flattened and transposed); beside
        a copy they are right.

        Args:
            sample: Number of the sample.
            cotangents: Cotangents of the sample, each of size 1 along ``out_dim``.
            copies: Number of times that it is run.
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
            return Beside(row, [[zero] * len(self.parameters) for _ in cotangents])
        norms = []
        for number, v in enumerate(cotangents, 1):
            beside = torch.zeros_like(z, memory_format=torch.contiguous_format)
            beside.narrow(self.out_dim, 0, 1).copy_(v)
            more = number < len(cotangents)
            norms.append(exact_grads(z, self.parameters, beside, retain=more))
        return Beside(row, norms)
