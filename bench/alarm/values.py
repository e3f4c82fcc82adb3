"""The values that alarms read: collected from run folders, kept in a table for each problem.

Usage: ``python -m bench.alarm.values OUT [--values FOLDER]`` adds the complete runs of OUT.

A row is a task of a run; measures have a value in rows of tasks after which they were taken. Five
digits are kept.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from bench.alarm.losses import Array
from bench.alarm.problems import MEASURES, PROBLEMS
from bench.alarm.signals import Course

KEPT = Path(__file__).parents[1] / "results" / "cpu" / "alarm" / "values"
OF_THE_PROBE = ("score", "critical")  # of traintools' PlasticityProbe
READ = (*MEASURES, "trainability", *OF_THE_PROBE)
COLUMNS = ("variant", "seed", "task", "accuracy", *READ)

Row = dict[str, str]


def run_rows(path: Path) -> list[Row]:
    """Return the rows of a run, from its folder, named ``VARIANT,seed-NUMBER``."""
    variant, seed = path.name.split(",seed-")
    readings: dict[int, dict[str, Any]] = {}
    extra = path / "readings.jsonl"
    for line in extra.read_text().splitlines() if extra.exists() else ():
        reading = json.loads(line)
        readings[reading["task"]] = reading
    rows = []
    for line in (path / "records.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["kind"] != "task":
            continue
        taken = {name: measure["value"] for name, measure in record["measures"].items()}
        taken |= readings.get(record["task"], {})
        row = {"variant": variant, "seed": seed, "task": str(record["task"])}
        row["accuracy"] = shown(record["accuracy"])
        rows.append(row | {name: shown(taken.get(name)) for name in READ})
    return rows


def shown(value: float | None) -> str:
    """Write a value to five digits; what is missing is empty."""
    return "" if value is None else f"{value:.5g}"


def file_of(folder: Path, problem: str) -> Path:
    """Return the table of a problem."""
    return folder / f"{problem}.csv"


def read_rows(folder: Path, problem: str) -> list[Row]:
    """Read the rows that are kept of a problem; none where nothing is kept yet."""
    path = file_of(folder, problem)
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_rows(folder: Path, problem: str, rows: Iterable[Row]) -> None:
    """Write the table of a problem, its runs in order."""
    folder.mkdir(parents=True, exist_ok=True)
    with file_of(folder, problem).open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows(sorted(rows, key=lambda row: (*run_of(row), int(row["task"]))))


def run_of(row: Mapping[str, str]) -> tuple[str, int]:
    """Return variant and seed of the run of a row."""
    return row["variant"], int(row["seed"])


def kept_runs(folder: Path, problem: str) -> set[tuple[str, int]]:
    """Return variant and seed of the runs of a problem whose values are kept."""
    return {run_of(row) for row in read_rows(folder, problem)}


def courses(folder: Path, problem: str) -> list[Course]:
    """Return the runs of a problem, as alarms see them."""
    runs = []
    for (variant, seed), rows in groupby(read_rows(folder, problem), key=run_of):
        of_run = list(rows)
        accuracy = np.array([number(row["accuracy"]) for row in of_run])
        read = [row for row in of_run if row[READ[0]]]
        read_at = np.array([int(row["task"]) for row in read])
        measures = {name: column(read, name) for name in READ}
        guess = PROBLEMS[problem].guess
        runs.append(Course(problem, variant, seed, guess, accuracy, read_at, measures))
    return runs


def column(rows: Iterable[Row], name: str) -> Array:
    """Return a measure's values in some rows."""
    return np.array([number(row[name]) for row in rows])


def number(text: str) -> float:
    """Return the number that is written; NaN where nothing is."""
    return float(text) if text else np.nan


def main() -> None:
    """Add the complete runs of a study's folder to the values that are kept."""
    parser = argparse.ArgumentParser(prog="python -m bench.alarm.values", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--values", type=Path, default=KEPT)
    given = parser.parse_args()
    for name, problem in PROBLEMS.items():
        rows = read_rows(given.values, name)
        known = {run_of(row) for row in rows}
        for path in sorted((given.out / name).glob("*,seed-*")):
            made = run_rows(path)
            if made and len(made) == problem.tasks and run_of(made[0]) not in known:
                rows += made
        if rows:
            write_rows(given.values, name, rows)
        print(f"{name}: {len({run_of(row) for row in rows})} runs", flush=True)


if __name__ == "__main__":
    main()
