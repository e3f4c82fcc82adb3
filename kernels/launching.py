"""Shared by all launches: dtypes, the device, workspaces, strides and hints on sizes.

Hints are what the compiler may know of them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlr.ops.tuning import tuned as tuned

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
INT32 = 1 << 31
FUSED = {"enable_fp_fusion": True}  # a product and a sum in one instruction; from Triton 3.10 on not by default


@triton.jit
def multiple(n, ALIGN: tl.constexpr):
    """Return ``n``, known to the compiler to be a multiple of ALIGN.

    Of multiples of 16 Triton takes note itself.
    """
    return n // ALIGN * ALIGN


def workspace(*shape: int, device: torch.device) -> Tensor:
    """Space for partial results; the kernel writes every element (the tests hand out NaN)."""
    return torch.empty(shape, dtype=torch.float32, device=device)


def on_device(t: Tensor) -> AbstractContextManager:
    """The context in which kernels on ``t`` are launched."""
    return torch.cuda.device(t.device) if t.is_cuda else nullcontext()


def covered(*tensors: Tensor) -> bool:
    """Return True if the kernels take these inputs.

    That is: one dtype of theirs, no empty ones, a sample within int32 offsets.
    """
    x = tensors[0]
    return x.dtype in DTYPES and all(
        t.dtype == x.dtype
        and t.numel() > 0
        and sum((n - 1) * s for n, s in zip(t.shape[1:], t.stride()[1:], strict=True)) < INT32
        for t in tensors
    )


def merged(*axes: tuple[int, int]) -> int | None:
    """Return the stride of the axis that axes, given as (size, stride), form, or None."""
    axes = tuple((n, s) for n, s in axes if n != 1)
    if any(outer != n * inner for (_, outer), (n, inner) in zip(axes, axes[1:])):
        return None
    return axes[-1][1] if axes else 1
