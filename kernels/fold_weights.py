"""Fold convolutions and their batch norms into one weight and one bias each, in one launch.

The kernel is Triton's.

See fastlr.ops.folded.fold_weights. A program makes one output channel of one convolution,
which it finds in a table of addresses. It reads the weight once and writes it once in the
activations' dtype (MobileNetV3-Large: 12 MB in, 6 MB out); what counts is that it is one launch for
all of them, not eight for each.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlr.kernels.launching import DTYPES, INT32, launch, on_device

BLOCK, WARPS = 256, 4
ROLES = ("WEIGHT", "BIAS", "GAMMA", "BETA", "MEAN", "VAR")
KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
MOST_TABLES = 1 << 12
# By what is in them. They stay: a captured CUDA graph reads its own at every replay.
_tables: dict[tuple, Tensor] = {}


@triton.jit
def _number(entry, convolutions, o, FIELD: tl.constexpr, KIND: tl.constexpr, other):
    """Number ``o`` at the address in one field of the table; ``other`` where there is none."""
    address = tl.load(entry + FIELD * convolutions)
    return tl.load(address.to(tl.pointer_type(KIND)) + o, address != 0, other).to(tl.float32)


@triton.jit
def fold_weights_kernel(
    table,
    folded,
    numbers,
    convolutions,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    GAMMA: tl.constexpr,
    BETA: tl.constexpr,
    MEAN: tl.constexpr,
    VAR: tl.constexpr,
):
    """Write one output channel to ``folded``, and bias, scale, rstd and shift to ``numbers``.

    ``table`` [14, convolutions], COUNT of them at most: the first program, six addresses, outputs,
    places in ``folded`` and how far apart there are output channels and the inner and outer
    elements of a channel, the number of inner ones, eps.
    """
    program, which = tl.program_id(0), tl.arange(0, COUNT)
    first = tl.load(table + which, which < convolutions, program + 1)
    convolution = tl.sum((first <= program).to(tl.int32)) - 1
    start = tl.load(table + convolution)
    o = program - start
    entry = table + convolution
    outputs, place = (
        tl.load(entry + 7 * convolutions),
        tl.load(entry + 8 * convolutions) + o * tl.load(entry + 9 * convolutions),
    )
    inner_step, outer_step = tl.load(entry + 10 * convolutions), tl.load(entry + 11 * convolutions)
    sizes = tl.load(entry + 12 * convolutions)
    inner, fan_in = (sizes >> 32).to(tl.int32), (sizes & 0xFFFFFFFF).to(tl.int32)
    eps = tl.load(entry + 13 * convolutions).to(tl.float64, bitcast=True).to(tl.float32)

    rstd = tl.rsqrt(_number(entry, convolutions, o, 6, VAR, 0.0) + eps)
    scale = rstd * _number(entry, convolutions, o, 3, GAMMA, 1.0)
    shift = _number(entry, convolutions, o, 2, BIAS, 0.0) - _number(
        entry, convolutions, o, 5, MEAN, 0.0
    )
    numbers += 4 * start + o
    tl.store(numbers, scale * shift + _number(entry, convolutions, o, 4, BETA, 0.0))
    tl.store(numbers + outputs, scale)
    tl.store(numbers + 2 * outputs, rstd)
    tl.store(numbers + 3 * outputs, shift)
    weight = tl.load(entry + convolutions).to(tl.pointer_type(WEIGHT)) + o * fan_in
    for begin in range(0, fan_in, BLOCK):
        element = begin + tl.arange(0, BLOCK)
        value = tl.load(weight + element, element < fan_in, 0.0).to(tl.float32) * scale
        at = place + element % inner * inner_step + element // inner * outer_step
        tl.store(folded + at, value.to(folded.dtype.element_ty), element < fan_in)


def _laid_out(flat: Tensor, weight: Tensor) -> tuple[Tensor, tuple[int, int, int, int]]:
    """Return ``flat`` in the shape of a weight, and the steps of the weight's memory.

    The channels of ``flat`` are last or, for a weight of one input, its taps are first. The steps
    are those of an output channel and of the inner and the outer elements of one; the last number
    says how many inner elements there are.
    """
    outputs, inputs, *kernel = weight.shape
    taps = weight[0, 0].numel()
    if inputs == 1:
        return flat.view(*kernel, outputs).movedim(-1, 0).unsqueeze(1), (1, outputs, 0, taps)
    if weight.ndim != 4:
        return flat.view(weight.shape), (inputs * taps, 1, 0, inputs * taps)
    folded = flat.view(outputs, *kernel, inputs).movedim(-1, 1)
    if weight.is_contiguous():
        return folded, (inputs * taps, inputs, 1, taps)
    return folded, (inputs * taps, 1, 0, inputs * taps)


def fold_weights(
    dtype: torch.dtype,
    eps: tuple[float, ...],
    *tensors: Any,  # six a convolution: [O, C / groups, *kernel], five of [O]
) -> list[tuple[Tensor, Tensor]]:  # of the shape of the weight, [4, O]
    """See fastlr.ops.folded.fold_weights.

    Folded weights have channels last, or taps first where they have one input; the numbers are
    float32. The tensors of one role must have one dtype.
    """
    calls = [tensors[i : i + 6] for i in range(0, len(tensors), 6)]
    kinds = [_dtypes(role) for role in zip(*calls, strict=True)]
    if not _fits(dtype, calls, kinds):
        return NotImplemented
    outputs = [len(weight) for weight, *_ in calls]
    # In one tensor for all, each at a multiple of 64 elements.
    places = [0, *accumulate(-(-weight.numel() // 64) * 64 for weight, *_ in calls)]
    programs = [0, *accumulate(outputs)]
    device = calls[0][0].device
    folded = torch.empty(places[-1], dtype=dtype, device=device)
    numbers = torch.empty(4 * programs[-1], dtype=torch.float32, device=device)
    results, entries = [], []
    for call, number, place, first in zip(calls, eps, places, programs, strict=False):
        weight, count = call[0], len(call[0])
        flat = folded[place : place + weight.numel()]
        shaped, (step, inner_step, outer_step, inner) = _laid_out(flat, weight)
        results.append((shaped, numbers[4 * first : 4 * (first + count)].view(4, count)))
        sizes = inner << 32 | weight[0].numel()
        entry = (first, *map(_address, call), count, place, step, inner_step, outer_step, sizes)
        entries.append((*entry, number))
    table = _table(entries, device)
    if table is None:
        return NotImplemented
    with on_device(folded):
        launch(
            fold_weights_kernel,
            programs[-1],
            table,
            folded,
            numbers,
            len(calls),
            COUNT=triton.next_power_of_2(len(calls)),
            BLOCK=BLOCK,
            **{
                role.upper(): KINDS[next(iter(kind))]
                for role, kind in zip(ROLES, kinds, strict=True)
            },
            num_warps=WARPS,
        )
    return results


def _dtypes(tensors: Iterable[Tensor | None]) -> set[torch.dtype]:
    """Return the dtypes of the tensors of one role; float32 where there are none."""
    return {t.dtype for t in tensors if t is not None} or {torch.float32}


def _fits(dtype: torch.dtype, calls: list[tuple], kinds: list[set[torch.dtype]]) -> bool:
    """Return True if the kernel takes these convolutions: dtypes, memory formats, sizes."""
    if dtype not in DTYPES or any(len(kind) > 1 or not kind <= DTYPES.keys() for kind in kinds):
        return False
    for weight, *numbers in calls:
        last = weight.ndim == 4 and weight.is_contiguous(memory_format=torch.channels_last)
        if not (last or weight.is_contiguous()) or not 0 < weight.numel() < INT32:
            return False
        if not all(t is None or t.is_contiguous() for t in numbers):
            return False
    return True


def _address(t: Tensor | None) -> int:
    """Return where a tensor lies; 0 for none."""
    return 0 if t is None else t.data_ptr()


def _table(entries: list[tuple], device: torch.device) -> Tensor | None:
    """Return the table of these entries on a device, and keep it; None if too many are kept.

    The last number of an entry is written as the bits of a float64.
    """
    key = (device, *entries)
    if key not in _tables:
        if len(_tables) >= MOST_TABLES:
            return None
        whole = torch.tensor([entry[:-1] for entry in entries], dtype=torch.int64)
        last = torch.tensor([entry[-1:] for entry in entries], dtype=torch.float64)
        table = torch.cat([whole, last.view(torch.int64)], 1)
        _tables[key] = table.T.contiguous().to(device)
    return _tables[key]
