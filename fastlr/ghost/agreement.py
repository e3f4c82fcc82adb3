"""Whether two computations of the same outputs or norms differ by more than rounding.

Outputs are compared element by element. A difference is judged by the element's own size and by that of its sample and its
column, not by the largest output: one masked logit of -1e9 or one column of 1e10 must not hide what the others do. Where
that is not enough (a column that is nothing but rounding), the rounding is measured, against another precision.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from fastlr.ghost import adapt

_PART = 1 << 22  # elements compared at once
_SEEN = 4096  # columns whose median says how large a sample's outputs are
Noise = Callable[[], Tensor | None]


def low_precision(device: torch.device, dtypes: Collection[torch.dtype]) -> bool:
    """Whether products are of fewer digits than float32: autocast, narrow parameters, or TF32 (torch's default in cuDNN)."""
    if torch.is_autocast_enabled(device.type) or any(d.itemsize < 4 for d in dtypes):
        return True
    tf32 = torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
    return device.type == "cuda" and tf32 and torch.float32 in dtypes


def rounding(dtype: torch.dtype, *, low: bool) -> float:
    """Relative difference of outputs that is taken for rounding unseen; more is measured."""
    return 0.02 if low else 1e-9 if dtype == torch.float64 else 1e-3


def agree(want: Tensor, got: Tensor, relative: float, noise: Noise | None = None, out_dim: int = 0) -> bool:
    """Whether outputs of the same samples are the same but for rounding.

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
    a, b = (t.detach().movedim(out_dim, 0).reshape(t.shape[out_dim], -1) for t in (want, got))
    if torch.equal(a, b):
        return True
    rows = _typical(a[:, :: max(1, a.shape[1] // _SEEN)], b[:, :: max(1, a.shape[1] // _SEEN)], 1)
    step = max(1, _PART // len(a))
    parts = [slice(lo, lo + step) for lo in range(0, a.shape[1], step)]
    doubtful = [part for part in parts if bool((_gap(a[:, part], b[:, part]) > relative * _size(a, b, part, rows)).any())]
    if not doubtful:
        return True
    found = None if noise is None else noise()
    off = None if found is None else found.detach().movedim(out_dim, 0).reshape(-1, a.shape[1])
    for part in doubtful:
        gap, size = _gap(a[:, part], b[:, part]), _size(a, b, part, rows)
        if off is None:  # nobody can tell: by the size of the column
            allowed = relative * torch.maximum(size, _finite(b[:, part]).amax(0))
        else:
            own = _finite(off[:, part])
            allowed = 32 * own.amax(0) + 1e-3 * relative * size
        if bool((gap > allowed).any()):
            return False
    return True


def _gap(a: Tensor, b: Tensor) -> Tensor:
    same = (a == b) | (a.isnan() & b.isnan())
    return (a.double() - b.double()).abs().masked_fill(same, 0.0).nan_to_num(torch.inf)


def _finite(a: Tensor) -> Tensor:
    return torch.where(a.isfinite(), a.double().abs(), 0.0)


def _size(a: Tensor, b: Tensor, part: slice, rows: Tensor) -> Tensor:
    """What an element's difference is measured by: its own size, or that of its sample's and its column's others."""
    columns = _typical(a[:, part], b[:, part], 0)
    return torch.maximum(_finite(a[:, part]), torch.minimum(rows, columns))


def _typical(a: Tensor, b: Tensor, dim: int) -> Tensor:
    """Median size along an axis of what is not the same to the bit, as masks are."""
    sizes = torch.where((a == b) | ~a.isfinite(), torch.nan, a.double().abs())
    return sizes.nanmedian(dim, keepdim=True).values.nan_to_num(0.0)


def precise_output(model: nn.Module, x: object, output: adapt.OutputSelector, dtype: torch.dtype) -> Tensor | None:
    """The model's output in another precision; None if it does not run in it."""
    tensors = {n: adapt.cast(t.detach(), dtype) for n, t in (*model.named_parameters(), *model.named_buffers())}
    device = next(iter(tensors.values())).device.type
    try:
        with torch.autocast(device, enabled=False), torch.enable_grad():
            return adapt.select_output(adapt.call_with(model, tensors, adapt.cast(x, dtype), dtype=dtype), output).detach()
    except adapt.FAILURES:
        return None


def measured_noise(model: nn.Module, x: object, output: adapt.OutputSelector) -> Tensor | None:
    """How far the model's own outputs for ``x`` are off by rounding, by another precision; None if it runs in no other."""
    own = adapt.forward(model, x, output).detach()
    wide = own.dtype == torch.float64
    other = precise_output(model, x, output, torch.float32 if wide else torch.float64)
    if other is None or other.shape != own.shape:
        return None
    return _gap(own, other).nan_to_num(posinf=0.0) * (2.0**-26 if wide else 1.0)


def norms_agree(value: Tensor, exact: Tensor, total: Tensor, close: float) -> bool:
    """Whether squared norms agree, relative to themselves and to the samples' totals."""
    return bool(((value - exact).abs() <= close * exact + 0.1 * close * total).all())


def same_output(model: nn.Module, x: object, got: Tensor, output: adapt.OutputSelector, out_dim: int = 0) -> bool:
    """Whether ``got`` is the model's own output for ``x``, but for what its precision explains."""
    own = adapt.forward(model, x, output).detach()
    low = low_precision(got.device, {p.dtype for p in model.parameters()})
    return agree(got, own, rounding(own.dtype, low=low), lambda: measured_noise(model, x, output), out_dim)
