"""One table: op -> backend -> function. The reference is the definition; the other backends are tested against it.

Backends: ``reference`` (fastlr.reference, the definition), ``torch`` (fast plain torch, fastlr.torch_*), ``triton``
(kernels/). Functions are imported on first use, so that importing fastlr never imports triton. A kernel may return
NotImplemented for a case that it does not cover: then plain torch serves. So it does where a kernel disagrees with it at
its first call of a kind (fastlr.kernel_checks).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from math import prod
from subprocess import CalledProcessError
from typing import Any

import torch
from torch import Tensor

from fastlr import kernel_checks
from fastlr.checks import waiting
from fastlr.errors import FastlrWarning

_OPS: dict[str, tuple[str, str | None, str | None, tuple[int, ...]]] = {
    # modules of the reference, of plain torch and of the kernel; arguments that have samples, along axis 0
    "shape_images": ("images", None, "shape_images", ()),
    "shape_images_from": ("images", None, "shape_images", ()),
    "shape_images_at": ("images", None, "shape_images", (0,)),
    "linear_sq_norms": ("norms", "ops", "linear_norms", (0, 1)),
    "conv_sq_norms": ("norms", "conv", "conv_norms", (0, 1)),
    "conv_grads": ("norms", "conv", None, (0, 1)),
    "embedding_sq_norms": ("norms", "ops", "embedding_norms", (0, 1)),
    "channel_sums": ("norms", "ops", "channel_sums", (0, 1, 2)),
    "layer_norm_sums": ("norms", "ops", "layer_norm_sums", (0, 1, 2, 3)),
    "rms_norm_sums": ("norms", "ops", "layer_norm_sums", (0, 1, 2)),
    "broadcast_sums": ("norms", "ops", "broadcast_sums", (0, 1)),
    "categorical_root_cotangent": ("predictive", "predictive", "fisher_root", (0, 1)),
    "fold_weights": ("folded", "folded", "fold_weights", ()),
    "folded_conv": ("folded", "folded", "folded", (0, 8)),
    "activation_grad": ("folded", "folded", "activations", (0, 1)),
    "gate_grad": ("folded", "folded", "gate", (0, 1, 2)),
    "folded_conv_moments": ("folded", "folded", "conv_norms", (0, 1, 8)),
    "folded_conv_backward": ("folded", "folded", "folded", (0, 1, 2, 12)),
}
_MODULES = {"reference": "fastlr.reference.", "torch": "fastlr.torch_", "triton": "fastlr.kernels."}
TABLE: dict[str, dict[str, str]] = {
    name: {backend: where + module for (backend, where), module in zip(_MODULES.items(), modules) if module}
    for name, (*modules, _) in _OPS.items()
}
SAMPLES: dict[str, tuple[int, ...]] = {name: samples for name, (*_, samples) in _OPS.items()}


@cache
def get(name: str, backend: str) -> Callable[..., Any]:
    """Return op ``name`` on ``backend``: the function of that name in the backend's module (KeyError if there is none)."""
    return getattr(import_module(TABLE[name][backend]), name)


def backends(name: str) -> tuple[str, ...]:
    """Return the backends that implement op ``name``."""
    return tuple(TABLE[name])


def twin(name: str) -> Callable[..., Any]:
    """What serves where the kernel of op ``name`` does not: plain torch, or else the definition."""
    return get(name, "torch" if "torch" in TABLE[name] else "reference")


def backend_for(*args: Any) -> str:
    """The backend that an op on these arguments is first asked of."""
    return _forced or ("triton" if _on_gpu(args) and has_triton() else "torch")


def run(name: str, *args: Any) -> Any:
    """Run op ``name``: by its Triton kernel on a GPU, where there is one that covers the case, else in plain torch."""
    chosen = backend_for(*args)
    if chosen in TABLE[name] and chosen != "torch":
        result = get(name, chosen)(*args) if _forced and not _checked else _by_kernel(name, args)
        if result is not NotImplemented:
            return result
    return get(name, "torch")(*args)


