"""Sums over ranks: fastlr's backends against the library's all-reduce, from 1 KB to 1 GB.

The tensors are bfloat16; the ranks are processes of this machine.

Every contender is first held to the definition (fastlr) or compared with float64 (the library's own
sum, which rounds at every step). Then the gradients of a training that processes share, in float32
and in bfloat16. Seconds are those of the slowest rank, medians over rounds in which all contenders
take turns. "bus" bandwidth is the traffic of the best all-reduce, 2 (W - 1) / W of the bytes, over
the time, as nccl-tests count it. With more ranks than cores, or on a busy machine, times say
little.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from definitions import reductions as reference
from pytest_benchmark.fixture import BenchmarkFixture
from ranks import good, run_ranks
from torch import Tensor

from fastlr import distributed
from fastlr.distributed.backends import Route, TorchRoute
from fastlr.experiments.memorization.experiment import DRIVER, Memorizer
from fastlr.experiments.memorization.options import MemorizeOptions
from fastlr.experiments.statistics.seeds import mean_over_seeds
from fastlr.experiments.training import data_parallel

CALLS = (
    (1 << 14, 200),
    (1 << 18, 50),
    (1 << 22, 5),
    (1 << 40, 1),
)  # (bytes up to which, calls in one timing)
SIZES = (*(1024 * 8**k for k in range(7)), 1 << 30)  # bytes: 1 KB, 8 KB, 64 KB, ... 256 MB, 1 GB
ERROR_SIZE = 1 << 20  # elements of the comparison with float64
TRAINED: dict[str, Any] = {  # 10 steps an epoch, each of 4 parts
    "model": "fastlr.models.convnet:ConvNet",
    "model_kwargs": {"widths": (16, 32, 64), "hidden": 64},
    "classes": 10,
    "size": 32,
    "n": 320,
    "batch_size": 32,
    "norm_batch": 8,
    "dtype": "bf16",
    "redundancy_n": 2,
}
EXCHANGED = 2_137_440  # elements of a timed exchange: the gradients of PatchTST


def drawn(rank: int, n: int) -> Tensor:
    """A rank's bfloat16 numbers."""
    return torch.randn(n, generator=torch.Generator().manual_seed(rank)).bfloat16()


def routes(route: Route) -> dict[str, Route]:
    """Fastlr's backends: its extension where it is there, and torch.distributed."""
    by_torch = {"torch.distributed": TorchRoute(dist.group.WORLD, "")}
    return {"extension": route, **by_torch} if route.name == "extension" else by_torch


