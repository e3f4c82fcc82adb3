"""The comparison of a kernel's result with that of plain torch for the same arguments.

All samples are compared, in the dtype of the arguments, so that a kernel is found that is wrong in
one tile, in the last rows or for one sample. What differs by more than a tolerance is held to
float64: a kernel may be off by a few times as much as plain torch itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastlr.ops.block import changed, leaves
from fastlr.ops.cudnn import never_cudnn
from fastlr.ops.torch_private import tree_leaves

ELEMENTS = 1 << 25  # of the largest argument of the samples that are compared at a time
# Relative to a sample's largest element, by the dtype of the result; others have the last one.
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 5e-3}
OF_SUMS = 1e-3
OF_TORCH = 8  # times the deviation of plain torch in the same dtype
IN_FLOAT32 = 2.0**-20  # of the terms that are summed
FAINT = 1e-30  # squares of which float32 keeps few digits, or none


class Deviation(NamedTuple):
    """How far a result is from the right one.

    Attributes:
        share: Deviation in parts of what is allowed; above 1 the result is wrong.
        relative: Deviation relative to the size of the right result.
        is_empty: Whether a right result has no finite nonzero element, so that nothing was learnt
            of it.
    """

    share: float
    relative: float
    is_empty: bool = False

    @staticmethod
    def worst(of: Sequence[Deviation], is_empty: bool) -> Deviation:
        """Return the largest of several deviations."""
        share = max([each.share for each in of], default=0.0)
        return Deviation(share, max([each.relative for each in of], default=0.0), is_empty)


WRONG = Deviation(float("inf"), float("inf"))


def compared(
    twin: Callable[..., Any], args: Sequence[Any], samples: Sequence[int], result: Any
) -> Deviation:
    """Return the largest deviation of a result from that of plain torch, over all samples.

    cuDNN, which plans every new size, is off.

    Args:
        twin: The op in plain torch.
        args: Arguments of the call.
        samples: Positions of the arguments that have samples along axis 0.
        result: Result of the kernel for these arguments.
    """
    found = []
    device = next(a.device for a in leaves(args) if isinstance(a, Tensor))
    with torch.no_grad(), torch.autocast(device.type, enabled=False), never_cudnn():
        for part, picked in _parts(args, samples):
            found.append(_of_part(twin, picked, bool(samples), _picked(result, part)))
    return Deviation.worst(found, all(each.is_empty for each in found))


def _parts(args: Sequence[Any], samples: Sequence[int]) -> Iterator[tuple[slice, Sequence[Any]]]:
    """Yield ranges of samples that fit into memory, with the arguments of each."""
    if not samples:
        yield slice(None), args
        return
    count = len(next(leaves([args[samples[0]]])))
    largest = max(a.numel() for a in leaves(args) if isinstance(a, Tensor))
    step = max(1, ELEMENTS * count // max(1, largest))
    for start in range(0, count, step):
        part = slice(start, start + step)

        def pick(a: Any, by_sample: bool, part: slice = part) -> Any:
            is_broadcast = not isinstance(a, Tensor) or a.ndim == 0 or len(a) != count
            return a[part] if by_sample and not is_broadcast else a

        yield part, changed(pick, args, samples)


def _picked(result: Any, part: slice) -> list[Tensor]:
    return [t if part == slice(None) else t[part] for t in _tensors(result)]


def _of_part(
    twin: Callable[..., Any], args: Sequence[Any], by_sample: bool, results: list[Tensor]
) -> Deviation:
    """Return the deviation of the results for some samples; by float64 where it is large."""
    right = _tensors(twin(*args))
    if [t.shape for t in right] != [t.shape for t in results]:
        return WRONG
    pairs = zip(results, right, strict=True)
    found = [_measured(got, plain, plain, 0.0, by_sample) for got, plain in pairs]
    if all(each.share <= 1 for each in found):
        return Deviation.worst(found, any(each.is_empty for each in found))
    found = []
    exact, terms = (_tensors(twin(*changed(change, args))) for change in (_wide, _size))
    for got, plain, true, size in zip(results, right, exact, terms, strict=True):
        of_terms = IN_FLOAT32 * _largest(size.nan_to_num(0, 0), by_sample)
        found.append(_measured(got, plain, true, of_terms, by_sample))
    return Deviation.worst(found, any(each.is_empty for each in found))


def _measured(
    got: Tensor, plain: Tensor, true: Tensor, of_terms: Tensor | float, by_sample: bool
) -> Deviation:
    """Return the deviation of one tensor, where plain torch and the true result are finite.

    Args:
        got: Result.
        plain: Result of plain torch.
        true: Right result.
        of_terms: Deviation that the terms of its sums explain, of each sample or of all.
        by_sample: Whether axis 0 numbers samples.
    """
    finite = true.isfinite() & plain.isfinite()

    def size_of(t: Tensor) -> Tensor:
        return _largest(torch.where(finite, t.double().abs(), 0.0).nan_to_num(torch.inf), by_sample)

    off, rounding, scale = size_of(got - true), size_of(plain - true), size_of(true)
    allowed = TOLERANCE.get(plain.dtype, OF_SUMS) * scale + OF_TORCH * rounding + of_terms + FAINT
    # What is zero and has to be zero is right; another number there is infinitely far off.
    share = torch.where(off > 0, off / allowed, 0.0).max()
    relative = torch.where(off > 0, off / scale, 0.0).max()
    return Deviation(float(share), float(relative), not bool(scale.any()))


def _largest(t: Tensor, by_sample: bool) -> Tensor:
    """Return the largest element in float64, of each sample [B] or of all [1]."""
    return t.double().reshape(len(t) if by_sample else 1, -1).amax(1)


def _tensors(result: Any) -> list[Tensor]:
    return [t for t in tree_leaves(result) if isinstance(t, Tensor)]


def _wide(a: Any, by_sample: bool = False) -> Any:
    """Return a tensor or dtype in float64, if it has floating-point numbers."""
    if isinstance(a, torch.dtype):
        return torch.float64
    return a.double() if isinstance(a, Tensor) and a.is_floating_point() else a


def _size(a: Any, by_sample: bool) -> Any:
    """Return absolute values in float64."""
    return _wide(a.abs() if isinstance(a, Tensor) else a)


def as_given(value: Any, like: Any) -> Any:
    """Return a tensor with dtype and strides of another of its shape; anything else as it is."""
    both_are = isinstance(value, Tensor) and isinstance(like, Tensor)
    if not both_are or value.shape != like.shape or 0 in like.stride():
        return value
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=value.device)
    return made.copy_(value)
