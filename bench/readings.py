"""The paper's two readings side by side: the gradient of each sample, or of a batch's mean.

``python -m bench.readings FOLDER`` learns one network of the preset ``demo`` twice, the same to the
bit, and measures local redundancy once by samples and once by batches, beside the training
gradient norm of both kinds. ``--out`` takes the table of their values, spreads and correlations.
"""

from __future__ import annotations

import argparse
import csv
import math
from pathlib import Path

import numpy as np

from fastlr.experiments.continual import ContinualRun, read_run
from fastlr.experiments.continual.experiment import DRIVER
from fastlr.experiments.statistics.correlation import correlation

IMAGES = 512
MEASURES = ("local_redundancy", "train_grad_norm", "batch_grad_norm")
SAMPLES = {"measures": MEASURES, "redundancy_probe": "sampled", "redundancy_n": IMAGES}
KINDS = {
    "samples": {**SAMPLES, "redundancy_batch": IMAGES},
    "one batch": {**SAMPLES, "redundancy_probe": "batch", "redundancy_batch": IMAGES},
    "batches of 64": {**SAMPLES, "redundancy_probe": "batch", "redundancy_batch": 64},
}
HEAD = (
    "quantity",
    "read by",
    "median first",
    "median last",
    "spread",
    "rho accuracy",
    "rho samples",
)


def main() -> None:
    """Carry out the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.readings", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path("bench/results/cpu/readings/readings.csv"))
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    runs = {name: learned(given.folder / name, given.seed, kind) for name, kind in KINDS.items()}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with given.out.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(HEAD)
        table.writerows(rows(runs))


def learned(path: Path, seed: int, settings: dict) -> ContinualRun:
    """Return the run with these settings, learned unless it is there."""
    if not (path / "config.json").exists():
        DRIVER.begin(path, "demo", {**settings, "seed": seed})
    return read_run(path)


def rows(runs: dict[str, ContinualRun]) -> list[list[str]]:
    """Return the table: each quantity by each reading."""
    by_samples = runs["samples"]
    assert all((run.accuracy == by_samples.accuracy).all() for run in runs.values())
    found = []
    for name, run in runs.items():
        value, reference = (one.measure("local_redundancy") for one in (run, by_samples))
        found.append(["local redundancy", name, *described(value, reference, run.accuracy)])
    reference = by_samples.measure("train_grad_norm")
    for name, key in (("samples", "train_grad_norm"), ("one batch", "batch_grad_norm")):
        value = by_samples.measure(key)
        found.append(
            ["training gradient norm", name, *described(value, reference, by_samples.accuracy)]
        )
    return found


def described(value: np.ndarray, reference: np.ndarray, accuracy: np.ndarray) -> list[str]:
    """Return medians of both fifths, the spread, and rank correlations times 100.

    The spread is the factor by which neighbouring tasks lie apart: the exponential of the standard
    deviation of the differences of neighbouring logarithms over the square root of two.
    """
    fifth = len(value) // 5
    spread = math.exp(np.diff(np.log(value)).std() / math.sqrt(2))
    medians = [f"{np.median(part):.3g}" for part in (value[:fifth], value[-fifth:])]
    rho = [100 * correlation("spearman", value, other) for other in (accuracy, reference)]
    return [*medians, f"x {spread:.2f}", *(f"{one:.0f}" for one in rho)]


if __name__ == "__main__":
    main()
