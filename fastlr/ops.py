"""One table: op -> backend -> function. The reference is the definition; the other backends are tested against it.

Backends: ``reference`` (fastlr.reference, the definition), ``torch`` (fast plain torch, fastlr.torch_*), ``triton``
(kernels/). Functions are imported on first use, so that importing fastlr never imports triton. A kernel may return
NotImplemented for a case that it does not cover: then plain torch serves.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from subprocess import CalledProcessError
from typing import Any

from torch import Tensor

from fastlr.errors import FastlrWarning

TABLE: dict[str, dict[str, str]] = {
    "shape_images": {"reference": "fastlr.reference.images", "triton": "fastlr.kernels.shape_images"},
    "shape_images_from": {"reference": "fastlr.reference.images", "triton": "fastlr.kernels.shape_images"},
    "shape_images_at": {"reference": "fastlr.reference.images", "triton": "fastlr.kernels.shape_images"},
    "linear_sq_norms": {
        "reference": "fastlr.reference.norms",
        "torch": "fastlr.torch_ops",
        "triton": "fastlr.kernels.linear_norms",
    },
    "conv_sq_norms": {
        "reference": "fastlr.reference.norms",
        "torch": "fastlr.torch_conv",
        "triton": "fastlr.kernels.conv_norms",
    },
    "conv_grads": {"reference": "fastlr.reference.norms", "torch": "fastlr.torch_conv"},
    "embedding_sq_norms": {
        "reference": "fastlr.reference.norms",
        "torch": "fastlr.torch_ops",
        "triton": "fastlr.kernels.embedding_norms",
    },
    "channel_sums": {
        "reference": "fastlr.reference.norms",
        "torch": "fastlr.torch_ops",
        "triton": "fastlr.kernels.channel_sums",
    },
    "layer_norm_sums": {
        "reference": "fastlr.reference.norms",
        "torch": "fastlr.torch_ops",
        "triton": "fastlr.kernels.layer_norm_sums",
    },
    "rms_norm_sums": {
        "reference": "fastlr.reference.norms",
        "torch": "fastlr.torch_ops",
        "triton": "fastlr.kernels.layer_norm_sums",
    },
    "broadcast_sums": {
        "reference": "fastlr.reference.norms",
        "torch": "fastlr.torch_ops",
        "triton": "fastlr.kernels.broadcast_sums",
    },
    "categorical_root_cotangent": {
        "reference": "fastlr.reference.predictive",
        "torch": "fastlr.torch_predictive",
        "triton": "fastlr.kernels.fisher_root",
    },
    "fold_weights": {
        "reference": "fastlr.reference.folded",
        "torch": "fastlr.torch_folded",
        "triton": "fastlr.kernels.fold_weights",
    },
    "folded_conv": {
        "reference": "fastlr.reference.folded",
        "torch": "fastlr.torch_folded",
        "triton": "fastlr.kernels.folded",
    },
    "activation_grad": {
        "reference": "fastlr.reference.folded",
        "torch": "fastlr.torch_folded",
        "triton": "fastlr.kernels.activations",
    },
    "gate_grad": {
        "reference": "fastlr.reference.folded",
        "torch": "fastlr.torch_folded",
        "triton": "fastlr.kernels.gate",
    },
    "folded_conv_moments": {
        "reference": "fastlr.reference.folded",
        "torch": "fastlr.torch_folded",
        "triton": "fastlr.kernels.conv_norms",
    },
    "folded_conv_backward": {
        "reference": "fastlr.reference.folded",
        "torch": "fastlr.torch_folded",
        "triton": "fastlr.kernels.folded",
    },
}


@cache
def get(name: str, backend: str) -> Callable[..., Any]:
    """Return op ``name`` on ``backend``: the function of that name in the backend's module (KeyError if there is none)."""
    return getattr(import_module(TABLE[name][backend]), name)


def backends(name: str) -> tuple[str, ...]:
    """Return the backends that implement op ``name``."""
    return tuple(TABLE[name])


def backend_for(*args: Any) -> str:
    """The backend that an op on these arguments is first asked of."""
    return _forced or ("triton" if _on_gpu(args) and has_triton() else "torch")


def run(name: str, *args: Any) -> Any:
    """Run op ``name``: by its Triton kernel on a GPU, where there is one that covers the case, else in plain torch."""
    chosen = backend_for(*args)
    if chosen in TABLE[name] and chosen != "torch" and not (_uncompiled and _call(name, args) in _uncompiled):
        try:
            result = get(name, chosen)(*args)
        except Exception as error:
            if _forced or not _is_compilers(error):
                raise
            _uncompiled.add(_call(name, args))
            _say_uncompiled(name, error)
            result = NotImplemented
        if result is not NotImplemented:
            return result
    return get(name, "torch")(*args)


_forced: str | None = None  # of the process, not of a context: the backward pass on a GPU runs in another thread
_uncompiled: set[tuple] = set()  # calls whose kernel Triton could not compile here
_said: set[str] = set()  # the ops that a warning has named


def _call(name: str, args: tuple[Any, ...]) -> tuple:
    """What a kernel is compiled for, roughly: the op, sizes, strides and dtypes, and what is no tensor and no number."""
    rest = [a for a in args if not isinstance(a, (int, float)) or isinstance(a, bool)]
    return name, *[(a.dtype, a.shape, a.stride()) if isinstance(a, Tensor) else repr(a) for a in rest]


def _is_compilers(error: Exception) -> bool:
    """Whether Triton could not compile or load a kernel: nothing has run then. What a kernel does wrong is not caught."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    said = isinstance(error, RuntimeError) and any(text in str(error) for text in _COMPILER_SAYS)
    return said or isinstance(error, (CompilationError, OutOfResources, PTXASError, CalledProcessError))


_COMPILER_SAYS = ("PassManager::run failed", "Failed to find C compiler", "failed to translate module to LLVM IR")


def _say_uncompiled(name: str, error: Exception) -> None:
    if name in _said:
        return
    _said.add(name)
    lines = str(error).strip().splitlines() or [type(error).__name__]
    built = "C compiler" in str(error) or isinstance(error, CalledProcessError)  # of the code that launches a kernel
    remedy = "install gcc and Python's headers, or set CC" if built else "please report it"
    warnings.warn(
        f"{name}: Triton could not compile its kernel for this call ({lines[-1][:200]}); plain torch serves, slower and "
        f"right. Remedy: {remedy} (`fastlr doctor` shows the versions).",
        FastlrWarning,
        stacklevel=3,
    )


@contextmanager
def using(backend: str | None) -> Iterator[None]:
    """Run ops on this backend where it has them (``None``: by device, as usual), for tests and benchmarks."""
    global _forced
    before, _forced = _forced, backend
    try:
        yield
    finally:
        _forced = before


def _on_gpu(args: tuple[Any, ...]) -> bool:
    return any(isinstance(a, Tensor) and a.is_cuda for a in args)


@cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None
