"""Sums over ranks: bandwidth and latency of fastlr's routes against the library's all-reduce, from 1 KB to 1 GB.

    python -m bench.reductions [--device cpu|cuda] [--ranks 2 4] [--largest 64] [--rounds 7] [--json FILE]

bfloat16 throughout, processes of this machine. Every contender is first held to the definition (fastlr) or to float64
(the library's own sum, which rounds at every step). Times are those of the slowest rank, medians over rounds in which all
contenders take turns. "bus" bandwidth is the traffic of the best all-reduce, 2 (W - 1) / W of the bytes, over the
time, as nccl-tests count it; a squared norm has half of that to move. Needs a process for each rank: with more ranks than
cores, or a busy machine, times say little.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.ranks import good, run_ranks
from bench.timing import environment, interleaved
from fastlr import distributed, reference
from fastlr.distributed.routes import Route, TorchRoute
from fastlr.errors import FastlrError
from fastlr.report.record import write_json
from fastlr.speed.clock import spread, waiter

LIMIT = 3000.0
CALLS = ((1 << 14, 200), (1 << 18, 50), (1 << 22, 5), (1 << 40, 1))  # (bytes up to which, calls in one timing)
ERROR_SIZE = 1 << 20  # elements of the comparison with float64


def sizes(largest_mib: float) -> list[int]:
    """Bytes: 1 KB, 8 KB, 64 KB, ... 256 MB, 1 GB, as far as ``largest_mib`` goes."""
    return [size for size in [*(1024 * 8**k for k in range(7)), 1 << 30] if size <= largest_mib * 2**20]


def contenders(route: Route, group: Any) -> dict[str, Callable[[Tensor], Any]]:
    """Name -> what is timed; the same names on every rank, in the same order."""
    torch_route = TorchRoute(group, "")
    found: dict[str, Callable[[Tensor], Any]] = {}
    if route.name == "extension":
        found["all_reduce, extension"] = lambda x: route.all_reduce(x, False)
        found["reduce_sq_norm, extension"] = lambda x: route.sq_norm(x)
    found["all_reduce, torch.distributed"] = lambda x: torch_route.all_reduce(x, False)
    found["reduce_sq_norm, torch.distributed"] = lambda x: torch_route.sq_norm(x)
    name = dist.get_backend(group)
    found[f"{name} all_reduce"] = lambda x: dist.all_reduce(x, group=group)
    found[f"{name} all_reduce + vector_norm"] = lambda x: _library_norm(x, group)
    return found


def _library_norm(x: Tensor, group: Any) -> Tensor:
    dist.all_reduce(x, group=group)
    return torch.linalg.vector_norm(x, dtype=torch.float32).square()


def drawn(rank: int, n: int, device: torch.device) -> Tensor:
    """This rank's bfloat16 numbers."""
    return torch.randn(n, generator=torch.Generator().manual_seed(rank)).bfloat16().to(device)


def check(route: Route, names: list[str], rank: int, device: torch.device) -> list[str]:
    """What is not as the definition says; empty if all is."""
    wrong = []
    for n in (1000, 300_001):
        x = drawn(rank, n, torch.device("cpu"))
        want, norm = reference.all_reduce(x.clone()), reference.reduce_sq_norm(x)
        for name, one in (("extension", route), ("torch.distributed", TorchRoute(dist.group.WORLD, ""))):
            if f"all_reduce, {name}" not in names:
                continue
            got = x.to(device, copy=True)
            one.all_reduce(got, False)
            if not torch.equal(got.cpu(), want):
                wrong.append(f"all_reduce, {name}, {n} elements")
            if abs(float(one.sq_norm(x.to(device))) / float(norm) - 1) > 1e-12:
                wrong.append(f"reduce_sq_norm, {name}, {n} elements")
    return wrong


def errors(rank: int, ranks: int, device: torch.device) -> dict[str, float]:
    """Root mean square of the error of a sum over that of the sum, float64 being the truth."""
    parts = [drawn(r, ERROR_SIZE, torch.device("cpu")) for r in range(ranks)]
    truth = torch.stack([p.double() for p in parts]).sum(0)
    ours, library, stepwise = parts[rank].to(device, copy=True), parts[rank].to(device, copy=True), parts[0].clone()
    distributed.all_reduce(ours)
    dist.all_reduce(library)
    for part in parts[1:]:
        stepwise += part
    found = {"fastlr": ours, dist.get_backend(): library, "bfloat16, one rank after the other": stepwise}
    scale = truth.square().mean().sqrt()
    return {name: float((t.cpu().double() - truth).square().mean().sqrt() / scale) for name, t in found.items()}


