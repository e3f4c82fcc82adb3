"""The table of the ops, and the choice of what runs one.

Every op has a function in plain torch, and most have a Triton kernel (kernels/), which serves on a
GPU. Functions are imported on first use, so that importing fastlr never imports triton.

A kernel is trusted by one comparison: at the first call of each size, dtype and layout, all of its
result is compared with plain torch (fastlr.ops.kernel_checks). Where they differ, or where Triton
cannot compile the kernel, plain torch serves the op from then on, and a warning says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from subprocess import CalledProcessError
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastlr.errors import warn
from fastlr.ops.block import leaves
from fastlr.ops.deferred_checks import may_wait_for_device
from fastlr.ops.kernel_checks import as_given, compared
from fastlr.ops.recent import Recent
from fastlr.ops.torch_private import tree_flatten, tree_leaves, tree_unflatten


class Op(NamedTuple):
    """One op.

    Attributes:
        torch: Module of its function in plain torch.
        kernel: Module of its Triton kernel, or None.
        samples: Positions of the arguments that have samples along axis 0; all tensors of a record.
    """

    torch: str
    kernel: str | None
    samples: tuple[int, ...]


TABLE = {
    "shape_images_from": Op("shape_images", "shape_images", ()),
    "shape_images_at": Op("shape_images", "shape_images", (0,)),
    "linear_sq_norms": Op("linear", "linear_norms", (0, 1)),
    "dense_sq_norms": Op("linear", "row_norms", (0,)),
    "one_row_sq_norms": Op("linear", "row_norms", (0, 1)),
    "conv_sq_norms": Op("convolution", "conv_norms", (0, 1)),
    "conv_grads": Op("convolution", None, (0, 1)),
    "embedding_sq_norms": Op("linear", "embedding_norms", (0, 1)),
    "channel_sums": Op("linear", "channel_sums", (0, 1, 2)),
    "layer_norm_sums": Op("linear", "layer_norm_sums", (0, 1, 2, 3)),
    "rms_norm_sums": Op("linear", "layer_norm_sums", (0, 1, 2)),
    "broadcast_sums": Op("linear", "broadcast_sums", (0, 1)),
    "categorical_root_cotangent": Op("fisher", "fisher_root", (0, 1)),
    "fold_weights": Op("folded", "fold_weights", ()),
    "folded_conv": Op("folded", "folded", (0, 2)),
    "activation_grad": Op("folded", None, (0, 1)),
    "folded_conv_sq_norms": Op("folded", "conv_norms", (0, 1, 3)),
    "folded_conv_backward": Op("folded", "folded", (0, 1, 2, 5)),
}
MOST_CALLS = 1 << 16  # compared calls that are remembered


class Choice(NamedTuple):
    """How ops run.

    Attributes:
        backend: "torch" or "triton"; None for Triton on a GPU, else plain torch.
        checked: Whether kernels are compared with plain torch.
        note: Function that is called with each launch of a kernel; nothing is launched, and plain
            torch serves. None to launch.
    """

    backend: str | None = None
    checked: bool = True
    note: Callable[..., None] | None = None


class Trust:
    """What comparisons of kernels with plain torch have shown in this process.

    Attributes:
        compared: Deviations of calls that agreed, in parts of what is allowed. The first part of a
            key is the op.
        switched_off: Ops that plain torch serves from now on, with the reasons.
    """

    def __init__(self) -> None:
        self.compared = Recent[tuple, float](MOST_CALLS)
        self.switched_off: dict[str, str] = {}

    def switch_off(self, name: str, reason: str) -> None:
        """Let plain torch serve an op, and warn."""
        self.switched_off[name] = reason
        warn(f"{name}: {reason}. Plain torch serves this op from now on, slower and right")


# One for the process, not for a context: the backward pass on a GPU runs in another thread.
_choice = Choice()
_one_notes = RLock()  # held by the thread that notes launches
_trust = Trust()


@cache
def get(name: str, backend: str) -> Callable[..., Any]:
    """Return the function that implements op ``name`` on ``backend``, "torch" or "triton".

    Raises KeyError if there is none.
    """
    op = TABLE[name]
    if backend == "torch":
        return getattr(import_module(f"fastlr.ops.{op.torch}"), name)
    if backend != "triton" or op.kernel is None:
        raise KeyError(f"{name} has no backend {backend}")
    return getattr(import_module(f"fastlr.kernels.{op.kernel}"), name)


def with_kernels() -> list[str]:
    """Return the ops that have a kernel."""
    return [name for name, op in TABLE.items() if op.kernel is not None]


@contextmanager
def using(backend: str | None) -> Iterator[None]:
    """Run ops on this backend where it has them, for tests and benchmarks.

    Args:
        backend: "torch", or "triton" for kernels that are not compared with plain torch; None for
            the usual choice.
    """
    with _choosing(Choice(backend, checked=backend is None)):
        yield


@contextmanager
def comparing() -> Iterator[Trust]:
    """Run ops by kernels on every device, and compare them as if none had been compared.

    Yields the outcome, which is dropped afterwards.
    """
    global _trust
    before, _trust = _trust, Trust()
    try:
        with _choosing(Choice("triton")):
            yield _trust
    finally:
        _trust = before


@contextmanager
def noting_launches(note: Callable[..., None] = lambda *launch: None) -> Iterator[None]:
    """Run models in the form that kernels serve, but let plain torch serve.

    Args:
        note: Function that is called with each launch that a GPU would make: a kernel, its
            arguments, its constants and options.
    """
    with _one_notes, _choosing(Choice("triton", note=note)):
        yield


@contextmanager
def _choosing(choice: Choice) -> Iterator[None]:
    global _choice
    before, _choice = _choice, choice
    try:
        yield
    finally:
        _choice = before


def backend_for(*args: Any) -> str:
    """Return the backend that an op on these arguments is first asked of."""
    return _backend(_choice, args)


def _backend(choice: Choice, args: tuple[Any, ...]) -> str:
    return choice.backend or ("triton" if has_triton() and _on_gpu(args) else "torch")


def run(name: str, *args: Any) -> Any:
    """Run op ``name`` by its Triton kernel on a GPU, else in plain torch.

    Plain torch serves also where the kernel does not cover the call or is not trusted.
    """
    choice, result = _choice, NotImplemented  # another thread may change the choice meanwhile
    if TABLE[name].kernel is not None and _backend(choice, args) == "triton":
        if choice.note is None:
            result = _by_kernel(name, args, choice.checked)
        else:
            result = _noted(name, args, choice.note)
    return get(name, "torch")(*args) if result is NotImplemented else result


def _by_kernel(name: str, args: tuple[Any, ...], checked: bool) -> Any:
    """Return the result of an op's kernel; NotImplemented where plain torch has to serve."""
    if not checked:
        return get(name, "triton")(*args)
    if name in _trust.switched_off:
        return NotImplemented
    key = _key_of_call(name, args)
    if key in _trust.compared:
        return get(name, "triton")(*args)
    if not may_wait_for_device():
        return NotImplemented  # nothing can be compared while a CUDA graph is captured
    result = _compiled(name, args, {})
    if result is NotImplemented:
        return result
    deviation = compared(get(name, "torch"), args, TABLE[name].samples, result)
    if deviation.share > 1:
        tensors = [a for a in leaves(args) if isinstance(a, Tensor)]
        shapes = ", ".join(f"{list(t.shape)} {t.dtype}" for t in tensors)
        _trust.switch_off(
            name,
            f"its Triton kernel is off by {deviation.relative:.2g} of the result of plain torch "
            f"for tensors of {shapes}: {deviation.share:.2g} times what rounding explains. "
            "Please report it with what `fastlr doctor --kernels` prints",
        )
        return NotImplemented
    if not deviation.is_empty:
        _trust.compared.put(key, deviation.share)
    return result