def contenders(route: Route) -> dict[str, Callable[[Tensor], Any]]:
    """Name -> what is timed; the same names on every rank, in the same order."""
    made: dict[str, Callable[[Tensor], Any]] = {}
    for name, each in routes(route).items():
        made[f"all_reduce, {name}"] = lambda x, each=each: each.all_reduce(x, False)
        made[f"reduce_sq_norm, {name}"] = each.sq_norm
    library = dist.get_backend()

    def library_norm(x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return torch.linalg.vector_norm(x, dtype=torch.float32).square()

    return {
        **made,
        f"{library} all_reduce": dist.all_reduce,
        f"{library} all_reduce + vector_norm": library_norm,
    }


def wrong(route: Route, rank: int, device: torch.device) -> list[str]:
    """Which sums are not as the definition says."""
    found = []
    for n in (1000, 300_001):
        x = drawn(rank, n)
        want, norm = reference.all_reduce(x.clone()), reference.reduce_sq_norm(x)
        for name, each in routes(route).items():
            got, got_norm = x.to(device, copy=True), float(each.sq_norm(x.to(device)))
            each.all_reduce(got, False)
            if not torch.equal(got.cpu(), want) or abs(got_norm / float(norm) - 1) > 1e-12:
                found.append(f"{name}, {n} elements")
    return found


def errors(rank: int, device: torch.device) -> dict[str, float]:
    """Root mean square of the error of a sum over that of the sum, float64 being the truth."""
    parts = [drawn(r, ERROR_SIZE) for r in range(dist.get_world_size())]
    truth = torch.stack([p.double() for p in parts]).sum(0)
    found = {}
    for name, reduce in (("fastlr", distributed.all_reduce), (dist.get_backend(), dist.all_reduce)):
        total = parts[rank].to(device, copy=True)
        reduce(total)
        found[name] = float((total.cpu().double() - truth).norm() / truth.norm())
    return found


def measure(rank: int, kind: str, largest: int, rounds: int) -> dict[str, Any]:
    """Return what one rank measures: backend, errors, and seconds of a call, or what is wrong.

    Seconds are by size and contender.
    """
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    route = distributed.connect(device, timeout=120)
    made = contenders(route)
    if kind == "cuda" and "cuda:nccl" not in dist.get_backend_config(dist.group.WORLD):
        made = {name: call for name, call in made.items() if "extension" in name}
    result: dict[str, Any] = {
        "backend": f"{route.name} ({route.why})",
        "errors": errors(rank, device),
    }
    result["wrong"] = wrong(route, rank, device)
    if not result["wrong"]:
        sizes = [size for size in SIZES if size <= largest]
        result["seconds"] = {
            n: times(made, drawn(rank, n // 2).to(device), n, rounds) for n in sizes
        }
    return result


def times(
    made: dict[str, Callable[[Tensor], Any]], source: Tensor, size: int, rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of a call of every contender in every round, all in turn.

    The first round is not counted.
    """
    calls = next(count for most, count in CALLS if size <= most)
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(rounds + 1):
        for name, call in made.items():
            x = source.clone()  # sums of sums grow out of range
            dist.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                call(x)
            if x.is_cuda:
                torch.cuda.synchronize()
            seconds[name].append((time.perf_counter() - start) / calls)
    return {name: values[1:] for name, values in seconds.items()}


@pytest.mark.benchmark(group="reductions")
@pytest.mark.parametrize("ranks", [2, 4])
def test_reductions(
    benchmark: BenchmarkFixture, ranks: int, device: torch.device, quick: bool, rounds: int
) -> None:
    """All contenders and sizes at one number of ranks; rows are in ``extra_info``."""
    gpu = device.type == "cuda"
    if not gpu and ranks > (os.cpu_count() or 1):
        pytest.skip(
            "more ranks than cores: times would say nothing, and the sums themselves are tested "
            "in tests/distributed"
        )
    backend = "cpu:gloo,cuda:nccl" if gpu and ranks <= torch.cuda.device_count() else "gloo"
    largest = 1 << 30 if gpu else 1 << 26
    if quick:
        largest = 1 << 13

    def world() -> list[dict[str, Any]]:
        given = device.type, largest, rounds
        return good(run_ranks(ranks, measure, *given, limit=3000, backend=backend, on_gpu=gpu))

    results = benchmark.pedantic(world, rounds=1)
    assert not any(result["wrong"] for result in results), results[0]["wrong"]
    rows = []
    for size, by_name in results[0]["seconds"].items():
        for name in by_name:
            slowest = map(
                max, zip(*(result["seconds"][size][name] for result in results), strict=True)
            )
            seconds = statistics.median(slowest)
            bus = 2 * (ranks - 1) / ranks * size / seconds
            rows.append(
                {
                    "ranks": ranks,
                    "bytes": size,
                    "name": name,
                    "seconds": seconds,
                    "bus bytes/s": bus,
                }
            )
    benchmark.extra_info |= {
        "contender": f"{ranks} ranks",
        "rows": rows,
        "errors": results[0]["errors"],
    }
    benchmark.extra_info["backend"] = results[0]["backend"]


def by_library(t: Tensor, group: Any = None) -> Tensor:
    """The library's own sum in the place of fastlr's."""
    dist.all_reduce(t, group=group)
    return t


class Noted:
    """A way to add up gradients that notes the first sum, what went into it, and bytes in all."""

    def __init__(self, reduce: Callable[..., Tensor]) -> None:
        self.reduce, self.sent = reduce, 0
        self.first: list[Tensor] = []

    def __call__(self, t: Tensor, group: Any) -> Tensor:
        """Replace a tensor by its sum."""
        own = [] if self.first else [t.clone()]
        self.sent += t.numel() * t.element_size()
        total = self.reduce(t, group)
        self.first += [*own, total.clone()] if own else []
        return total


def trained(rank: int, epochs: int, seeds: int, rounds: int) -> dict[str, Any]:
    """Train together by each way to add up gradients.

    Returned are what each sends, its error in the first step, and the loss at the end.
    """
    route = distributed.connect(torch.device("cpu"), timeout=120)
    rows, truth, steps = [], torch.empty(0), epochs * TRAINED["n"] // TRAINED["batch_size"]
    for name, reduce in (("fastlr", distributed.all_reduce), (dist.get_backend(), by_library)):
        for dtype, kind in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            losses = []
            for seed in reversed(range(seeds)):
                options, noted = (
                    MemorizeOptions(**TRAINED, reduce_dtype=dtype, seed=seed),
                    Noted(reduce),
                )
                with distributed.sharded(timeout=120):
                    memorizer = Memorizer(
                        DRIVER.open_data(options)[0], options, torch.device("cpu")
                    )
                    data_parallel.all_reduce = noted  # type: ignore[assignment]
                    for epoch in range(1, epochs + 1):
                        memorizer.epoch(epoch)
                    memorizer.parallel.check()
                    losses.append(memorizer.evaluate("at the end")["loss"])
            before, after = (t[: memorizer.parameters].double() for t in noted.first)
            truth = truth if rows else by_library(before.clone())  # of float32, added in float64
            x = torch.randn(EXCHANGED, generator=torch.Generator().manual_seed(rank)).to(kind)
            seconds = times({dtype: lambda x, reduce=reduce: reduce(x, None)}, x, x.nbytes, rounds)[
                dtype
            ]
            row = {
                "sum": f"{dtype} by {name}",
                "bytes a step": noted.sent // steps,
                "ms": 1e3 * statistics.median(seconds),
            }
            row["error of the first step"] = float((after - truth).norm() / truth.norm())
            rows.append({**row, f"loss after {steps} steps": mean_over_seeds(losses)})
    return {"backend": f"{route.name} ({route.why})", "rows": rows}


@pytest.mark.benchmark(group="gradients of a shared training")
@pytest.mark.parametrize("ranks", [2, 4])
def test_trained(
    benchmark: BenchmarkFixture, ranks: int, device: torch.device, quick: bool, rounds: int
) -> None:
    """Train with gradients in float32 and bfloat16, summed by fastlr and by the library.

    Times are taken only where each rank has a core.
    """
    if device.type != "cpu":
        pytest.skip("trained on the CPU")

    def world() -> list[dict[str, Any]]:
        return good(run_ranks(ranks, trained, *((1, 2) if quick else (20, 6)), rounds, limit=3000))

    result = benchmark.pedantic(world, rounds=1)[0]
    rows = [{"ranks": ranks, **row} for row in result["rows"]]
    for row in rows:
        row |= {
            key: f"{mean.value:.3g} ± {mean.stderr:.1g}"
            for key, mean in row.items()
            if key.startswith("loss")
        }
    errors = [row["error of the first step"] for row in rows]
    assert errors[0] < 1e-6 and errors[2] < 1e-6 and errors[1] < errors[3] * 1.01 < 2e-2, errors
    if ranks > (os.cpu_count() or 1):
        rows = [{**row, "ms": "-"} for row in rows]
    benchmark.extra_info |= {
        "contender": f"{ranks} ranks",
        "rows": rows,
        "backend": result["backend"],
    }
