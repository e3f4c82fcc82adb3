"""Runs that differ by intervention: their courses, and what foretells their accuracy.

The records are made up, so that both are known.
"""

import csv
import math
import shutil

import numpy as np
import pytest
from continual_runs import GRID, read_lines, write_grid, write_lines, write_run

from fastlr.display.tables import brief
from fastlr.experiments.continual import read_run, read_runs
from fastlr.experiments.continual.course import by_intervention, course_sheets
from fastlr.experiments.continual.interventions import INTERVENTIONS
from fastlr.experiments.continual.options import COMPARED
from fastlr.experiments.continual.prediction import predictions
from fastlr.experiments.continual.report import write_report


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    return write_grid(tmp_path_factory.mktemp("grid"))


def test_only_what_foretells_accuracy_gains_out_of_sample(grid):
    by = {p.measure: p for p in predictions(read_runs([grid]), resamples=200)}
    assert by["local_redundancy"].low > 0.02
    assert by["local_redundancy"].n > 2000
    assert by["weight_norm"].low < 0 < by["weight_norm"].high
    assert abs(by["weight_norm"].gain) < 0.005
    assert by["local_redundancy"].base == by["weight_norm"].base  # measured at the same tasks


def test_no_task_of_a_block_is_learned_from(tmp_path):
    """A measure that is the target in one half and noise in the other foretells nothing."""
    folder = write_run(tmp_path / "run", 200)
    run, lines = read_run(folder), read_lines(folder)
    target = run.future_accuracy()
    noise = np.random.default_rng(0).normal(size=200)
    for t, line in enumerate(lines[1:]):
        known = t < 100 and np.isfinite(target[t])
        line["measures"] = {"weight_norm": {"value": float(target[t] if known else noise[t])}}
    write_lines(folder, lines)
    (found,) = predictions([read_run(folder)], resamples=200)
    assert found.gain < 0


def test_readings_of_zero_are_told(grid, tmp_path):
    """They have no logarithm; without them a network that has died looks alive."""
    folder = tmp_path / "grid"
    shutil.copytree(grid, folder)
    lines = read_lines(folder / "way-3,seed-0")
    for line in lines[-15:]:
        line["measures"]["local_redundancy"]["value"] = 0.0
    write_lines(folder / "way-3,seed-0", lines)
    sheet, *_ = course_sheets(by_intervention(read_runs([folder])))
    assert "left out of LR: way-3 (15 of 160)." in sheet.notes[-1]
    (untouched, *_) = course_sheets(by_intervention(read_runs([grid])))
    assert len(untouched.notes) == len(sheet.notes) - 1


def test_a_measure_that_does_not_change_gains_nothing(tmp_path):
    """Its residuals are rounding, of which slopes without bound would be fitted."""
    for level in (7e6, 0.3, 1e-9):
        folder = write_run(tmp_path / f"run-{level}", 130)
        lines = read_lines(folder)
        for line in lines[1:]:
            line["measures"] = {"weight_norm": {"value": level}}
        write_lines(folder, lines)
        (found,) = predictions([read_run(folder)], resamples=200)
        assert (found.gain, found.low, found.high) == pytest.approx((0, 0, 0), abs=1e-12)


def test_the_report_lays_the_courses_side_by_side(grid, tmp_path, cli):
    out = tmp_path / "out"
    cli(f"report {grid} --bootstrap 100 --out {out}", says="Over the run: ")
    assert not (out / "causes.csv").exists()
    with (out / "course.csv").open() as file:
        course = {row["intervention"]: row for row in csv.DictReader(file)}
    lr = np.array(
        [read_run(grid / f"way-3,seed-{seed}").measure("local_redundancy") for seed in range(4)]
    )
    first, last = (np.log(part).mean(1) for part in (lr[:, :20], lr[:, 80:]))
    assert course["way-3"]["LR first"] == brief(math.exp(first.mean()))
    assert course["way-3"]["LR last"] == brief(math.exp(last.mean()))
    assert course["way-3"]["seeds"] == f"x {math.exp(np.std(last, ddof=1)):.2f}"
    assert (out / "course.png").stat().st_size > 10_000


@pytest.mark.filterwarnings("error")
def test_late_tasks_that_were_skipped_leave_a_gap_and_the_other_seeds(tmp_path):
    write_grid(tmp_path, seeds=2, tasks=30, grid=GRID[:3])
    for name in ("way-1,seed-0", "way-2,seed-0", "way-2,seed-1"):
        lines = read_lines(tmp_path / name)
        for line in lines[21:]:
            line.update(accuracy=None, skipped="the loss is not finite", measures={})
        write_lines(tmp_path / name, lines)
    write_report([tmp_path], out=tmp_path / "out", resamples=100)
    with (tmp_path / "out" / "course.csv").open() as file:
        course = {row["intervention"]: row["last %"] for row in csv.DictReader(file)}
    late = 100 * read_run(tmp_path / "way-1,seed-1").accuracy[24:].mean()
    assert float(course["way-1"]) == pytest.approx(late, abs=0.1)
    assert course["way-2"] == "–"


def test_options_of_interventions_are_compared_and_in_the_help(cli):
    printed = cli("continual --help").out
    for intervention in INTERVENTIONS.values():
        assert f"{intervention.name} ({intervention.source[:10]}" in printed
        for name in intervention.options:
            assert name in COMPARED
            assert f"--set {name}=" in printed
