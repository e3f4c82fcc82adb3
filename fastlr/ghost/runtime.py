"""The surroundings of an estimate.

Model state kept, memory, progress, versions, and a hash of the inputs.
"""

from __future__ import annotations

import hashlib
import math
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from threading import Timer
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastlr.errors import InputError
from fastlr.ghost.model_io import ModelView
from fastlr.ghost.objects import storage
from fastlr.ghost.process_state import quiet_rng
from fastlr.ghost.state import train_flags_kept
from fastlr.ghost.writes import unchanged
from fastlr.ops.cudnn import never_cudnn, repeatable_cudnn
from fastlr.ops.deferred_checks import out_of_memory
from fastlr.ops.memory import free_bytes, total_bytes
from fastlr.ops.torch_private import tree_flatten

OnProgress = Callable[[int, int, float, float], Any]

PATIENCE = 3.0  # seconds before a progress bar that nobody has asked for
LINE_PATIENCE = 2.0  # seconds before a line says what takes long

_CPU_BYTES, _GPU_BYTES, _LARGEST_CHUNK = 3 << 30, 48 << 30, 512
# Peak memory of a chunk over the activations that plain autograd saves for it. Kernels fold blocks
# and make few temporaries.
_WORK, _WORK_OF_KERNELS = 3.0, 1.5
_COPIES = 4  # of the output on a GPU: cotangents, gradients, and what is made on the way
# Of the free memory, at most: a captured chunk keeps its own, one beside it takes as much.
_SHARE = 0.4


