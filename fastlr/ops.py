"""One table: op -> backend -> function. The reference is the definition; the other backends are tested against it.

Backends: ``reference`` (fastlr.reference, the definition), ``torch`` (fast plain torch, fastlr.torch_ops), ``triton``
(kernels/). Functions are imported on first use, so that importing fastlr never imports triton.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module

TABLE: dict[str, dict[str, str]] = {}


def register(name: str, **backends: str) -> None:
    """Add an op; each backend is ``"module:function"`` with the same signature as the reference."""
    TABLE[name] = backends


@cache
def get(name: str, backend: str) -> Callable:
    """Return the implementation of op ``name`` on ``backend`` (KeyError if there is none)."""
    module, function = TABLE[name][backend].split(":")
    return getattr(import_module(module), function)


def backends(name: str) -> tuple[str, ...]:
    """Return the backends that implement op ``name``."""
    return tuple(TABLE[name])


register("shape_images", reference="fastlr.reference.images:shape_images", triton="fastlr.kernels.shape_images:shape_images")
