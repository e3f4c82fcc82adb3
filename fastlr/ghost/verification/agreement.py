"""Do two computations of the same outputs or norms differ by more than rounding?

Outputs are compared element by element. A difference is judged by the element's own size and by
that of its sample and its column, not by the largest output: one masked logit of -1e9 or one column
of 1e10 must not hide what the others do. Where that is not enough (a column that is nothing but
rounding), the rounding is measured (fastlr.ghost.verification.noise).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastlr.ghost.batch import Batch
from fastlr.ghost.model_io import ModelView
from fastlr.ghost.verification.clone_or_model import CloneOrModel
from fastlr.ghost.verification.copies import Subject
from fastlr.ghost.verification.noise import (
    Noise,
    RoundingProbe,
    distance,
    gap,
    kinds_but_casts,
    lowest_dtype,
)
from fastlr.ops.torch_private import narrow_products

_PART = 1 << 22  # elements compared at once
_SEEN = 4096  # columns whose median says how large a sample's outputs are
# Differences of this many times the largest rounding measured in a column are taken for rounding.
MARGIN = 32
# Likewise where products have fewer digits than their sums, which alone depend on the company.
_MARGIN_OF_FEW_DIGITS = 2
_DOUBLE = 1e-9  # relative difference of outputs in float64 that is taken for rounding unseen
LARGEST_OF_FLOAT32 = 0.01  # relative difference that is rounding; more is for fewer digits
_TF32 = 2.0**-10  # the rounding of products in fewer digits than their dtype shows


def low_precision(device: torch.device, dtypes: Collection[torch.dtype]) -> bool:
    """Return True if products have fewer digits than float32.

    So they do under autocast, with narrow parameters, and under TF32 (cuDNN's default).
    """
    if torch.is_autocast_enabled(device.type) or any(d.itemsize < 4 for d in dtypes):
        return True
    return torch.float32 in dtypes and narrow_products(device.type)


def rounding(dtype: torch.dtype, *, low: bool) -> float:
    """Relative difference of outputs that is taken for rounding unseen; more is measured."""
    if low:
        return 0.02
    return _DOUBLE if dtype == torch.float64 else 1e-3


def agree(
    want: Tensor,
    got: Tensor,
    relative: float,
    noise: Callable[[], Noise | None] | None = None,
    out_dim: int = 0,
) -> bool:
    """Return True if outputs of the same samples are the same but for rounding.

    Args:
        want: outputs, samples along ``out_dim``.
        got: the same samples' outputs, computed in another way or in other company.
        relative: difference, in parts of an element's size, that needs no explanation.
        noise: asked where that is exceeded; how far outputs of some samples are off by rounding,
            samples along the same axis, or None if nobody can tell.
        out_dim: the samples' axis.
    """
    if want.shape != got.shape:
        return False
    a, b = _by_sample(want, got, out_dim)
    if torch.equal(a, b):
        return True
    # The size that is asked below is never less than an element's own, and takes longer.
    if a.numel() <= _PART and (gap(a, b) <= relative * _finite(a)).all():
        return True
    every = max(1, a.shape[1] // _SEEN)
    rows = _typical(a[:, ::every], b[:, ::every], 1)
    doubtful = _doubtful(a, b, relative, rows)
    if not doubtful:
        return True
    measured = noise and noise()
    rounded: Tensor | None = None
    if measured:
        rounded = _finite(measured.allowed.movedim(out_dim, 0).reshape(-1, a.shape[1])).amax(0)
    for part in doubtful:
        size = _size(a, b, part, rows)
        allowed = relative * torch.maximum(size, _finite(b[:, part]).amax(0))
        if measured and rounded is not None:
            if measured.own:
                allowed = torch.maximum(allowed, rounded[part])
            else:
                allowed = rounded[part] + 1e-3 * relative * size
        elif noise is not None:  # nobody can tell: the row speaks, too
            allowed = torch.maximum(allowed, relative * rows / a.shape[1] ** 0.5)
        difference = gap(a[:, part], b[:, part])
        needs_an_explanation = difference > relative * size
        if (needs_an_explanation & (difference > allowed)).any():
            return False
    return True


def _by_sample(want: Tensor, got: Tensor, out_dim: int) -> tuple[Tensor, Tensor]:
    """Both as [samples, elements], without their graphs."""
    a, b = (t.detach().movedim(out_dim, 0).reshape(t.shape[out_dim], -1) for t in (want, got))
    return a, b


def _doubtful(a: Tensor, b: Tensor, relative: float, rows: Tensor) -> list[slice]:
    """Return the parts of the elements that hold a difference beyond ``relative``."""
    step = max(1, _PART // len(a))
    parts = [slice(lo, lo + step) for lo in range(0, a.shape[1], step)]
    return [p for p in parts if (gap(a[:, p], b[:, p]) > relative * _size(a, b, p, rows)).any()]


def _finite(a: Tensor) -> Tensor:
    return torch.where(a.isfinite(), a.double().abs(), 0.0)


def _size(a: Tensor, b: Tensor, part: slice, rows: Tensor) -> Tensor:
    """Return the size that an element's difference is measured by.

    It is its own, or that of its sample's and its column's others.
    """
    columns = _typical(a[:, part], b[:, part], 0)
    return torch.maximum(_finite(a[:, part]), torch.minimum(rows, columns))


def _typical(a: Tensor, b: Tensor, dim: int) -> Tensor:
    """Median size along an axis of what is not the same to the bit, as masks are."""
    sizes = torch.where((a == b) | ~a.isfinite(), torch.nan, a.double().abs())
    return sizes.nanmedian(dim, keepdim=True).values.nan_to_num(0.0)


def measured_noise(
    probe: RoundingProbe, bits_vary: Callable[[], bool] | None = None
) -> Noise | None:
    """Measure how far the outputs of a few samples are off by rounding.

    None if nobody can tell (random ones).

    Another precision tells where the whole forward pass takes it. Where the model casts, its
    parameters are moved.

    Args:
        probe: the model and the samples.
        bits_vary: asked before parameters are moved, whether a sample's bits depend on its company
            at all; None: they may.
    """
    first = probe.run()
    if first is None:
        return None
    own, lowest = first.detach(), lowest_dtype(first)
    other = probe.in_other_precision(own)
    by_precision = None if other is None else Noise(MARGIN * other.off, own=False)
    if other is not None and other.whole and (own.dtype != torch.float64 or lowest == own.dtype):
        return by_precision
    low = low_precision(own.device, {lowest})
    step = max(torch.finfo(lowest).eps, _TF32 if low else 0.0)
    if not _is_repeatable(probe, own, min(MARGIN * step, rounding(lowest, low=low))):
        return by_precision
    if bits_vary is not None and not bits_vary():
        return by_precision
    moved = probe.with_moves(own, step)
    if moved is None:
        return by_precision
    allowed = (_MARGIN_OF_FEW_DIGITS if low else MARGIN) * moved
    if by_precision is None:
        return Noise(allowed, own=True)
    return Noise(torch.maximum(allowed, by_precision.allowed), own=False)


def model_noise(view: ModelView, x: Any) -> Noise | None:
    """Measure how far a model's own outputs for some samples are off by rounding.

    None if nobody can tell.

    A clone runs in its place where one was found to be right: other threads do not see the model
    with other tensors then.
    """
    clone_or_model = CloneOrModel(view, x)
    clone_or_model.take_known_clone()
    probe = RoundingProbe(Subject.of(view, clone_or_model), x)
    return clone_or_model.carry_out(lambda: measured_noise(probe))


def noise_by_truth(view: ModelView, batch: Batch, company: Sequence[int]) -> Noise | None:
    """Measure how far a batch's output is off by rounding, where its samples do not interact.

    The output is that of the model as it is, not the one that is in question.

    A model that casts to float32 itself has no float64 copy: it is run in float64 with these casts
    lifted. There the company in question must give what it gives in the batch to float64's digits.
    None if it does not, or if the model does not run so, or by another graph: it may go by dtypes.

    Args:
        view: the model.
        batch: all samples.
        company: numbers of samples whose outputs were another in it; a single one is run beside a
            copy, as it is in audits.
    """
    company = [*company] * 2 if len(company) == 1 else company
    clone_or_model = CloneOrModel(view, batch.pick(range(batch.count)))
    clone_or_model.take_known_clone()
    subject = Subject.of(view, clone_or_model)

    def truth() -> Noise | None:
        whole = RoundingProbe(subject, batch.pick(range(batch.count)))
        own, exact = whole.run(), whole.with_casts_lifted()
        if own is None or exact is None or exact.shape != own.shape:
            return None
        if low_precision(own.device, {lowest_dtype(own)}):
            return None
        if kinds_but_casts(own) != kinds_but_casts(exact):
            return None
        apart = RoundingProbe(subject, batch.pick(company)).with_casts_lifted()
        numbers = torch.tensor(company, device=exact.device)
        together = exact.detach().index_select(view.out_dim, numbers)
        if apart is None or not agree(together, apart, _DOUBLE, None, view.out_dim):
            return None
        return Noise(MARGIN * distance(own.detach(), exact.detach()), own=False)

    return clone_or_model.carry_out(truth)


def _is_repeatable(probe: RoundingProbe, own: Tensor, relative: float) -> bool:
    """Return True if another forward pass gives the same but for rounding: it draws nothing."""
    again = probe.run()
    return again is not None and agree(own, again.detach(), relative)


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
    part = 0.1 * close if close > LARGEST_OF_FLOAT32 else 1e-9 * close
    return (value - exact).abs() <= close * exact + part * total


def norms_agree(value: Tensor, exact: Tensor, total: Tensor, close: float) -> bool:
    """Return True if squared norms agree, relative to themselves and to the samples' totals."""
    return bool(((value - exact).abs() <= close * exact + 0.1 * close * total).all())


def outputs_differ(own: Tensor, got: Tensor, relative: float, out_dim: int) -> Tensor:
    """Return on the device whether outputs of one sample differ by more than needs no explanation.

    In few digits an element is judged by the sample's others, too.
    """
    a, b = _by_sample(own, got, out_dim)
    size = _finite(a)
    if relative > LARGEST_OF_FLOAT32:
        size = torch.maximum(size, _typical(a, b, 1))
    return (gap(a, b) > relative * size).any()


def unexplained(output: Tensor, parameters: Iterable[Tensor]) -> float:
    """Return the relative difference from a model's output that needs no explanation."""
    low = low_precision(output.device, {p.dtype for p in parameters})
    return rounding(output.dtype, low=low)
