"""Is the bound of Theorem 3.4 calibrated? It is laid beside the redundancy itself along a run.

Usage: ``python -m bench.calibration OUT`` makes the runs that are left (the MLP of the study of
alarms on random labels, as it is and helped, five seeds), adds their values to
``bench/results/cpu/calibration/values.csv``, and writes the report and the figure beside it.
``python -m bench.calibration`` does the latter alone.

At some checkpoints of each run, K shape images are the candidates of `local_redundancy_exact`
(Definition 3.1, all datasets of size n, steps of half and whole epsilon) and the inputs of an
estimate with ``probe="exact"``. Truth over bound, ``epsilon * n * LR``, is a product of three
factors:

- *worst input*: the largest over the mean of the estimate's values of single inputs. The
  redundancy is of the worst inputs, the estimate a mean.
- *other datasets*: the redundancy over that with each dataset fitted by its own gradient alone, as
  in the proof of the theorem.
- *beyond first order*: the latter over ``epsilon * n`` times the largest value.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import kendalltau

import fastlr
from bench.alarm import networks
from bench.alarm.problems import PROBLEMS
from bench.alarm.runs import settings_of
from bench.causes.runs import Cell, tasks_done
from fastlr.display.figures import COLOURS, legend_below, new_figure, save_figure, style
from fastlr.display.sheets import Sheet
from fastlr.experiments.continual.experiment import DRIVER
from fastlr.experiments.runs.progress import Progress
from fastlr.experiments.statistics.seeds import mean_over_seeds
from fastlr.files import write_text
from fastlr.ops.reference.theory import local_redundancy_exact

KEPT = Path(__file__).parent / "results" / "cpu" / "calibration"
PROBLEM = "random-labels"
SEEDS = range(5)
CHECKPOINTS = (0, 5, 12, 25, 50, 75, 99)  # tasks, the first is 0
ENUMERATED = ((24, 1), (4, 2))  # candidates K, and samples n of a dataset
STEPS = (0.001, 0.01, 0.1)  # epsilon * LR
FACTORS = ("worst input", "other datasets", "beyond first order")
COLUMNS = ("variant", "seed", "task", "candidates", "n", "step", "value", "truth", *FACTORS)


class Row(NamedTuple):
    """One enumeration: truth beside bound at a checkpoint.

    Attributes:
        variant: of the run, "none" or the intervention that helps.
        seed: of the run.
        task: after which it was made.
        candidates: how many inputs may stand in a dataset, K.
        n: samples of a dataset.
        step: epsilon * LR.
        value: LR, the estimate's, of the candidates.
        truth: the redundancy over epsilon and n, in the unit of the value.
        worst: the factor "worst input".
        others: the factor "other datasets".
        order: the factor "beyond first order".
    """

    variant: str
    seed: int
    task: int
    candidates: int
    n: int
    step: float
    value: float
    truth: float
    worst: float
    others: float
    order: float

    @property
    def factors(self) -> tuple[float, float, float]:
        """The three whose product is truth over bound, in the order of `FACTORS`."""
        return self.worst, self.others, self.order


def enumerated(model: Any, candidates: int, n: int, step: float) -> tuple[float, ...]:
    """Return value, truth and the three factors, for the first ``candidates`` shape images."""
    x = fastlr.ShapeImages((3, 8, 8)).batch(0, candidates, seed=0)
    inputs = fastlr.TensorInputs(x)
    estimate = fastlr.estimate(model, inputs, candidates, probe="exact", progress=False)
    assert estimate.per_sample is not None
    worst = float(estimate.per_sample.max())
    epsilon = step / estimate.value
    arguments = {"n": n, "epsilon": epsilon, "etas": (epsilon / 2,)}
    truth = local_redundancy_exact(model, x, **arguments) / (epsilon * n)
    own = local_redundancy_exact(model, x, **arguments, own_dataset_only=True) / (epsilon * n)
    return estimate.value, truth, worst / estimate.value, truth / own, own / worst


class Reader:
    """Enumerates at the checkpoints of a run, and adds the rows to a file of the run's folder."""

    def __init__(self, path: Path, cell: Cell) -> None:
        self.path, self.cell = path / "calibration.csv", cell

    def __call__(self, progress: Progress) -> None:
        """Enumerate if a task has just ended that is a checkpoint."""
        record = progress.record
        if record is None or record["kind"] != "task" or record["task"] not in CHECKPOINTS:
            return
        model = networks.network_of_the_run()
        with self.path.open("a", newline="") as file:
            for candidates, n in ENUMERATED:
                for step in STEPS:
                    found = enumerated(model, candidates, n, step)
                    place = self.cell.variant, self.cell.seed, record["task"], candidates, n, step
                    csv.writer(file).writerow([*place, *(f"{v:.6g}" for v in found)])


def make_runs(out: Path) -> Iterator[Path]:
    """Make or go on with the runs, and yield the file of rows of each that is complete."""
    for seed in SEEDS:
        for variant in PROBLEMS[PROBLEM].variants:
            cell = Cell(PROBLEM, variant, seed)
            settings = settings_of(cell, None)
            settings |= {"measures": (), "measure_every": settings["tasks"] + 1}
            path = out / f"{variant},seed-{seed}"
            reader = Reader(path, cell)
            if not (path / "config.json").exists():
                DRIVER.begin(path, "demo", settings, report=reader)
            elif tasks_done(path) < settings["tasks"]:
                DRIVER.resume(path, settings, report=reader)
            yield reader.path


