"""Run everything that fastlr measures on a GPU, or resume such a run.

    python -m bench.gpu_run [--seconds 560] [--resume FOLDER] [--steps FILE] [--out FOLDER]
                            [--commit ID]

The steps are those of `bench.gpu_run.steps`. A step that exceeds its time limit is stopped with all
its processes; so is a step whose run is killed. The time counts from the start of the process. Five
files are in the output folder after every step:

- ``results.jsonl``: a line per attempt of a step (exit code, seconds, time limit, output);
- ``tests.jsonl``: lines when a test is collected, starts and ends (outcome, seconds, failure);
- ``report.txt``: a line per attempt, and the number of tests by outcome, to read;
- ``records.tar.gz``: records of the benchmarks;
- ``triton.tar.gz``: compiled kernels, so that the next machine need not compile them again.

With ``--resume`` a command starts from the files of an earlier one. It skips steps that passed or
have used up their attempts, and tests that passed. An attempt that was cut short by the end of its
command is not counted. While a step runs, its output is in ``step.log``. If the run is killed, the
next command reports the end of that file.

Exits with 1 if a step failed and none is left to try, 2 if nothing can run here, 0 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.gpu_run.first_value import process_start
from bench.gpu_run.runner import RESULTS, GpuRun
from bench.gpu_run.steps import ROOT, STEPS, read_steps

# A process of its own asks torch: a CUDA context here would take memory from the steps.
ASK = """
import json, torch
found = torch.cuda.is_available()
gpu = torch.cuda.get_device_properties(0) if found else None
print(json.dumps(found and {"name": gpu.name, "capability": f"{gpu.major}.{gpu.minor}"}))
"""


def find_gpu() -> dict[str, str] | None:
    """Return name and compute capability of the GPU that torch finds, or None."""
    command = [sys.executable, "-c", ASK]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout or "null") or None


def default_folder(gpu: dict[str, str] | None) -> Path:
    """Return ``$OUT``, or the folder of results that is named after the GPU."""
    if os.environ.get("OUT"):
        return Path(os.environ["OUT"])
    name = re.sub(r"[^a-z0-9]+", "-", gpu["name"].lower()) if gpu else "no-gpu"
    return ROOT / "bench" / "results" / name.strip("-").removeprefix("nvidia-")


def commit() -> str:
    """Return the commit of the clone, or "unknown" where there is no git."""
    from fastlr.experiments.runs.folder import commit_of_source

    return commit_of_source() or "unknown"


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=560, help="time for the command (560)")
    parser.add_argument("--resume", type=Path, help="folder of an earlier command's files")
    parser.add_argument("--steps", type=Path, help="JSON file of other steps; needs no GPU")
    parser.add_argument("--out", type=Path, help="output folder (default: $OUT, or by GPU)")
    parser.add_argument("--commit", help="commit for the records (default: the clone's)")
    return parser.parse_args(arguments)


def refused(message: str) -> int:
    """Print an error and return the exit code for it."""
    print(f"error: {message}", file=sys.stderr)
    return 2


def main(arguments: list[str] | None = None) -> int:
    """Run the steps; see the module."""
    options: Any = parsed(arguments)
    gpu = None
    if options.steps is None:
        gpu = find_gpu()
        if gpu is None:
            return refused("torch finds no GPU: run this on a GPU machine, or pass --steps FILE")
    try:
        steps = read_steps(options.steps) if options.steps else STEPS
    except (OSError, ValueError) as error:
        return refused(f"--steps: {error}")
    out = (options.out or default_folder(gpu)).resolve()
    resume = options.resume and options.resume.resolve()
    if resume and not (resume / RESULTS).exists():
        return refused(f"--resume: {resume} has no {RESULTS}")
    if (out / RESULTS).exists() and resume != out:
        return refused(f"--out: {out} has results: resume them, or choose another folder")
    capability = gpu["capability"] if gpu else "9.0"
    environment = {
        "TORCH_CUDA_ARCH_LIST": capability,
        **os.environ,
        "PYTHON": sys.executable,
        "PYTHONUNBUFFERED": "1",
        "GPU_RUN_COMMIT": options.commit or commit(),
    }
    with tempfile.TemporaryDirectory(prefix="gpu-run-") as work:
        run = GpuRun(steps, out, Path(work), resume, environment)
        return run.run(options.seconds - (time.time() - process_start()))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a step ends with its run
    sys.exit(main())