def measure(rank: int, kind: str, bytes_of_each: list[int], rounds: int) -> dict[str, Any]:
    """What one rank finds: its route, what is wrong, errors, and seconds of one call by size and contender."""
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    ranks = dist.get_world_size()
    route = distributed.connect(device, timeout=120)
    group = dist.group.WORLD
    made = contenders(route, group)
    if kind == "cuda" and "cuda:nccl" not in dist.get_backend_config(group):
        made = {name: call for name, call in made.items() if "extension" in name}
    found: dict[str, Any] = {"route": [route.name, route.why], "wrong": check(route, list(made), rank, device)}
    found["errors"] = errors(rank, ranks, device)
    found["seconds"] = {}
    if not found["wrong"]:
        for size in bytes_of_each:
            calls = next(count for most, count in CALLS if size <= most)
            found["seconds"][size] = _times(made, drawn(rank, size // 2, device), calls, rounds)
    return found


def _times(made: dict[str, Callable[[Tensor], Any]], source: Tensor, calls: int, rounds: int) -> dict[str, list[float]]:
    buffers = {name: source.clone() for name in made}
    wait = waiter(source.device)

    def repeated(name: str) -> Callable[[], None]:
        def call() -> None:
            for _ in range(calls):
                made[name](buffers[name])

        return call

    def meet() -> None:
        wait()
        dist.barrier()

    def renew(_: int) -> None:  # sums of sums grow out of range, which no contender minds
        for buffer in buffers.values():
            buffer.copy_(source)

    seconds = interleaved({name: repeated(name) for name in made}, rounds, synchronize=meet, after_round=renew)
    return {name: [t / calls for t in times] for name, times in seconds.items()}


def joined(ranks: int, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows: one for each size and contender, with the slowest rank's time of every round."""
    rows = []
    for size in found[0]["seconds"]:
        for name in found[0]["seconds"][size]:
            slowest = [max(times) for times in zip(*(each["seconds"][size][name] for each in found), strict=True)]
            row = {"ranks": ranks, "bytes": size, "name": name, **spread(slowest)}
            share = 2 * (ranks - 1) / ranks
            rows.append(row | {"bus_bytes_per_second": share * size / row["seconds"]})
    return rows


def table(rows: list[dict[str, Any]], ranks: int) -> Table:
    """Milliseconds by contender and size."""
    own = [row for row in rows if row["ranks"] == ranks]
    made = Table(title=f"{ranks} ranks: ms of one call (slowest rank, median)", box=None, pad_edge=False)
    made.add_column("")
    for size in dict.fromkeys(row["bytes"] for row in own):
        made.add_column(_short(size), justify="right", no_wrap=True)
    for name in dict.fromkeys(row["name"] for row in own):
        made.add_row(name, *(f"{row['seconds'] * 1e3:.3g}" for row in own if row["name"] == name))
    return made


def _short(size: int) -> str:
    for shift, unit in ((30, "GB"), (20, "MB"), (10, "KB")):
        if size >> shift:
            return f"{size >> shift} {unit}"
    return str(size)


def backend_for(kind: str, ranks: int) -> str:
    """NCCL where every rank has a GPU of its own; gloo exchanges on the CPU otherwise."""
    return "cpu:gloo,cuda:nccl" if kind == "cuda" and ranks <= torch.cuda.device_count() else "gloo"


def main(arguments: list[str] | None = None) -> int:
    """Run; 0 if all is right, 1 if something is wrong, 2 for wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m bench.reductions", description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--largest", type=float, help="MiB; default: 1024 on GPUs, 64 on a CPU")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", help="file for the record")
    args = parser.parse_args(arguments)
    if not all(1 <= ranks <= 8 for ranks in args.ranks) or args.rounds < 1:
        parser.error("--ranks are from 1 to 8, --rounds at least 1")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here")
    largest = args.largest or (1024 if args.device == "cuda" else 64)
    console, rows, said = Console(), [], {}
    settings = {"device": args.device, "largest_mib": largest, "rounds": args.rounds}
    record: dict[str, Any] = {"what": __doc__.split("\n")[0], "settings": settings, "environment": environment()}
    record["note"] = _note(max(args.ranks), record["environment"]) if args.device == "cpu" else ""
    for ranks in args.ranks:
        backend = backend_for(args.device, ranks)
        found = run_ranks(ranks, measure, args.device, sizes(largest), args.rounds, limit=LIMIT, backend=backend)
        try:
            found = good(found)
        except FastlrError as error:
            print(f"error: {ranks} ranks: {error}", file=sys.stderr)
            return 1
        rows += joined(ranks, found)
        said[ranks] = {name: found[0][name] for name in ("route", "errors")}
        said[ranks]["wrong"] = sorted({text for each in found for text in each["wrong"]})
        console.print(f"{ranks} ranks: {found[0]['route'][0]} ({found[0]['route'][1]}); wrong: {said[ranks]['wrong']}")
        console.print("error against float64: " + ", ".join(f"{k} {v:.2e}" for k, v in found[0]["errors"].items()))
        console.print(table(rows, ranks))
    if args.json:
        write_json(args.json, {**record, "ranks": said, "rows": rows})
    return 1 if any(each["wrong"] for each in said.values()) else 0


def _note(ranks: int, about: dict[str, Any]) -> str:
    cores, load = os.cpu_count() or 1, about.get("load") or 0.0
    told = []
    if load > 0.5 * cores:
        told.append(
            f"the machine was busy when this began (load {load} on {cores} cores): times are not to be relied on"
        )
    if ranks > cores:
        told.append(f"up to {ranks} ranks on {cores} cores: ranks take turns")
    return "; ".join(told)


if __name__ == "__main__":
    sys.exit(main())
