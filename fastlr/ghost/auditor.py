"""Audits of a model: a random sample of what is measured is measured again.

It runs beside a copy of itself, as the model is: the stage "Audited" of docs/trust.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from fastlr.errors import NonlinearBackwardError
from fastlr.ghost.batch import Batch
from fastlr.ghost.fallback import SingleSamples
from fastlr.ghost.graph import exact_grads, walk
from fastlr.ghost.model_io import FAILURES, ModelView
from fastlr.ghost.norms import forward_of, norm_tolerance
from fastlr.ghost.planner import (
    Chunk,
    batch_of,
    compared,
    interaction,
    let_a_proof_name_the_culprit,
)
from fastlr.ghost.recurrent import Unfused
from fastlr.ghost.verification.agreement import norms_agree
from fastlr.ghost.verification.audit import Disproved
from fastlr.ghost.verification.clone_or_model import CloneOrModel
from fastlr.ghost.verification.company import in_batch_of
from fastlr.ghost.verification.copies import Subject
from fastlr.ghost.verification.prover import require_scaling, scales_of
from fastlr.ghost.verification.record import Ledger


class SampleAudit:
    """One sample of a batch, run beside a copy of itself.

    Args:
        view: the model.
        ledger: what was proven of it.
        batch: the inputs.
        sample: its number.
        v: the cotangent of the batch.

    Attributes:
        row: its output beside the copy.
        exact: its exact squared norms there, by parameter.
    """

    def __init__(
        self, view: ModelView, ledger: Ledger, batch: Batch, sample: int, v: Tensor
    ) -> None:
        self.view, self.batch, self.sample, self.v = view, batch, sample, v
        self.tolerance = norm_tolerance(view, ledger, v.device)
        samples = SingleSamples(forward_of(view, batch), view.out_dim, view.parameters)
        own = samples.run(sample, [view.row(v, sample)])
        self.row, (exact,) = own.row, own.norms
        self.exact = dict(zip(view.parameters, exact, strict=True))
        self.total = torch.stack(exact).sum()

    def has_its_output(self, output: Tensor) -> bool:
        """Return True if the sample's row of the batch's output is the one beside its copy."""
        return in_batch_of(self.view, self.batch, output).holds([self.sample], self.row)

    def refuted(self, norms: dict[str, Tensor], run: Callable[[], Tensor]) -> list[str]:
        """Return the parameters whose squared norms for the sample are not the exact ones.

        They differ by more than rounding explains.

        Args:
            norms: of the sample, by parameter.
            run: runs the whole batch again, as it is measured.
        """
        wrong = [name for name in norms if not self._agrees(norms[name], name)]
        if wrong:
            rounding = self._rounding()
            wrong = [n for n in wrong if n not in rounding or self._beyond(norms, n, rounding[n])]
        if wrong and self.v.dtype != torch.float64:
            within = self._within(run())
            wrong = [n for n in wrong if not self._explained_within(norms[n], within[n], n)]
        return wrong

    def off(self, norms: dict[str, Tensor], names: Iterable[str]) -> dict[str, float]:
        """Return how far norms are from the exact ones, in parts of the sample's total."""
        return {n: float((norms[n] - self.exact[n]).abs() / self.total) for n in names}

    def _agrees(self, value: Tensor, name: str) -> bool:
        return norms_agree(value, self.exact[name], self.total, self.tolerance)

    def _beyond(self, norms: dict[str, Tensor], name: str, rounding: Tensor) -> bool:
        return bool(((norms[name] - self.exact[name]).abs() > 8 * rounding).any())

    def _explained_within(self, value: Tensor, within: Tensor, name: str) -> bool:
        """Return True if a norm is that of the sample within its batch, which is almost exact."""
        loose = max(0.01, 2 * self.tolerance)
        return norms_agree(value, within, self.total, self.tolerance) and norms_agree(
            within, self.exact[name], self.total, loose
        )

    def _within(self, z: Tensor) -> dict[str, Tensor]:
        """Return the exact squared norms of the sample within the batch as it is measured.

        The other samples' cotangents are zero. In few digits an activation near a kink may fall on
        its other side where the sample is alone: outputs then agree but for rounding, gradients
        less.
        """
        cotangent = torch.zeros_like(self.v)
        self.view.row(cotangent, self.sample).copy_(self.view.row(self.v, self.sample))
        norms = exact_grads(z, self.view.parameters, cotangent)
        return dict(zip(self.view.parameters, norms, strict=True))

    def _rounding(self) -> dict[str, Tensor]:
        """Return how far the exact squared norms are off by rounding.

        It is found from float64; empty if nobody can tell.
        """
        view, v, j, batch = self.view, self.v, self.sample, self.batch
        if v.dtype == torch.float64:
            return {}
        clone_or_model = CloneOrModel(view, batch.pick([j, j]))
        clone_or_model.take_known_clone()
        model = Subject.of(view, clone_or_model)
        wide = model.state_in(torch.float64)
        in_double = model.with_tensors(wide, torch.float64)
        for n, p in view.parameters.items():
            wide[n].requires_grad_()
            for hook in (p._backward_hooks or {}).values():
                wide[n].register_hook(hook)  # what they do to gradients is no rounding

        def forward(samples: Sequence[int]) -> Tensor:
            with torch.autocast(v.device.type, enabled=False), Unfused():
                return in_double.output(batch.pick(samples))

        samples = SingleSamples(forward, view.out_dim, {n: wide[n] for n in view.parameters})
        own = [view.row(v, j).double()]
        try:
            beside = clone_or_model.carry_out(lambda: samples.run(j, own, [2]))
        except FAILURES:
            return {}
        # one without a gradient may be held outside the module, where the copy does not replace it
        exact, (truth,) = self.exact, beside.norms
        return {n: (exact[n] - t).abs() for n, t in zip(view.parameters, truth, strict=True) if t}


