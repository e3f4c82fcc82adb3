"""What the kernels of the folded path share: checks, memory formats, and the end of sums that were split.

Where a sample's weight gradient M is added up by several programs, each writes its part to a workspace [B, S, K, O]
(fp32; K weights an output channel); ``finish_moments_kernel`` adds the parts in order and squares. Traffic: the parts are
written and read once, 8 S K O bytes a sample; the launchers split only where that is small against the activations.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlr.kernels.launching import DTYPES, INT32, on_device, workspace

CHANNELS_A_PROGRAM, WEIGHTS_A_STEP = 32, 32


@triton.jit
def finish_moments_kernel(
    parts, weight, scale, squares, inner, parts_sums, sums, splits, outputs, weights, weight_output,
    CHANNELS: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Moments of CHANNELS channels of one sample from parts [B, S, K, O] of M and parts [B, S, O] of the sums of g."""
    tiles = tl.cdiv(outputs, CHANNELS)
    tile, sample = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    output = tile * CHANNELS + tl.arange(0, CHANNELS)
    exists = output < outputs
    parts += sample * splits * weights * outputs
    parts_sums += sample * splits * outputs
    square = tl.zeros([WEIGHTS, CHANNELS], tl.float32)
    along = tl.zeros([WEIGHTS, CHANNELS], tl.float32)
    for start in range(0, weights, WEIGHTS):
        k = start + tl.arange(0, WEIGHTS)
        mask = (k < weights)[:, None] & exists[None, :]
        product = tl.zeros([WEIGHTS, CHANNELS], tl.float32)
        for part in range(0, splits):
            at = (part * weights + k)[:, None] * outputs + output[None, :]
            product += tl.load(parts + at, mask, other=0.0)
        w = tl.load(weight + output[None, :] * weight_output + k[:, None], mask, other=0.0).to(tl.float32)
        along += w * product
        square += product * product
    total = tl.zeros([CHANNELS], tl.float32)
    for part in range(0, splits):
        total += tl.load(parts_sums + part * outputs + output, exists, other=0.0)
    s = tl.load(scale + output, exists, other=0.0).to(tl.float32)
    tl.store(squares + tl.program_id(0), tl.sum(tl.sum(square, 0) * s * s))
    tl.store(inner + sample * outputs + output, tl.sum(along, 0), exists)
    tl.store(sums + sample * outputs + output, total, exists)


def finish_moments(parts: Tensor, parts_sums: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(squared norms [B] float64, <W, M> [B, O], sums [B, O]) from parts [B, S, K, O] and [B, S, O]."""
    count, splits, weights, outputs = parts.shape
    tiles = triton.cdiv(outputs, CHANNELS_A_PROGRAM)
    squares = workspace(count, tiles, device=parts.device)
    inner, sums = (workspace(count, outputs, device=parts.device) for _ in range(2))
    with on_device(parts):
        finish_moments_kernel[(count * tiles,)](
            parts, weight, scale, squares, inner, parts_sums, sums, splits, outputs, weights, weights,
            CHANNELS=CHANNELS_A_PROGRAM, WEIGHTS=WEIGHTS_A_STEP, num_warps=4,
        )  # fmt: skip
    return squares.sum(1, dtype=torch.float64), inner, sums


def covered(*tensors: Tensor) -> bool:
    """Whether the kernels take these: one dtype of theirs, 4 axes, not empty, offsets within a sample below 2^31."""
    dtype = tensors[0].dtype
    return dtype in DTYPES and all(
        t.dtype == dtype
        and t.ndim == 4
        and t.numel() > 0
        and min(t.stride()) >= 0
        and sum((n - 1) * s for n, s in zip(t.shape[1:], t.stride()[1:], strict=True)) < INT32
        for t in tensors
    )


def channels_last(t: Tensor) -> bool:
    """Whether the channels of [B, C, H, W] are next to each other in memory (and not the columns)."""
    return t.stride(1) == 1 and t.shape[1] > 1


def empty_output(x: Tensor, channels: int, spatial: Sequence[int]) -> Tensor:
    """Space for [B, channels, *spatial] in the dtype and the memory format of ``x``."""
    memory_format = torch.channels_last if channels_last(x) else torch.contiguous_format
    return torch.empty(len(x), channels, *spatial, dtype=x.dtype, device=x.device, memory_format=memory_format)


def like(t: Tensor, other: Tensor) -> Tensor:
    """The values of ``t`` with the strides of ``other``: itself if it has them."""
    return t if t.stride() == other.stride() else torch.empty_like(other).copy_(t)


def alignment(dtype: torch.dtype, last: bool, *tensors: Tensor) -> int:
    """Elements that a vector load may take: 16 bytes where sizes and strides allow it for all of [B, C, H, W], else 1."""
    wide = 4 if dtype == torch.float32 else 8
    for t in tensors:
        size = t.shape[1] if last else t.shape[2] * t.shape[3]
        inner = 1 if last else 3
        if size % wide or t.stride(inner) != 1:
            return 1
        others = [t.stride(i) for i in range(4) if i != inner and t.shape[i] > 1 and (last or i != 2)]
        if any(s % wide for s in others):
            return 1
    return wide


def finish_cases() -> list[tuple]:
    """Variants of the kernel of this file to compile ahead of time in the tests."""
    kinds = dict.fromkeys(("parts", "scale", "squares", "inner", "parts_sums", "sums"), "*fp32")
    blocks = {"CHANNELS": CHANNELS_A_PROGRAM, "WEIGHTS": WEIGHTS_A_STEP}
    names = [name for name in finish_moments_kernel.arg_names if name not in blocks]
    cases = []
    for dtype in ("fp32", "bf16"):
        signature = {name: kinds.get(name, "i32") for name in names} | {"weight": f"*{dtype}"}
        options = {"num_warps": 4, "divisible": "pointers"}
        cases.append((f"finish[{dtype}]", finish_moments_kernel, signature, blocks, options))
    return cases
