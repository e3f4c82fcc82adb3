"""The runs of the study: small networks with and without interventions.

Usage: ``python -m bench.causes OUT``.

Problems of an MLP on scikit-learn's digits with every intervention, then those of a transformer
and, with an image store, of a ConvNet with four; ``values`` is about what a value is like by
itself. Each seed has all of them before the next; those that take second derivatives come later.
What is there is gone on with or left alone, so it may be interrupted, and several processes may
share OUT. Then ``python -m bench.causes.report OUT/PROBLEM``, also before the last run has ended.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fastlr.errors import InputError
from fastlr.experiments.continual.experiment import DRIVER

OF_NETWORK = ("weight_norm", "dormant_ratio", "effective_rank", "train_grad_norm")
MEASURES = ("local_redundancy", "local_redundancy_next_task", *OF_NETWORK)
COMMON = {
    "measures": MEASURES,
    "measure_every": 4,
    "redundancy_n": 256,
    "redundancy_batch": 256,
    "fused": True,
}
SMOOTH = {"model_kwargs": {"activation": "GELU"}}
FLOOR = {"redundancy_floor": 500.0, "floor_images": 16}
INTERVENTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "shrink-and-perturb": {"shrink": 0.8, "perturb": 0.03},
    "l2-init": {"l2_init": 1e-3},
    "redundancy-floor": FLOOR,
    "continual-backprop": {"cbp_rate": 1e-3},
    "layer-norm": {"model_kwargs": {"layer_norm": True}},
    "ewc": {"ewc": 10.0},
    "replay": {"replay_images": 256},
    "reset": {"reset_every": 10, "reset_layers": 2},
    "gelu": SMOOTH,
    "gelu-redundancy-floor": {**SMOOTH, **FLOOR},
}
FOUR = dict(list(INTERVENTIONS.items())[:4])
NETWORKS: dict[str, dict[str, Any]] = {
    "as-it-is": {},
    "width-16": {"widths": [16] * 3},
    "width-32": {"widths": [32] * 3},
    "width-128": {"widths": [128] * 3},
    "width-256": {"widths": [256] * 3},
    "depth-1": {"widths": [64]},
    "depth-2": {"widths": [64] * 2},
    "depth-6": {"widths": [64] * 6},
    "gelu": {"activation": "GELU"},
    "tanh": {"activation": "Tanh"},
    "orthogonal": {"initialisation": "orthogonal_"},
    "kaiming-normal": {"initialisation": "kaiming_normal_"},
}
# 160 steps a task, as the next has
LABELS = {"data": "random-labels-digits", "random_images": 256, "epochs": 20}
PIXELS = {"data": "permuted-digits", "random_images": 512, "epochs": 10}
TRANSFORMER = {
    "model": "timm/vit_tiny_patch16_224",
    "model_kwargs": {"img_size": 8, "patch_size": 2, "embed_dim": 48, "depth": 2, "num_heads": 4},
    "learning_rate": 1e-3,
}
CONVNET = {"model": "fastlr.models.convnet:ConvNet", "learning_rate": 1e-3, "epochs": 10}


class Problem(NamedTuple):
    """Settings of all its runs, those of each variant by name, the most seeds and tasks."""

    settings: Mapping[str, Any]
    variants: Mapping[str, Mapping[str, Any]] = INTERVENTIONS
    seeds: int = 10
    tasks: int = 200


PROBLEMS = {
    "random-labels": Problem(LABELS),
    "permuted-digits": Problem(PIXELS),
    "values": Problem(
        {**LABELS, "measures": (*MEASURES, "local_redundancy_noise")},
        {k: {"model_kwargs": v} for k, v in NETWORKS.items()},
        seeds=5,
        tasks=40,
    ),
    "transformer": Problem({**LABELS, **TRANSFORMER}, FOUR, 4, 100),
    "class-pairs": Problem(CONVNET, FOUR, 4),
}


class Cell(NamedTuple):
    """One run of the study."""

    problem: str
    variant: str
    seed: int


def cells(seeds: int, problems: Iterable[str]) -> list[Cell]:
    """Return all runs in their order.

    First come those of the MLP, then the dear ones, then the others; each seed has all of them
    before the next.
    """

    def place(cell: Cell) -> tuple[bool, bool, int]:
        problem = PROBLEMS[cell.problem]
        second_derivatives = "redundancy_floor" in problem.variants[cell.variant]
        return "model" in problem.settings, second_derivatives, cell.seed

    found = []
    for name in problems:
        problem = PROBLEMS[name]
        for variant in problem.variants:
            found += [Cell(name, variant, seed) for seed in range(min(seeds, problem.seeds))]
    return sorted(found, key=place)


def carry_out(path: Path, settings: Mapping[str, Any]) -> None:
    """Begin a run, or go on with it; a run that is complete is left alone."""
    try:
        if not (path / "config.json").exists():
            DRIVER.begin(path, "demo", settings)
        elif tasks_done(path) < settings["tasks"]:
            DRIVER.resume(path, settings)
    except InputError as error:  # another process has it
        print(f"left out: {error}", flush=True)


def tasks_done(path: Path) -> int:
    """Count the tasks in the records of a run; none yet where it was killed as it began."""
    records = path / "records.jsonl"
    return records.read_text().count('"kind": "task"') if records.exists() else 0


def main() -> None:
    """Run what is left."""
    parser = argparse.ArgumentParser(prog="python -m bench.causes", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--images", type=Path, help="store of fastlr data prepare, for class-pairs")
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, help="these alone")
    parser.add_argument("--seeds", type=int, default=10, help="at most")
    parser.add_argument("--tasks", type=int, default=200, help="at most")
    given = parser.parse_args()
    if not given.images and "class-pairs" in (given.problems or ()):
        parser.error("class-pairs needs --images")
    problems = given.problems or list(PROBLEMS)
    if not given.images:
        problems = [name for name in problems if name != "class-pairs"]
    for cell in cells(given.seeds, problems):
        problem = PROBLEMS[cell.problem]
        path = given.out / cell.problem / f"{cell.variant},seed-{cell.seed}"
        settings = {
            "data": str(given.images),
            **COMMON,
            **problem.settings,
            **problem.variants[cell.variant],
            "seed": cell.seed,
            "tasks": min(given.tasks, problem.tasks),
        }
        carry_out(path, settings)
        print(path, flush=True)
