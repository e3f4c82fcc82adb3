"""Shared by all launches: dtypes, the device, workspaces, strides and hints on sizes.

Hints are what the compiler may know of sizes. Every kernel is launched by `launch`, the one place
that knows which compiled variant a launch needs (`asked`).
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

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
    note = _noted.note
    if note is None:
        kernel[(programs,)](*args, **constants, **FUSED)
    else:
        note(kernel, args, constants)


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


@contextmanager
def asked() -> Iterator[list[str]]:
    """Within it nothing is launched in this thread.

    The list is of the compiled variants that launches would need.
    """
    variants = list[str]()
    with noting(lambda *launch: variants.append(variant(*launch))):
        yield variants


class Parameter(NamedTuple):
    """What the compiler may know of an argument of a kernel."""

    name: str
    constant: bool
    specialised: bool  # a number: whether it is 1 or a multiple of 16
    aligned: bool  # if so, whether it is a multiple of 16


_parameters: dict[Any, list[Parameter]] = {}  # function -> its parameters


def parameters(kernel: Any) -> list[Parameter]:
    """Return the parameters of a kernel, compiled or interpreted."""
    function = kernel.fn
    if function not in _parameters:
        numbers, units = (
            _declared(kernel, f"do_not_specialize{end}") for end in ("", "_on_alignment")
        )
        _parameters[function] = [
            Parameter(
                name, "constexpr" in str(given.annotation), name not in numbers, name not in units
            )
            for name, given in inspect.signature(function).parameters.items()
        ]
    return _parameters[function]


def _declared(kernel: Any, option: str) -> tuple[str, ...]:
    """The names given for an option of `triton.jit`.

    None where an interpreter's version does not tell: variants are finer then.
    """
    given = getattr(kernel, option, None) or getattr(kernel, "kwargs", {}).get(option)
    return tuple(given or ())


def variant(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> str:
    """Return the compiled variant that a launch needs, the same text in every process.

    Triton compiles a kernel anew for other types of arguments, other constants and options, for
    numbers that are 1 or multiples of 16, for numbers that need 64 bits, and for memory that is not
    aligned to 16 bytes.
    """
    options, values = dict(constants), list(args)
    told = []
    for parameter in parameters(kernel):
        value = options.pop(parameter.name) if parameter.name in options else values.pop(0)
        told.append(
            f"{parameter.name}={repr(value) if parameter.constant else _seen_of(value, parameter)}"
        )
    told += [f"{name}={value!r}" for name, value in sorted(options.items())]
    return f"{kernel.fn.__name__}({', '.join(told)})"


def _seen_of(value: Any, parameter: Parameter) -> str:
    """All that the compiler sees of an argument that is no constant."""
    if isinstance(value, Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return f"*{kind}" if value.data_ptr() % 16 == 0 else f"*{kind} unaligned"
    if isinstance(value, int) and not isinstance(value, bool):
        if -INT32 <= value < INT32:
            width = "i32"
        else:
            width = "i64" if value < 1 << 63 else "u64"
        if parameter.specialised and value == 1:
            return f"{width} 1"
        aligned = parameter.specialised and parameter.aligned and value % 16 == 0
        return f"{width}%16" if aligned else width
    return repr(value) if value is None else type(value).__name__


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
