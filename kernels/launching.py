"""Shared by all launches: dtypes, the device, workspaces, strides and hints on sizes.

Hints are what the compiler may know of sizes. Every kernel is launched by `launch`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlr.ops.tuning import architecture as architecture
from fastlr.ops.tuning import on_device as on_device
from fastlr.ops.tuning import tuned as tuned

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
INT32 = 1 << 31
# A product and a sum in one instruction; from Triton 3.10 on not by default.
FUSED = {"enable_fp_fusion": True}
# Called with a kernel, its arguments, and its constants and the compiler's options.
Note = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]


@triton.jit
def multiple(n, ALIGN: tl.constexpr):
    """Return ``n``, known to the compiler to be a multiple of ALIGN.

    Of multiples of 16 Triton takes note itself.
    """
    return n // ALIGN * ALIGN


def launch(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
    """Launch so many programs of a kernel on the current device.

    Within `noting` it is noted instead.

    Args:
        kernel: of `triton.jit`.
        programs: how many.
        args: its arguments but for constants.
        constants: its constants, and the compiler's options (``num_warps``, ...).
    """
    constants |= FUSED
    if _noted.note is None:
        kernel[(programs,)](*args, **constants)
    else:
        _noted.note(kernel, args, constants)


class _Noted(threading.local):
    """What `noting` calls in this thread."""

    note: Note | None = None


_noted = _Noted()


@contextmanager
def noting(note: Note) -> Iterator[None]:
    """Within it nothing is launched in this thread, but ``note`` is called instead."""
    before, _noted.note = _noted.note, note
    try:
        yield
    finally:
        _noted.note = before


def workspace(*shape: int, device: torch.device) -> Tensor:
    """Space for partial results; the kernel writes every element (the tests hand out NaN)."""
    return torch.empty(shape, dtype=torch.float32, device=device)


def covered(*tensors: Tensor) -> bool:
    """Return True if the kernels take these inputs.

    That is: one dtype of theirs, no empty ones, a sample within int32 offsets.
    """
    dtype = tensors[0].dtype
    if dtype not in DTYPES:
        return False
    return all(t.dtype == dtype and t.numel() > 0 and _span(t) < INT32 for t in tensors)


def _span(t: Tensor) -> int:
    """Return the offset of the last element of a sample."""
    return sum((n - 1) * step for n, step in zip(t.shape[1:], t.stride()[1:], strict=True))


def merged(*axes: tuple[int, int]) -> int | None:
    """Return the stride of the axis that axes, given as (size, stride), form, or None."""
    axes = tuple((n, s) for n, s in axes if n != 1)
    if any(outer != n * inner for (_, outer), (n, inner) in zip(axes, axes[1:])):
        return None
    return axes[-1][1] if axes else 1
