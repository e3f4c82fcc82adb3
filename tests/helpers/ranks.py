"""Worlds of processes on this machine, where every rank runs a function in a process group.

Tests and bench/test_reductions.py use them.

Processes come from a fork server that has imported torch once, so a world starts in a tenth of a
second. The store is held by the process that asks for them, so that any rank may be killed.
"""

import multiprocessing
import multiprocessing.context
import os
import sys
import time
import traceback
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import wait
from unittest.mock import patch

import torch
import torch.distributed as dist

from fastlr.errors import FastlrError

LIMIT = 120.0
PRELOADED = [
    "torch._dynamo",
    "torchvision",
    "fastlr.cli.main",
    "fastlr.estimator.estimator",
    "kills",
    "rank_estimates",
    "rank_reductions",
    "rank_runs",
]
TORCHRUN = [sys.executable, *"-m torch.distributed.run --standalone --nproc-per-node 2".split()]


def fork_server():
    """Return a context of processes from a server that has imported what a run imports.

    torch._dynamo, which takes a second, is imported for torch's optimisers. The server is
    given this process's path: older Pythons' leave out, without a word, what they do not find.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        forkserver.ensure_running()
    return context


class Ended(Exception):
    """A process ended without a result."""


def run_ranks(size, function, *args, limit=LIMIT, backend="gloo", on_gpu=False):
    """Return ``function(rank, *args)`` of every rank, or in its place what it raised, or `Ended`.

    Args:
        size: number of ranks.
        function: of a module, not a lambda.
        *args: for the function.
        limit: seconds; processes that are still there are killed, and AssertionError is raised.
        backend: of the process group that is made; None for no group.
        on_gpu: the ranks use CUDA, which does not survive a fork: each process starts anew.
    """
    context = multiprocessing.get_context("spawn") if on_gpu else fork_server()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(size):
        here, there = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank, args=(rank, size, store.port, backend, there, function, args), daemon=True
        )
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    results = [None] * size
    waiting = dict(zip(pipes, range(size)))
    deadline = time.monotonic() + limit
    try:
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise AssertionError(
                    f"ranks {sorted(waiting.values())} are not done after {limit} s"
                )
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    results[rank] = pipe.recv()
                except EOFError:
                    processes[rank].join()
                    results[rank] = Ended(f"exit code {processes[rank].exitcode}")
    finally:
        stuck = []
        for rank, process in enumerate(processes):
            process.join(0 if waiting else 20)
            if process.is_alive():
                stuck.append(rank)
                process.kill()
                process.join()
    if stuck:
        raise AssertionError(f"ranks {stuck} were done, but did not end")
    return results


def error_of(work):
    """Return the error that work raises and its kind, or "no error"."""
    try:
        work()
    except (FastlrError, KeyboardInterrupt, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def timed_error(work):
    """Return what `error_of` does, and after how many seconds."""
    start = time.perf_counter()
    return error_of(work), time.perf_counter() - start


def good(results):
    """The results, or the first exception among them raised."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def _rank(rank, size, port, backend, pipe, function, args):
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        if backend:
            store = dist.TCPStore("127.0.0.1", port, is_master=False)
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30)
            )
            _all_have_joined(store, size)
        result = function(rank, *args)
    except BaseException as error:
        getattr(error, "add_note", str)(traceback.format_exc())  # Python 3.11 on
        result = error
    pipe.send(result)
    pipe.close()
    if backend and not isinstance(result, BaseException):
        dist.destroy_process_group()


def _all_have_joined(store, size):
    """Wait until the group stands on every rank.

    One that ended now would break the others' connecting, not their work.
    """
    if store.add("joined", 1) == size:
        store.set("all have joined", "1")
    store.wait(["all have joined"], timedelta(seconds=30))