def _compiled(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return the result of an op's kernel; NotImplemented where Triton cannot compile it."""
    try:
        return get(name, "triton")(*args, **options)
    except Exception as error:
        if not _is_compilers(error):
            raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        # Of the code that launches a kernel.
        built = "C compiler" in str(error) or isinstance(error, CalledProcessError)
        remedy = "install gcc and Python's headers, or set CC" if built else "please report it"
        _trust.switch_off(
            name,
            f"Triton could not compile or load its kernel for this call ({lines[-1][:200]}). "
            f"Remedy: {remedy} (`fastlr doctor` shows the versions)",
        )
        return NotImplemented


def _noted(name: str, args: tuple[Any, ...], note: Callable[..., None]) -> Any:
    """Note the launches of an op, and return plain torch's result as the kernel would give it.

    Dtypes and strides are the kernel's, so that what follows is launched as after the kernel.
    """
    with import_module("fastlr.kernels.launching").noting(note):
        empty = get(name, "triton")(*args)
    if empty is NotImplemented:
        return empty
    values, form = tree_flatten(get(name, "torch")(*args))
    made: dict[int, Any] = {}  # one tensor that is given twice stays one
    for value, like in zip(values, tree_leaves(empty), strict=True):
        made.setdefault(id(like), as_given(value, like))
    return tree_unflatten([made[id(like)] for like in tree_leaves(empty)], form)


def images_agree(
    name: str, args: tuple[Any, ...], numbers: Tensor, options: dict[str, Any]
) -> bool:
    """Return True if a kernel of shape images gives every bit of plain torch.

    The first and the last image are compared, once for each of these options and sizes.

    Args:
        name: Op, "shape_images_from" or "shape_images_at".
        args: Its arguments.
        numbers: Numbers of the images, or of the first and the last one; int64.
        options: Its keyword arguments.
    """
    sizes = [len(a) if isinstance(a, Tensor) else a for a in args]
    kind = [value for key, value in options.items() if key not in ("table", "seed")]
    key = (name, numbers.get_device(), *sizes, repr(kind))
    if name in _trust.switched_off:
        return False
    if key in _trust.compared or not may_wait_for_device():
        return key in _trust.compared
    made = _compiled(name, args, options)
    if made is NotImplemented:
        return False
    if torch.equal(made[[0, -1]], get("shape_images_at", "torch")(numbers[[0, -1]], **options)):
        _trust.compared.put(key, 0.0)
        return True
    _trust.switch_off(name, f"its Triton kernel gives other images than plain torch for {kind}")
    return False


def _key_of_call(name: str, args: tuple[Any, ...]) -> tuple:
    """Return all that the choice of a call's kernel depends on.

    That is the op, sizes, strides, dtypes, the device, whether memory is aligned, and options.
    """
    parts: list[Any] = [name]
    for a in leaves(args):
        if isinstance(a, Tensor):
            parts += (a.dtype, a.shape, a.stride(), a.data_ptr() % 16, a.get_device())
        elif type(a) is list:
            parts.append(tuple(a))
        elif type(a) is int:  # a seed, of which the compiler knows this
            parts += (a == 1, a % 16 == 0, a.bit_length() > 31)
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