def begin_audit(chunk: Chunk, sample: int, v: Tensor, *, plan_is_new: bool) -> SampleAudit:
    """Run a sample beside a copy of itself, and require that it gives its row of the output.

    Raises:
        Disproved: it gives another by an earlier batch's plan: so what is known of the model is no
            longer true.
        FoldRefuted: it gives another because of the folding.
        InteractionError: it gives another.
        NonlinearBackwardError: a hook of a parameter clips gradients, or adds to them.
    """
    batch = batch_of(chunk)
    if chunk.view.has_hooked_parameters:
        _require_hooks_to_scale(chunk, batch, sample, v)
    audit = SampleAudit(chunk.view, chunk.ledger, batch, sample, v)
    if audit.has_its_output(chunk.z.detach()):
        return audit
    if not plan_is_new:
        raise Disproved(
            sample,
            f"sample {sample} alone gives another output than within its batch of {chunk.count}",
        )
    compared(chunk)
    let_a_proof_name_the_culprit(chunk, batch)
    raise interaction(chunk)


def _require_hooks_to_scale(chunk: Chunk, batch: Batch, sample: int, v: Tensor) -> None:
    """Require that a sample's gradients scale as its cotangent does, hooks of parameters included.

    The proof requires it of a copy of the model, which has no such hooks.
    """
    view = chunk.view
    exponents, close = scales_of(chunk.graph.float_dtypes())
    own = view.row(v, sample)
    cotangents = [own, *(own * 2.0**exponent for exponent in exponents)]
    samples = SingleSamples(forward_of(view, batch), view.out_dim, view.parameters)
    norms, *scaled = map(torch.stack, samples.run(sample, cotangents).norms)
    at_scales = dict(zip(exponents, scaled, strict=True))
    require_scaling(norms, at_scales, close)


def changed_by_hooks(parameters: Mapping[str, Tensor]) -> list[str]:
    """Return the names of parameters whose hooks give another gradient than they are given.

    No rule takes these hooks, and an audited sample may be one that they leave as it is (one that
    keeps positive numbers alone). So they are given random numbers.
    """
    return [name for name, p in parameters.items() if p._backward_hooks and _hooks_change(p)]


