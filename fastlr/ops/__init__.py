"""The ops: a table of their backends (dispatch), definitions (reference/) and fast plain torch."""

from __future__ import annotations

from fastlr.ops.dispatch import (
    SAMPLES,
    TABLE,
    backend_for,
    backends,
    compared_anew,
    get,
    has_triton,
    images_agree,
    noting_launches,
    run,
    switch_off,
    switched_off,
    twin,
    using,
)

__all__ = [
    "SAMPLES",
    "TABLE",
    "backend_for",
    "backends",
    "compared_anew",
    "get",
    "has_triton",
    "images_agree",
    "noting_launches",
    "run",
    "switch_off",
    "switched_off",
    "twin",
    "using",
]
