"""The runs of the study of alarms.

Usage: ``python -m bench.alarm.runs OUT [--images STORE] [--problems NAME ...] [--pilots]``.

Every seed has all problems and variants before the next. What is there is gone on with or left
alone, so it may be interrupted, and several processes may share OUT; runs whose values are kept
already (``--values``) are not made again. With ``--pilots``, three other seeds run unhelped, and
the onsets of their losses are printed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.alarm import networks
from bench.alarm.losses import find_loss
from bench.alarm.problems import COMMON, IMAGES, NONE, PROBLEMS
from bench.alarm.values import KEPT, kept_runs
from bench.causes.runs import Cell, tasks_done
from fastlr.errors import InputError
from fastlr.experiments.continual.experiment import DRIVER
from fastlr.experiments.data import TaskSequence, normalise, take
from fastlr.experiments.runs.progress import Progress

PILOTS = range(1000, 1003)
READINGS = "readings.jsonl"  # of a run: what the driver does not measure
Report = Callable[[Progress], None]
IMAGES_READ = 256  # training images of a task that serve a reading of the probe


def cells(problems: Iterable[str]) -> list[Cell]:
    """Return all runs, each seed with all problems and variants before the next."""
    found = [
        Cell(name, variant, seed)
        for name in problems
        for variant in PROBLEMS[name].variants
        for seed in range(PROBLEMS[name].seeds)
    ]
    return sorted(found, key=lambda cell: cell.seed)


def settings_of(cell: Cell, images: Path | None) -> dict[str, Any]:
    """Return the options of a run, as they differ from the preset ``demo``."""
    problem = PROBLEMS[cell.problem]
    model_kwargs = {"name": problem.network, "kwargs": dict(problem.network_kwargs)}
    return {
        "data": str(images),
        **COMMON,
        **problem.settings,
        **problem.variants[cell.variant],
        "model": "bench.alarm.networks:remembered",
        "model_kwargs": model_kwargs,
        "seed": cell.seed,
        "tasks": problem.tasks,
    }


class Reader:
    """Reads, after every task that the driver measures, what it does not measure, into a file.

    A run that is killed between its own record and this reading lacks the reading.
    """

    def __init__(self, path: Path, tasks: TaskSequence, learned: int) -> None:
        self.path, self.tasks, self.learned = path, tasks, learned

    def __call__(self, progress: Progress) -> None:
        """Take the readings if a task has just ended at which measures were taken."""
        record = progress.record
        if record is None or record["kind"] != "task" or not record["measures"]:
            return
        task = self.tasks.load(record["task"])
        rows = np.random.default_rng(record["task"]).permutation(len(task.train_y))[:IMAGES_READ]
        x = normalise(take(task.train_x, task.train_y.new_tensor(rows)))
        network = networks.network_of_the_run()
        probe = networks.probe_reading(network, x)
        reading = {"task": record["task"], "score": probe.score, "critical": probe.critical}
        reading["trainability"] = networks.trainability(network, x[: self.learned])
        with (self.path / READINGS).open("a") as file:
            file.write(json.dumps(reading) + "\n")


def carry_out(
    path: Path, settings: Mapping[str, Any], reader_of: Callable[[TaskSequence], Report]
) -> None:
    """Begin a run, or go on with it; a run that is complete is left alone.

    Args:
        path: its folder.
        settings: its options, as they differ from the preset ``demo``.
        reader_of: makes what is called with the run's progress.
    """
    tasks, _ = DRIVER.open_data(DRIVER.options_from("demo", settings))
    reader = reader_of(tasks)
    try:
        if not (path / "config.json").exists():
            DRIVER.begin(path, "demo", settings, report=reader)
        elif tasks_done(path) < settings["tasks"]:
            DRIVER.resume(path, settings, report=reader)
    except InputError as error:  # another process has it
        print(f"left out: {error}", flush=True)


def accuracies(path: Path) -> np.ndarray:
    """Return the accuracy of each task of a run [tasks]."""
    return np.array([record["accuracy"] for record in task_records(path)])


def task_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a run's tasks."""
    for line in (path / "records.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "task":
            yield record


def pilots(out: Path, names: Iterable[str], images: Path | None) -> None:
    """Run seeds that the study does not use, unhelped, and print the onsets of their losses."""
    for name in names:
        problem = PROBLEMS[name]
        onsets = []
        for seed in PILOTS:
            path = out / "pilots" / name / f"seed-{seed}"
            settings = settings_of(Cell(name, NONE, seed), images)
            settings |= {"measure_every": problem.tasks + 1}
            carry_out(path, settings, partial(Reader, path, learned=0))
            accuracy = accuracies(path)
            loss = find_loss(accuracy, problem.guess)
            onsets.append(loss.onset if loss else problem.tasks)
            tens = accuracy[: len(accuracy) // 10 * 10].reshape(-1, 10).mean(1)
            print(name, seed, loss, " ".join(f"{mean:.2f}" for mean in tens), flush=True)
        print(name, "median onset", median(onsets), flush=True)


def main() -> None:
    """Run what is left."""
    parser = argparse.ArgumentParser(prog="python -m bench.alarm.runs", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--images", type=Path, help="store of fastlr data prepare, for class-pairs")
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, help="these alone")
    parser.add_argument("--values", type=Path, default=KEPT, help="folder of values that are kept")
    parser.add_argument("--pilots", action="store_true")
    given = parser.parse_args()
    if not given.images and IMAGES in (given.problems or ()):
        parser.error(f"{IMAGES} needs --images")
    names = given.problems or [name for name in PROBLEMS if given.images or name != IMAGES]
    if given.pilots:
        pilots(given.out, names, given.images)
        return
    for cell in cells(names):
        if (cell.variant, cell.seed) in kept_runs(given.values, cell.problem):
            continue
        path = given.out / cell.problem / f"{cell.variant},seed-{cell.seed}"
        learned = PROBLEMS[cell.problem].learned
        reader_of = partial(Reader, path, learned=learned)
        carry_out(path, settings_of(cell, given.images), reader_of)
        print(path, flush=True)


if __name__ == "__main__":
    main()
