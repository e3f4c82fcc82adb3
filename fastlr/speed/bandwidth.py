"""The two ceilings of a machine, measured: bytes a second of a large copy, operations a second of a large product."""

from __future__ import annotations

from typing import Any

import torch

from fastlr.speed.clock import Timer, cache_bytes, spread


def copy_bandwidth(device: torch.device, timer: Timer, *, size: int | None = None, repeats: int = 50) -> dict[str, Any]:
    """Bytes read plus bytes written, a second, of a copy from one place of the device's memory to another.

    Args:
        device: whose memory.
        timer: its clock.
        size: bytes copied at once; default 1 GiB on a GPU, 64 MiB on a CPU.
        repeats: how often; the median counts.

    Returns:
        bytes_per_second with quantiles, seconds with quantiles, bytes (moved by one copy) and how it was timed.
    """
    size = size or ((1 << 30) if device.type == "cuda" else (64 << 20))
    pairs = max(2, -(-3 * cache_bytes(device) // size))  # a buffer is touched again after several times the cache
    sources = [torch.randn(size // 4, device=device) for _ in range(pairs)]
    targets = [torch.empty_like(source) for source in sources]
    calls = [lambda a=a, b=b: b.copy_(a) for a, b in zip(sources, targets, strict=True)]
    seconds = timer.seconds(calls, repeats)
    if not all(torch.equal(a, b) for a, b in zip(sources, targets, strict=True)):
        raise RuntimeError("a copy did not arrive")
    moved = 2 * 4 * (size // 4)
    rates = spread([moved / s for s in seconds], "bytes_per_second")
    return {**spread(seconds), **rates, "bytes": moved, "how": timer.how}


def matmul_rate(
    device: torch.device, timer: Timer, dtype: torch.dtype, *, size: int | None = None, repeats: int = 20
) -> dict[str, Any]:
    """Floating-point operations a second of a product of square matrices of random numbers, by torch.

    Args:
        device: where.
        timer: its clock.
        dtype: of the matrices.
        size: rows and columns; default 8192 on a GPU, 512 on a CPU.
        repeats: how often; the median counts.
    """
    size = size or (8192 if device.type == "cuda" else 512)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    seconds = timer.seconds([lambda: a @ b], repeats)
    operations = 2 * size**3
    rates = spread([operations / s for s in seconds], "operations_per_second")
    return {**spread(seconds), **rates, "operations": operations, "dtype": str(dtype).removeprefix("torch.")}
