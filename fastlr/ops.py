"""One table: op -> backend -> function. The reference is the definition; the other backends are tested against it.

Backends: ``reference`` (fastlr.reference, the definition), ``torch`` (fast plain torch, fastlr.torch_ops), ``triton``
(kernels/). Functions are imported on first use, so that importing fastlr never imports triton.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

TABLE: dict[str, dict[str, str]] = {
    "shape_images": {"reference": "fastlr.reference.images", "triton": "fastlr.kernels.shape_images"},
    "linear_sq_norms": {"reference": "fastlr.reference.norms", "torch": "fastlr.torch_ops"},
    "conv_sq_norms": {"reference": "fastlr.reference.norms", "torch": "fastlr.torch_ops"},
    "conv_grads": {"reference": "fastlr.reference.norms", "torch": "fastlr.torch_ops"},
    "embedding_sq_norms": {"reference": "fastlr.reference.norms", "torch": "fastlr.torch_ops"},
    "channel_sums": {"reference": "fastlr.reference.norms", "torch": "fastlr.torch_ops"},
    "layer_norm_sums": {"reference": "fastlr.reference.norms", "torch": "fastlr.torch_ops"},
}


@cache
def get(name: str, backend: str) -> Callable[..., Any]:
    """Return op ``name`` on ``backend``: the function of that name in the backend's module (KeyError if there is none)."""
    return getattr(import_module(TABLE[name][backend]), name)


def backends(name: str) -> tuple[str, ...]:
    """Return the backends that implement op ``name``."""
    return tuple(TABLE[name])


def run(name: str, *args: Any) -> Any:
    """Run op ``name`` on its fast plain-torch backend, which serves every device."""
    return get(name, "torch")(*args)
