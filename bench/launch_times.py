"""The whole estimate on a GPU: beside plain passes, and where its time goes, kernel by kernel.

    python -m bench.launch_times [NETWORK ...] [--precision bfloat16] [-n 5000] [--chunk 1000]
                                 [--rounds 10] [--device cuda] [--record FOLDER] [--commit ID]
                                 [--table FILE] [--few-positions N] [--least-weights N]

Of each network the norms are first held to float64. Then plain passes and estimates over the same
images take turns, as in ``bench/test_estimate.py``, and one estimate more is traced: every kernel
that ran, and how long. What plain is, and in which mode the estimate runs, is said there.

Writes ``<network>-<precision>.json`` to the folder, and prints the kernels that took longest. A
launch there is the number of its kernel among ``kernels``, when it began and how long it took, in
microseconds.

Exits with 1 where norms are wrong, or an estimate did not run as a CUDA graph with every batch norm
folded: the error names the blocks and the reasons.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from bench.cases import MAIN
from bench.paired import Work, Wrong, ratios, seconds_of
from bench.test_estimate import estimate_pair
from bench.test_norms import copy_bandwidth
from fastlr.display.record import finite, machine
from fastlr.experiments.runs.folder import commit_of_source
from fastlr.files import write_text
from fastlr.ops import gram, tuning

SAMPLES = 64  # whose norms are held to float64
SIZE = 224
SHOWN = 24  # kernels


class Launch(NamedTuple):
    """A kernel, or a copy, that the GPU ran: its name, and when it began and ended, in us."""

    name: str
    begun: float
    ended: float


def traced(function: Any) -> list[Launch]:
    """Call a function and return what the GPU ran for it, in order."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        function()
        torch.cuda.synchronize()
    on_gpu = [e for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    ran = [Launch(e.name, e.time_range.start, e.time_range.end) for e in on_gpu]
    return sorted(ran, key=lambda launch: launch.begun)


def by_kernel(launches: list[Launch]) -> dict[str, tuple[int, float]]:
    """Return how often each kernel ran and its milliseconds, the longest first."""
    sums: dict[str, list[float]] = defaultdict(list)
    for launch in launches:
        sums[launch.name].append((launch.ended - launch.begun) / 1e3)
    found = {name: (len(each), sum(each)) for name, each in sums.items()}
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def measured(name: str, precision: str, n: int, chunk: int | None, rounds: int) -> dict[str, Any]:
    """Return the record of one network, in chunks of this size or as many as fit.

    Raises:
        paired.Wrong: Its norms are not the truth's, or it does not run as a replayed CUDA graph
            with every batch norm folded.
    """
    begun = time.perf_counter()
    device = torch.device("cuda")
    work: Work = estimate_pair(
        name, precision, "default", n, SIZE, min(n, SAMPLES), device, chunk=chunk
    )
    notes: list[str] = []

    def estimated() -> None:
        """Measure once, and keep the notes that are new."""
        notes.extend(note for note in work.run().notes if note not in notes)

    first = seconds_of(estimated, device)
    facts = dict(work.check())  # two estimates more, by which the chunk is captured
    seconds_of(work.plain, device)
    until_timed = time.perf_counter() - begun
    pairs = [(seconds_of(work.plain, device), seconds_of(estimated, device)) for _ in range(rounds)]
    plain, own = zip(*pairs, strict=True)
    launches = traced(estimated)
    start = launches[0].begun
    kernels = list(by_kernel(launches))
    return {
        "network": name,
        "precision": precision,
        **facts,
        "notes": notes,
        "seconds_of_the_first_estimate": first,
        "seconds_until_timed": until_timed,
        **ratios(list(own), list(plain)),
        "own_seconds": own,
        "each_plain_seconds": plain,
        "milliseconds_of_kernels": sum(ms for _, ms in by_kernel(launches).values()),
        "milliseconds_from_first_to_last": (launches[-1].ended - start) / 1e3,
        "kernels": kernels,
        "launches": [
            [
                kernels.index(launch.name),
                round(launch.begun - start, 2),
                round(launch.ended - launch.begun, 2),
            ]
            for launch in launches
        ],
    }


def launches_of(record: dict[str, Any]) -> list[Launch]:
    """Return the launches of a record, in order."""
    names = record["kernels"]
    return [
        Launch(names[kernel], begun, begun + took) for kernel, begun, took in record["launches"]
    ]


def compact(record: dict[str, Any]) -> str:
    """Return a record as JSON with a line an entry."""
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in finite(record).items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def show(record: dict[str, Any], console: Console) -> None:
    """Print a record: the times, and the kernels that took longest."""
    console.print(
        f"{record['network']}, {record['precision']}, n = {record['n']}, chunks of "
        f"{record['chunk']}: {1e3 * record['seconds']:.1f} ms, plain "
        f"{1e3 * record['plain_seconds']:.1f} ms, ratio {record['ratio']:.3f}; first estimate "
        f"{record['seconds_of_the_first_estimate']:.1f} s; kernels "
        f"{record['milliseconds_of_kernels']:.1f} ms within "
        f"{record['milliseconds_from_first_to_last']:.1f} ms; norms off by "
        f"{record['deviation_rms']:.2g} (torch's own {record['torch_deviation_rms']:.2g})"
    )
    for note in record["notes"]:
        console.print(f"note: {note}", markup=False)
    table = Table("kernel", "launches", "ms", box=None, pad_edge=False)
    for name, (count, ms) in list(by_kernel(launches_of(record)).items())[:SHOWN]:
        table.add_row(name[:60], str(count), f"{ms:.2f}")
    console.print(table)


def main(arguments: list[str] | None = None) -> int:
    """Measure the networks, one after the other; see the module."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.launch_times", description=__doc__.split("\n")[0]
    )
    parser.add_argument("networks", nargs="*", default=[MAIN])
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("-n", type=int, default=5000)
    parser.add_argument("--chunk", type=int, help="default: as many as fit")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", type=torch.device, default="cuda", help="cuda or cuda:1")
    parser.add_argument("--record", type=Path, default=Path("bench/results/gpu"))
    parser.add_argument("--commit", default=commit_of_source())
    parser.add_argument("--table", type=Path, help="block sizes instead of fastlr/ops/tuned.json")
    parser.add_argument(
        "--few-positions",
        type=int,
        default=gram.FEW_POSITIONS,
        help=f"most positions for norms by Gram matrices ({gram.FEW_POSITIONS}; 0: by kernels)",
    )
    parser.add_argument(
        "--least-weights",
        type=int,
        default=gram.LEAST_WEIGHTS,
        help=f"fewest weights of a layer for norms by Gram matrices ({gram.LEAST_WEIGHTS})",
    )
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("error: torch finds no GPU here", file=sys.stderr)
        return 2
    if args.device.index is not None:
        torch.cuda.set_device(args.device)
    if args.table is not None:
        if not args.table.exists():
            print(f"error: --table: {args.table} does not exist", file=sys.stderr)
            return 2
        tuning.TABLE = args.table
        tuning.table.cache_clear()
    gram.FEW_POSITIONS, gram.LEAST_WEIGHTS = args.few_positions, args.least_weights
    console = Console()
    args.record.mkdir(parents=True, exist_ok=True)
    made_by = {
        "command": f"python -m bench.launch_times {' '.join(arguments or sys.argv[1:])}",
        "machine": machine(torch.device("cuda")),
        "versions": {
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cudnn": torch.backends.cudnn.version(),
        },
        "commit": args.commit,
        "copy_bytes_per_second": copy_bandwidth(torch.device("cuda")),
    }
    code = 0
    for name in args.networks:
        try:
            record = made_by | measured(name, args.precision, args.n, args.chunk, args.rounds)
        except Wrong as problem:
            print(f"error: {name}: {problem}", file=sys.stderr)
            code = 1
            continue
        path = args.record / f"{name}-{args.precision.replace(' ', '-')}.json"
        write_text(path, compact(record))
        show(record, console)
    return code


if __name__ == "__main__":
    sys.exit(main())