@contextmanager
def as_it_was(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Put the model into eval mode with gradients on, and restore its state afterwards.

    Flags, buffers, attributes and random states are then as before.
    """
    modules = list(model.modules())
    with (
        train_flags_kept(modules),
        torch.inference_mode(False),
        torch.enable_grad(),
        quiet_rng(device),
        _repeatable(modules, device),
    ):
        for module in modules:
            module.training = False
        with unchanged(model):
            yield


@contextmanager
def _repeatable(modules: list[nn.Module], device: torch.device) -> Iterator[None]:
    """On a GPU, let cuDNN add in a fixed order, so that the same call gives the same bits.

    Models with recurrent layers do without it: it refuses their backward pass in eval mode.
    """
    if device.type != "cuda":
        yield
        return
    is_recurrent = any(isinstance(module, nn.RNNBase) for module in modules)
    with repeatable_cudnn(), never_cudnn() if is_recurrent else nullcontext():
        yield


def move_samples(t: Any, in_dim: int, size: int) -> Any:
    """Move the samples of a batched tensor (axis 0 of that size) to ``in_dim``."""
    if not isinstance(t, Tensor) or t.ndim == 0 or t.shape[0] != size:
        return t
    if not -t.ndim <= in_dim < t.ndim:
        raise InputError(f"in_dim={in_dim} is not an axis of an input of shape {tuple(t.shape)}")
    return t.movedim(0, in_dim)


def read_together(first: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """Return one-dimensional tensors on the host as float64, by one transfer.

    They come from one device; None stays None.
    """
    there = [first, *(t.to(first.device) for t in others if t is not None)]
    joined = torch.cat([t.detach().double() for t in there])
    parts = iter(joined.cpu().split(list(map(len, there))))
    return tuple(None if t is None else next(parts) for t in (first, *others))


def clock(device: torch.device) -> float:
    """Return the time in seconds once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def same_device(asked: torch.device, actual: torch.device) -> bool:
    """Return True if a device that the user named is the one the model is on.

    "cuda" means the current one.
    """
    if asked.type == "cuda" and asked.index is None and actual.type == "cuda":
        return actual.index == torch.cuda.current_device()
    return asked.type == actual.type and (asked.index or 0) == (actual.index or 0)


class InputsThatFit(NamedTuple):
    """How many inputs a chunk may take.

    Attributes:
        device: a quarter of its memory, whatever else holds some of it: the same in every run, as
            chunks of another size may give other last bits.
        free: what is free of it now.
    """

    device: int
    free: int


def chunk_for_memory(view: ModelView, few: int, forward: Callable[[int], Tensor]) -> InputsThatFit:
    """Return how many inputs fit the memory, by the bytes that a small forward pass saves.

    Args:
        view: Model that the forward pass runs.
        few: Number of inputs of that pass.
        forward: Runs so many inputs and returns the output, with its graph.
    """
    try:
        saved, output = _saved_bytes(view, lambda: forward(few))
    except Exception as error:
        if not out_of_memory(error):
            raise
        return InputsThatFit(1, 1)
    work, most = _WORK * saved / few, _CPU_BYTES
    if view.device.type != "cpu":
        # Weights that the pass has cast or computed are saved once, whatever the number of inputs.
        activations = saved / few
        if few > 1:
            with suppress(Exception):  # the model may take no odd batch
                activations = saved - _saved_bytes(view, lambda: forward(few - 1))[0]
        work, most = _WORK_OF_KERNELS * activations + _COPIES * output / few, _GPU_BYTES
    weights = max(p.nbytes for p in view.parameters.values())
    per_input = work + weights + 1
    of_device, of_free = total_bytes(view.device) / 4, _SHARE * free_bytes(view.device)
    inputs = [int(min(budget, most) // per_input) for budget in (of_device, of_free)]
    return InputsThatFit(*[max(1, min(_LARGEST_CHUNK, fitting)) for fitting in inputs])


def _saved_bytes(view: ModelView, forward: Callable[[], Tensor]) -> tuple[int, int]:
    """Return the bytes that a forward pass leaves but for the model's own, and its output's."""
    storages: dict[int, int] = {}

    def saved(t: Tensor) -> Tensor:
        storages[storage(t)] = t.untyped_storage().nbytes()
        return t.detach()  # t itself would keep its graph for ever

    with torch.autograd.graph.saved_tensors_hooks(saved, lambda kept: kept):
        output = forward()
    storages[output.data_ptr()] = output.nbytes
    for t in (*view.module.parameters(), *view.module.buffers()):
        storages.pop(storage(t), None)
    return sum(storages.values()), output.nbytes


@contextmanager
def reporter(progress: bool | OnProgress | None, total: int) -> Iterator[OnProgress | None]:
    """Yield a function to call as (done, total, value, stderr).

    It is a progress bar's, the user's, or None.

    For ``progress=None`` the bar comes after `PATIENCE` seconds, where somebody may see it.
    """
    if progress is True:
        with _bar(total) as update:
            yield update
    elif progress is not None or not _watched():
        yield None if progress is False else progress
    else:
        with ExitStack() as late:
            begun, shown = time.monotonic(), list[OnProgress]()

            def report(done: int, total: int, value: float, stderr: float) -> None:
                if not shown and done < total and time.monotonic() - begun >= PATIENCE:
                    shown.append(late.enter_context(_bar(total, stderr=True)))
                for update in shown:
                    update(done, total, value, stderr)

            yield report


@contextmanager
def late_line(text: str, wanted: bool) -> Iterator[None]:
    """Print a line after `LINE_PATIENCE` seconds, where somebody may see it."""
    line = Timer(LINE_PATIENCE, print, [text], {"file": sys.stderr})
    line.daemon = True
    if wanted and _watched():
        line.start()
    try:
        yield
    finally:
        line.cancel()


@contextmanager
def _bar(total: int, *, stderr: bool = False) -> Iterator[OnProgress]:
    """A progress bar; one on stderr goes when it is done."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=Console(stderr=True) if stderr else None, transient=stderr
    ) as bar:
        task = bar.add_task("local redundancy", total=total)

        def update(done: int, total: int, value: float, stderr: float) -> None:
            error = "" if math.isnan(stderr) else f" +- {stderr:.2g}"
            bar.update(
                task,
                completed=done,
                total=total,
                description=f"local redundancy {value:.5g}{error}",
            )

        yield update


def _watched() -> bool:
    """Return True if stderr is a terminal, or this is a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell" or (
        sys.stderr is not None and sys.stderr.isatty()
    )


def describe(thing: Any) -> str:
    """Return the repr of an object, or its type's name where the repr is an address."""
    return type(thing).__name__ if type(thing).__repr__ is object.__repr__ else repr(thing)


def inputs_hash(inputs: Any, used: int, seed: int) -> str:
    """Return a hash of the first two inputs and the last.

    They are made on the CPU in float32 whatever the model.
    """
    total = hashlib.sha256()
    for start, stop in ((0, min(2, used)), (used - 1, used)):
        x = inputs.batch(start, stop, seed=seed, device=torch.device("cpu"), dtype=torch.float32)
        for leaf in tree_flatten(x)[0]:
            if isinstance(leaf, Tensor):
                total.update(f"{tuple(leaf.shape)}{leaf.dtype}".encode())
                total.update(
                    leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
                )
            else:
                total.update(repr(leaf).encode())
    return total.hexdigest()[:16]


def versions() -> dict[str, str]:
    """Return the versions of fastlr, torch and Python."""
    return {
        "fastlr": _version_of_fastlr(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


@cache  # it is read from a file
def _version_of_fastlr() -> str:
    try:
        return version("fastlr")
    except PackageNotFoundError:
        return "not installed"
