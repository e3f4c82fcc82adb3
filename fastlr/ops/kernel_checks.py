"""Checks that hold kernels to plain torch, their twin.

The first call of each kind is compared with its twin on a few samples: once a machine, as
comparisons that were passed are kept (fastlr.ops.kept_comparisons).

Audits run single samples by plain autograd, which kernels do not take, so they are held to plain
torch here. Two calls are of one kind if they run the same compiled variants of the same kernels
(`variants`) and are alike (`signature`): dtypes, memory formats, the order of magnitude of every
size, and what divides every size and stride. The truth is plain torch on the same arguments raised
to float64. A kernel may be off by its dtype's tolerance, a few times as much as plain torch in the
dtype given, and rounding in float32 of the terms where they cancel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastlr.errors import warn
from fastlr.ops.block import changed, leaves
from fastlr.ops.deferred_checks import out_of_memory
from fastlr.ops.geometry import ConvGeometry
from fastlr.ops.kept_comparisons import KeptComparisons
from fastlr.ops.recent import Recent
from fastlr.ops.torch_private import full_products, tree_flatten

MOST = 8  # samples compared
ELEMENTS = 1 << 24  # of their largest argument
TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
OF_TORCH = 8  # times the deviation of plain torch in the same dtype
ROUNDING = {torch.float64: 2.0**-40}  # of the terms that are summed
IN_FLOAT32 = 2.0**-20
MOST_CALLS = 1 << 16  # kept in mind
SEVERAL = 2  # kinds of call that disagree: then no other kind of that op is trusted


def divisor(n: int) -> int:
    """Return all that a kernel may know of a number's divisibility.

    That it is 0 or 1, or the largest power of two up to 16 that divides it.
    """
    return n if 0 <= n <= 1 else min(n & -n, 16)


def kind_of_call(
    launcher: Callable[..., Any] | None, args: Sequence[Any], samples: Sequence[int]
) -> str:
    """Return the kind of a call, the same in every process.

    It is the call's `signature` and the `variants` that its launcher runs.
    """
    alike, launched = signature(args, samples), variants(launcher, args)
    return f"{alike} by {' and '.join(launched)}" if launched else alike


def variants(launcher: Callable[..., Any] | None, args: Sequence[Any]) -> list[str]:
    """Return the compiled variants of kernels that a launcher runs for these arguments.

    They are found without running them.

    Launchers choose block sizes, splits and forms by thresholds of their own: they are asked, and
    launch nothing meanwhile.
    """
    if launcher is None:
        return []
    with import_module("fastlr.kernels.launching").asked() as found:
        launcher(*args)
    return list(dict.fromkeys(found))


def signature(args: Sequence[Any], samples: Sequence[int]) -> str:
    """Return the signature of a call: what is alike in calls that are compared once.

    It is the same in every process. See `compared`.
    """
    parts = leaves(changed(_described, args, samples))
    return "; ".join(part for part in parts if part is not None)


def _described(a: Any, by_sample: bool) -> str | None:
    """Describe an argument for the signature of a call; None for a number that is none of it."""
    if isinstance(a, Tensor):
        return _layout(a, by_sample)
    if isinstance(a, ConvGeometry):
        return signature(a, ())
    if isinstance(a, int) and not isinstance(a, bool):
        return f"int%{divisor(a)}"
    if isinstance(a, (tuple, list)):
        return str(list(a))
    return None if isinstance(a, float) else str(a).removeprefix("torch.")


def _layout(t: Tensor, by_sample: bool) -> str:
    """Describe a tensor's dtype and layout for the signature of a call.

    Of each axis: the order of magnitude of its size, what divides size and stride, and how axes
    join.

    Of the number of samples, the first axis then, the order of magnitude alone.
    """
    order = sorted(range(t.ndim), key=lambda i: (t.stride(i), t.shape[i]))
    pairs = zip(order, order[1:], strict=False)
    joins = ""
    for inner, outer in pairs:
        joins += "-" if t.stride(outer) == t.stride(inner) * t.shape[inner] else "/"
    known = [f"%{divisor(n)}" for n in t.shape]
    known = ["", *known[1:]] if by_sample and known else known
    axes = ",".join(
        f"{n.bit_length()}{d}@{divisor(s)}"
        for n, d, s in zip(t.shape, known, t.stride(), strict=True)
    )
    aligned = "" if t.data_ptr() % 16 == 0 else " unaligned"
    return (
        f"{str(t.dtype).removeprefix('torch.')}[{axes}]{''.join(map(str, order))}{joins}{aligned}"
    )


class Deviation(NamedTuple):
    """How far a result is from the truth.

    As a share of what is allowed (above 1: wrong), and relative to the result's size.
    """

    share: float
    relative: float


def compared(
    kernel: Callable[..., Any],
    twin: Callable[..., Any],
    args: Sequence[Any],
    samples: Sequence[int],
    result: Any = None,
) -> Deviation:
    """Compare what a kernel gives for these arguments with its twin, on at most MOST samples.

    Args:
        kernel: the op's kernel.
        twin: plain torch, or the definition.
        args: of the call.
        samples: numbers of the arguments that have samples, along axis 0.
        result: what the kernel has given for the call; None: not yet asked.

    Returns:
        The largest deviation of any sample and result; where all results are zero, on arguments
        drawn instead. The twin's float32 products are without TF32.
    """
    result = kernel(*args) if result is None else result
    tensors = [a for a in leaves(args) if isinstance(a, Tensor)]
    by_sample = bool(samples)
    count = len(next(leaves([args[samples[0]]]))) if samples else 0
    largest = max(t.numel() for t in tensors)
    few = max(1, min(MOST, ELEMENTS * max(1, count) // max(1, largest)))
    chosen = torch.linspace(0, count - 1, min(few, count)).round().long() if samples else None

    def has_samples(a: Any) -> bool:  # a factor may be broadcast instead
        return isinstance(a, Tensor) and a.ndim > 0 and len(a) == count

    def pick(a: Any, by_sample: bool) -> Any:
        return _of(a, chosen) if by_sample and has_samples(a) else a

    def draw(a: Any, by_sample: bool) -> Any:
        return _drawn(a, few if by_sample and has_samples(a) else None)

    with torch.no_grad(), torch.autocast(tensors[0].device.type, enabled=False), full_products():
        picked = changed(pick, args, samples)
        results = [_of(t, chosen) for t in _leaves(result)]
        deviation, empty = _deviation(results, picked, twin, by_sample)
        if empty:  # zero or not finite: nothing was learnt
            drawn = changed(draw, args, samples)
            # On as many samples: on fewer it might be another compiled variant.
            again = kernel(*drawn)
            if again is not NotImplemented:
                results = [_of(t, chosen) for t in _leaves(again)]
                picked = changed(pick, drawn, samples)
                deviation = max(deviation, _deviation(results, picked, twin, by_sample)[0])
    return deviation


def _deviation(
    results: list[Tensor], args: Sequence[Any], twin: Callable[..., Any], by_sample: bool
) -> tuple[Deviation, bool]:
    """Return how far results are from the truth, and True if that says nothing.

    It says nothing where no result is finite and not zero.
    """
    dtypes = [a.dtype for a in leaves(args) if isinstance(a, Tensor) and a.is_floating_point()]
    if not dtypes:
        return _exact(results, _leaves(twin(*args)))
    lowest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    truth, rounded = _leaves(twin(*changed(_wide, args))), _leaves(twin(*args))
    terms = _leaves(twin(*changed(_size, args)))
    worst, empty = Deviation(0.0, 0.0), True
    for got, right, low, size in zip(results, truth, rounded, terms, strict=True):
        if got.shape != right.shape:
            return Deviation(float("inf"), float("inf")), False
        seen = right.isfinite() & low.isfinite()
        error = torch.where(seen, (got.double() - right).abs(), 0.0).nan_to_num(nan=torch.inf)
        rounding = torch.where(seen, (low.double() - right).abs(), 0.0)
        scale = torch.where(seen, right.abs(), 0.0)
        error, rounding, scale, size = (
            _largest(t, by_sample) for t in (error, rounding, scale, size.nan_to_num(0, 0))
        )
        allowed = (
            TOLERANCE[lowest] * scale
            + OF_TORCH * rounding
            + ROUNDING.get(lowest, IN_FLOAT32) * size
        )
        wrong = error > allowed
        relative = torch.where(error > 0, error / scale, 0.0).max()  # infinite where zero is right
        share = torch.where(wrong | (allowed > 0), error / allowed, 0.0).max()
        worst = max(worst, Deviation(float(share), float(relative)))
        empty &= not bool(scale.any())
    return worst, empty


def _exact(results: list[Tensor], truth: list[Tensor]) -> tuple[Deviation, bool]:
    """Of integer arithmetic: every bit must be right."""
    same = all(
        a.shape == b.shape and torch.equal(a, b) for a, b in zip(results, truth, strict=True)
    )
    return Deviation(0.0, 0.0) if same else Deviation(float("inf"), float("inf")), False


def _largest(t: Tensor, by_sample: bool) -> Tensor:
    """Return the largest element in float64, of each sample [B] or of all []."""
    if not by_sample:
        return t.double().amax()
    return t.double().flatten(1).amax(1) if t.ndim > 1 else t.double()


def _leaves(result: Any) -> list[Tensor]:
    return [t for t in tree_flatten(result)[0] if isinstance(t, Tensor)]


def _wide(a: Any, by_sample: bool = False) -> Any:
    """To float64, tensors and dtypes alike."""
    if isinstance(a, torch.dtype):
        return torch.float64
    return a.double() if isinstance(a, Tensor) and a.is_floating_point() else a


def _size(a: Any, by_sample: bool) -> Any:
    """Return absolute values in float64; anything but a tensor as `_wide` does."""
    return _wide(a.abs() if isinstance(a, Tensor) else a)


def _of(t: Tensor, chosen: Tensor | None) -> Tensor:
    """Some samples of a tensor, in its memory format."""
    return t if chosen is None or len(chosen) == len(t) else t[chosen.to(t.device)]


def _drawn(a: Any, few: int | None) -> Any:
    """Return random numbers from 0.5 to 1.5 with the strides of a floating-point tensor.

    Anything else is returned as it is.

    Args:
        a: an argument of a call.
        few: so many samples are drawn, and repeated along axis 0; None: there are no samples.
    """
    if not isinstance(a, Tensor) or not a.is_floating_point():
        return a
    shape = without_repeats(a).shape
    count = shape[0] if few is not None else 0
    part = shape if few is None else (min(few, count), *shape[1:])
    values = torch.rand(part, generator=torch.Generator().manual_seed(a.ndim)) + 0.5
    values = values.to(a.device, a.dtype)
    if count > len(values):
        values = values[torch.arange(count, device=a.device) % len(values)]
    return with_strides(values, a)


def without_repeats(t: Tensor) -> Tensor:
    """The first of the elements along axes on which a tensor is expanded (strides of 0)."""
    for axis, step in enumerate(t.stride()):
        if step == 0:
            t = t.narrow(axis, 0, min(1, t.shape[axis]))
    return t


def with_strides(values: Tensor, t: Tensor) -> Tensor:
    """Values, those of `without_repeats`, with the shape and the strides of ``t``."""
    return (
        torch.empty_strided(values.shape, t.stride(), dtype=values.dtype, device=values.device)
        .copy_(values)
        .expand(t.shape)
    )


def as_given(value: Any, like: Any) -> Any:
    """Return a tensor with dtype and strides of another of its shape; anything else as it is."""
    both_are = isinstance(value, Tensor) and isinstance(like, Tensor)
    if not both_are or value.shape != like.shape or 0 in like.stride():
        return value
    return with_strides(value.to(like.dtype), like)


class Comparisons:
    """What was found of kernels in this process: the kinds of call that were compared or are off.

    Args:
        kept: those that earlier processes have passed.

    Attributes:
        serves: Calls whose kind was looked up, and whether the kernel serves them.
        uncompiled: The ops that a warning has named as not compiled.
    """

    def __init__(self, kept: KeptComparisons | None = None) -> None:
        self._kept = kept or KeptComparisons()
        self._known: set[tuple[str, str, int]] = set()
        self._off: dict[str, set[str]] = {}
        self.serves = Recent[tuple, bool](MOST_CALLS)
        self.uncompiled: set[str] = set()

    def known(self, name: str, kind: str, args: Sequence[Any]) -> bool:
        """Return True if a call of this kind was compared on the device of the arguments."""
        return (name, kind, _device(args)) in self._known

    def off(self, name: str, kind: str) -> bool:
        """Return True if plain torch serves calls of this kind."""
        off = self._off.get(name, ())
        return len(off) >= SEVERAL or kind in off

    def switch_off(self, name: str, kind: str) -> None:
        """Let plain torch serve calls of this kind."""
        self._off.setdefault(name, set()).add(kind)
        self.serves.clear()

    def switched_off(self) -> list[list[str]]:
        """The kinds that plain torch serves: [op, kind], sorted."""
        return [[name, kind] for name in sorted(self._off) for kind in sorted(self._off[name])]

    def agrees(
        self,
        name: str,
        kind: str,
        kernel: Callable[..., Any],
        twin: Callable[..., Any],
        args: Sequence[Any],
        samples: Sequence[int],
        result: Any = None,
    ) -> bool | None:
        """Return True if a kernel agrees with its twin at a first call, whose result may be known.

        None where memory did not suffice to tell.

        One that disagrees is switched off for calls of this kind, with a warning. One that agreed
        in an earlier process is run, so that it is loaded, and not compared.
        """
        device = _device(args)
        known = name, kind, device
        try:
            result = kernel(*args) if result is None else result
            if self._kept.passed(device, name, kind):
                self._known.add(known)
                return True
            deviation = compared(kernel, twin, args, samples, result)
        except Exception as error:
            if not out_of_memory(error):
                raise
            return None
        self._known.add(known)
        if deviation.share <= 1:
            self._kept.enter(device, name, kind)
            return True
        self._kept.forget(device, name)
        self.switch_off(name, kind)
        tensors = [a for a in leaves(args) if isinstance(a, Tensor)]
        shapes = ", ".join(f"{list(t.shape)}" for t in tensors)
        dtypes = ", ".join(dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in tensors))
        warn(
            f"{name}: its Triton kernel is off by {deviation.relative:.2g} of the result of plain "
            f"torch for tensors of {shapes} ({dtypes}), {deviation.share:.2g} times what rounding "
            "explains; it is switched off for such calls in this process, and plain torch serves. "
            "Please report it with what `fastlr doctor --kernels` prints."
        )
        return False


def _device(args: Sequence[Any]) -> int:
    return next(a.get_device() for a in leaves(args) if isinstance(a, Tensor))
