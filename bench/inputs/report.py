"""What the inputs that are tried tell, beside what own images tell: tables and a figure.

Usage: ``python -m bench.inputs.report [OUT]``: with the folder of the runs, their values and the
bits a parameter are kept in ``bench/results/cpu/inputs`` first.

Inputs pass if, on the unhelped runs, their distance to own images is smaller than that of shapes in
every seed of at least two problems, and larger beyond its error in none. The distance is the mean
over the readings of |log10 of the ratio of two values|, each value divided by its median over tasks
5 to 15. Of those that pass the nearest, by the mean over the problems, are kept.
"""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fastlr
from bench.alarm.analysis import LEAD, judge_rule, losing_problems
from bench.alarm.choices import candidates
from bench.alarm.falls import half_sheet
from bench.alarm.losses import Array
from bench.alarm.problems import JUDGED, NONE, PROBLEMS
from bench.alarm.runs import READINGS, task_records
from bench.alarm.signals import TRAILING, Course, signal
from bench.alarm.values import number, shown
from bench.inputs.images import DeadLeaves, FractalNoise, SpectrumImages
from bench.inputs.runs import GAUSSIAN, OWN, RUN_MEASURES, SHAPES, TRIED
from fastlr.display.figures import COLOURS, legend_below, new_figure, style
from fastlr.display.sheets import DASH, Sheet
from fastlr.experiments.data import normalise
from fastlr.experiments.data.random_labels import load_digits
from fastlr.experiments.runs.report import Drawing, Report, write_files
from fastlr.experiments.statistics.seeds import mean_over_seeds
from fastlr.models.mlp import MLP

KEPT = Path(__file__).parents[1] / "results" / "cpu" / "inputs"
SYNTHETIC = (SHAPES, *TRIED)
SILENT = ("silent", *(f"woken_{name}" for name in SYNTHETIC))
COLUMNS = ("problem", "variant", "seed", "task", "accuracy", OWN, *SYNTHETIC, *SILENT)
RESAMPLES = 200
CAPACITY = {"n": 1536, "steps": 2000, "learning_rate": 1e-2, "repeats": 3}
FITTED = 256  # digits that inputs are fitted on for the bits a parameter

Row = dict[str, str]


def run_rows(path: Path) -> list[Row]:
    """Return a row for each task of a run, from its folder ``PROBLEM/VARIANT,seed-NUMBER``."""
    variant, seed = path.name.split(",seed-")
    lines = (path / READINGS).read_text().splitlines()
    readings = {reading["task"]: reading for reading in map(json.loads, lines)}
    rows = []
    for record in task_records(path):
        taken = readings.get(record["task"], {})
        if taken:
            for name, measure in RUN_MEASURES.items():
                taken[name] = record["measures"][measure]["value"]
        row = {"problem": path.parent.name, "variant": variant, "seed": seed}
        row |= {"task": str(record["task"]), "accuracy": shown(record["accuracy"])}
        rows.append(row | {name: shown(taken.get(name)) for name in COLUMNS[5:]})
    return rows


def keep(out: Path, kept: Path) -> None:
    """Keep the values of the complete runs of a folder, and the bits a parameter."""
    rows: list[Row] = []
    for name in JUDGED:
        for path in sorted((out / name).glob("*,seed-*")):
            made = run_rows(path)
            if len(made) == PROBLEMS[name].tasks:
                rows += made
    write_table(kept / "values.csv", COLUMNS, rows)
    bits = [
        {"inputs": name, "bits a parameter": f"{value:.4f}", "stderr": f"{error:.4f}"}
        for name, value, error in capacities()
    ]
    write_table(kept / "capacity.csv", tuple(bits[0]), bits)


def write_table(path: Path, columns: Sequence[str], rows: Iterable[Row]) -> None:
    """Write a table as CSV."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, columns, lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def read_table(path: Path) -> list[Row]:
    """Read a table of CSV."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def capacities() -> Iterable[tuple[str, float, float]]:
    """Yield inputs, the bits of random labels a parameter that an MLP takes up on them, its error.

    The MLP has 1,580 parameters and four classes; own images are digits.
    """
    own = normalise(load_digits(CAPACITY["n"])[0])
    fitted, size = own[-FITTED:], (3, 8, 8)
    kinds = {
        OWN: own[: CAPACITY["n"]],
        SHAPES: fastlr.ShapeImages(size),
        GAUSSIAN: fastlr.GaussianInputs(fitted),
        "spectrum": SpectrumImages.fit(fitted),
        "leaves": DeadLeaves(size),
        "fractal": FractalNoise(size),
    }
    for name, inputs in kinds.items():
        torch.manual_seed(0)
        model = MLP(num_classes=4, size=8, widths=[8])
        found = fastlr.memorization_capacity(model, inputs, **CAPACITY)  # type: ignore[arg-type]
        yield name, float(found), found.details["stderr"]


