"""Audits: a sample of a measured batch runs again, alone, by plain autograd.

In: a sample with its output and norms in the batch (`SampleAudit`). Out: whether they are those
that it has alone ("In every measurement" in docs/trust.md). Hooks of parameters are tested here,
too, as no rule takes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fastlr.errors import InteractionError, NonlinearBackwardError
from fastlr.ghost.batch import Batch
from fastlr.ghost.cotangents import Pass, generic_cotangent
from fastlr.ghost.fallback import SingleSamples
from fastlr.ghost.graph import autocast_dtype, exact_grads, walk
from fastlr.ghost.model_io import FAILURES, ModelView
from fastlr.ghost.norms import forward_of, norm_tolerance
from fastlr.ghost.verification.agreement import norms_close, outputs_differ, unexplained
from fastlr.ghost.verification.company import InBatch
from fastlr.ghost.verification.record import Ledger
from fastlr.ops.deferred_checks import out_of_memory

LARGEST_SCALE = 40  # power of two that cotangents are beyond unit size; in float16 none
SCALE, SMALL_SCALE = 12, -3  # exponents of two: so much larger cotangents; in dtypes of small range
LARGEST_OF_NARROW_DTYPES = 2.0**20


class Scale(NamedTuple):
    """How gradients are tested for whether they scale as the cotangent does.

    Attributes:
        exponent: Power of two by which cotangents are scaled.
        close: Difference of squared norms that is rounding, in parts of themselves.
        far: The same for cotangents scaled by that power.
        tiny: Smallest number of full precision.
    """

    exponent: int
    close: float
    far: float
    tiny: float

    @staticmethod
    def of(dtypes: Collection[torch.dtype]) -> Scale:
        """Return the scale for a graph with these dtypes."""
        tiny = max((torch.finfo(dtype).tiny for dtype in dtypes), default=0.0)
        if any(torch.finfo(dtype).max < LARGEST_OF_NARROW_DTYPES for dtype in dtypes):
            return Scale(SMALL_SCALE, 0.05, 0.05, tiny)
        digits = min((dtype.itemsize for dtype in dtypes), default=8)
        close = {8: 1e-6, 4: 1e-3}.get(digits, 0.05)
        return Scale(SCALE, close, 1e-6 if digits == 8 else 0.05, tiny)

    def require(
        self,
        norms: Tensor,
        scaled: Tensor,
        factor: Tensor | float,
        parameters: Iterable[Tensor],
        close: float,
    ) -> None:
        """Require that squared norms [parameters] scale.

        Args:
            norms: Squared norms for a cotangent.
            scaled: Squared norms for another, a multiple of it.
            factor: What the latter are to be multiplied by.
            parameters: The parameters.
            close: Difference that is rounding.
        """
        elements = norms.new_tensor([p.numel() for p in parameters])
        faint = 1e-6 * norms.sum() if self.tiny < 1e-30 else norms.sum()
        allowed = close * (norms + faint) + elements * self.tiny**2 * factor
        allowed = torch.maximum(allowed, elements * self.tiny**2)
        if not bool(((scaled * factor - norms).abs() <= allowed).all()):
            raise NonlinearBackwardError(
                "gradients do not scale as the output's do: a multiple of the one does not give "
                "the same multiple of the others. Something changes them on the way, such as a "
                "hook that clips them or adds to them; remove it for the measurement"
            )


class SampleAudit:
    """One sample of a measured batch, to be run again beside a copy of itself by plain autograd.

    What is compared is copied: the memory of the batch may be used again before `run`.

    Args:
        view: Model.
        ledger: Routes of the parameters.
        batch: Inputs of the measured batch.
        sample: Number of the sample.
        z: Output of the batch, without its graph.
        one: Backward pass of the batch.
        table: Squared norms [parameters, B] of that pass. Those of parameters that go by the loop
            are exact, and not compared.
        whole: Function that returns the batch again.
        forward: Function that runs the batch again as it was measured, and returns its output.

    Attributes:
        row: Output of the sample beside its copy.
        exact: Squared norms [parameters] of its gradients there.
    """

    row: Tensor
    exact: Tensor

    def __init__(
        self,
        view: ModelView,
        ledger: Ledger,
        batch: Batch,
        sample: int,
        z: Tensor,
        one: Pass,
        table: Tensor,
        whole: Callable[[], Batch],
        forward: Callable[[], Tensor],
    ) -> None:
        self.view, self.sample, self.whole, self.forward = view, sample, whole, forward
        self.batch = batch.part(range(sample, sample + 1))
        narrow = torch.float16 in (ledger.dtype, z.dtype, autocast_dtype(z.device))
        self.own_v, factor = one.own(sample, view.out_dim, 0 if narrow else LARGEST_SCALE)
        self.of_unit = factor
        self.own_row = view.row(z, sample).clone()
        self.norms = table[:, sample] * factor
        by_loop = [name in ledger.loop for name in view.parameters]
        self.by_loop = torch.tensor(by_loop, device=z.device) if any(by_loop) else None
        self.tolerance = norm_tolerance(view, ledger, z.device)

    def run(self, scale: Scale | None = None, unit_v: Tensor | None = None) -> Tensor:
        """Run the sample; return on the device whether its output and its norms [2] may differ.

        Args:
            scale: How its gradients are required to follow its cotangent, if at all.
            unit_v: Its cotangent of unit size, for `scale`.
        """
        samples = SingleSamples(
            forward_of(self.view, self.batch), self.view.out_dim, self.view.parameters
        )
        cotangents = [self.own_v]
        if scale is not None and unit_v is not None:
            cotangents += [self.own_v * 2.0**scale.exponent, unit_v]
        beside = samples.run(0, cotangents)
        self.row, self.exact = beside.row, torch.stack(beside.norms[0])
        if scale is not None:
            larger, of_unit = map(torch.stack, beside.norms[1:])
            parameters = list(self.view.parameters.values())
            scale.require(self.exact, larger, 4.0**-scale.exponent, parameters, scale.far)
            scale.require(self.exact, of_unit, self.of_unit, parameters, scale.close)
        relative = unexplained(self.own_row, self.view.parameters.values())
        differs = outputs_differ(self.row, self.own_row, relative, self.view.out_dim)
        return torch.stack([differs, self._wrong(self.norms, self.exact).any()])

    def holds(self, may_differ: bool, may_be_wrong: bool) -> bool:
        """Return True if output and norms are right, given the flags of `run`."""
        return (not may_differ or self.has_its_output()) and not (may_be_wrong and self.refuted())

    def has_its_output(self) -> bool:
        """Return True if the sample's output in the batch is the one beside its copy.

        Rounding is measured on samples of the batch.
        """
        batch, shape = self.whole(), list(self.own_row.shape)
        shape[self.view.out_dim] = batch.count
        own = InBatch(self.view, batch, self.own_row.expand(shape))
        return own.holds([self.sample], self.row)

    def refuted(self) -> dict[str, float]:
        """Return the parameters whose squared norms are not the exact ones, beyond rounding.

        With each goes its error, in parts of the sample's total.
        """
        names = list(self.view.parameters)
        wrong = self._wrong(self.norms, self.exact)
        if wrong.any() and self.own_v.dtype != torch.float64:
            within, loose = self._within(), max(0.01, 2 * self.tolerance)
            wrong &= self._wrong(self.norms, within) | self._wrong(within, self.exact, loose)
        share = (self.norms - self.exact).abs() / self.exact.sum()
        return {names[k]: float(share[k]) for k in wrong.nonzero().flatten().tolist()}

    def _wrong(self, norms: Tensor, exact: Tensor, close: float | None = None) -> Tensor:
        """Return which squared norms [parameters] differ by more than rounding."""
        close = self.tolerance if close is None else close
        wrong = ~norms_close(norms, exact, self.exact.sum(), close)
        return wrong if self.by_loop is None else wrong & ~self.by_loop

    def _within(self) -> Tensor:
        """Return the exact squared norms of the sample within the batch as it is measured.

        The other samples' cotangents are zero. In few digits an activation near a kink may fall on
        its other side where the sample is alone: outputs then agree but for rounding, gradients
        less.
        """
        z = self.forward()
        cotangent = torch.zeros_like(z, memory_format=torch.contiguous_format)
        self.view.row(cotangent, self.sample).copy_(self.own_v)
        return torch.stack(exact_grads(z, self.view.parameters, cotangent))

    def deviations(self) -> dict[str, float]:
        """Return errors of squared norms, in parts of the total, of parameters with a gradient."""
        off = ((self.norms - self.exact).abs() / self.exact.sum()).tolist()
        named = zip(self.view.parameters, off, self.exact.tolist(), strict=True)
        return {name: deviation for name, deviation, exact in named if exact > 0}


def require_same_among_copies(view: ModelView, ledger: Ledger, batch: Batch, z: Tensor) -> None:
    """Require that a sample has the same norms beside one copy of itself and beside two.

    Args:
        view: Model.
        ledger: Routes of the parameters.
        batch: Inputs of a batch.
        z: Output for them.

    Raises:
        InteractionError: A hook or a custom backward formula goes by the number of samples.
    """
    samples = SingleSamples(forward_of(view, batch), view.out_dim, view.parameters)
    v = generic_cotangent(view.row(z.detach(), 0))
    try:
        beside = [samples.run_copies(0, [v], copies) for copies in (2, 3)]
    except FAILURES as error:  # the model may take no such number
        if out_of_memory(error):
            raise
        return
    pair, three = [torch.stack(one.norms[0]) for one in beside]
    if not norms_close(three, pair, pair.sum(), norm_tolerance(view, ledger, z.device)).all():
        raise InteractionError(
            "the gradient of a sample changes with the number of samples beside it: a hook or a "
            "custom backward formula divides by that number, or mixes samples. Make it work on "
            "each sample alone"
        )


def changed_by_hooks(parameters: Mapping[str, Tensor]) -> list[str]:
    """Return the names of parameters whose hooks give another gradient than they are given.

    No rule takes these hooks, and an audited sample may be one that they leave as it is (one that
    keeps positive numbers alone). So they are given random numbers.
    """
    return [name for name, p in parameters.items() if p._backward_hooks and _hooks_change(p)]


def _hooks_change(p: Tensor) -> bool:
    given = random_gradient(p, 0)
    try:
        return not torch.equal(hooked(p, given), given)
    except FAILURES:  # it takes no such gradient
        return True


def random_gradient(p: Tensor, seed: int) -> Tensor:
    """Return random numbers as the gradient of a parameter."""
    return torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)).to(p)


def hooked(p: Tensor, gradient: Tensor) -> Tensor:
    """Return what the hooks of a parameter make of a gradient, which stays as it is."""
    gradient = gradient.clone()
    with torch.no_grad():
        for hook in (p._backward_hooks or {}).values():
            returned = hook(gradient)
            gradient = gradient if returned is None else returned
    return gradient


def require_hooks_to_scale(view: ModelView, z: Tensor, v: Tensor, *, always: bool = False) -> None:
    """Require that the gradient of <v, z> scales as v does, if parameters of the model have hooks.

    So plain autograd is tested where no sample is audited: that of a single sample, and of a whole
    batch. The graph of z is kept.

    Args:
        view: Model.
        z: Output.
        v: Cotangent.
        always: Whether to test it whatever hooks there are.

    Raises:
        NonlinearBackwardError: A hook clips gradients, or adds to them.
    """
    if not (always or view.has_hooked_parameters):
        return
    scale = Scale.of(walk(z, view.parameters).float_dtypes())
    to_unit_size = -max(math.frexp(float(v.abs().max()))[1], -1000)

    def norms(exponent: int) -> Tensor:
        scaled = (v * 2.0**to_unit_size).to(z.dtype) * 2.0**exponent
        return torch.stack(exact_grads(z, view.parameters, scaled, retain=True))

    larger = norms(scale.exponent)
    scale.require(norms(0), larger, 4.0**-scale.exponent, view.parameters.values(), scale.far)
