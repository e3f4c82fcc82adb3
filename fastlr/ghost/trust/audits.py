"""Audits: random samples of a measured batch run again, alone, by plain autograd.

In: a batch with its output and norms. Out: whether a sample has the same output and norms alone
("In every measurement" in docs/trust.md). `Audits` draws the samples, `SampleAudit` runs one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from fastlr.errors import ModelError
from fastlr.ghost.graph.plan import Plan
from fastlr.ghost.model.batch import Batch
from fastlr.ghost.model.view import ModelView
from fastlr.ghost.norms.cotangents import Pass
from fastlr.ghost.trust.agreement import (
    norm_tolerance,
    norms_close,
    output_tolerance,
    outputs_need_full_check,
)
from fastlr.ghost.trust.company import BatchOutput
from fastlr.ghost.trust.hooks import Scale
from fastlr.ghost.trust.truth import SingleSamples, exact_sq_norms
from fastlr.ops.autocast import autocast_dtype

SHARE = 0.03  # of the time of raw calls, spent on audits beyond those of new plans
SAMPLES = 3  # audited in the first chunk of a measurement, and where a plan is new
LARGEST_SCALE = 40  # power of two by which cotangents exceed unit size; in float16 none


class Draw(NamedTuple):
    """Samples of a batch that are audited.

    Attributes:
        random: Number of randomly drawn samples.
        last: Whether the last sample of the batch is audited.
    """

    random: int
    last: bool = False

    @staticmethod
    def of_chunk(first: bool, last: bool) -> Draw:
        """Return the draw for a chunk of a measurement, which may be its first or last one."""
        return Draw(SAMPLES if first else int(last), last)


Check = bool | Draw | None  # None: as often as costs at most `SHARE` of the time


class Refuted(ModelError):
    """Plain autograd refutes what was measured.

    Attributes:
        names: Names of the parameters with wrong norms; none if the output is wrong.
        plan: Plan of the batch.
        blocks: Folded blocks that have some of these parameters.
    """

    def __init__(
        self,
        text: str,
        names: Collection[str] = (),
        plan: Plan | None = None,
        blocks: Collection[str] = (),
    ) -> None:
        super().__init__(text)
        self.names, self.plan, self.blocks = names, plan, blocks


class Audits:
    """Counts and draws of the audits of one engine.

    Attributes:
        passed: Number of samples whose output and norms were right.
        failed: Number of samples that refuted an earlier plan.
        measured: Seconds that raw calls took.
        spent: Seconds of these that audits took, except those of new plans.
    """

    def __init__(self) -> None:
        self.passed = self.failed = 0
        self.measured = self.spent = 0.0
        self._drawn = 0
        self._again: int | None = None

    def samples(self, count: int, check: Check, at_least: int = 0) -> list[int]:
        """Return the numbers of the samples to audit, another draw in every call.

        Args:
            count: Number of samples in the batch.
            check: Samples that the caller wants audited. After a failure, every batch is audited.
            at_least: Least number of randomly drawn samples.
        """
        if isinstance(check, Draw):
            random, last = check
        else:
            is_within_share = self.spent <= SHARE * self.measured
            random, last = int(is_within_share if check is None else check), False
        random = max(random, at_least, int(self.failed > 0))
        if not (random or last):
            return []
        self._drawn += 1
        most = min(random + last, count)
        chosen = [count - 1] * last
        if self._again is not None and self._again < count:
            chosen.append(self._again)
        self._again = None
        chosen += Random(self._drawn).sample(range(count), most)
        return list(dict.fromkeys(chosen))[:most]

    def fail(self, sample: int) -> None:
        """Count a failure; its sample is audited again next."""
        self.failed += 1
        self._again = sample


class SampleAudit:
    """One sample of a measured batch, to be run again beside a copy of itself by plain autograd.

    It holds copies of its outputs and norms: the batch's memory may be used again before `run`.

    Args:
        view: Model.
        plan: Plan of the batch. Parameters that it measures by sample are exact, and not compared.
        batch: Inputs of the batch.
        sample: Number of the sample.
        z: Output of the batch.
        one: Backward pass of the batch.
        table: Squared norms [parameters, B] of that pass.
        batch_again: Function that returns the whole batch, which may have to be made again.
        run_again: Function that runs the batch again as it was measured, and returns its output.

    Attributes:
        row_alone: Output of the sample beside its copy.
        exact: Squared norms [parameters] of its gradients there.
    """

    row_alone: Tensor
    exact: Tensor

    def __init__(
        self,
        view: ModelView,
        plan: Plan,
        batch: Batch,
        sample: int,
        z: Tensor,
        one: Pass,
        table: Tensor,
        batch_again: Callable[[], Batch],
        run_again: Callable[[], Tensor],
    ) -> None:
        self.view, self.sample = view, sample
        self.batch_again, self.run_again = batch_again, run_again
        self.batch = batch.part(range(sample, sample + 1))
        narrow = torch.float16 in (plan.dtype, z.dtype, autocast_dtype(z.device))
        self.own_v, self.own_per_unit = one.own(
            sample, view.out_dim, 0 if narrow else LARGEST_SCALE
        )
        self.unit_v = view.row(one.v, sample)
        self.row_in_batch = view.row(z, sample).detach().clone()
        self.norms = table[:, sample] * self.own_per_unit
        by_sample = [name in plan.by_sample for name in view.parameters]
        self.by_sample = torch.tensor(by_sample, device=z.device) if any(by_sample) else None
        self.tolerance = norm_tolerance(view.parameters.values(), plan.dtype, z.device)

    def run(self, scale: Scale | None = None) -> Tensor:
        """Run the sample; return on the device whether its output and its norms [2] may differ.

        Args:
            scale: How its gradients must scale with its cotangent; None: not tested.
        """
        samples = SingleSamples(self.view, self.batch, self.view.parameters)
        cotangents = [self.own_v]
        if scale is not None:
            cotangents += [self.own_v * 2.0**scale.exponent, self.unit_v]
        beside = samples.run(0, cotangents)
        self.row_alone, self.exact = beside.row, beside.norms[0]
        if scale is not None:
            larger, of_unit = beside.norms[1:]
            parameters = list(self.view.parameters.values())
            scale.require(
                self.exact, larger, 4.0**-scale.exponent, parameters, scale.tolerance_when_scaled
            )
            scale.require(self.exact, of_unit, self.own_per_unit, parameters, scale.tolerance)
        relative = output_tolerance(self.row_in_batch, self.view.parameters.values())
        differs = outputs_need_full_check(
            self.row_alone, self.row_in_batch, relative, self.view.out_dim
        )
        return torch.stack([differs, self._wrong(self.norms, self.exact).any()])

    def problem(self, may_differ: bool, may_be_wrong: bool) -> tuple[str, Collection[str]]:
        """Return what is wrong with the sample, given the flags of `run`; "" for nothing.

        With it come the names of the parameters with wrong norms: none if its output is wrong.
        """
        if may_differ and not self.has_its_output():
            return f"sample {self.sample} alone gives another output than within its batch", ()
        errors = self.errors() if may_be_wrong else {}
        if not errors:
            return "", ()
        worst = max(errors, key=lambda name: errors[name])
        where = f"the norm of {worst} for sample {self.sample}"
        return f"{where} is off by {errors[worst]:.1e} of its total", errors.keys()

    def has_its_output(self) -> bool:
        """Return True if the sample has the same output in the batch and beside its copy.

        Rounding is measured on samples of the batch.
        """
        batch, shape = self.batch_again(), list(self.row_in_batch.shape)
        shape[self.view.out_dim] = batch.count
        own = BatchOutput(self.view, batch, self.row_in_batch.expand(shape))
        return own.matches([self.sample], self.row_alone)

    def errors(self) -> dict[str, float]:
        """Return the errors of wrong squared norms, in parts of the total, by parameter."""
        names = list(self.view.parameters)
        wrong = self._wrong(self.norms, self.exact)
        if wrong.any() and self.own_v.dtype != torch.float64:
            within, loose = self._exact_within_batch(), max(0.01, 2 * self.tolerance)
            wrong &= self._wrong(self.norms, within) | self._wrong(within, self.exact, loose)
        share = (self.norms - self.exact).abs() / self.exact.sum()
        return {names[k]: float(share[k]) for k in wrong.nonzero().flatten().tolist()}

    def _wrong(self, norms: Tensor, exact: Tensor, close: float | None = None) -> Tensor:
        """Return which squared norms [parameters] differ by more than rounding."""
        close = self.tolerance if close is None else close
        wrong = ~norms_close(norms, exact, self.exact.sum(), close)
        return wrong if self.by_sample is None else wrong & ~self.by_sample

    def _exact_within_batch(self) -> Tensor:
        """Return the exact squared norms of the sample within the batch as it is measured.

        The other samples' cotangents are zero. In few digits, an activation near a kink may be on
        its other side when the sample is alone. Outputs then agree but for rounding, gradients
        less.
        """
        z = self.run_again()
        cotangent = torch.zeros_like(z, memory_format=torch.contiguous_format)
        self.view.row(cotangent, self.sample).copy_(self.own_v)
        return exact_sq_norms(z, self.view.parameters, cotangent)

    def deviations(self) -> dict[str, float]:
        """Return errors of squared norms, in parts of the total, of parameters with a gradient."""
        off = ((self.norms - self.exact).abs() / self.exact.sum()).tolist()
        named = zip(self.view.parameters, off, self.exact.tolist(), strict=True)
        return {name: deviation for name, deviation, exact in named if exact > 0}
