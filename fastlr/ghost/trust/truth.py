"""The truth that all norms are compared with: plain autograd on one sample at a time.

In: a model and a batch. Out: the squared norms of one sample's gradients. No operation of fastlr's
takes part in them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fastlr.errors import ModelError
from fastlr.ghost.fusion.forward import ForwardPass
from fastlr.ghost.fusion.mode import OURS
from fastlr.ghost.fusion.recurrent import Unfused
from fastlr.ghost.graph.formulas import dense
from fastlr.ghost.model.batch import Batch
from fastlr.ghost.model.view import FAILURES, ModelView
from fastlr.ops.autocast import full_precision
from fastlr.ops.cudnn import cudnn_as_user_set

PART = 1 << 18  # elements whose copies in float64 stay in a CPU's cache
# Torch's batch norm on a CPU, folded or not, is wrong for one sample: it takes the strides of a
# transposed view for another memory format.
_WRONG_FOR_ONE_SAMPLE_ON_CPU = OURS | {"NativeBatchNormBackward0"}


class SampleResult(NamedTuple):
    """One sample, run beside copies of itself.

    Attributes:
        row: Output of the sample.
        norms: Squared norms [parameters] of its gradients for each cotangent, float64.
    """

    row: Tensor
    norms: list[Tensor]


@dataclass(eq=False)
class SingleSamples:
    """Runs a model, as it is written, on single samples.

    Attributes:
        view: Model.
        batch: Batch that has the samples.
        parameters: Parameters by name.
    """

    view: ModelView
    batch: Batch
    parameters: Mapping[str, Tensor]

    def run(
        self, sample: int, cotangents: Sequence[Tensor], *, alone_first: bool = False
    ) -> SampleResult:
        """Run one sample beside a copy of itself, or alone; the other way if the model fails so."""
        failures = []
        for copies in (1, 2) if alone_first else (2, 1):
            try:
                return self.run_copies(sample, cotangents, copies)
            except FAILURES as error:
                failures.append(error)
        raise failures[0]

    def run_copies(self, sample: int, cotangents: Sequence[Tensor], copies: int) -> SampleResult:
        """Run one sample several times at once; the cotangents of its copies are zero.

        Torch's backward formulas may be wrong for a batch of one. Beside a copy they are right.

        Args:
            sample: Number of the sample.
            cotangents: Cotangents of the sample, each of size 1 along ``out_dim``.
            copies: Number of times that it is run.
        """
        with Unfused():
            z = self.view.forward(self.batch.pick([sample] * copies), copies=False)
        row, shape = self.view.row(z.detach(), 0), cotangents[0].shape
        if z.shape[self.view.out_dim] != copies or row.shape != shape:
            raise ModelError(
                f"sample {sample} gives an output of shape {tuple(z.shape)} where {copies} of it "
                f"are run, in the batch {tuple(shape)}; check in_dim= and out_dim="
            )
        if not z.requires_grad:
            zeros = torch.zeros(len(self.parameters), dtype=torch.float64, device=z.device)
            return SampleResult(row, [zeros] * len(cotangents))
        norms = []
        for number, v in enumerate(cotangents, 1):
            beside = torch.zeros_like(z, memory_format=torch.contiguous_format)
            self.view.row(beside, 0).copy_(v)
            more = number < len(cotangents)
            norms.append(exact_sq_norms(z, self.parameters, beside, retain=more))
        return SampleResult(row, norms)


def norms_of_one(forward: ForwardPass, v: Tensor, *, retain: bool) -> dict[str, Tensor]:
    """Return the squared norms [1] of a batch of one sample, by plain autograd."""
    parameters = forward.view.parameters
    if not _autograd_is_right_for_one_sample(forward):
        return norms_by_loop(forward, v, parameters)
    exact = exact_sq_norms(forward.z, parameters, v, retain=retain)
    return dict(zip(parameters, exact[:, None], strict=True))


def norms_by_loop(
    forward: ForwardPass, v: Tensor, parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the squared norms [B] of some parameters by one pass per sample."""
    view, alone = forward.view, _autograd_is_right_for_one_sample(forward)
    samples = SingleSamples(view, forward.batch, parameters)
    with cudnn_as_user_set(view.device):
        passes = [samples.run(k, [view.row(v, k)], alone_first=alone) for k in range(forward.count)]
    table = torch.stack([beside.norms[0] for beside in passes], 1)
    return dict(zip(parameters, table, strict=True))


def _autograd_is_right_for_one_sample(forward: ForwardPass) -> bool:
    """Return True if autograd is right for a batch of one sample."""
    return _WRONG_FOR_ONE_SAMPLE_ON_CPU.isdisjoint(forward.graph.names)


def exact_sq_norms(
    z: Tensor, parameters: Mapping[str, Tensor], v: Tensor, *, retain: bool = False
) -> Tensor:
    """Return the squared norms [parameters] (float64) of <v, z>'s gradients, by plain autograd."""
    zero = torch.zeros((), dtype=torch.float64, device=z.device)
    with full_precision(z.device):
        gradients = torch.autograd.grad(
            z, list(parameters.values()), v, retain_graph=retain, allow_unused=True
        )
        summed = [zero if g is None else _partly_summed(dense(g)) for g in gradients]
        return torch.stack(torch._foreach_norm(summed, dtype=torch.float64)).square()


def _partly_summed(gradient: Tensor) -> Tensor:
    """Return a gradient, or the lengths of its parts, which have the same norm."""
    if gradient.is_cuda or gradient.numel() <= PART:
        return gradient
    return torch.stack(torch._foreach_norm(gradient.flatten().split(PART), dtype=torch.float64))
