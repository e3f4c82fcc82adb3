"""The table of the ops: op -> backend -> function.

The reference is the definition; the other backends are tested against it.

Backends: ``reference`` (fastlr.ops.reference, the definition), ``torch`` (fast plain torch,
fastlr.ops), ``triton`` (kernels/). Functions are imported on first use, so that importing fastlr
never imports triton.

`run` chooses the backend. Plain torch serves wherever a kernel does not, and `_by_kernel` is the
one function that says so, by NotImplemented: the kernel does not cover the call, Triton cannot
compile it, or it is not trusted (fastlr.ops.kernel_checks: it disagreed with plain torch at the
first call of a kind, as which every new compiled variant counts, or cannot be compared now).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from math import prod
from subprocess import CalledProcessError
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastlr.errors import warn
from fastlr.ops import kernel_checks
from fastlr.ops.block import leaves
from fastlr.ops.deferred_checks import may_wait_for_device
from fastlr.ops.kept_comparisons import KeptComparisons
from fastlr.ops.torch_private import tree_flatten, tree_unflatten

_OPS: dict[str, tuple[str, str | None, str | None, tuple[int, ...]]] = {
    # modules of the reference, of plain torch and of the kernel; arguments that have samples, along
    # axis 0 (records: all of their tensors have them)
    "shape_images": ("ops.shape_images", None, "kernels.shape_images", ()),
    "shape_images_from": ("ops.shape_images", None, "kernels.shape_images", ()),
    "shape_images_at": ("ops.shape_images", None, "kernels.shape_images", (0,)),
    "linear_sq_norms": ("ops.reference.norms", "ops.linear", "kernels.linear_norms", (0, 1)),
    "column_sq_norms": ("ops.reference.norms", "ops.linear", None, (0, 1)),
    "dense_sq_norms": ("ops.reference.norms", "ops.linear", "kernels.row_norms", (0,)),
    "one_row_sq_norms": ("ops.reference.norms", "ops.linear", "kernels.row_norms", (0, 1)),
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
    "folded_conv": ("ops.reference.folded", "ops.folded", "kernels.folded", (0, 2)),
    "activation_grad": ("ops.reference.folded", "ops.folded", None, (0, 1)),
    "gate_grad": ("ops.reference.folded", "ops.folded", None, (0, 1, 2)),
    "folded_conv_sq_norms": ("ops.reference.folded", "ops.folded", "kernels.conv_norms", (0, 1, 3)),
    "folded_conv_backward": ("ops.reference.folded", "ops.folded", "kernels.folded", (0, 1, 2, 5)),
}
TABLE: dict[str, dict[str, str]] = {}  # op -> backend -> module
SAMPLES: dict[str, tuple[int, ...]] = {}  # op -> its arguments that have samples
for _name, (_reference, _torch, _triton, _samples) in _OPS.items():
    _modules = {"reference": _reference, "torch": _torch, "triton": _triton}
    TABLE[_name] = {
        backend: f"fastlr.{module}" for backend, module in _modules.items() if module is not None
    }
    SAMPLES[_name] = _samples


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


class Choice(NamedTuple):
    """Which backend ops are asked of, and how far it is trusted.

    Attributes:
        backend: The one that `using` names; None: Triton on a GPU, else plain torch.
        checked: Kernels are held to plain torch at the first call of each kind.
        by_twins: Models run in the blocks that the backend has, and plain torch serves them.
        noted: Called with each launch of a kernel, which is not made: plain torch serves.
    """

    backend: str | None = None
    checked: bool = True
    by_twins: bool = False
    noted: Callable[..., None] | None = None


_LAST_OF_LOW_WORD = (1 << 32) - 2  # number of an image; the next but one needs the high word, too
# Of the process, not of a context: the backward pass on a GPU runs in another thread.
_choice = Choice()
_one_notes = Lock()
_comparisons = kernel_checks.Comparisons()


@contextmanager
def using(backend: str | None, *, checked: bool = False, twins: bool = False) -> Iterator[None]:
    """Run ops on this backend where it has them, for tests and benchmarks.

    ``None``: the backend goes by the device, as usual.

    ``checked``: kernels that are asked for by name are held to plain torch all the same. ``twins``:
    models run in the blocks that this backend has, and plain torch serves them.
    """
    global _choice
    before, _choice = _choice, Choice(backend, checked or backend is None, twins)
    try:
        yield
    finally:
        _choice = before


@contextmanager
def noting_launches(note: Callable[..., None]) -> Iterator[None]:
    """Note the launches that a GPU would make, and let plain torch serve.

    Args:
        note: called with a kernel, its arguments, and its constants and options.

    Raises:
        RuntimeError: another thread does so, too.
    """
    global _choice
    if not _one_notes.acquire(blocking=False):
        raise RuntimeError("another thread notes launches")
    before, _choice = _choice, Choice("triton", checked=False, noted=note)
    try:
        yield
    finally:
        _choice = before
        _one_notes.release()


def backend_for(*args: Any) -> str:
    """The backend that an op on these arguments is first asked of."""
    if _choice.backend is not None:
        return _choice.backend
    return "triton" if has_triton() and _on_gpu(args) else "torch"


def run(name: str, *args: Any) -> Any:
    """Run op ``name`` by its Triton kernel on a GPU, else in plain torch.

    Plain torch serves also where no kernel does.
    """
    backend = backend_for(*args)
    if backend not in TABLE[name] or _choice.by_twins:
        backend = "torch"
    if backend == "triton":
        if _choice.noted is not None:
            return _by_twin_as_the_kernel_gives_it(name, args, _choice.noted)
        result = _by_kernel(name, args)
        if result is not NotImplemented:
            return result
        backend = "torch"
    return get(name, backend)(*args)


def switched_off() -> list[list[str]]:
    """Return the kernels that were found to disagree with plain torch in this process.

    A sorted list of [op, signature], for JSON.
    """
    return _comparisons.switched_off()


def switch_off(kernels: list[list[str]]) -> None:
    """Leave to plain torch what `switched_off` has given, in another process perhaps."""
    for name, signature in kernels:
        _comparisons.switch_off(name, signature)


@contextmanager
def compared_anew() -> Iterator[None]:
    """Compare kernels within it as if none had been compared, on this machine or in this process.

    What is found within it is forgotten but for what is kept on disk.
    """
    global _comparisons
    before = _comparisons
    _comparisons = kernel_checks.Comparisons(KeptComparisons(believed=False))
    try:
        yield
    finally:
        _comparisons = before


def _by_twin_as_the_kernel_gives_it(
    name: str, args: tuple[Any, ...], note: Callable[..., None]
) -> Any:
    """Return the result of plain torch with dtypes and strides of the kernel's, and note launches.

    So what comes after it is launched as after the kernel.
    """
    right = twin(name)(*args)
    with import_module("fastlr.kernels.launching").noting(note):
        empty = get(name, "triton")(*args)
    if empty is NotImplemented:
        return right
    values, form = tree_flatten(right)
    made: dict[int, Any] = {}  # one tensor that is given twice stays one
    given = []
    for value, like in zip(values, tree_flatten(empty)[0], strict=True):
        if id(like) not in made:
            made[id(like)] = kernel_checks.as_given(value, like)
        given.append(made[id(like)])
    return tree_unflatten(given, form)


def _by_kernel(name: str, args: tuple[Any, ...]) -> Any:
    """Return the result of an op's kernel for this call; NotImplemented where plain torch serves.

    A kernel that is held to plain torch is compared at the first call of a kind.
    """
    if not _choice.checked:
        return get(name, "triton")(*args)
    key = _key_of_call(name, args)
    serves = _comparisons.serves.get(key)
    if serves is None:
        return _at_first_call(name, args, key)
    return _launched(name, args, key) if serves else NotImplemented


def _at_first_call(name: str, args: tuple[Any, ...], key: tuple) -> Any:
    """Do as `_by_kernel` for a call that was not made yet, and note whether the kernel serves it.

    Nothing is noted where that cannot be told now: it is asked again at the next such call.
    """
    samples = SAMPLES[name]
    kind = kernel_checks.kind_of_call(_kernel_launcher(name), args, samples)
    if _comparisons.off(name, kind):
        _comparisons.serves.put(key, False)
        return NotImplemented
    was_compared = _comparisons.known(name, kind, args)
    can_be_compared = may_wait_for_device() and not _capturing()
    if not was_compared and not can_be_compared:
        return NotImplemented
    result = _launched(name, args, key)
    serves: bool | None = result is not NotImplemented
    if serves and not was_compared:
        kernel = get(name, "triton")
        serves = _comparisons.agrees(name, kind, kernel, twin(name), args, samples, result)
        memory_did_not_suffice = serves is None
        if memory_did_not_suffice:
            return result
    _comparisons.serves.put(key, bool(serves))
    return result if serves else NotImplemented


def _launched(name: str, args: tuple[Any, ...], key: tuple) -> Any:
    """Return the kernel's result, or NotImplemented where Triton cannot compile it.

    Then plain torch serves this call from now on.
    """
    try:
        return get(name, "triton")(*args)
    except Exception as error:
        if _choice.backend is not None or not _is_compilers(error):
            raise
        _warn_uncompiled(name, error)
        _comparisons.serves.put(key, False)
        return NotImplemented


def _kernel_launcher(name: str) -> Callable[..., Any] | None:
    """Return the function that launches the kernel of an op; None where Triton is not installed."""
    if not find_spec("triton"):
        return None
    return getattr(import_module(TABLE[name]["triton"]), name)


def images_agree(device: torch.device, options: dict[str, Any]) -> bool:
    """Return True if the kernels of shape images give every bit of the definition.

    They are compared once for these options.
    """
    kind = repr({name: given for name, given in options.items() if name not in ("table", "seed")})
    key = (str(device), kind)
    known = _comparisons.serves.get(key)
    if known is not None:
        return known
    if not may_wait_for_device():
        return False
    some = max(1, min(4, kernel_checks.ELEMENTS // prod(options["size"])))
    first = torch.full((1,), _LAST_OF_LOW_WORD, dtype=torch.int64, device=device)
    numbers = first + torch.arange(some, device=device)
    agree = [
        _image_kernel_agrees("shape_images_from", (first, some), options, kind),
        _image_kernel_agrees("shape_images_at", (numbers,), options, kind),
    ]
    return _comparisons.serves.put(key, all(agree))


def _image_kernel_agrees(
    name: str, args: tuple[Any, ...], options: dict[str, Any], kind: str
) -> bool:
    """Return True if a kernel of shape images gives every bit of the definition for these."""
    if _comparisons.off(name, kind):
        return False
    kernel = partial(get(name, "triton"), **options)
    definition = partial(get(name, "reference"), **options)
    try:
        return bool(_comparisons.agrees(name, kind, kernel, definition, args, SAMPLES[name]))
    except Exception as error:
        if not _is_compilers(error):
            raise
        _warn_uncompiled(name, error)
        return False


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _key_of_call(name: str, args: tuple[Any, ...]) -> tuple:
    """Return all that the choice of a call's kernel depends on.

    That is the op, sizes, strides, dtypes, the device, whether memory is aligned, and options.
    """
    parts: list[Any] = [name]
    for a in leaves(args):
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

    if isinstance(error, (CompilationError, OutOfResources, PTXASError, CalledProcessError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TRITON_SAYS)


_TRITON_SAYS = (
    # Where it compiles.
    "PassManager::run failed",
    "Failed to find C compiler",
    "failed to translate module to LLVM IR",
    # Where the driver loads what was compiled.
    "Triton Error [CUDA]: device kernel image is invalid",
    "Triton Error [CUDA]: no kernel image is available",
    "Triton Error [CUDA]: a PTX JIT compilation failed",
    "Triton Error [CUDA]: the provided PTX was compiled with an unsupported toolchain",
)


def _warn_uncompiled(name: str, error: Exception) -> None:
    if name in _comparisons.uncompiled:
        return
    _comparisons.uncompiled.add(name)
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # Of the code that launches a kernel.
    built = "C compiler" in str(error) or isinstance(error, CalledProcessError)
    remedy = "install gcc and Python's headers, or set CC" if built else "please report it"
    warn(
        f"{name}: Triton could not compile or load its kernel for this call ({lines[-1][:200]}); "
        f"plain torch serves, slower and right. Remedy: {remedy} (`fastlr doctor` shows the "
        "versions)."
    )


def _on_gpu(args: tuple[Any, ...]) -> bool:
    return any([getattr(a, "is_cuda", False) for a in args])


@cache
def has_triton() -> bool:
    """Return True if Triton is installed and its kernels may run.

    They may not on AMD GPUs, where none was tried: a warning says so.
    """
    if find_spec("triton") is None:
        return False
    if torch.version.hip is not None:
        warn(
            "torch is built for AMD GPUs (ROCm), on which fastlr's kernels were never tried: plain "
            "torch serves, slower and right"
        )
        return False
    return True