_forced: str | None = None  # of the process, not of a context: the backward pass on a GPU runs in another thread
_checked = False  # whether a kernel that is forced is held to plain torch all the same
_said: set[str] = set()  # the ops that a warning has named as not compiled
_serves: dict[tuple, bool] = {}  # call -> whether its kernel serves; what is not here has not been looked at
_held = kernel_checks.Held()
MOST_CALLS = 1 << 16  # kept in mind


def switched_off() -> list[list[str]]:
    """The kernels that were found to disagree with plain torch in this process: [op, signature], sorted; for JSON."""
    return _held.switched_off()


def switch_off(kernels: list[list[str]]) -> None:
    """Leave to plain torch what `switched_off` has given, in another process perhaps."""
    for name, signature in kernels:
        _held.switch_off(name, signature)
    _serves.clear()


def _by_kernel(name: str, args: tuple[Any, ...]) -> Any:
    """The kernel's result, or NotImplemented where plain torch serves; the first call of a kind is compared."""
    call = _call(name, args)
    serves = _serves.get(call)
    if serves is False:
        return NotImplemented
    kind, known = "", bool(serves)
    if not known:
        kind = kernel_checks.signature(args, SAMPLES[name])
        if _held.off(name, kind):
            return _note(call, False)
        known = _held.known(name, kind, args)
        if not known and (not waiting() or _capturing()):
            return NotImplemented  # nothing can be compared now
    kernel = get(name, "triton")
    try:
        result = kernel(*args)
    except Exception as error:
        if _forced or not _is_compilers(error):
            raise
        _say_uncompiled(name, error)
        return _note(call, False)
    if serves or result is NotImplemented:
        return result if serves else _note(call, False)
    agrees = known or _held.agrees(name, kind, kernel, twin(name), args, SAMPLES[name], result)
    if agrees is not None:  # else memory did not suffice: next time
        _note(call, agrees)
    return NotImplemented if agrees is False else result


def images_agree(device: torch.device, options: dict[str, Any]) -> bool:
    """Whether the kernels of shape images give every bit of the definition with these options; compared once."""
    call = (str(device), repr({name: value for name, value in options.items() if name not in ("table", "seed")}))
    if call not in _serves:
        if not waiting():
            return False
        first = torch.full((1,), (1 << 32) - 2, dtype=torch.int64, device=device)  # high words are compared too
        index = first + torch.arange(max(1, min(4, kernel_checks.ELEMENTS // prod(options["size"]))), device=device)
        right = True
        for name, args in {"shape_images_from": (first, len(index)), "shape_images_at": (index,)}.items():
            kernel, define = (partial(get(name, backend), **options) for backend in ("triton", "reference"))
            off = _held.off(name, call[1])
            right &= not off and bool(_held.agrees(name, call[1], kernel, define, args, SAMPLES[name], kernel(*args)))
        _note(call, right)
    return _serves[call]


def _note(call: tuple, serves: bool) -> Any:
    if len(_serves) >= MOST_CALLS:
        _serves.clear()
    _serves[call] = serves
    return NotImplemented


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _call(name: str, args: tuple[Any, ...]) -> tuple:
    """What a call's kernel goes by: the op, sizes, strides, dtypes, the device, whether memory is aligned, and options."""
    parts: list[Any] = [name]
    for a in args:
        if isinstance(a, Tensor):
            parts += (a.dtype, a.shape, a.stride(), a.data_ptr() & 15, a.get_device())
        elif type(a) is list:
            parts.append(tuple(a))
        elif type(a) is int:  # a seed: kernels know of it what they know of every number
            parts.append(kernel_checks.divisor(a))
        elif type(a) is not float:
            parts.append(a)
    return tuple(parts)


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
def using(backend: str | None, *, checked: bool = False) -> Iterator[None]:
    """Run ops on this backend where it has them (``None``: by device, as usual), for tests and benchmarks.

    ``checked``: kernels that are asked for by name are held to plain torch all the same.
    """
    global _forced, _checked
    before = _forced, _checked
    _forced, _checked = backend, checked
    try:
        yield
    finally:
        _forced, _checked = before


def _on_gpu(args: tuple[Any, ...]) -> bool:
    return any(isinstance(a, Tensor) and a.is_cuda for a in args)


@cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None
