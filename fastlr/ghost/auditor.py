"""Audits of a model: a random sample of what is measured is measured again.

It runs beside a copy of itself, as the model is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastlr.distributed import on_demand
from fastlr.errors import InputError
from fastlr.ghost import model_io as adapt
from fastlr.ghost.cotangents import Cotangent, passes
from fastlr.ghost.fallback import beside_copy
from fastlr.ghost.graph import exact_grads
from fastlr.ghost.known import Plan
from fastlr.ghost.model_io import ModelView
from fastlr.ghost.planner import Chunk, Planner
from fastlr.ghost.recurrent import Unfused
from fastlr.ghost.verification.agreement import low_precision, norms_agree
from fastlr.ghost.verification.audit import Audits, Disproved
from fastlr.ghost.verification.stand_in import StandIn

Spot = tuple[int, dict[str, Tensor]]  # an audited sample and its exact squared norms


class Auditor(Planner):
    """A planner that holds samples to their exact gradients.

    Attributes:
        audits: how many were right, how many were not, and when the next is due.
    """

    def __init__(self, view: ModelView) -> None:
        super().__init__(view)
        self._writes_inputs: bool | None = None  # None: not known yet
        self.audits = Audits()

    def _forward(self, x: Any) -> Tensor:
        given = adapt.copied(x) if self._writes_inputs is not False else x
        before = adapt.times_written(given)
        z = self.folding.run(self.view.named, lambda: self.view.forward(given), given)
        written = adapt.times_written(given) != before
        if written and self._writes_inputs is False:
            self._writes_inputs = True
            raise InputError(
                "the model has written to its inputs, as it had not before: they are changed; "
                "pass them again"
            )
        self._writes_inputs = written or bool(self._writes_inputs)
        return z

    def _forward_of(self, batch: adapt.Batch) -> Callable[[Sequence[int]], Tensor]:
        def forward(samples: Sequence[int]) -> Tensor:
            with Unfused():
                return self.view.forward(batch.pick(samples))

        return forward

    def audit(
        self, plan: Plan, x: Any, output: Tensor, table: Tensor, cotangent: Cotangent
    ) -> bool:
        """Return True if a random sample of a batch has its own output and norms.

        The batch is one that `run_planned` did.

        Args:
            plan: of the batch.
            x: inputs.
            output: the output for them.
            table: squared norms [parameters, B].
            cotangent: as then.
        """
        self._current = plan.flags
        with torch.inference_mode(False), self.audits.timed():
            ((v, scale, _),) = passes(cotangent, output, self.view.out_dim)
            batch = self.view.batch(x, self.view.sample_count(output))
            j, same, exact = self._draw_and_run(batch, output, v)
            norms = dict(zip(self.parameters, table[:, j] / scale[j], strict=True))
            right = same and not self._refuted(norms, exact, x, batch, v, j)
        self.audits.passed += right
        return right

    def _exact_of_one(self, chunk: Chunk, v: Tensor, *, fresh: bool) -> Spot:
        """Return the exact squared norms of one random sample beside a copy of itself.

        Its output must be its row of the batch.

        Raises:
            Disproved: it is another, and not ``fresh``: so what is known of the model is no longer
                true.
            FoldRefuted: it is another because of the folding.
            InteractionError: it is another.
        """
        batch = self._batch(chunk)
        j, same, exact = self._draw_and_run(batch, chunk.z.detach(), v)
        if not same:
            if not fresh:
                raise Disproved(
                    j,
                    f"sample {j} alone gives another output than within its batch of {chunk.count}",
                )
            self._batch(chunk, compare=True)
            self._blame(batch, alike=True)
        return j, exact

    def _draw_and_run(
        self, batch: adapt.Batch, output: Tensor, v: Tensor
    ) -> tuple[int, bool, dict[str, Tensor]]:
        """Draw a random sample and run it beside a copy of itself.

        Returns the sample, whether it has its row of the output there, and its exact squared norms
        there.
        """
        j = self.audits.draw(batch.count)
        sample = self._forward_of(batch), j, self.view.row(v, j), self.view.out_dim, self.parameters
        try:
            row, exact = beside_copy(*sample)
        except adapt.FAILURES:  # it may take one sample only
            row, exact = beside_copy(*sample, copies=1)
        same = self._same_outputs(self.view.row(output, j), row, self._noise_of(batch))
        return j, same, dict(zip(self.parameters, exact, strict=True))

    def _disproved(
        self, norms: dict[str, Tensor], spot: Spot, chunk: Chunk, v: Tensor, *, fresh: bool
    ) -> dict[str, Tensor]:
        """Return the parameters whose norm of the audited sample is not its exact norm.

        From now on they are done by the loop.

        Raises Disproved instead where the plan is an earlier batch's: it is proven anew first.
        """
        j, exact = spot
        norms_of_sample = {name: value[j] for name, value in norms.items()}
        wrong = self._refuted(norms_of_sample, exact, chunk.x, self._batch(chunk), v, j)
        if not wrong:
            self.audits.passed += 1
            return {}
        total = torch.stack(list(exact.values())).sum()
        gaps = {name: float((norms[name][j] - exact[name]).abs() / total) for name in wrong}
        if not fresh:
            name = max(gaps, key=lambda n: gaps[n])
            raise Disproved(
                j, f"the norm of {name} for sample {j} is off by {gaps[name]:.1e} of its total"
            )
        for name in wrong:
            proof = self.ledger.parameters[name]
            proof.route, proof.reason = (
                "loop",
                f"audit of a sample: off by {gaps[name]:.1e} of its total",
            )
        return {name: self.parameters[name] for name in wrong}

    def _refuted(
        self,
        norms: dict[str, Tensor],
        exact: dict[str, Tensor],
        x: Any,
        batch: adapt.Batch,
        v: Tensor,
        j: int,
    ) -> list[str]:
        """Return the parameters whose squared norms for sample j are not the exact ones.

        They differ by more than rounding explains.
        """
        total = torch.stack(list(exact.values())).sum()
        wrong = [
            name for name, value in norms.items() if not self._agrees(value, exact[name], total)
        ]
        if wrong:
            noise = self._norm_noise(batch, v, j, exact)
            wrong = [n for n in wrong if not self._agrees(norms[n], exact[n], total, noise.get(n))]
        if wrong and v.dtype != torch.float64:
            within = self._within(x, v, j)
            loose = max(0.01, 2 * self._close(v))
            wrong = [
                n
                for n in wrong
                if not (
                    self._agrees(norms[n], within[n], total)
                    and norms_agree(within[n], exact[n], total, loose)
                )
            ]
        return wrong

    def _within(self, x: Any, v: Tensor, j: int) -> dict[str, Tensor]:
        """Return the exact squared norms of sample j within the batch as it is measured.

        The other samples' cotangents are zero.

        In few digits an activation near a kink may fall on its other side where the sample is
        alone: outputs then agree but for rounding, gradients less.
        """
        cotangent = torch.zeros_like(v)
        self.view.row(cotangent, j).copy_(self.view.row(v, j))
        return dict(
            zip(
                self.parameters,
                exact_grads(self._forward(x), self.parameters, cotangent),
                strict=True,
            )
        )

    def _norm_noise(
        self, batch: adapt.Batch, v: Tensor, j: int, exact: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return how far the exact squared norms of a sample are off by rounding.

        It is found from float64; empty if nobody can tell.
        """
        if v.dtype == torch.float64:
            return {}
        held = (*self.model.named_parameters(), *self.model.named_buffers())
        wide = {n: on_demand.cast(t, torch.float64) for n, t in held}
        wide |= {n: wide[n].requires_grad_() for n in self.parameters}
        stand_in = StandIn(self.model, batch.pick([j, j]), self.view.output)
        stand_in.take_known_clone()
        for n, p in self.parameters.items():  # what they do to gradients is no rounding
            for hook in (p._backward_hooks or {}).values():
                wide[n].register_hook(hook)

        def forward(samples: Sequence[int]) -> Tensor:
            given = adapt.cast(batch.pick(samples), torch.float64)
            with torch.autocast(v.device.type, enabled=False), torch.enable_grad(), Unfused():
                result = stand_in.call_with(wide, given, dtype=torch.float64)
                return adapt.select_output(result, self.view.output)

        row, chosen = self.view.row(v, j).double(), {n: wide[n] for n in self.parameters}
        try:
            _, truth = stand_in.trusted(
                lambda: beside_copy(forward, j, row, self.view.out_dim, chosen)
            )
        except adapt.FAILURES:
            return {}
        # one without a gradient may be held outside the module, where the copy does not replace it
        return {n: (exact[n] - t).abs() for n, t in zip(self.parameters, truth, strict=True) if t}

    def _agrees(
        self, value: Tensor, exact: Tensor, total: Tensor, noise: Tensor | None = None
    ) -> bool:
        """Return True if squared norms agree within the model's own precision.

        Or within some times the measured rounding.
        """
        if norms_agree(value, exact, total, self._close(value)):
            return True
        return noise is not None and bool(((value - exact).abs() <= 8 * noise).all())

    def _close(self, value: Tensor) -> float:
        dtypes = {p.dtype for p in self.parameters.values()}
        if dtypes == {torch.float64} and self.ledger.dtype is not None:
            dtypes = {self.ledger.dtype}  # the model may cast to fewer digits
        return (
            0.1
            if low_precision(value.device, dtypes)
            else 1e-8
            if dtypes == {torch.float64}
            else 1e-3
        )
