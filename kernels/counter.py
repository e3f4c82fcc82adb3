"""Philox4x32-10 in Triton, for kernels to share: the same words as ``fastlr.ops.philox``."""

from __future__ import annotations

import triton
import triton.language as tl

if hasattr(tl, "mul"):

    @triton.jit
    def product(x, y):
        """Multiply modulo 2^32."""
        return tl.mul(x, y, sanitize_overflow=False)

else:  # Triton 3.3

    @triton.jit
    def product(x, y):
        """Multiply modulo 2^32; TRITON_DEBUG=1 refuses what wraps around."""
        return x * y


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Return four random words for each counter (c0, c1, c2, c3) under the key (k0, k1).

    All are blocks of uint32 of one shape.
    """
    for _ in tl.static_range(10):
        old_c0, old_c2 = c0, c2
        c0 = tl.umulhi(old_c2, tl.full(old_c2.shape, 0xCD9E8D57, tl.uint32)) ^ c1 ^ k0
        c2 = tl.umulhi(old_c0, tl.full(old_c0.shape, 0xD2511F53, tl.uint32)) ^ c3 ^ k1
        c1 = product(old_c2, tl.full(old_c2.shape, 0xCD9E8D57, tl.uint32))
        c3 = product(old_c0, tl.full(old_c0.shape, 0xD2511F53, tl.uint32))
        k0 = tl.add(k0, tl.full(k0.shape, 0x9E3779B9, tl.uint32), sanitize_overflow=False)
        k1 = tl.add(k1, tl.full(k1.shape, 0xBB67AE85, tl.uint32), sanitize_overflow=False)
    return c0, c1, c2, c3


def halves(value: int) -> tuple[int, int]:
    """Return the low and high 32 bits of an unsigned 64-bit integer as int32.

    A kernel then has one variant for all values.
    """
    low, high = value & 0xFFFFFFFF, value >> 32
    return low - ((low >> 31) << 32), high - ((high >> 31) << 32)