def courses(rows: Iterable[Row]) -> list[Course]:
    """Return the runs, with the readings of all inputs as measures."""

    def place(row: Row) -> tuple[str, str, int]:
        return row["problem"], row["variant"], int(row["seed"])

    found = []
    for (problem, variant, seed), group in groupby(rows, place):
        of_run = list(group)
        read = [row for row in of_run if row[SHAPES]]
        measures = {name: numbers(read, name) for name in COLUMNS[5:]}
        at = np.array([int(row["task"]) for row in read])
        guess = PROBLEMS[problem].guess
        accuracy = numbers(of_run, "accuracy")
        found.append(Course(problem, variant, seed, guess, accuracy, at, measures))
    return found


def numbers(rows: Iterable[Row], name: str) -> Array:
    """Return a column, NaN where it is empty."""
    return np.array([number(row[name]) for row in rows])


def distance(course: Course, name: str) -> float:
    """Return how far the course of a value is from that on own images, in powers of ten."""
    apart = signal(course, name) - signal(course, OWN)
    return float(np.nanmean(np.abs(apart))) / math.log(10)


def distances(runs: Iterable[Course], name: str) -> list[float]:
    """Return how far the courses of a value are from those on own images."""
    return [distance(run, name) for run in runs]


def unhelped(runs: Iterable[Course]) -> dict[str, list[Course]]:
    """Return the runs without help by problem."""
    found: dict[str, list[Course]] = {}
    for run in runs:
        if run.variant == NONE:
            found.setdefault(run.problem, []).append(run)
    return found


def verdict(runs: Iterable[Course], name: str) -> tuple[list[str], list[str]]:
    """Return the problems where inputs are nearer to own than shapes are, and where farther.

    Nearer: in every seed. Farther: in the mean over seeds, beyond its standard error.
    """
    nearer, farther = [], []
    for problem, of_problem in unhelped(runs).items():
        gains = [distance(run, name) - distance(run, SHAPES) for run in of_problem]
        if max(gains) < 0:
            nearer.append(problem)
        mean = mean_over_seeds(gains)
        if mean.value > mean.stderr:
            farther.append(problem)
    return nearer, farther


def passes(nearer: Sequence[str], farther: Sequence[str]) -> bool:
    """Return True if inputs pass by a `verdict`."""
    return len(nearer) >= 2 and not farther


def mean_distance(runs: Iterable[Course], name: str) -> float:
    """Return the distance to own images, mean over the problems without help."""
    by_problem = [np.mean(distances(of_it, name)) for of_it in unhelped(runs).values()]
    return float(np.mean(by_problem))


def sentences(runs: Sequence[Course]) -> list[str]:
    """Say of each input that is tried whether it passes, and which are kept."""
    said = []
    passed = {}
    for name in TRIED:
        nearer, farther = verdict(runs, name)
        if passes(nearer, farther):
            passed[name] = mean_distance(runs, name)
        said.append(
            f"{name}: {'passes' if name in passed else 'dropped'}; nearer to own images than "
            f"shapes in every seed of {', '.join(nearer) or 'no problem'}; farther beyond the "
            f"error in {', '.join(farther) or 'none'}."
        )
    if passed:
        means = ", ".join(f"{name} {value:.2f}" for name, value in passed.items())
        kept = min(passed, key=passed.__getitem__)
        said.append(
            f"Kept: {kept}. Mean distance over the problems of those that pass: {means}; of "
            f"shapes {mean_distance(runs, SHAPES):.2f}."
        )
    return said


def of_seeds(values: Sequence[float], digits: int = 2) -> str:
    """Write a mean over seeds with its standard error; a dash where nothing is known."""
    if not np.isfinite(values).all():
        return DASH
    mean = mean_over_seeds(values)
    return f"{mean.value:.{digits}f} ± {mean.stderr:.{digits}f}"


def distance_sheet(runs: Sequence[Course]) -> Sheet:
    """How far each input's course is from that on own images, by problem and variant."""
    lines = []
    for (problem, variant), group in groupby(runs, lambda run: (run.problem, run.variant)):
        of_it = list(group)
        cells = [of_seeds(distances(of_it, name)) for name in SYNTHETIC]
        lines.append((f"{problem} {variant}", *cells))
    note = (
        "Mean over the readings of |log10| of the ratio of the value to that on the task's own "
        "images, each divided by its median over tasks 5 to 15; means over three seeds with "
        "standard errors. Runs without help (none) decide."
    )
    return Sheet("distance", "Distance to own images", ("runs", *SYNTHETIC), lines, (note,))


