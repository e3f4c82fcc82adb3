"""The table of the ops: op -> backend -> function.

The reference is the definition; the other backends are tested against it.

Backends: ``reference`` (fastlr.ops.reference, the definition), ``torch`` (fast plain torch,
fastlr.ops), ``triton`` (kernels/). Functions are imported on first use, so that importing fastlr
never imports triton. A kernel may return NotImplemented for a case that it does not cover: then
plain torch serves. So it does where a kernel disagrees with it at its first call of a kind, as
which every new compiled variant counts (fastlr.ops.kernel_checks).
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

from fastlr.errors import FastlrWarning
from fastlr.ops import kernel_checks
from fastlr.ops.deferred_checks import waiting

_OPS: dict[str, tuple[str, str | None, str | None, tuple[int, ...]]] = {
    # modules of the reference, of plain torch and of the kernel; arguments that have samples, along
    # axis 0
    "shape_images": ("ops.shape_images", None, "kernels.shape_images", ()),
    "shape_images_from": ("ops.shape_images", None, "kernels.shape_images", ()),
    "shape_images_at": ("ops.shape_images", None, "kernels.shape_images", (0,)),
    "linear_sq_norms": ("ops.reference.norms", "ops.linear", "kernels.linear_norms", (0, 1)),
    "column_sq_norms": ("ops.reference.norms", "ops.linear", None, (0, 1)),
    "dense_sq_norms": ("ops.reference.norms", "ops.linear", "kernels.row_norms", (0,)),
    "conv_sq_norms": ("ops.reference.norms", "ops.convolution", "kernels.conv_norms", (0, 1)),
    "conv_grads": ("ops.reference.norms", "ops.convolution", None, (0, 1)),
    "embedding_sq_norms": ("ops.reference.norms", "ops.linear", "kernels.embedding_norms", (0, 1)),
    "channel_sums": ("ops.reference.norms", "ops.linear", "kernels.channel_sums", (0, 1, 2)),
    "layer_norm_sums": (
        "ops.reference.norms",
        "ops.linear",
        "kernels.layer_norm_sums",
        (0, 1, 2, 3),
    ),
    "rms_norm_sums": ("ops.reference.norms", "ops.linear", "kernels.layer_norm_sums", (0, 1, 2)),
    "broadcast_sums": ("ops.reference.norms", "ops.linear", "kernels.broadcast_sums", (0, 1)),
    "categorical_root_cotangent": (
        "ops.reference.fisher",
        "ops.fisher",
        "kernels.fisher_root",
        (0, 1),
    ),
    "fold_weights": ("ops.reference.folded", "ops.folded", "kernels.fold_weights", ()),
    "folded_conv": ("ops.reference.folded", "ops.folded", "kernels.folded", (0, 5, 7)),
    "activation_grad": ("ops.reference.folded", "ops.folded", None, (0, 1)),
    "gate_grad": ("ops.reference.folded", "ops.folded", None, (0, 1, 2)),
    "folded_conv_sq_norms": ("ops.reference.folded", "ops.folded", "kernels.conv_norms", (0, 1, 5)),
    "folded_conv_backward": (
        "ops.reference.folded",
        "ops.folded",
        "kernels.folded",
        (0, 1, 2, 9, 12, 13, 14),
    ),
}
TABLE: dict[str, dict[str, str]] = {
    name: {
        backend: f"fastlr.{module}"
        for backend, module in zip(("reference", "torch", "triton"), modules)
        if module
    }
    for name, (*modules, _) in _OPS.items()
}
SAMPLES: dict[str, tuple[int, ...]] = {name: samples for name, (*_, samples) in _OPS.items()}


@cache
def get(name: str, backend: str) -> Callable[..., Any]:
    """Return the function that implements op ``name`` on ``backend``.

    It is the function of that name in the backend's module (KeyError if there is none).
    """
    return getattr(import_module(TABLE[name][backend]), name)


def backends(name: str) -> tuple[str, ...]:
    """Return the backends that implement op ``name``."""
    return tuple(TABLE[name])


def twin(name: str) -> Callable[..., Any]:
    """Return the function that serves op ``name`` where its kernel does not.

    It is plain torch, or else the definition.
    """
    return get(name, "torch" if "torch" in TABLE[name] else "reference")


def backend_for(*args: Any) -> str:
    """The backend that an op on these arguments is first asked of."""
    return _forced or ("triton" if _on_gpu(args) and has_triton() else "torch")


def run(name: str, *args: Any) -> Any:
    """Run op ``name`` by its Triton kernel on a GPU, else in plain torch.

    Plain torch serves also where no kernel covers the case.
    """
    chosen = backend_for(*args)
    if chosen in TABLE[name] and chosen != "torch" and not _by_twins:
        result = get(name, chosen)(*args) if _forced and not _checked else _by_kernel(name, args)
        if result is not NotImplemented:
            return result
    return get(name, "torch")(*args)


_forced: str | None = (
    None  # of the process, not of a context: the backward pass on a GPU runs in another thread
)
_by_twins = False  # whether plain torch serves all calls of the backend that is forced
_checked = False  # whether a kernel that is forced is held to plain torch all the same
_warned: set[str] = set()  # the ops that a warning has named as not compiled
_serves: dict[
    tuple, bool
] = {}  # call -> whether its kernel serves; what is not here has not been looked at
_comparisons = kernel_checks.Comparisons()
MOST_CALLS = 1 << 16  # kept in mind


def switched_off() -> list[list[str]]:
    """Return the kernels that were found to disagree with plain torch in this process.

    A sorted list of [op, signature], for JSON.
    """
    return _comparisons.switched_off()


def switch_off(kernels: list[list[str]]) -> None:
    """Leave to plain torch what `switched_off` has given, in another process perhaps."""
    for name, signature in kernels:
        _comparisons.switch_off(name, signature)
    _serves.clear()


def _by_kernel(name: str, args: tuple[Any, ...]) -> Any:
    """Return the kernel's result, or NotImplemented where plain torch serves.

    The first call of a kind is compared with plain torch.
    """
    call = _call(name, args)
    if call in _serves:
        return _launched(name, args, call) if _serves[call] else NotImplemented
    kind = kernel_checks.kind_of_call(_launcher(name), args, SAMPLES[name])
    if _comparisons.off(name, kind):
        return _note(call, False)
    known = _comparisons.known(name, kind, args)
    if not known and (not waiting() or _capturing()):
        return NotImplemented  # nothing can be compared now
    result = _launched(name, args, call)
    if result is NotImplemented:
        return _note(call, False)
    agrees = known or _comparisons.agrees(
        name, kind, get(name, "triton"), twin(name), args, SAMPLES[name], result
    )
    if agrees is not None:  # else memory did not suffice: next time
        _note(call, agrees)
    return NotImplemented if agrees is False else result


def _launched(name: str, args: tuple[Any, ...], call: tuple) -> Any:
    """Return the kernel's result, or NotImplemented where Triton cannot compile it.

    Then plain torch serves this call from now on.
    """
    try:
        return get(name, "triton")(*args)
    except Exception as error:
        if _forced or not _is_compilers(error):
            raise
        _warn_uncompiled(name, error)
        return _note(call, False)


def _launcher(name: str) -> Callable[..., Any] | None:
    """The function that launches the kernel of an op; None without Triton."""
    return getattr(import_module(TABLE[name]["triton"]), name) if find_spec("triton") else None


def images_agree(device: torch.device, options: dict[str, Any]) -> bool:
    """Return True if the kernels of shape images give every bit of the definition.

    They are compared once for these options.
    """
    call = (
        str(device),
        repr({name: value for name, value in options.items() if name not in ("table", "seed")}),
    )
    if call not in _serves:
        if not waiting():
            return False
        # High words are compared too.
        start = torch.full((1,), (1 << 32) - 2, dtype=torch.int64, device=device)
        index = start + torch.arange(
            max(1, min(4, kernel_checks.ELEMENTS // prod(options["size"]))), device=device
        )
        right = True
        for name, args in {
            "shape_images_from": (start, len(index)),
            "shape_images_at": (index,),
        }.items():
            kernel, define = (
                partial(get(name, backend), **options) for backend in ("triton", "reference")
            )
            off = _comparisons.off(name, call[1])
            right &= not off and bool(
                _comparisons.agrees(
                    name, call[1], kernel, define, args, SAMPLES[name], kernel(*args)
                )
            )
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
    """Return all that the choice of a call's kernel depends on.

    That is the op, sizes, strides, dtypes, the device, whether memory is aligned, and options.
    """
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
    """Return True if the error says that Triton could not compile or load a kernel.

    Nothing has run then. Wrong kernels are not caught.
    """
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    in_message = isinstance(error, RuntimeError) and any(
        text in str(error) for text in _COMPILER_SAYS
    )
    return in_message or isinstance(
        error, (CompilationError, OutOfResources, PTXASError, CalledProcessError)
    )


_COMPILER_SAYS = (
    "PassManager::run failed",
    "Failed to find C compiler",
    "failed to translate module to LLVM IR",
)


def _warn_uncompiled(name: str, error: Exception) -> None:
    if name in _warned:
        return
    _warned.add(name)
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # Of the code that launches a kernel.
    built = "C compiler" in str(error) or isinstance(error, CalledProcessError)
    remedy = "install gcc and Python's headers, or set CC" if built else "please report it"
    warnings.warn(
        f"{name}: Triton could not compile its kernel for this call ({lines[-1][:200]}); plain "
        f"torch serves, slower and right. Remedy: {remedy} (`fastlr doctor` shows the versions).",
        FastlrWarning,
        stacklevel=4,
    )


@contextmanager
def using(backend: str | None, *, checked: bool = False, twins: bool = False) -> Iterator[None]:
    """Run ops on this backend where it has them, for tests and benchmarks.

    ``None``: the backend goes by the device, as usual.

    ``checked``: kernels that are asked for by name are held to plain torch all the same. ``twins``:
    models run in the blocks that this backend has, and plain torch serves them.
    """
    global _forced, _checked, _by_twins
    before = _forced, _checked, _by_twins
    _forced, _checked, _by_twins = backend, checked, twins
    try:
        yield
    finally:
        _forced, _checked, _by_twins = before


def _on_gpu(args: tuple[Any, ...]) -> bool:
    return any(isinstance(a, Tensor) and a.is_cuda for a in args)


@cache
def has_triton() -> bool:
    """Return True if Triton is installed."""
    return find_spec("triton") is not None
