"""What an estimate needs from its surroundings: model state kept, memory, progress, versions, a hash of the inputs."""

from __future__ import annotations

import hashlib
import math
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from fastlr.errors import InputError
from fastlr.ghost.adapt import buffers_kept, quiet_rng

Report = Callable[[int, int, float, float], Any]


@contextmanager
def as_it_was(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Put the model into eval mode with gradients on; afterwards flags, buffers and random states are as before.

    Flags are set directly: ``model.eval()`` may be overridden, and merge or freeze things.
    """
    modules = list(model.modules())
    flags = [module.training for module in modules]
    with buffers_kept(modules):
        try:
            with torch.inference_mode(False), torch.enable_grad(), quiet_rng(device), _repeatable(modules, device):
                for module in modules:
                    module.training = False
                yield
        finally:
            for module, flag in zip(modules, flags, strict=True):
                module.training = flag


@contextmanager
def _repeatable(modules: list[nn.Module], device: torch.device) -> Iterator[None]:
    """On a GPU, let cuDNN add in a fixed order, so that the same call gives the same bits.

    Models with recurrent layers do without it: it refuses their backward pass in eval mode.
    """
    if device.type != "cuda":
        yield
        return
    cudnn: Any = torch.backends.cudnn
    before = cudnn.enabled, cudnn.benchmark, cudnn.deterministic
    cudnn.enabled = cudnn.enabled and not any(isinstance(module, nn.RNNBase) for module in modules)
    cudnn.benchmark, cudnn.deterministic = False, True
    try:
        yield
    finally:
        cudnn.enabled, cudnn.benchmark, cudnn.deterministic = before


def move_samples(t: Any, in_dim: int, size: int) -> Any:
    """Move the samples of a batched tensor (axis 0 of that size) to ``in_dim``."""
    if not isinstance(t, Tensor) or t.ndim == 0 or t.shape[0] != size:
        return t
    if not -t.ndim <= in_dim < t.ndim:
        raise InputError(f"in_dim={in_dim} is not an axis of an input of shape {tuple(t.shape)}")
    return t.movedim(0, in_dim)


def clock(device: torch.device) -> float:
    """Return the time in seconds once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def same_device(asked: torch.device, actual: torch.device) -> bool:
    """Whether a device that the user named is the one the model is on; "cuda" means the current one."""
    if asked.type == "cuda" and asked.index is None and actual.type == "cuda":
        return actual.index == torch.cuda.current_device()
    return asked.type == actual.type and (asked.index or 0) == (actual.index or 0)


def free_bytes(device: torch.device) -> int:
    """Memory that can be had on the device now, the allocator's cache included; on the CPU, available RAM."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, OSError, ValueError):
        return 4 << 30


@contextmanager
def reporter(progress: bool | Report, total: int) -> Iterator[Report | None]:
    """Yield a function to call as (done, total, value, stderr): a progress bar's, the user's, or None."""
    if progress is False:
        yield None
    elif progress is not True:
        yield progress
    else:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns) as bar:
            task = bar.add_task("local redundancy", total=total)

            def update(done: int, total: int, value: float, stderr: float) -> None:
                error = "" if math.isnan(stderr) else f" +- {stderr:.2g}"
                bar.update(task, completed=done, total=total, description=f"local redundancy {value:.5g}{error}")

            yield update


def describe(thing: Any) -> str:
    """Return the repr of an object, or its type's name where the repr is an address."""
    return type(thing).__name__ if type(thing).__repr__ is object.__repr__ else repr(thing)


def digest(inputs: Any, used: int, seed: int) -> str:
    """Return a hash of the first two inputs and the last, made on the CPU in float32 whatever the model."""
    total = hashlib.sha256()
    for start, stop in ((0, min(2, used)), (used - 1, used)):
        x = inputs.batch(start, stop, seed=seed, device=torch.device("cpu"), dtype=torch.float32)
        for leaf in tree_flatten(x)[0]:
            if isinstance(leaf, Tensor):
                total.update(f"{tuple(leaf.shape)}{leaf.dtype}".encode())
                total.update(leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
            else:
                total.update(repr(leaf).encode())
    return total.hexdigest()[:16]


def versions() -> dict[str, str]:
    """Return the versions of fastlr, torch and Python."""
    try:
        own = version("fastlr")
    except PackageNotFoundError:
        own = "not installed"
    return {"fastlr": own, "torch": torch.__version__, "python": platform.python_version()}