def silent_sheet(runs: Sequence[Course]) -> Sheet:
    """Which units are silent on own images at the end, and which of these other inputs wake."""
    lines = []
    for problem, of_problem in unhelped(runs).items():
        cells = []
        for name in SILENT:
            at_the_end = [100 * run.measures[name][-1] for run in of_problem]
            cells.append(of_seeds(at_the_end, 0))
        lines.append((problem, *cells))
    note = (
        "Percent of all ReLU units, after the last task of the runs without help: silent on the "
        "task's own images; silent there, but active on some of 256 shapes, and so on. The "
        "transformer has no ReLU."
    )
    columns = ("problem", "silent", *SYNTHETIC)
    return Sheet("silent", "Units that own images leave silent", columns, lines, (note,))


def warning_sheet(runs: Sequence[Course]) -> Sheet:
    """What alarms by each input's value find, by rules that the other problems choose."""
    problems = list(dict.fromkeys(run.problem for run in runs))
    losing = losing_problems(runs)
    accuracy = {"accuracy": tuple(f"accuracy_{width}" for width in TRAILING)}
    lines = []
    for name, signals in (accuracy | {name: (name,) for name in (OWN, *SYNTHETIC)}).items():
        alarms = {}
        for problem in problems:
            made = candidates(runs, signals, problem, problems)
            alarms[problem] = judge_rule(made, problem, problems, None, RESAMPLES)
        found = [
            f"{alarms[problem].found[LEAD][0] * alarms[problem].losses:.0f} of "
            f"{alarms[problem].losses}"
            for problem in losing
        ]
        false = np.nanmean([alarm.false[0] for alarm in alarms.values()])
        lines.append((name, *found, f"{false:.2f}"))
    note = (
        f"Losses found at least {LEAD} tasks ahead, by problem, and false alarms in 100 tasks, "
        "mean over all problems: by the rule that the other problems choose, as in the study of "
        "alarms, helped runs among them. Three seeds are few: the study has thirty."
    )
    columns = ("value on", *losing, "false alarms")
    return Sheet("warning", "Warnings", columns, lines, (note,))


def capacity_sheet(bits: Iterable[Mapping[str, str]]) -> Sheet:
    """How many bits of random labels a parameter takes up on each input."""
    lines = [(row["inputs"], f"{row['bits a parameter']} ± {row['stderr']}") for row in bits]
    note = (
        "An MLP of 1,580 parameters, {n:,} inputs of four random classes, {steps:,} steps, "
        "{repeats} draws of labels (`fastlr.memorization_capacity`); own images are digits."
    ).format(**CAPACITY)
    return Sheet("capacity", "Capacity", ("inputs", "bits a parameter"), lines, (note,))


def figure(runs: Sequence[Course]) -> Any:
    """Draw, for each problem, the courses without help: median over seeds of the change."""
    by_problem = unhelped(runs)
    drawing, axes = new_figure((10, 9), math.ceil(len(by_problem) / 2), 2)
    panels = [panel for row in axes for panel in row]
    for panel, (problem, of_problem) in zip(panels, by_problem.items()):
        for index, name in enumerate((OWN, *SYNTHETIC)):
            changes = np.exp([signal(run, name) for run in of_problem])
            width = 2.4 if name == OWN else 1.2
            colour = COLOURS[index % len(COLOURS)]
            panel.plot(
                of_problem[0].read_at,
                np.median(changes, 0),
                color=colour,
                linewidth=width,
                label=name,
            )
        panel.set_yscale("log")
        panel.minorticks_off()
        style(panel, "value over its reference", problem, grid="y")
        panel.set_xlabel("task", fontsize=9)
    for panel in panels[len(by_problem) :]:
        panel.set_visible(False)
    legend_below(drawing, panels[0])
    return drawing


def write_report(rows: Sequence[Row], bits: Sequence[Row], out: Path) -> Report:
    """Write the report of the values of some runs and of the bits a parameter."""
    runs = courses(rows)
    sheets = [
        distance_sheet(runs),
        silent_sheet(runs),
        warning_sheet(runs),
        half_sheet(runs, {name: name for name in (OWN, *SYNTHETIC)}),
        capacity_sheet(bits),
    ]
    caption = (
        "Local redundancy on each input over its median in tasks 5 to 15, median over three seeds "
        "without help."
    )
    by_input = {name: distances(runs, name) for name in SYNTHETIC}
    out.mkdir(parents=True, exist_ok=True)
    return write_files(
        out,
        "Do other synthetic inputs tell what own images tell?",
        sentences(runs),
        [f"{len(runs)} runs of {len(unhelped(runs))} problems."],
        sheets,
        [Drawing("inputs.png", partial(figure, runs), caption)],
        [],
        {"runs": [f"{run.problem} {run.variant} {run.seed}" for run in runs], "distance": by_input},
        screen=sheets,
    )


def main(arguments: Sequence[str]) -> None:
    """Keep the values of a folder of runs if one is given; write the report and show it."""
    if arguments:
        keep(Path(arguments[0]), KEPT)
    rows, bits = read_table(KEPT / "values.csv"), read_table(KEPT / "capacity.csv")
    write_report(rows, bits, KEPT).show()


if __name__ == "__main__":
    main(sys.argv[1:])