def read(paths: Iterable[Path]) -> list[Row]:
    """Return the rows of files; of one that was enumerated twice, the last."""
    found: dict[tuple, Row] = {}
    for path in paths:
        with path.open(newline="") as file:
            for line in csv.reader(file):
                if line[0] != COLUMNS[0]:
                    seed, task, candidates, n = map(int, line[1:5])
                    row = Row(line[0], seed, task, candidates, n, *map(float, line[5:]))
                    found[row[:6]] = row
    return sorted(found.values())


def of_a_run(rows: Sequence[Row]) -> tuple:
    """Return what the rows of one course share: its run and how it was enumerated."""
    return rows[0].variant, rows[0].candidates, rows[0].n, rows[0].step


def courses(rows: Iterable[Row]) -> list[list[Row]]:
    """Return the rows of each run and way to enumerate, by task."""

    def place(row: Row) -> tuple:
        return row.variant, row.candidates, row.n, row.step, row.seed

    ordered = sorted(rows, key=lambda row: (*place(row), row.task))
    return [list(course) for _, course in groupby(ordered, place)]


def drifts(course: Sequence[Row]) -> np.ndarray:
    """Return how much each factor, and last truth over bound, moves over a course.

    That is the standard deviation of its natural logarithm over the checkpoints.
    """
    parts = np.array([row.factors for row in course])
    return np.log(np.column_stack([parts, parts.prod(1)])).std(0, ddof=1)


def mean_and_error(values: Sequence[float]) -> str:
    """Return a mean over seeds with its standard error, as a cell of a table."""
    mean = mean_over_seeds(values)
    return f"{mean.value:.2f}" + f" ± {mean.stderr:.2f}" * (mean.n > 1)


def sheet(rows: Iterable[Row]) -> Sheet:
    """Return the table of the report: a line for each variant, way to enumerate and step."""
    names = ("runs", "truth over bound, first task", "last task")
    moved = tuple(f"moves: {name}" for name in (*FACTORS, "all"))
    lines = []
    for (variant, candidates, n, step), group in groupby(courses(rows), of_a_run):
        of_seeds = list(group)
        first, last = (
            [course[at].truth / course[at].value for course in of_seeds] for at in (0, -1)
        )
        moves = np.array([drifts(course) for course in of_seeds]).T
        taus = []
        for course in of_seeds:
            truths, values = zip(*((row.truth, row.value) for row in course), strict=True)
            taus.append(kendalltau(truths, values).statistic)
        name = f"{variant} K={candidates} n={n} {step:g}"
        cells = [mean_and_error(values) for values in (first, last, *moves, taus)]
        lines.append((name, *cells))
    note = (
        "Runs: the intervention, K candidates, n samples of a dataset, ε LR. Truth over bound: "
        "local redundancy by enumeration (Definition 3.1) over ε n LR, after the first and the "
        "last task; means over seeds with standard errors. Moves: standard deviation, over the "
        f"checkpoints (tasks {', '.join(map(str, CHECKPOINTS))}), of the natural logarithm of each "
        "factor, and of their product. Kendall's tau: of the order of a run's checkpoints by truth "
        "and by LR."
    )
    columns = (*names, *moved, "Kendall's tau")
    return Sheet("calibration", "Truth beside bound", columns, lines, (note,))


def figure(rows: Sequence[Row]) -> Any:
    """Draw the three factors along the runs, mean over seeds, at the smallest and largest step."""
    variants = list(PROBLEMS[PROBLEM].variants)
    drawing, axes = new_figure((9, 6.5), len(ENUMERATED), len(variants))
    for across, variant in enumerate(variants):
        for down, (candidates, n) in enumerate(ENUMERATED):
            panel = axes[down][across]
            for step, line in ((STEPS[0], "-"), (STEPS[-1], "--")):
                here = [
                    row
                    for row in rows
                    if (row.variant, row.candidates, row.step) == (variant, candidates, step)
                ]
                draw_factors(panel, here, line, f", ε LR = {step:g}")
            title = f"{variant}: datasets of {n} among {candidates} inputs"
            style(panel, "factor", title, grid="y")
            panel.set_ylim(bottom=0)
            panel.set_xlabel("task", fontsize=9)
    legend_below(drawing, axes[0][0])
    return drawing


def draw_factors(panel: Any, rows: Sequence[Row], line: str, label: str) -> None:
    """Draw each factor of these rows, mean over seeds, against the task."""
    tasks = sorted({row.task for row in rows})
    for index, name in enumerate(FACTORS):
        means = [
            np.mean([row.factors[index] for row in rows if row.task == task]) for task in tasks
        ]
        panel.plot(tasks, means, line, color=COLOURS[index], label=name + label, marker=".")


def main(arguments: Sequence[str]) -> None:
    """Make what is left of the runs if a folder is given; write the report and the figure."""
    KEPT.mkdir(parents=True, exist_ok=True)
    values = KEPT / "values.csv"
    if arguments:
        rows = read(make_runs(Path(arguments[0])))
        with values.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
            writer.writerows(rows)
    rows = read([values])
    table = sheet(rows)
    write_text(KEPT / "report.md", table.markdown() + "\n")
    write_text(KEPT / "calibration.csv", table.csv())
    save_figure(figure(rows), KEPT / "calibration.png")


if __name__ == "__main__":
    main(sys.argv[1:])
