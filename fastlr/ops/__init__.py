"""The ops: their table (dispatch), and fast plain torch."""

from __future__ import annotations

from fastlr.ops.dispatch import (
    TABLE,
    backend_for,
    comparing,
    get,
    has_triton,
    images_agree,
    noting_launches,
    run,
    using,
    with_kernels,
)

__all__ = [
    "TABLE",
    "backend_for",
    "comparing",
    "get",
    "has_triton",
    "images_agree",
    "noting_launches",
    "run",
    "using",
    "with_kernels",
]
