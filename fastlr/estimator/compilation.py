"""Kernels of a model are compiled side by side, before its first estimate on a GPU.

Triton compiles a kernel where it is first launched, one after the other. So a pass over a few
inputs goes ahead, in which plain torch serves every op and each launch is handed to Triton's
asynchronous compiler instead. Nothing depends on it: what it does not compile, a launch does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import cache
from importlib import import_module
from threading import Thread
from typing import Any

import torch

from fastlr import ops
from fastlr.estimator.passes import Passes
from fastlr.ghost.engine import Engine
from fastlr.ghost.trust.audits import Draw
from fastlr.ops.cudnn import never_cudnn
from fastlr.ops.process_state import quiet_rng, warnings_ignored

FEW = 8  # inputs of the pass
MOST_THREADS = 16  # which Triton's compiler keeps busy, as it works outside of Python's lock


def compile_kernels(passes: Passes, start: int, stop: int) -> None:
    """Compile what a chunk of an estimate launches, if the model was not measured before.

    Args:
        passes: Passes of the estimate.
        start: Number of the chunk's first input.
        stop: Number after its last one.
    """
    if passes.engine.audited_plans or not ops.has_triton():
        return
    own = Passes(passes.options, passes.view)
    own.engine = Engine(own.view)

    def run(note: Callable[..., None]) -> None:
        with ops.noting_launches(note):
            own.norms(start, min(stop, start + FEW), Draw(0))

    # The estimate itself says what is wrong, and draws what it would have drawn.
    with suppress(Exception), quiet_rng(own.view.device), warnings_ignored(), never_cudnn():
        side_by_side(run, own.view.device)


def side_by_side(run: Callable[[Callable[..., None]], Any], device: torch.device) -> None:
    """Compile kernels side by side.

    Args:
        run: Function that calls its argument with each launch: a kernel, its arguments, its
            constants and options.
        device: Device of the kernels.

    Raises:
        ImportError: Triton has no asynchronous compiler, as before 3.5.
    """
    mode_of: Any = import_module("triton.runtime._async_compile").AsyncCompileMode

    def load(compiled: Future) -> None:
        """Build what launches a kernel, and load both into the device."""
        with torch.cuda.device(device):
            compiled.result().run  # noqa: B018

    with ThreadPoolExecutor(threads()) as pool, mode_of(pool, ignore_errors=True) as mode:
        context = copy_context()  # backward passes run in other threads

        def note(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> None:
            context.copy().run(lambda: kernel.warmup(*args, grid=(1,), **constants))

        run(note)
        for compiled in list(mode.raw_futures):
            pool.submit(load, compiled)


def threads() -> int:
    """Return the number of threads that compile: the cores that this rank may use."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // ranks))


@cache
def hash_triton_in_background() -> Thread:
    """Hash Triton's own files in a thread, once a process.

    The hash is part of the key of every compiled kernel. It takes 2 s, and the first launch waits
    for it.

    Returns:
        The thread, which nothing has to wait for.
    """

    def hash_files() -> None:
        with suppress(Exception):  # the first launch hashes them itself, and raises
            import_module("triton.runtime.cache").triton_key()

    thread = Thread(target=hash_files, daemon=True)
    thread.start()
    return thread
