"""Do two computations of the same outputs or norms differ by more than rounding?

Outputs are compared element by element. A difference is judged by the element's own size and by
that of its sample and its column, not by the largest output: one masked logit of -1e9 or one column
of 1e10 must not hide what the others do. Where that is not enough (a column that is nothing but
rounding), the caller measures the rounding (fastlr.ghost.trust.company).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from fastlr.ops.torch_private import narrow_products

_PART = 1 << 22  # elements compared at once
_SEEN = 4096  # columns whose median is the scale of a sample's outputs
_DOUBLE = 1e-9  # relative difference of outputs in float64 that is taken for rounding unseen
_LEAST_SCALE = 0.01  # of the size of a sample's elements, where one of them is nearly zero
# Squared norms that are nothing but rounding, in parts of the tolerance and the sample's total.
NOISE, NOISE_IN_FEW_DIGITS = 1e-9, 0.1
# Relative difference of audited squared norms and outputs that is rounding: it adds up from layer
# to layer.
AUDITED_IN_FEW_DIGITS = 0.1
# Relative difference that is rounding in float32. A larger tolerance means fewer digits.
LARGEST_TOLERANCE_OF_FLOAT32 = 0.01


def computes_in_few_digits(device: torch.device, dtypes: Collection[torch.dtype]) -> bool:
    """Return True if products have fewer digits than float32.

    So they do under autocast, with narrow parameters, and under TF32 (cuDNN's default).
    """
    if torch.is_autocast_enabled(device.type) or any(d.itemsize < 4 for d in dtypes):
        return True
    return torch.float32 in dtypes and narrow_products(device.type)


def rounding(dtype: torch.dtype, *, low: bool = False) -> float:
    """Return the relative difference of outputs in a dtype that is rounding; ``low``: TF32 too."""
    if low or dtype.itemsize < 4:
        return 0.02
    return _DOUBLE if dtype == torch.float64 else 1e-3


def agree(
    want: Tensor,
    got: Tensor,
    relative: float,
    out_dim: int = 0,
    measured_rounding: Tensor | float = 0.0,
) -> bool:
    """Return True if outputs of the same samples are the same but for rounding.

    Args:
        want: Outputs, samples along ``out_dim``.
        got: The same samples' outputs, computed in another way or in other company.
        relative: Difference, in parts of an element's size, that needs no explanation.
        out_dim: Sample axis.
        measured_rounding: Measured rounding of one sample's elements, allowed on top.
    """
    if want.shape != got.shape:
        return False
    a, b = _by_sample(want, got, out_dim)
    # The scales that are computed below only allow more, and take longer.
    if torch.equal(a, b) or a.numel() <= _PART and _are_close(a, b, relative):
        return True
    scale_of_samples = _scales_of_samples(a, b)
    step = max(1, _PART // len(a))
    allowed_on_top = torch.as_tensor(measured_rounding, device=a.device)
    allowed_on_top = allowed_on_top.flatten().expand(a.shape[1])
    parts = zip(a.split(step, 1), b.split(step, 1), allowed_on_top.split(step), strict=True)
    for of_want, of_got, more in parts:
        scale = scale_of_samples
        if relative <= LARGEST_TOLERANCE_OF_FLOAT32:
            # In few digits, large elements spoil small ones. Otherwise columns of 1e10 would hide
            # what a column of ones does.
            scale_of_columns = _scales_where_they_differ(of_want, of_got, 0)
            scale = torch.minimum(scale_of_samples, scale_of_columns)
        allowed = relative * torch.maximum(_finite_size(of_want), scale) + more
        if (gap(of_want, of_got) > allowed).any():
            return False
    return True


def _are_close(a: Tensor, b: Tensor, relative: float) -> bool:
    """Return True if no element of b differs from that of a by more than a part of it."""
    return torch.allclose(_wide(b), _wide(a), rtol=relative, atol=0.0, equal_nan=True)


def gap(a: Tensor, b: Tensor) -> Tensor:
    """Return distances of elements; 0 where both are NaN or the same infinity."""
    same = (a == b) | (a.isnan() & b.isnan())
    return (_wide(a) - _wide(b)).abs().masked_fill(same, 0.0).nan_to_num(torch.inf)


def _wide(t: Tensor) -> Tensor:
    """The tensor in float32 at least."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


def _by_sample(want: Tensor, got: Tensor, out_dim: int) -> tuple[Tensor, Tensor]:
    """Both as [samples, elements], without their graphs."""
    a, b = (t.detach().movedim(out_dim, 0).reshape(t.shape[out_dim], -1) for t in (want, got))
    return a, b


def _finite_size(a: Tensor) -> Tensor:
    return torch.where(a.isfinite(), _wide(a).abs(), 0.0)


def _scales_of_samples(a: Tensor, b: Tensor) -> Tensor:
    """Median size of each sample's elements, of some of them where there are many."""
    every = max(1, a.shape[1] // _SEEN)
    return _scales_where_they_differ(a[:, ::every], b[:, ::every], 1)


def _scales_where_they_differ(a: Tensor, b: Tensor, dim: int) -> Tensor:
    """Median size along an axis, without masked elements, which have one constant in both."""
    constants_as_of_masks = (a == b) | ~a.isfinite()
    sizes = torch.where(constants_as_of_masks, torch.nan, _wide(a).abs())
    return sizes.nanmedian(dim, keepdim=True).values.nan_to_num(0.0)


def median_size(row: Tensor) -> float:
    """Return the median size of the finite elements of one sample's output."""
    sizes = row.detach().double().abs()
    return float(sizes[sizes.isfinite()].median().nan_to_num(0.0)) if sizes.numel() else 0.0


def norms_close(value: Tensor, exact: Tensor, total: Tensor, close: float) -> Tensor:
    """Return element by element whether audited squared norms are the exact ones but for rounding.

    A norm that is zero but for rounding has some 1e-14 of its sample's total in float32. A larger
    part of the total would hide small norms, such as those of LoRA's first factor.

    Args:
        value: Squared norms.
        exact: Squared norms by plain autograd.
        total: Squared norms of all parameters together.
        close: Relative difference that is rounding.
    """
    in_few_digits = close > LARGEST_TOLERANCE_OF_FLOAT32
    part_of_total = close * (NOISE_IN_FEW_DIGITS if in_few_digits else NOISE)
    return (value - exact).abs() <= close * exact + part_of_total * total


def outputs_need_full_check(
    alone: Tensor, in_batch: Tensor, relative: float, out_dim: int
) -> Tensor:
    """Return on the device whether outputs of an audited sample may differ by more than rounding.

    It is the first check of an audit. In few digits it allows more than `agree`: as much as audits
    allow norms. An element that is nearly zero is judged by the scale of its sample.

    Args:
        alone: Output of the sample beside its copy.
        in_batch: Its output within the batch.
        relative: Difference, in parts of an element's size, that needs no explanation.
        out_dim: Sample axis.
    """
    a, b = _by_sample(alone, in_batch, out_dim)
    if a.device.type == "cpu" and _are_close(a, b, relative):
        return a.new_zeros((), dtype=torch.bool)
    least = _scales_of_samples(a, b)
    if relative > LARGEST_TOLERANCE_OF_FLOAT32:
        relative = AUDITED_IN_FEW_DIGITS
    else:
        least = _LEAST_SCALE * least
    return (gap(a, b) > relative * torch.maximum(_finite_size(a), least)).any()


def output_tolerance(output: Tensor, parameters: Iterable[Tensor]) -> float:
    """Return the relative difference from a model's output that needs no explanation."""
    low = computes_in_few_digits(output.device, {p.dtype for p in parameters})
    return rounding(output.dtype, low=low)


def norm_tolerance(
    parameters: Iterable[Tensor], lowest: torch.dtype, device: torch.device
) -> float:
    """Return the relative difference of squared norms that is rounding.

    Args:
        parameters: Parameters of the model.
        lowest: Least precise dtype in the graph, as a float64 model may cast to fewer digits.
        device: Device of the model.
    """
    dtypes = {p.dtype for p in parameters}
    if dtypes == {torch.float64}:
        dtypes = {lowest}
    if computes_in_few_digits(device, dtypes):
        return AUDITED_IN_FEW_DIGITS
    return 1e-8 if dtypes == {torch.float64} else 1e-3
