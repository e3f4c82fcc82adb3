"""Triton's interpreter, made right for bfloat16, loops and masks.

Kernels run in it without a GPU, where ``TRITON_INTERPRET=1`` was set before Triton was imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def repair_interpreter() -> None:
    """Repair the interpreter of Triton 3.3 to 3.9 before kernels run in it.

    - ``range()`` over a run-time value makes a Python integer of an array of one element, which
      NumPy 2.4 no longer allows. Kernels need such loops: Triton pipelines the loads of ``range``,
      not of ``while``.
    - Triton 3.9 refuses its own masks where they have come out as integers.
    - bfloat16 is kept as the upper half of a float32's bits, in unsigned integers, and the
      interpreter multiplies, adds and compares those integers, has no constants of it, and cuts
      off in casts what a GPU rounds to the nearest (ties to even).
    """
    from triton.runtime import interpreter

    if getattr(interpreter._patch_lang_tensor, "repaired", False):
        return
    _repair_loops(interpreter)
    builder: Any = interpreter.InterpreterBuilder
    _repair_mask(builder, "create_masked_load", 1)
    _repair_mask(builder, "create_masked_store", 2)
    _repair_bfloat16(interpreter, builder)


def _repair_loops(interpreter: Any) -> None:
    """Let a number of a kernel be the limit of a ``range``."""
    plain = interpreter._patch_lang_tensor

    def patched(tensor: Any, *scope: Any) -> None:
        plain(tensor, *scope)
        assign = scope[0].set_attr if scope else setattr  # Triton 3.3 knows no scope
        assign(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patched.repaired = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = patched


def _repair_mask(builder: Any, name: str, place: int) -> None:
    """Make truth values of the mask that a method of the builder has as argument ``place``."""
    call = getattr(builder, name)

    def with_truth(self: Any, *args: Any) -> Any:
        args[place].data = args[place].data.astype(bool)
        return call(self, *args)

    setattr(builder, name, with_truth)


def _repair_bfloat16(interpreter: Any, builder: Any) -> None:
    """Have operations of bfloat16 computed in float32, and their results rounded."""
    import triton.language as tl

    handle = interpreter.TensorHandle

    def is_bfloat16(a: Any) -> bool:
        return bool(a.dtype.scalar == tl.bfloat16)

    def widened(a: Any) -> Any:
        """Return an operand, in float32 if it is bfloat16."""
        return handle(from_bfloat16(a.data), tl.float32) if is_bfloat16(a) else a

    def rounded(result: Any) -> Any:
        """Return a result of bfloat16 operands; comparisons are truth values already."""
        data = result.data
        return handle(data if data.dtype == bool else to_bfloat16(data), tl.bfloat16)

    def in_float32(name: str, operands: int) -> None:
        """Replace a method of the builder whose first arguments are ``operands`` of one dtype."""
        call: Callable[..., Any] = getattr(builder, name)

        def computed(self: Any, *args: Any) -> Any:
            if not is_bfloat16(args[0]):
                return call(self, *args)
            wide = [widened(a) for a in args[:operands]]
            return rounded(call(self, *wide, *args[operands:]))

        setattr(builder, name, computed)

    for name in ("unary_op", "create_erf", "create_rsqrt"):
        in_float32(name, 1)
    in_float32("binary_op", 2)
    for name in ("create_fma", "create_clampf"):
        in_float32(name, 3)
    product, cast = builder.create_dot, builder.cast_impl

    def create_dot(self: Any, a: Any, b: Any, *args: Any) -> Any:
        return product(self, widened(a), widened(b), *args)

    def cast_impl(self: Any, source: Any, kind: Any) -> Any:
        if kind.scalar != tl.bfloat16:
            return cast(self, widened(source), kind)
        if is_bfloat16(source):
            return source
        return handle(to_bfloat16(source.data.astype(np.float32)), tl.bfloat16)

    def get_bf16(self: Any, value: float) -> Any:
        return handle(to_bfloat16(np.array([value], dtype=np.float32)), tl.bfloat16)

    builder.create_dot, builder.cast_impl, builder.get_bf16 = create_dot, cast_impl, get_bf16


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """Return in float32 what 16 bits hold in bfloat16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Return the 16 bits of the bfloat16 nearest to float32 numbers, of two the even one."""
    bits = np.asarray(values, dtype=np.float32).view(np.uint32)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FFF, nearest).astype(np.uint16)
