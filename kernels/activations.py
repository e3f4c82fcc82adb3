"""Gradient at the input of an activation in Triton, as ``fastlr.reference.folded.activation_grad``: one pass in fp32.

Elementwise over dense memory, so that every memory format is one case: the two tensors must have the same strides. The
limit is reading two numbers and writing one an element (bf16: 6 bytes).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlr.kernels.activation_functions import act_derivative
from fastlr.kernels.launching import DTYPES, on_device
from fastlr.reference.folded import ACTIVATIONS

BLOCK, WARPS = 1024, 4


@triton.jit
def activation_grad_kernel(out, grad, kept, count, ACT: tl.constexpr, BLOCK: tl.constexpr):
    """One block of elements."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = place < count
    slope = act_derivative(tl.load(kept + place, exists, 0.0).to(tl.float32), ACT)
    value = tl.load(grad + place, exists, 0.0).to(tl.float32)
    if ACT == "relu" or ACT == "relu6":
        value = tl.where(slope != 0, value, 0.0)  # an infinite gradient does not pass a closed gate
    else:
        value *= slope
    tl.store(out + place, value.to(out.dtype.element_ty), exists)


def _dense(t: Tensor) -> bool:
    """Whether the elements fill one piece of memory, each of them once."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(t.stride(), t.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def activation_grad(grad: Tensor, kept: Tensor, act: str) -> Tensor:
    """See fastlr.reference.folded.activation_grad."""
    if act == "none":
        return grad
    order = [[s for s, n in zip(t.stride(), t.shape, strict=True) if n != 1] for t in (grad, kept)]
    fits = grad.shape == kept.shape and order[0] == order[1] and _dense(grad) and 0 < grad.numel() < (1 << 31) - BLOCK
    if not fits or any(t.dtype not in DTYPES for t in (grad, kept)) or act not in ACTIVATIONS:
        return NotImplemented
    out = torch.empty_like(grad)  # of the same strides, as grad is dense
    with on_device(grad):
        activation_grad_kernel[(triton.cdiv(grad.numel(), BLOCK),)](
            out, grad, kept, grad.numel(), ACT=act, BLOCK=BLOCK, num_warps=WARPS
        )
    return out


def compile_cases() -> list[tuple]:
    """Variants to compile ahead of time in the tests: every activation and dtype, and element counts of either kind."""
    cases = []
    pointers = ("out", "grad", "kept")
    for act in (act for act in ACTIVATIONS if act != "none"):
        for dtype in DTYPES.values():
            for aligned in (True, False):
                name = f"activation_grad[{act}, {dtype}{', aligned' * aligned}]"
                signature = {**dict.fromkeys(pointers, f"*{dtype}"), "count": "i32"}
                options = {"num_warps": WARPS, "divisible": (*pointers, "count") if aligned else ()}
                cases.append((name, activation_grad_kernel, signature, {"ACT": act, "BLOCK": BLOCK}, options))
    # Triton turns an argument of 1 into a constant.
    name, kernel, signature, constants, options = cases[-1]
    cases.append((f"{name[:-1]}, one]", kernel, dict.fromkeys(pointers, "*fp16"), {**constants, "count": 1}, options))
    return cases
