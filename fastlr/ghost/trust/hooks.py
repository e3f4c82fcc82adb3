"""Hooks that change gradients: no rule takes them, and no graph shows them.

In: a model, its output and a cotangent. Out: errors for hooks after which gradients do not scale
with the cotangent, and the names of parameters whose hooks change their gradients.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fastlr.errors import InteractionError, NonlinearBackwardError
from fastlr.ghost.graph.walk import walk
from fastlr.ghost.model.batch import Batch
from fastlr.ghost.model.view import FAILURES, ModelView
from fastlr.ghost.norms.cotangents import generic_cotangent
from fastlr.ghost.trust.agreement import norms_close
from fastlr.ghost.trust.truth import SingleSamples, exact_sq_norms
from fastlr.ops.deferred_checks import out_of_memory

SCALE, SMALL_SCALE = 12, -3  # exponents of two: so much larger cotangents; in dtypes of small range
LARGEST_OF_NARROW_DTYPES = 2.0**20


class Scale(NamedTuple):
    """How gradients are tested for whether they scale as the cotangent does.

    Attributes:
        exponent: Power of two by which cotangents are scaled.
        tolerance: Relative difference of squared norms that is rounding.
        tolerance_when_scaled: The same for cotangents scaled by that power.
        tiny: Smallest number of full precision.
    """

    exponent: int
    tolerance: float
    tolerance_when_scaled: float
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
            scaled: Squared norms for a multiple of it.
            factor: Factor that undoes the scaling of these.
            parameters: Parameters.
            close: Relative difference that is rounding.

        Raises:
            NonlinearBackwardError: They do not scale.
        """
        elements = norms.new_tensor([p.numel() for p in parameters])
        has_wide_range = self.tiny < 1e-30
        faint = (1e-6 if has_wide_range else 1.0) * norms.sum()
        allowed = close * (norms + faint) + elements * self.tiny**2 * factor
        allowed = torch.maximum(allowed, elements * self.tiny**2)
        if not bool(((scaled * factor - norms).abs() <= allowed).all()):
            raise NonlinearBackwardError(
                "gradients do not scale as the output's do: a multiple of the one does not give "
                "the same multiple of the others. Something changes them on the way, such as a "
                "hook that clips them or adds to them; remove it for the measurement"
            )


def require_hooks_to_scale(view: ModelView, z: Tensor, v: Tensor) -> None:
    """Require that the gradient of <v, z> scales with v. The graph of z is kept.

    Raises:
        NonlinearBackwardError: A hook clips gradients, or adds to them.
    """
    scale = Scale.of(walk(z, view.parameters).float_dtypes())
    to_unit_size = -max(math.frexp(float(v.abs().max()))[1], -1000)

    def norms(exponent: int) -> Tensor:
        scaled = (v * 2.0**to_unit_size).to(z.dtype) * 2.0**exponent
        return exact_sq_norms(z, view.parameters, scaled, retain=True)

    scale.require(
        norms(0),
        norms(scale.exponent),
        4.0**-scale.exponent,
        view.parameters.values(),
        scale.tolerance_when_scaled,
    )


def require_same_among_copies(view: ModelView, batch: Batch, z: Tensor, tolerance: float) -> None:
    """Require that a sample has the same norms beside one copy of itself and beside two.

    Args:
        view: Model.
        batch: Inputs.
        z: Output for them.
        tolerance: Relative difference of squared norms that is rounding.

    Raises:
        InteractionError: A hook or a custom backward formula depends on the number of samples.
    """
    samples = SingleSamples(view, batch, view.parameters)
    v = generic_cotangent(view.row(z.detach(), 0))
    try:
        beside = [samples.run_copies(0, [v], copies) for copies in (2, 3)]
    except FAILURES as error:  # the model may take no such number
        if out_of_memory(error):
            raise
        return
    pair, three = [one.norms[0] for one in beside]
    if not norms_close(three, pair, pair.sum(), tolerance).all():
        raise InteractionError(
            "the gradient of a sample changes with the number of samples beside it: a hook or a "
            "custom backward formula divides by that number, or mixes samples. Make it work on "
            "each sample alone"
        )


def changed_by_hooks(parameters: Mapping[str, Tensor]) -> list[str]:
    """Return the names of parameters whose hooks change a random gradient.

    An audited sample may be one whose gradient a hook leaves as it is.
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
    return torch.randn(p.shape, generator=torch.Generator().manual_seed(seed), device="cpu").to(p)


def hooked(p: Tensor, gradient: Tensor) -> Tensor:
    """Return a gradient after the hooks of a parameter; the argument is unchanged."""
    gradient = gradient.clone()
    with torch.no_grad():
        for hook in (p._backward_hooks or {}).values():
            returned = hook(gradient)
            gradient = gradient if returned is None else returned
    return gradient
