"""The steps of a run, in order: each is a shell command with a time limit.

Commands run in the clone's folder. They find this Python in ``$PYTHON``, the folder of records in
``$RECORDS`` and the commit in ``$GPU_RUN_COMMIT``. A row for each form compares forms on one card,
as the three rows of ``resnet50`` do.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
HEADLINE = "mobilenet_v3_large"  # the paper's network
TABLE = '"$RECORDS/tuned.json"'  # block sizes, written by the step "tune"
FIRST_TESTS = "tests/ops/test_kernels_folded.py"  # the kernels that take most of the time


class Step(NamedTuple):
    """A command of a run.

    Attributes:
        name: Name in the results, unique among the steps.
        seconds: Time limit.
        attempts: Number of times that a failing command is started, over all resumed runs.
        command: Line for the shell.
        setup: True for a step that runs in every command, and without which no other can run.
    """

    name: str
    seconds: float
    attempts: int
    command: str
    setup: bool = False


def python(words: str) -> str:
    """Return the command that runs a module with its arguments."""
    return f'"$PYTHON" -m {words}'


def timed(name: str, seconds: float, words: str, attempts: int = 1) -> Step:
    """Return a step that times estimates and plain passes in turn.

    Args:
        name: Name of the step and of the folder of its record.
        seconds: Time limit.
        words: Arguments of `bench.launch_times`.
        attempts: Number of attempts.
    """
    record = f'--commit "$GPU_RUN_COMMIT" --record "$RECORDS/{name}"'
    return Step(name, seconds, attempts, python(f"bench.launch_times {words} {record}"))


def gpu_tests(name: str, seconds: float, files: Iterable[str], processes: int) -> Step:
    """Return a step that runs the tests of these files that need a GPU, side by side if it can."""
    parallel = ""
    if importlib.util.find_spec("xdist") is not None:
        count = min(processes, os.cpu_count() or 1)
        parallel = f"-n {count} --dist load --maxschedchunk 1"
    options = "-q --continue-on-collection-errors -p no:timeout -p no:cacheprovider"
    words = f"pytest -p bench.gpu_run.plugin {options} {parallel} {' '.join(files)}"
    return Step(name, seconds, 9, python(words))


def benchmark(name: str, seconds: float, words: str) -> Step:
    """Return a step that runs a part of ``pytest bench/`` on the GPU and keeps its record."""
    record = f'--device cuda --benchmark-json="$RECORDS/{name}.json"'
    return Step(name, seconds, 1, python(f"pytest -v -rxXs -p no:cacheprovider {words} {record}"))


def files_with_gpu_tests() -> list[str]:
    """Return the test files that have tests for a GPU, as paths from the clone's folder."""
    marks = ("needs_gpu", "needs a GPU", "import recorders", "from recorders")
    paths = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if path.parent.name != "bench" and any(mark in text for mark in marks):
            paths.append(path.relative_to(ROOT).as_posix())
    return sorted(paths, key=lambda path: path != FIRST_TESTS)


TEST_FILES = files_with_gpu_tests()
OPS_TESTS = [path for path in TEST_FILES if path.startswith("tests/ops/")]
OTHER_TESTS = [path for path in TEST_FILES if not path.startswith("tests/ops/")]

# This clone must be installed, which builds the extension, and no other one.
KERNELS = "import os, fastlr.kernels as k; assert os.path.samefile(k.__path__[0], 'kernels')"
VERSION = "from importlib.metadata import version; version('fastlr')"
INSTALLED = f'"$PYTHON" -c "{VERSION}; {KERNELS}"'
PIP = python("pip install -q --no-build-isolation --no-deps -e .")
INSTALL = f"{INSTALLED} 2>/dev/null || {{ PIP_BREAK_SYSTEM_PACKAGES=1 {PIP} && {INSTALLED}; }}"
EMPTY_CACHES = 'rm -rf "$TRITON_CACHE_DIR"'
STEPS = (
    Step("install", 120, 1, INSTALL, setup=True),
    Step("machine", 30, 1, f"nvidia-smi; {python('fastlr doctor')}"),
    Step("planning", 40, 1, python("bench.gpu_run.planning")),
    Step("first_value_cold", 120, 1, f"{EMPTY_CACHES}; {python('bench.gpu_run.first_value')}"),
    Step("first_value_warm", 90, 1, python("bench.gpu_run.first_value")),
    timed("headline", 240, HEADLINE, attempts=2),
    timed("headline_1000", 120, f"{HEADLINE} --chunk 1000"),
    Step("vmap_peer", 90, 1, python("bench.gpu_run.vmap_peer")),
    timed("resnet50", 120, "resnet50 -n 1000"),
    timed("resnet50_kernels", 90, "resnet50 -n 1000 --few-positions 0"),
    timed("resnet50_gram_196", 90, "resnet50 -n 1000 --few-positions 196"),
    timed("headline_gram", 120, f"{HEADLINE} --least-weights 65536"),
    timed("vit_b_16", 60, "vit_b_16 -n 1000"),
    Step("doctor_kernels", 120, 1, python("fastlr doctor --kernels")),
    gpu_tests("tests_ops", 500, OPS_TESTS, processes=12),
    gpu_tests("tests_other", 300, OTHER_TESTS, processes=8),
    Step("tune", 300, 2, python(f"bench.tune {HEADLINE} resnet50 --table {TABLE}")),
    timed("headline_tuned", 120, f"{HEADLINE} --table {TABLE}", attempts=2),
    timed("resnet50_tuned", 90, f"resnet50 -n 1000 --table {TABLE}", attempts=2),
    benchmark("ops", 300, "bench/test_norms.py"),
    Step(
        "roofline",
        30,
        1,
        python('bench.gpu_run.roofline "$RECORDS/ops.json" "$RECORDS/roofline.png"'),
    ),
    benchmark("training", 90, "bench/test_training.py -k graph"),
    benchmark("peers", 150, f"bench/test_peers.py -k {HEADLINE}"),
    benchmark("modes", 300, f"bench/test_estimate.py -k '{HEADLINE} or test_plain'"),
    benchmark("networks", 240, "bench/test_estimate.py -k 'resnet50 or vit_b_16'"),
    benchmark("reductions", 120, "bench/test_reductions.py"),
)
# Steps that compile hundreds of kernels: they stay in Triton's own folder, as they would not fit
# into the archive.
OWN_CACHE = ("doctor_kernels", "tests_ops", "tests_other", "tune", "ops")


def read_steps(path: Path) -> tuple[Step, ...]:
    """Return the steps of a JSON file: a list of objects with the attributes of `Step`.

    Raises:
        ValueError: The file has no such list, or two steps of one name.
    """
    try:
        steps = tuple(Step(**row) for row in json.loads(path.read_text(encoding="utf-8")))
    except TypeError as error:
        raise ValueError(f"{path}: {error}") from error
    if len({step.name for step in steps}) < len(steps):
        raise ValueError(f"{path}: two steps have the same name")
    return steps
