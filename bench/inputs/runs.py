"""Runs of the study of alarms once more, read on the inputs that are tried.

Usage: ``python -m bench.inputs.runs OUT --images STORE``.

Three seeds of each of its problems, with and without help; what is there is gone on with or left
alone. Then ``python -m bench.inputs.report OUT`` keeps the values of complete runs and makes the
report.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fastlr
from bench.alarm import networks
from bench.alarm.problems import JUDGED, PROBLEMS
from bench.alarm.runs import READINGS, carry_out, settings_of
from bench.causes.runs import Cell
from bench.inputs.images import DeadLeaves, FractalNoise, SpectrumImages
from fastlr.experiments.continual.experiment import DRIVER
from fastlr.experiments.continual.fields import FITTED, THIS_TASK
from fastlr.experiments.data import TaskSequence, normalise
from fastlr.experiments.runs.progress import Progress

SEEDS = range(3)
OWN, SHAPES = "own", "shapes"
GAUSSIAN = "gaussian"
# What the runs measure themselves.
RUN_MEASURES = {SHAPES: "local_redundancy", OWN: THIS_TASK, GAUSSIAN: FITTED}
TRIED = (GAUSSIAN, "spectrum", "leaves", "fractal")
N = 256


def candidates(tasks: TaskSequence) -> dict[str, Any]:
    """Return the inputs that are tried; fitted are the first task's images."""
    first = normalise(tasks.load(0).train_x)
    size = (3, tasks.size, tasks.size)
    made = fastlr.GaussianInputs(first), SpectrumImages.fit(first), DeadLeaves(size)
    return dict(zip(TRIED, (*made, FractalNoise(size)), strict=True))


def active_units(model: nn.Module, x: Tensor) -> Tensor:
    """Return which ReLU units are positive anywhere on a batch, ``[units]``."""
    found: list[Tensor] = []

    def note(module: nn.Module, args: tuple, output: Tensor) -> None:
        found.append((output > 0).movedim(1, 0).flatten(1).any(1))

    relus = [module for module in model.modules() if isinstance(module, nn.ReLU)]
    hooks = [module.register_forward_hook(note) for module in relus]
    with torch.no_grad():
        model(x)
    for hook in hooks:
        hook.remove()
    return torch.cat(found) if found else torch.ones(0, dtype=torch.bool)


def silence(model: nn.Module, own: Tensor, batches: dict[str, Tensor]) -> dict[str, float]:
    """Return shares of ReLU units by name: silent on own images, and of these active on others.

    Without ReLU they are NaN.
    """
    on_own = active_units(model, own)
    shares = {"silent": float((~on_own).double().mean())}
    for name, batch in batches.items():
        only_here = ~on_own & active_units(model, batch)
        shares[f"woken_{name}"] = float(only_here.double().mean())
    return shares


class Reader:
    """Measures local redundancy on the inputs that are tried whenever the run measures, to a file.

    A run that is killed between its own record and this reading lacks the reading.
    """

    def __init__(self, path: Path, probe: str, tasks: TaskSequence) -> None:
        self.path, self.probe, self.tasks = path, probe, tasks
        self.inputs = candidates(tasks)
        shapes = fastlr.ShapeImages((3, tasks.size, tasks.size))
        every = {SHAPES: shapes, **self.inputs}
        self.batches = {name: inputs.batch(0, N) for name, inputs in every.items()}
        self.estimators: dict[str, fastlr.LocalRedundancy] = {}

    def __call__(self, progress: Progress) -> None:
        """Take the readings if a task has just ended at which measures were taken."""
        record = progress.record
        if record is None or record["kind"] != "task" or not record["measures"]:
            return
        model = networks.network_of_the_run()
        if not self.estimators:
            arguments = {"n": N, "probe": self.probe, "batch_size": N, "progress": False}
            self.estimators = {
                name: fastlr.LocalRedundancy(model, inputs, **arguments)
                for name, inputs in self.inputs.items()
                if name not in RUN_MEASURES
            }
        own = normalise(self.tasks.load(record["task"]).train_x[:N])
        values = {name: estimator.measure().value for name, estimator in self.estimators.items()}
        reading = {"task": record["task"], **values, **silence(model, own, self.batches)}
        with (self.path / READINGS).open("a") as file:
            file.write(json.dumps(reading) + "\n")


def cells() -> list[Cell]:
    """Return all runs, each seed with all problems and variants before the next."""
    return [
        Cell(name, variant, seed)
        for seed in SEEDS
        for name in JUDGED
        for variant in PROBLEMS[name].variants
    ]


def main() -> None:
    """Run what is left."""
    parser = argparse.ArgumentParser(prog="python -m bench.inputs.runs", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--images", type=Path, required=True, help="store of fastlr data prepare")
    given = parser.parse_args()
    for cell in cells():
        path = given.out / cell.problem / f"{cell.variant},seed-{cell.seed}"
        settings = settings_of(cell, given.images) | {"measures": tuple(RUN_MEASURES.values())}
        probe = DRIVER.options_from("demo", settings).redundancy_probe
        carry_out(path, settings, partial(Reader, path, probe))
        print(path, flush=True)


if __name__ == "__main__":
    main()
