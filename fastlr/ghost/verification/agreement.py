"""Do two computations of the same outputs or norms differ by more than rounding?

Outputs are compared element by element. A difference is judged by the element's own size and by that of its sample and its
column, not by the largest output: one masked logit of -1e9 or one column of 1e10 must not hide what the others do. Where
that is not enough (a column that is nothing but rounding), the rounding is measured, against another precision.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor, nn

from fastlr.distributed import on_demand
from fastlr.ghost import model_io as adapt
from fastlr.ghost.verification.stand_in import StandIn
from fastlr.ops.torch_private import narrow_products

_PART = 1 << 22  # elements compared at once
_SEEN = 4096  # columns whose median says how large a sample's outputs are
Noise = Callable[[], Tensor | None]


def low_precision(device: torch.device, dtypes: Collection[torch.dtype]) -> bool:
    """Return True if products have fewer digits than float32: autocast, narrow parameters, TF32 (cuDNN's default)."""
    if torch.is_autocast_enabled(device.type) or any(d.itemsize < 4 for d in dtypes):
        return True
    return torch.float32 in dtypes and narrow_products(device.type)


def rounding(dtype: torch.dtype, *, low: bool) -> float:
    """Relative difference of outputs that is taken for rounding unseen; more is measured."""
    return 0.02 if low else 1e-9 if dtype == torch.float64 else 1e-3


def agree(want: Tensor, got: Tensor, relative: float, noise: Noise | None = None, out_dim: int = 0) -> bool:
    """Return True if outputs of the same samples are the same but for rounding.

    Args:
        want: outputs, samples along ``out_dim``.
        got: the same samples' outputs, computed in another way or in other company.
        relative: difference, in parts of an element's size, that needs no explanation.
        noise: asked where that is exceeded; how far outputs of some samples are off by rounding, samples along the same
            axis, or None if nobody can tell.
        out_dim: the samples' axis.
    """
    if want.shape != got.shape:
        return False
    a, b = _by_sample(want, got, out_dim)
    if torch.equal(a, b):
        return True
    rows, parts, beyond = _compared(a, b, relative)
    doubtful = [part for part, flag in zip(parts, beyond.tolist(), strict=True) if flag]
    if not doubtful:
        return True
    measured = None if noise is None else noise()
    off = None if measured is None else measured.detach().movedim(out_dim, 0).reshape(-1, a.shape[1])
    for part in doubtful:
        gap, size = _gap(a[:, part], b[:, part]), _size(a, b, part, rows)
        if off is None:  # nobody can tell: by the size of the column
            allowed = relative * torch.maximum(size, _finite(b[:, part]).amax(0))
        else:
            allowed = 32 * _finite(off[:, part]).amax(0) + 1e-3 * relative * size
        if bool((gap > allowed).any()):
            return False
    return True


def _by_sample(want: Tensor, got: Tensor, out_dim: int) -> tuple[Tensor, Tensor]:
    """Both as [samples, elements], without their graphs."""
    a, b = (t.detach().movedim(out_dim, 0).reshape(t.shape[out_dim], -1) for t in (want, got))
    return a, b


def _compared(a: Tensor, b: Tensor, relative: float) -> tuple[Tensor, list[slice], Tensor]:
    """The size of each sample's outputs, parts of the columns, and which of them have an element that is off by more."""
    rows = _typical(a[:, :: max(1, a.shape[1] // _SEEN)], b[:, :: max(1, a.shape[1] // _SEEN)], 1)
    step = max(1, _PART // len(a))
    parts = [slice(lo, lo + step) for lo in range(0, a.shape[1], step)]
    beyond = [(_gap(a[:, part], b[:, part]) > relative * _size(a, b, part, rows)).any() for part in parts]
    return rows, parts, torch.stack(beyond)


def _gap(a: Tensor, b: Tensor) -> Tensor:
    same = (a == b) | (a.isnan() & b.isnan())
    return (a.double() - b.double()).abs().masked_fill(same, 0.0).nan_to_num(torch.inf)


def _finite(a: Tensor) -> Tensor:
    return torch.where(a.isfinite(), a.double().abs(), 0.0)


def _size(a: Tensor, b: Tensor, part: slice, rows: Tensor) -> Tensor:
    """The size that an element's difference is measured by: its own, or that of its sample's and its column's others."""
    columns = _typical(a[:, part], b[:, part], 0)
    return torch.maximum(_finite(a[:, part]), torch.minimum(rows, columns))


def _typical(a: Tensor, b: Tensor, dim: int) -> Tensor:
    """Median size along an axis of what is not the same to the bit, as masks are."""
    sizes = torch.where((a == b) | ~a.isfinite(), torch.nan, a.double().abs())
    return sizes.nanmedian(dim, keepdim=True).values.nan_to_num(0.0)


def output_in(
    dtype: torch.dtype,
    stand_in: StandIn,
    x: object,
    output: adapt.OutputSelector,
    state: Mapping[str, Tensor],
) -> Tensor | None:
    """The output of a model with these parameters and buffers in a precision; None if it does not run in it."""
    tensors = {n: on_demand.cast(t, dtype) for n, t in state.items()}
    device = next(iter(tensors.values())).device.type
    try:
        with torch.autocast(device, enabled=False), torch.enable_grad():
            result = stand_in.call_with(tensors, adapt.cast(x, dtype), dtype=dtype)
            return adapt.select_output(result, output).detach()
    except adapt.FAILURES:
        return None


def measured_noise(model: nn.Module, x: object, output: adapt.OutputSelector) -> Tensor | None:
    """How far the model's own outputs for ``x`` are off by rounding, by another precision; None if it runs in no other."""
    own = adapt.forward(model, x, output).detach()
    dtype = other_precision(own)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tensors = {n: on_demand.cast(t, dtype) for n, t in state.items()}
    stand_in = StandIn(model, x, output)
    stand_in.take_known_clone()
    other = stand_in.trusted(lambda: output_in(dtype, stand_in, x, output, tensors))
    return noise_between(own, other)


def other_precision(own: Tensor) -> torch.dtype:
    """The precision by which the rounding of an output is measured."""
    return torch.float32 if own.dtype == torch.float64 else torch.float64


def noise_between(own: Tensor, other: Tensor | None) -> Tensor | None:
    """How far an output is off by rounding, from what another precision gives; None without that."""
    if other is None or other.shape != own.shape:
        return None
    return _gap(own, other).nan_to_num(posinf=0.0) * (2.0**-26 if own.dtype == torch.float64 else 1.0)


def norms_agree(value: Tensor, exact: Tensor, total: Tensor, close: float) -> bool:
    """Return True if squared norms agree, relative to themselves and to the samples' totals."""
    return bool(((value - exact).abs() <= close * exact + 0.1 * close * total).all())


def same_output(model: nn.Module, x: object, got: Tensor, output: adapt.OutputSelector, out_dim: int = 0) -> bool:
    """Return True if ``got`` is the model's own output for ``x``, but for what its precision explains."""
    own, relative = _own(model, x, output)
    return agree(got, own, relative, lambda: measured_noise(model, x, output), out_dim)


def output_differs(model: nn.Module, x: object, got: Tensor, output: adapt.OutputSelector, out_dim: int = 0) -> Tensor:
    """Return true on the device, waiting for nothing, if `same_output` would have to look closer at some element."""
    own, relative = _own(model, x, output)
    if own.shape != got.shape:
        return torch.ones((), dtype=torch.bool, device=got.device)
    return _compared(*_by_sample(got, own, out_dim), relative)[-1].any()


def _own(model: nn.Module, x: object, output: adapt.OutputSelector) -> tuple[Tensor, float]:
    """The model's own output, and the relative difference from it that needs no explanation."""
    own = adapt.forward(model, x, output).detach()
    return own, rounding(own.dtype, low=low_precision(own.device, {p.dtype for p in model.parameters()}))
