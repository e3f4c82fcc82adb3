"""``fastlr doctor --kernels``: a self-test of the Triton kernels.

Small models are measured at three odd sizes in each dtype, by kernels that are compared with plain
torch as in every first call (fastlr.ops.dispatch).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import fastlr
from fastlr import ops
from fastlr.estimator.compilation import side_by_side
from fastlr.ops.process_state import warnings_ignored

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = ((3, 9, 11), (2, 12, 7), (5, 8, 13))  # samples, height, width


def outcomes(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, list[float], str]]:
    """Compare every kernel with plain torch in one dtype.

    Returns:
        For each op its name, deviations in parts of what is allowed, and why it is wrong or does
        not run ("" if it is right).
    """
    with warnings_ignored():
        if device.type == "cuda":
            with suppress(Exception):  # what does not compile here is found below
                side_by_side(partial(_note_all, device, dtype), device)
        with ops.comparing() as trust:
            _run_all(device, dtype)
    for name in ops.with_kernels():
        shares = [share for key, share in trust.compared.items() if key[0] == name]
        yield name, shares, trust.switched_off.get(name, "")


def _note_all(device: torch.device, dtype: torch.dtype, note: Callable[..., None]) -> None:
    with ops.noting_launches(note):
        _run_all(device, dtype)


def _run_all(device: torch.device, dtype: torch.dtype) -> None:
    """Run every kernel at each of the sizes."""
    for samples, height, width in SIZES:
        generator = torch.Generator().manual_seed(height)
        pixels = torch.rand(samples, 3, height, width, generator=generator)
        words = torch.randint(9, (samples, height * width), generator=generator)
        _measure(_images(), pixels, device, dtype)
        _measure(_images(), pixels.contiguous(memory_format=torch.channels_last), device, dtype)
        _measure(_tokens(), words, device, dtype)
        _measure(_tokens(), words[:, :height], device, dtype)
        _call_alone(samples, height, width, device, dtype)
        _make_images(samples, height, width, device, dtype)


def _images() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Hardswish()),
        *(nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 24, 1), nn.BatchNorm2d(24), nn.Conv2d(24, 7, 3), nn.GroupNorm(1, 7)),
        *(nn.AdaptiveAvgPool2d((5, 3)), nn.Flatten(), nn.Linear(7 * 5 * 3, 10)),
    )


def _tokens() -> nn.Module:
    embedding = (nn.Embedding(9, 33), nn.LayerNorm(33), nn.RMSNorm(33))
    return nn.Sequential(*embedding, nn.Linear(33, 131), nn.ReLU(), nn.Linear(131, 130))


def _measure(model: nn.Module, x: Tensor, device: torch.device, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for t in model.eval().state_dict().values():
        if t.is_floating_point():
            t.uniform_(0.1, 0.9, generator=generator)
    x = x.to(device, dtype) if x.is_floating_point() else x.to(device)

    def cotangent(z: Tensor) -> Any:
        return fastlr.Categorical().cotangent(z, "rademacher", range(len(z)), 0)

    fastlr.per_sample_grad_sq_norms(model.to(device, dtype), x, cotangent)


def _call_alone(
    samples: int, height: int, width: int, device: torch.device, dtype: torch.dtype
) -> None:
    """Run what torch takes apart on some devices: an RMS norm."""
    x, g = torch.rand(2, samples, height, width).to(device, dtype)
    ops.run("rms_norm_sums", x, g, x.float().square().mean(-1, keepdim=True).rsqrt())


def _make_images(
    samples: int, height: int, width: int, device: torch.device, dtype: torch.dtype
) -> None:
    """Make images, over the end of the numbers of 32 bits."""
    size = (3, height, width)
    options = {"size": size, "rectangles": 3, "circles": 4, "seed": 1, "dtype": dtype}
    first = torch.full((1,), (1 << 32) - 2, device=device)
    numbers = first + torch.arange(samples, device=device)
    ops.images_agree("shape_images_from", (first, samples), numbers, options)
    ops.images_agree("shape_images_at", (numbers,), numbers, options)