def _hooks_change(p: Tensor) -> bool:
    given = _random_gradient(p, 0)
    try:
        return not torch.equal(_hooked(p, given), given)
    except FAILURES:  # it takes no such gradient
        return True


def _random_gradient(p: Tensor, seed: int) -> Tensor:
    return torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)).to(p)


def _hooked(p: Tensor, gradient: Tensor) -> Tensor:
    """Return what the hooks of a parameter make of a gradient, which stays as it is."""
    gradient = gradient.clone()
    with torch.no_grad():
        for hook in (p._backward_hooks or {}).values():
            returned = hook(gradient)
            gradient = gradient if returned is None else returned
    return gradient


def require_hooks_to_add(view: ModelView) -> None:
    """Require of hooks of parameters that they give for a sum of gradients the sum of theirs.

    Where the squared norm of a batch's gradient stands for those of its samples, scaling is not
    enough: a hook that keeps positive numbers alone scales.

    Raises:
        NonlinearBackwardError: a hook does not.
    """
    for name, p in view.parameters.items():
        if p._backward_hooks and not _hooks_add(p):
            raise NonlinearBackwardError(
                f"a hook of parameter {name} does not give for the sum of two gradients the sum of "
                "what it gives for each, so that a batch's gradient does not stand for those of "
                "its samples; remove it for the measurement"
            )


def _hooks_add(p: Tensor) -> bool:
    one, other = _random_gradient(p, 0), _random_gradient(p, 1)
    try:
        apart, together = _hooked(p, one) + _hooked(p, other), _hooked(p, one + other)
    except FAILURES:  # it takes no such gradient
        return True
    rounding = 100 * torch.finfo(p.dtype).eps
    return torch.allclose(apart, together, rtol=rounding, atol=rounding * float(apart.abs().max()))


def require_hooks_to_scale(view: ModelView, z: Tensor, v: Tensor) -> None:
    """Require that the gradient of <v, z> scales as v does, if parameters of the model have hooks.

    So plain autograd is held to it where no sample is audited: that of a single sample, and of a
    whole batch. The graph of z is kept.

    Raises:
        NonlinearBackwardError: a hook of a parameter clips gradients, or adds to them.
    """
    if not view.has_hooked_parameters:
        return
    exponents, close = scales_of(walk(z, view.parameters).float_dtypes())
    to_unit_size = -max(math.frexp(float(v.abs().max()))[1], -1000)

    def norms(exponent: int) -> Tensor:
        scaled = (v * 2.0**to_unit_size).to(z.dtype) * 2.0**exponent
        return torch.stack(exact_grads(z, view.parameters, scaled, retain=True))

    require_scaling(norms(0), {exponent: norms(exponent) for exponent in exponents}, close)


def audited(
    audit: SampleAudit,
    norms: dict[str, Tensor],
    run: Callable[[], Tensor],
    *,
    plan_is_new: bool,
) -> dict[str, str]:
    """Hold the norms of a batch to the exact ones of an audited sample.

    Args:
        audit: of the sample.
        norms: of all samples, by parameter.
        run: runs the batch again, as it is measured.
        plan_is_new: whether the plan is this batch's own.

    Returns:
        The parameters whose norms are not the exact ones, and what the audit found of each.

    Raises:
        Disproved: there are such, and the plan is an earlier batch's: it is to be proven anew.
    """
    of_sample = {name: value[audit.sample] for name, value in norms.items()}
    wrong = audit.refuted(of_sample, run)
    off = audit.off(of_sample, wrong)
    if wrong and not plan_is_new:
        worst = max(off, key=lambda name: off[name])
        raise Disproved(
            audit.sample,
            f"the norm of {worst} for sample {audit.sample} is off by {off[worst]:.1e} of its "
            "total",
        )
    return {name: f"audit of a sample: off by {off[name]:.1e} of its total" for name in wrong}
