"""Audits of a model: a random sample of what is measured, beside a copy of itself, as the model is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastlr.errors import InputError
from fastlr.ghost import adapt
from fastlr.ghost.agreement import low_precision, norms_agree
from fastlr.ghost.audit import Audits, Disproved
from fastlr.ghost.cotangents import Cotangent, passes
from fastlr.ghost.fallback import beside_copy
from fastlr.ghost.graph import exact_grads
from fastlr.ghost.plan import Planner
from fastlr.ghost.recurrent import Unfused


class Auditor(Planner):
    """A planner that holds samples to their exact gradients.

    Attributes:
        audits: how many were right, how many were not, and when the next is due.
    """

    def __init__(self, module: nn.Module, output: adapt.OutputSelector, in_dim: int, out_dim: int) -> None:
        super().__init__(module, output, in_dim, out_dim)
        self._writes_inputs: bool | None = None  # None: not known yet
        self.audits = Audits()

    def _forward(self, x: Any) -> Tensor:
        named = dict(self.model.named_parameters())
        given = adapt.copied(x) if self._writes_inputs is not False else x
        before = adapt.versions(given)
        z = self.folding.run(named, lambda: adapt.forward(self.model, given, self.output))
        written = adapt.versions(given) != before
        if written and self._writes_inputs is False:
            self._writes_inputs = True
            raise InputError("the model has written to its inputs, as it had not before: they are changed; pass them again")
        self._writes_inputs = written or bool(self._writes_inputs)
        return z

    def _forward_of(self, batch: adapt.Batch) -> Callable[[Sequence[int]], Tensor]:
        def forward(samples: Sequence[int]) -> Tensor:
            with Unfused():
                return adapt.forward(self.model, batch.pick(samples), self.output)

        return forward

    def audit(self, x: Any, output: Tensor, table: Tensor, cotangent: Cotangent) -> bool:
        """Whether a random sample of a batch that `run_planned` did has its own output and norms.

        Args:
            x: inputs.
            output: the output for them.
            table: squared norms [parameters, B].
            cotangent: as then.
        """
        count = output.shape[self.out_dim]
        with torch.inference_mode(False), self.audits.timed():
            ((v, scale, _),) = passes(cotangent, output, self.out_dim)
            batch = adapt.Batch(x, count, self.in_dim)
            j, same, exact = self._draw_and_run(batch, output, v)
            found = dict(zip(self.parameters, table[:, j] / scale[j], strict=True))
            right = same and not self._refuted(found, exact, x, batch, v, j)
        self.audits.passed += right
        return right

    def _exact_of_one(
        self, x: Any, z: Tensor, v: Tensor, count: int, *, fresh: bool
    ) -> tuple[int, dict[str, Tensor]]:
        """Exact squared norms of one random sample beside a copy of itself; its output must be its row of the batch.

        Raises:
            Disproved: it is another, and not ``fresh``: so what is known of the model is no longer true.
            FoldRefuted: it is another because of the folding.
            InteractionError: it is another.
        """
        batch = self._batch(x, z, count)
        j, same, exact = self._draw_and_run(batch, z.detach(), v)
        if not same:
            if not fresh:
                raise Disproved(j, f"sample {j} alone gives another output than within its batch of {count}")
            self._batch(x, z, count, compare=True)
            self._blame(batch, z, count, alike=True)
        return j, exact

    def _draw_and_run(self, batch: adapt.Batch, output: Tensor, v: Tensor) -> tuple[int, bool, dict[str, Tensor]]:
        """A random sample, whether beside a copy it has its row of the output, and its exact squared norms there."""
        j = self.audits.draw(batch.count)
        given = self._forward_of(batch), j, v.narrow(self.out_dim, j, 1), self.out_dim, self.parameters
        try:
            row, exact = beside_copy(*given)
        except adapt.FAILURES:  # it may take one sample only
            row, exact = beside_copy(*given, copies=1)
        same = self._same_outputs(output.narrow(self.out_dim, j, 1), row, self._noise_of(batch, batch.count))
        return j, same, dict(zip(self.parameters, exact, strict=True))

    def _disproved(
        self,
        norms: dict[str, Tensor],
        spot: tuple[int, dict[str, Tensor]],
        x: Any,
        z: Tensor,
        v: Tensor,
        count: int,
        *,
        fresh: bool,
    ) -> dict[str, Tensor]:
        """Parameters whose norm of the audited sample is not its exact norm: from now on done by the loop.

        Raises Disproved instead where the plan is an earlier batch's: it is proven anew first.
        """
        j, exact = spot
        found = {name: value[j] for name, value in norms.items()}
        wrong = self._refuted(found, exact, x, self._batch(x, z, count), v, j)
        if not wrong:
            self.audits.passed += 1
            return {}
        total = torch.stack(list(exact.values())).sum()
        gaps = {name: float((norms[name][j] - exact[name]).abs() / total) for name in wrong}
        if not fresh:
            name = max(gaps, key=lambda n: gaps[n])
            raise Disproved(j, f"the norm of {name} for sample {j} is off by {gaps[name]:.1e} of its total")
        for name in wrong:
            proof = self.ledger.parameters[name]
            proof.route, proof.reason = "loop", f"audit of a sample: off by {gaps[name]:.1e} of its total"
        return {name: self.parameters[name] for name in wrong}

    def _refuted(
        self, found: dict[str, Tensor], exact: dict[str, Tensor], x: Any, batch: adapt.Batch, v: Tensor, j: int
    ) -> list[str]:
        """Parameters whose squared norms for sample j are not the exact ones, by more than rounding explains."""
        total = torch.stack(list(exact.values())).sum()
        wrong = [name for name, value in found.items() if not self._agrees(value, exact[name], total)]
        if wrong:
            noise = self._norm_noise(batch, v, j, exact)
            wrong = [n for n in wrong if not self._agrees(found[n], exact[n], total, noise.get(n))]
        if wrong and v.dtype != torch.float64:
            within = self._within(x, v, j)
            loose = max(0.01, 2 * self._close(v))
            wrong = [
                n
                for n in wrong
                if not (self._agrees(found[n], within[n], total) and norms_agree(within[n], exact[n], total, loose))
            ]
        return wrong

    def _within(self, x: Any, v: Tensor, j: int) -> dict[str, Tensor]:
        """Exact squared norms of sample j within the batch as it is measured, the other cotangents zero.

        In few digits an activation near a kink may fall on its other side where the sample is alone: outputs then agree
        but for rounding, gradients less.
        """
        cotangent = torch.zeros_like(v)
        cotangent.narrow(self.out_dim, j, 1).copy_(v.narrow(self.out_dim, j, 1))
        return dict(zip(self.parameters, exact_grads(self._forward(x), self.parameters, cotangent), strict=True))

    def _norm_noise(self, batch: adapt.Batch, v: Tensor, j: int, exact: dict[str, Tensor]) -> dict[str, Tensor]:
        """How far the exact squared norms of a sample are off by rounding, from float64; empty if nobody can tell."""
        if v.dtype == torch.float64:
            return {}
        held = (*self.model.named_parameters(), *self.model.named_buffers())
        wide = {n: adapt.cast(t.detach(), torch.float64) for n, t in held}
        wide |= {n: wide[n].requires_grad_() for n in self.parameters}

        def forward(samples: Sequence[int]) -> Tensor:
            given = adapt.cast(batch.pick(samples), torch.float64)
            with torch.autocast(v.device.type, enabled=False), torch.enable_grad(), Unfused():
                return adapt.select_output(adapt.call_with(self.model, wide, given, dtype=torch.float64), self.output)

        try:
            own = v.narrow(self.out_dim, j, 1).double()
            _, truth = beside_copy(forward, j, own, self.out_dim, {n: wide[n] for n in self.parameters})
        except adapt.FAILURES:
            return {}
        return {n: (exact[n] - t).abs() for n, t in zip(self.parameters, truth, strict=True)}

    def _agrees(self, value: Tensor, exact: Tensor, total: Tensor, noise: Tensor | None = None) -> bool:
        """Whether squared norms agree within the model's own precision, or within some times the measured rounding."""
        if norms_agree(value, exact, total, self._close(value)):
            return True
        return noise is not None and bool(((value - exact).abs() <= 8 * noise).all())

    def _close(self, value: Tensor) -> float:
        dtypes = {p.dtype for p in self.parameters.values()}
        return 0.1 if low_precision(value.device, dtypes) else 1e-8 if dtypes == {torch.float64} else 1e-3
