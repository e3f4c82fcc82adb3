"""The full benchmark on a GPU, in one command of at most eight minutes: see fastlr/speed.

    python -m bench.gpu [--quick] [--budget 480] [--commit HASH]

Everything of ``fastlr bench``, then other tools for per-sample norms on a batch that they can hold: torch.func's vmap, and
Opacus if it is installed; then training steps (bench/training.py). Writes gpu.json, roofline.png, roofline-stages.png and
report.txt to $OUT (default bench/results/<name of the GPU>/). Exits with 1 if anything is wrong or failed, 2 where there is
no GPU.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bench import cases, peer_autograd, peers, training
from fastlr.speed import figures, tables
from fastlr.speed.clock import first_line, interleaved, peak_bytes, release, spread, waiter
from fastlr.speed.front import say_on
from fastlr.speed.machine import ROOT
from fastlr.speed.networks import CLASSES, MAIN, Network, exact_float32
from fastlr.speed.record import Record, Section
from fastlr.speed.run import Bench, exit_code, settings_for

SECTION = "other tools"
BATCHES = (64, 16, 4)  # tried in turn until all of a tool fits
CHECKED = 4


def contenders() -> dict[str, Callable[[cases.Case, torch.Tensor], peer_autograd.Contender]]:
    """Plain, fastlr, torch.func and, if it is installed, Opacus."""
    names = ["plain", "fastlr", "vmap", *(["opacus", "opacus-ghost"] if importlib.util.find_spec("opacus") else [])]
    return {name: peers.PEERS[name] for name in names}


def other_tools(record: Record, network: Network, batches: tuple[int, ...] = BATCHES, rounds: int = 5) -> None:
    """Per-sample norms by other tools and by fastlr, float32 without TF32: held to float64, then timed in rounds.

    Args:
        record: where rows go, in section "other tools".
        network: whose model and images are taken; its dtype does not count.
        batches: sizes to try; the largest at which every tool that works at all fits is taken for all of them.
        rounds: timed rounds.
    """
    with exact_float32():
        for batch in batches:
            try:
                _tools(record, network, batch, rounds)
                return
            except torch.OutOfMemoryError as error:
                record.note(f"{SECTION}: batch {batch} does not fit ({first_line(error)[:80]})")
            release(network.device)
    record.add(SECTION, "all", "error", error=f"out of memory at every batch of {batches}")


def _tools(record: Record, network: Network, batch: int, rounds: int) -> None:
    # Opacus is wrong on channels_last (its depthwise rule), so that everyone gets rows of one channel.
    model = copy.deepcopy(network.model).to(memory_format=torch.contiguous_format)
    case = cases.Case(model, network.batch(batch).contiguous(), name=network.name)
    with torch.no_grad():
        z = model(case.x)
    cotangent = torch.randn(z.shape, generator=torch.Generator().manual_seed(1)).to(z)
    samples = peers.checked_samples(batch, CHECKED)
    truth = {"samples": samples, "norms": cases.loop_norms(cases.as_double(case), cotangent, samples)}
    runs: dict[str, Callable[[], Any]] = {}
    facts: dict[str, dict[str, Any]] = {}
    failed: list[tuple[str, str, str, dict[str, Any]]] = []
    for name, make in contenders().items():
        title = peers.TITLES[name]
        try:
            contender = make(case, cotangent)
            found, peak = peak_bytes(contender.run, network.device)
            verdict = {} if found is None else peers.gate(found, truth)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            failed.append((title, "error" if name in ("plain", "fastlr") else "cannot run", first_line(error), {}))
            continue
        if verdict and not verdict["correct"]:
            status = "wrong" if name == "fastlr" else "not right"
            failed.append((title, status, peers.wrong(verdict), verdict))
            continue
        runs[title] = contender.run
        facts[title] = {
            "kind": "plain" if name == "plain" else "tool",
            "peak_bytes": peak,
            "notes": contender.notes,
        } | verdict
    seconds = interleaved(runs, rounds, synchronize=waiter(network.device))
    base = peers.TITLES["plain"]
    common = {"n": batch, "size": network.images.size[1], "precision": "float32, no TF32, contiguous"}
    for title, times in seconds.items():
        row = common | facts[title] | spread(times)
        if base in seconds:
            ratios = spread([a / b for a, b in zip(times, seconds[base], strict=True)], "ratio")
            row |= {**ratios, "against": base}
        record.add(SECTION, title, **row)
    for title, status, error, values in failed:  # another tool's failure is its own; fastlr's is ours
        record.add(SECTION, title, status, error=error, kind="tool", **values)


def compile_ahead(networks: Sequence[str], options: Sequence[str] = (), limit: float = 150.0) -> float:
    """Let a process for each network and precision launch its kernels once, all at the same time; return the seconds.

    They leave what they compiled in Triton's cache on disk, where this process finds it: one after the other, most of the
    budget would go into compiling.

    Args:
        networks: torchvision's names.
        options: more of ``fastlr estimate``.
        limit: seconds; what is not done then is compiled later.
    """
    began = time.monotonic()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    command = [sys.executable, "-m", "fastlr", "estimate", "-n", "64", "--batch-size", "32", *options]
    classes = {name: ["--classes", str(CLASSES[name])] if name in CLASSES else [] for name in networks}
    running = [
        subprocess.Popen([*command, name, *classes[name], "--dtype", dtype], cwd=ROOT, **quiet)  # type: ignore[call-overload]
        for name in networks
        for dtype in ("bf16", "fp32")
    ]
    for process in running:
        try:
            process.wait(max(0.0, began + limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return time.monotonic() - began


def folder(name: str) -> Path:
    """Where results go: $OUT, or bench/results/<name of the GPU>."""
    short = re.sub(r"[^a-z0-9]+", "-", name.lower().replace("nvidia", "")).strip("-")
    return Path(os.environ.get("OUT") or ROOT / "bench" / "results" / short)


def main(arguments: list[str] | None = None) -> int:
    """Run everything; see the module."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="only the main cases, no torch.compile, about two minutes")
    parser.add_argument(
        "--budget", type=float, help="seconds (480; 180 with --quick): the last sections are dropped first"
    )
    parser.add_argument("--commit", help="commit of these files, for the record, where there is no .git")
    args = parser.parse_args(arguments)
    if args.budget is not None and not args.budget > 0:
        parser.error("--budget must be a positive number of seconds")
    if not torch.cuda.is_available():
        print("error: torch finds no GPU here; `fastlr bench` runs the CPU cases", file=sys.stderr)
        return 2
    if importlib.util.find_spec("fastlr.kernels") is None:
        print(
            "error: fastlr.kernels is not importable: install the package first "
            "(pip install --no-build-isolation --no-deps -e .)",
            file=sys.stderr,
        )
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    out = folder(torch.cuda.get_device_name(device))
    out.mkdir(parents=True, exist_ok=True)
    settings, say = settings_for(device, quick=args.quick, budget=args.budget), say_on(Console(stderr=True))
    say("compiling kernels ahead")
    spent = compile_ahead([MAIN, *settings.others])
    bench = Bench(dataclasses.replace(settings, budget=max(1.0, settings.budget - spent)), say)
    bench.record.note(f"kernels were compiled ahead, in {spent:.0f} s of the budget of {settings.budget:.0f} s")
    if args.commit:
        bench.record.environment["commit"] = args.commit
    extra = [] if args.quick else [Section(SECTION, 40, lambda: other_tools(bench.record, bench.network()))]
    extra += training.sections(bench.record, device, ("eager", "graph"))
    record = bench.run(extra, after=lambda: bench.record.save(out / "gpu.json"))
    try:
        figures.draw(record, out / "roofline.png")
    except Exception as error:
        record.sections.append({"name": "figures", "status": "error", "seconds": 0.0, "error": first_line(error)})
    record.save(out / "gpu.json")
    text = Console(width=100, record=True)
    text.print(tables.report(record), highlight=False)
    (out / "report.txt").write_text(text.export_text(), encoding="utf-8")
    print(f"written to {out}")
    return exit_code(record)


if __name__ == "__main__":
    sys.exit(main())
