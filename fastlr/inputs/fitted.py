"""Inputs that are generated like some of the data's."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fastlr.errors import InputError, warn
from fastlr.inputs.base import Inputs
from fastlr.inputs.user import TensorInputs
from fastlr.ops.philox import STREAMS, normals

# A sum of so many products of a normal draw (below 2**23 steps of 2**-20) and a deviation (at most
# 2**16 steps of the grid) stays below 2**53 steps: float64 adds it exactly.
MOST_SAMPLES = 1 << 14
_BITS = 15
_SMALLEST = 2.0**-100  # of the largest values: all their steps and sums are float32's
_AT_ONCE = 1 << 22  # deviations that are widened to float64 at once


class GaussianInputs(Inputs):
    """Gaussian inputs with the mean and the covariance of some of the data's.

    Input i is ``m + sum_j z_ij (x_j - m) / sqrt(n - 1)`` with z_ij ~ N(0, 1) and m the mean of the
    n inputs x_j. So it has their mean and covariance: each pixel's or time step's, those between
    channels, and the power spectrum. It lies in the span of the x_j, without being one of them.

    Units that are dead on the data may respond to shapes or noise. On these inputs most of them are
    dead, too (docs/interpreting.md, "Choose inputs that resemble the data"). The x_j need no
    labels; a few hundred suffice. Fit once, and use the same object for all measurements.

    Args:
        x: some inputs as the network sees them (normalised), ``[n, ...]`` floating point, of any
            shape. They are rounded to a grid of 2**15 steps up to the largest, so that the sums
            are exact: the same bits on every machine. A warning says where that changes how much
            they vary, as others are far larger.

    Batches are ``[b, ...]``, made on the CPU.

    Raises:
        InputError: x is no floating-point tensor of 2 to 16,384 finite samples, or all are alike
            on the grid, or the largest value is not between 2**-100 and 2**100.

    >>> GaussianInputs(torch.randn(200, 3, 8, 8)).batch(0, 4, seed=1).shape
    torch.Size([4, 3, 8, 8])
    """

    def __init__(self, x: Tensor) -> None:
        given = checked(x)
        rounded = _to_grid(given)
        mean = _to_grid(rounded.mean(0), of=rounded)
        deviations = (rounded - mean).float()
        if not deviations.any():
            raise InputError(
                "all samples of x are alike, to 2**-15 of the largest value: nothing varies that "
                "could be fitted"
            )
        _warn_of_lost_variance(given, rounded)
        self._fitted = TensorInputs((mean[None], deviations))

    @property
    def mean(self) -> Tensor:
        """The mean of the fitted inputs, ``[...]`` float64."""
        return self._fitted.tensors[0][0]

    @property
    def deviations(self) -> Tensor:
        """The fitted inputs less their mean, ``[n, ...]`` float32."""
        return self._fitted.tensors[1]

    def __repr__(self) -> str:
        return f"GaussianInputs(fitted on float32{list(self.deviations.shape)})"

    def to_dict(self) -> dict[str, Any]:
        """Return the class, the number and shape of what was fitted, and its hash, for JSON."""
        count, *shape = self.deviations.shape
        return {
            "inputs": "GaussianInputs",
            "samples": count,
            "shape": shape,
            "fitted": self._hash(),
        }

    def identity(self, used: int, seed: int) -> str:
        """Return the hash of what was fitted, and the seed."""
        if type(self) is not GaussianInputs:
            return ""
        return f"gaussian:{self._hash()} {seed}"

    def _hash(self) -> str:
        """Return the hash of mean and deviations, which float32 holds as they are."""
        return self._fitted.identity(len(self.deviations), 0)

    def _make(
        self, start: int, stop: int, seed: int, device: torch.device, dtype: torch.dtype | None
    ) -> Tensor:
        count = len(self.deviations)
        shape, stream = (count,), STREAMS["fitted"]
        draws = normals(start, stop, shape, stream=stream, seed=seed, device="cpu").double()
        scale = 1 / math.sqrt(count - 1)
        columns = max(1, _AT_ONCE // count)
        parts = [
            (draws @ deviations.double() * scale + mean).float()
            for deviations, mean in zip(
                self.deviations.flatten(1).split(columns, 1),
                self.mean.flatten().split(columns),
                strict=True,
            )
        ]
        samples = torch.cat(parts, 1).unflatten(1, self.mean.shape)
        return samples.to(device, dtype or torch.float32)


def checked(x: Tensor) -> Tensor:
    """Return x in float64 on the CPU, or raise InputError unless it can be fitted."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim < 2:
        got = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise InputError(
            "x must be a floating-point tensor [n, ...] of inputs as the network sees them, got "
            f"{got}: stack some, of a data set TensorInputs(dataset, item=0).batch(0, 300)"
        )
    if not 2 <= len(x) <= MOST_SAMPLES or not x.numel():
        raise InputError(
            f"x must have 2 to {MOST_SAMPLES:,} samples with values, got {list(x.shape)}: a few "
            "hundred serve"
        )
    x = x.detach().to("cpu", torch.float64)
    if not x.isfinite().all():
        raise InputError("x has values that are not finite: leave those samples out")
    largest = float(x.abs().max())
    if largest and not _SMALLEST < largest < 1 / _SMALLEST:
        raise InputError(f"x has values up to {largest:.2g}, beyond float32's sums: normalise them")
    return x


def _warn_of_lost_variance(given: Tensor, rounded: Tensor) -> None:
    """Warn of values of a sample whose variance the grid changes by more than a tenth."""
    before, after = given.var(0), rounded.var(0)
    lost = int(((after - before).abs() > 0.1 * before).sum())
    if lost:
        warn(
            f"{lost} of {before.numel()} values of a sample vary too little beside the largest, "
            f"{float(given.abs().max()):.2g}: rounded to 2**-15 of it, their variance is another. "
            "Normalise x, as the network sees it"
        )


def _to_grid(values: Tensor, of: Tensor | None = None) -> Tensor:
    """Round to multiples of the power of two that has 2**15 steps up to the largest of a tensor.

    Args:
        values: what is rounded.
        of: the tensor whose largest value counts; None: ``values`` itself.
    """
    largest = (values if of is None else of).abs().max().item()
    step = 2.0 ** (math.frexp(largest)[1] - _BITS)
    return torch.round(values / step) * step
