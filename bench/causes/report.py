"""The report of the study: do interventions that change a measure change accuracy?

Usage: ``python -m bench.causes.report RUNS...``; it may be asked for before the last run has ended.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench.causes.comparison import compare
from bench.causes.correlations import together
from bench.causes.figure import scatter
from bench.causes.prose import findings
from bench.causes.sheets import correlations_sheet, interventions_sheet
from fastlr.display.record import counted
from fastlr.errors import InputError
from fastlr.experiments.continual import tables
from fastlr.experiments.continual.course import by_intervention, course_sheets
from fastlr.experiments.continual.figures import group_curves
from fastlr.experiments.continual.options import COMPARED
from fastlr.experiments.continual.prediction import prediction_sheet, predictions
from fastlr.experiments.continual.records import read_runs
from fastlr.experiments.runs.report import Drawing, Report, make_folder, write_files


def write_report(
    paths: Sequence[str | Path],
    out: str | Path | None = None,
    *,
    figures: str = "png",
    resamples: int = 1000,
    seed: int = 0,
) -> Report:
    """Compare runs that differ by interventions and seeds, and write the report.

    Args:
        paths: Run folders, or folders of run folders.
        out: Folder for the files, made if missing; None: ``report`` in the one path given,
            ``fastlr-report`` for several.
        figures: "png", or "none".
        resamples: Of the bootstraps.
        seed: Of the bootstraps.

    Raises:
        InputError: No run there, runs that differ in more, runs of one intervention alone, or an
            argument out of range.
    """
    if resamples < 100:
        raise InputError(f"{resamples} resamples: a standard error needs at least 100")
    runs = read_runs(paths, pool=False, apart=(*COMPARED, "measures"))
    if len(by_intervention(runs)) < 2:
        raise InputError("these are runs of one intervention: there is nothing to compare")
    folder = make_folder(paths, out, figures)
    predicted = predictions(runs, resamples=resamples, seed=seed)
    found = compare(runs)
    pairs = together(found, resamples=resamples, seed=seed)
    screen = [
        correlations_sheet(found, pairs),
        interventions_sheet(found),
        *course_sheets(found.groups),
        prediction_sheet(predicted),
    ]
    sentences = findings(found, pairs, predicted)
    runs_told = [str(run.path) for run in runs]
    late = {name: values.tolist() for name, values in found.measures.items()}
    numbers = {
        "findings": sentences,
        "runs": runs_told,
        "resamples": resamples,
        "seed": seed,
        "interventions": found.names,
        "logarithms": sorted(found.logs),
        "late_accuracy": found.accuracy.tolist(),
        "late_measures": late,
        "together": list(map(vars, pairs)),
        "predictions": list(map(vars, predicted)),
    }
    drawings = [
        Drawing(
            "causes.png",
            partial(scatter, found),
            "Late accuracy over late local redundancy, by intervention.",
        ),
        Drawing(
            "course.png",
            partial(group_curves, found.groups),
            "Both over the tasks, by intervention.",
        ),
    ]
    lead = (
        f"{counted(len(runs), 'run')} of {counted(len(found.names), 'intervention')}, compared "
        f"over {found.tasks} tasks."
    )
    return write_files(
        folder,
        "Does it cause plasticity?",
        sentences,
        [lead],
        [*screen, tables.runs_sheet(runs), tables.definitions_sheet(runs)],
        drawings if figures == "png" else [],
        runs,
        numbers,
        screen=screen,
    )


def main() -> None:
    """Write the report that the command line asks for, and show its tables."""
    parser = argparse.ArgumentParser(prog="python -m bench.causes.report", description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", help="run folders, or folders of them")
    parser.add_argument("--out", type=Path, help="folder of the report; else report in RUNS")
    parser.add_argument("--figures", choices=("png", "none"), default="png")
    parser.add_argument("--bootstrap", type=int, default=1000, help="resamples")
    parser.add_argument("--seed", type=int, default=0, help="of the resamples")
    given = parser.parse_args()
    try:
        written = write_report(
            given.runs,
            given.out,
            figures=given.figures,
            resamples=given.bootstrap,
            seed=given.seed,
        )
    except InputError as error:
        parser.error(str(error))
    written.show()


if __name__ == "__main__":
    main()
