"""The paper's Tables 1 and 2 where plasticity is lost: pairs of classes, measured at every task.

Usage: ``python -m bench.alarm.tables OUT --images STORE [--report FOLDER]``.

The unhelped runs of the problem class-pairs once more, ten seeds, with the measures of the paper's
tables after every task; then the report of `fastlr report`, by the paper's own statistics.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.alarm.problems import IMAGES, NONE, PROBLEMS
from bench.alarm.runs import settings_of
from bench.causes.runs import Cell, tasks_done
from fastlr.experiments.continual.experiment import DRIVER
from fastlr.experiments.continual.options import OF_THE_TABLES
from fastlr.experiments.continual.report import write_report


def main() -> None:
    """Make the runs that are left, and their report."""
    parser = argparse.ArgumentParser(prog="python -m bench.alarm.tables", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--report", type=Path, help="its folder; else in OUT")
    given = parser.parse_args()
    paths = []
    for seed in range(PROBLEMS[IMAGES].seeds):
        settings = settings_of(Cell(IMAGES, NONE, seed), given.images)
        settings |= {"measures": OF_THE_TABLES, "measure_every": 1}
        path = given.out / f"seed-{seed}"
        if not (path / "config.json").exists():
            DRIVER.begin(path, "demo", settings)
        elif tasks_done(path) < settings["tasks"]:
            DRIVER.resume(path, settings)
        paths.append(path)
        print(path, flush=True)
    write_report(paths, given.report or given.out / "report").show()


if __name__ == "__main__":
    main()
