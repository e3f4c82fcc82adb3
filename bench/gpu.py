"""The full benchmark on a GPU, in one command of at most eight minutes, most telling part first.

    python -m bench.gpu [--quick] [--budget 480] [--device cuda]

The doctor, the headline (the whole estimate of MobileNetV3-Large, n = 5000, kernel by kernel),
every op (after the calls of bench/kernel_cases.py: an op that is wrong there is not timed; their
kernels are compiled ahead, in parallel), the GPU tests, the estimate in other modes, training
steps, other tools, other networks, and a roofline of the ops. A part that does not fit in the
budget any more is left out, and said to be; the headline always runs. Writes a record of each part,
report.txt and roofline.png to $OUT (default bench/results/<name of the GPU>/). Exits with 1 if
anything is wrong or failed, 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.cases import MAIN
from fastlr import ops
from fastlr.display.figures import COLOURS, GRID, INK, MUTED, new_figure, save_figure, style

ROOT = Path(__file__).resolve().parents[1]
# That it may always take: on an H200 and 16 cores it was not done after 110, most of which go into
# cuDNN's plans for each shape of a convolution.
HEADLINE_SECONDS = 200.0
LEAST_INTENSITY = 0.05  # where kernels without floating-point arithmetic are drawn


class Part(NamedTuple):
    """A command of ``python -m``: its name, its words, and the least seconds to begin it with."""

    name: str
    words: tuple[str, ...]
    least: float = 60


DOCTOR = Part("doctor", ("fastlr", "doctor"), 0)
HEADLINE = Part("headline", ("bench.launch_times", MAIN, "--chunk", "1000"), 0)
OPS = Part("ops", ("pytest", "bench/test_norms.py"), 30)
FURTHER = (
    Part("tests", ("pytest", "tests/ops", "tests/estimator/test_replay.py")),
    Part(
        "modes",
        ("pytest", "bench/test_estimate.py", "-k", f"{MAIN} or test_plain"),
    ),
    Part("training", ("pytest", "bench/test_training.py", "-k", "graph"), 40),
    Part("peers", ("pytest", "bench/test_peers.py", "-k", MAIN), 40),
    Part("networks", ("pytest", "bench/test_estimate.py", "-k", "resnet50 or vit_b_16")),
    Part("reductions", ("pytest", "bench/test_reductions.py")),
)


def compile_ahead(limit: float) -> None:
    """Compile the kernels of small calls, all at once.

    Processes launch the kernels at the same time.

    They leave what they compiled in Triton's cache on disk: one after the other, most of the budget
    would go into compiling. What is not done after ``limit`` seconds is compiled later. An estimate
    compiles its own ahead.
    """
    names = [name for name in ops.TABLE if "triton" in ops.backends(name)]
    count = min(8, max(1, (os.cpu_count() or 2) // 2))
    commands = []
    for i in range(count):
        commands.append(
            [
                sys.executable,
                "-c",
                "from bench.kernel_cases import CASES; from fastlr.cli import doctor; "
                f"doctor.kernels({names[i::count]}, CASES)",
            ]
        )
    with ThreadPoolExecutor(len(commands)) as threads:  # what is not done in time is killed
        for command in commands:
            threads.submit(subprocess.run, command, cwd=ROOT, capture_output=True, timeout=limit)


def run(part: Part, out: Path, device: str, quick: bool, limit: float) -> str:
    """Run one part of at most ``limit`` seconds; return "ok", or what went wrong."""
    command = [sys.executable, "-m", *part.words]
    if part.words[0] == "pytest":
        command += ["-v", "-rxXs", "-p", "no:cacheprovider"]
    if part.words[0] == "bench.launch_times":
        command += ["--device", device, "--record", str(out)]
    elif part.words[1].startswith("bench"):
        command += [
            "--device",
            device,
            f"--benchmark-json={out / part.name}.json",
            *(["--quick"] if quick else []),
        ]
    with open(out / f"{part.name}.txt", "w", encoding="utf-8") as log:
        try:
            code = subprocess.run(
                command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, timeout=limit
            ).returncode
        except subprocess.TimeoutExpired:
            return f"not done within the {limit:.0f} s that were left"
    return "ok" if code == 0 else f"failed (exit code {code}): see {part.name}.txt"


def roofline(record: dict[str, Any], path: Path) -> None:
    """Draw each op's bytes a second over arithmetic intensity, under a large copy's bandwidth."""
    rows = [
        row["extra_info"] for row in record["benchmarks"] if "bytes_per_second" in row["extra_info"]
    ]
    bandwidth = max(row["copy_bandwidth"] for row in rows) / 1e9
    figure, axes = new_figure((9.0, 6.0), 1, 1)
    style(axes, "GB/s", f"Every op against its memory: {record['machine_info'].get('gpu', 'CPU')}")
    axes.axhline(bandwidth, color=INK)
    # The share that large layers are to reach.
    axes.axhline(0.7 * bandwidth, color=MUTED, linestyle="--")
    axes.text(
        LEAST_INTENSITY, 1.02 * bandwidth, f"copy {bandwidth:,.0f} GB/s", fontsize=8, color=MUTED
    )
    for place, name in enumerate(dict.fromkeys(row["op"] for row in rows)):
        mine = [row for row in rows if row["op"] == name]
        x = [max(LEAST_INTENSITY, row["operations"] / row["bytes"]) for row in mine]
        y = [row["bytes_per_second"] / 1e9 for row in mine]
        marker = "os^D"[place // len(COLOURS) % 4]
        axes.scatter(x, y, s=26, color=COLOURS[place % len(COLOURS)], marker=marker, label=name)
    axes.set(xscale="log", yscale="log")
    axes.grid(True, which="major", color=GRID, linewidth=0.8)
    axes.set_xlabel(
        "floating-point operations per byte that must be moved (left edge: none)", color=INK
    )
    figure.legend(loc="outside right center", fontsize=7.5, frameon=False)
    save_figure(figure, path)


def main(arguments: list[str] | None = None) -> int:
    """Run everything; see the module."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="doctor, headline and main ops, about four minutes"
    )
    parser.add_argument("--budget", type=float, help="seconds (480; 240 with --quick)")
    parser.add_argument("--device", default="cuda", help="cuda or cuda:1")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("error: torch finds no GPU here; `make bench` runs the CPU cases", file=sys.stderr)
        return 2
    if importlib.util.find_spec("fastlr.kernels") is None:
        print(
            "error: install fastlr first: pip install --no-build-isolation --no-deps -e .",
            file=sys.stderr,
        )
        return 2
    short = re.sub(
        r"[^a-z0-9]+", "-", torch.cuda.get_device_name(torch.device(args.device)).lower()
    ).strip("-")
    out = Path(os.environ.get("OUT") or ROOT / "bench" / "results" / short.removeprefix("nvidia-"))
    out.mkdir(parents=True, exist_ok=True)
    end, lines = time.monotonic() + (args.budget or (240.0 if args.quick else 480.0)), []
    for part in (DOCTOR, HEADLINE, OPS, *(() if args.quick else FURTHER)):
        if part is OPS:
            compile_ahead(60)
        left, outcome = end - time.monotonic(), "left out: the budget is spent"
        if part in (DOCTOR, HEADLINE):
            left = max(left, HEADLINE_SECONDS)
        if part.least <= left:
            outcome = run(part, out, args.device, args.quick, left)
        lines.append(f"{part.name}: {outcome}")
        print(lines[-1], flush=True)
        (out / "report.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if (out / "ops.json").exists():
        roofline(json.loads((out / "ops.json").read_text()), out / "roofline.png")
    print(f"written to {out}")
    return int(any("failed" in line or "not done" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
