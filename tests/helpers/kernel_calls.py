"""Calls of ops on a device and in a dtype, and their comparison with plain torch."""

from __future__ import annotations

from typing import Any

import torch
from borders import Borders
from torch import Tensor

from fastlr import ops
from fastlr.ops.block import Block, changed
from fastlr.ops.kernel_checks import compared

IMAGES = [  # options of shape_images and its like
    {
        "size": size,
        "rectangles": 3,
        "circles": 4,
        "seed": 1,
        "table": None,
        "dtype": dtype,
        "channels_last": last,
    }
    for size, dtype, last in (
        ((3, 33, 35), torch.float32, False),
        ((3, 64, 32), torch.bfloat16, True),
        ((1, 7, 70), torch.uint8, False),
        ((4, 16, 16), torch.float16, True),
    )
]


def moved(op: str, args: tuple, device: torch.device, dtype: torch.dtype) -> tuple:
    """Return a call's arguments on a device, their float32 data in ``dtype``.

    Strides are the same; parameters and statistics keep their dtype.
    """
    if op == "fold_weights":
        return dtype, *(_on(a, device, None) for a in args[1:])

    def on_device(a: Any, by_sample: bool) -> Any:
        return _on(a, device, dtype if by_sample else None)

    given = changed(on_device, args, ops.TABLE[op].samples)
    for i, a in enumerate(given):
        if isinstance(a, Block):
            given[i] = a._replace(folded=_on(a.folded, device, dtype))
    return tuple(given)


def outcome(name, device, dtype, backend, twin, calls):
    """Compare an op with its twin, and return what is wrong and the largest deviation.

    All tensors lie in the middle of buffers of NaN, whose borders are looked at afterwards.

    Args:
        name: Name of the op.
        device: Device of the calls.
        dtype: Dtype of the data.
        backend: "triton" or "torch".
        twin: What it is compared with.
        calls: Arguments by case.
    """
    wrong, worst = [], 0.0
    for case, args in calls.items():
        borders = Borders()
        given = borders.around_all(moved(name, args, device, dtype))
        with borders:
            result = ops.get(name, backend)(*given)
        if result is NotImplemented:
            continue
        deviation = compared(twin, given, ops.TABLE[name].samples, result)
        if borders.broken():
            wrong.append(f"{case} writes beyond a tensor")
        if deviation.share > 1:
            wrong.append(f"{case} is off by {deviation.relative:.2g}")
        worst = max(worst, deviation.share)
    return wrong, worst


def _on(a: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Return a tensor on a device, with the same strides; anything else as it is.

    Numbers in float32 get ``dtype`` if there is one.
    """
    if not isinstance(a, Tensor):
        return a
    kind = dtype if dtype is not None and a.dtype == torch.float32 else a.dtype
    values = without_repeats(a)
    made = torch.empty_strided(values.shape, a.stride(), dtype=kind, device=device)
    return made.copy_(values).expand(a.shape)


def without_repeats(t: Tensor) -> Tensor:
    """Return the first of the elements along axes on which a tensor is expanded (strides of 0)."""
    for axis, step in enumerate(t.stride()):
        if step == 0:
            t = t.narrow(axis, 0, min(1, t.shape[axis]))
    return t
