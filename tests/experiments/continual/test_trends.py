"""Trends of runs that were learned for them, trimmed: one new seed of each problem."""

import copy
import shutil
from pathlib import Path

from continual_cases import SMALL, begin
from continual_runs import read_lines, write_lines, write_run
from pytest import approx, mark

from fastlr.display.trend import trend
from fastlr.experiments.continual import experiment as continual
from fastlr.experiments.continual import read_run
from fastlr.experiments.continual.report import write_report
from fastlr.experiments.continual.trends import in_a_line, readings, trends

# Learned with seed 11: the preset demo with 128 synthetic images, without and with
# shrink-and-perturb, and at a learning rate of 3; permuted digits and a transformer (the study of
# causes, bench/results/cpu/causes). The records hold what the trend needs.
RUNS = Path(__file__).with_name("runs_of_trends")


def cut(name, tasks):
    """The first tasks of a run."""
    run = copy.copy(read_run(RUNS / name))
    run.rows = {task: record for task, record in run.tasks.items() if task < tasks}
    return run


def direction(run):
    return trend(readings(run)).direction


@mark.parametrize("tasks", [28, 40, 84, 200])
def test_of_a_network_that_stops_learning_it_falls(tasks):
    assert direction(cut("demo", tasks)) == -1


@mark.parametrize("tasks", [28, 40, 60, 84, 120, 160, 200])
def test_of_one_that_shrink_and_perturb_keeps_learning_it_does_not(tasks):
    assert direction(cut("shrink-and-perturb", tasks)) >= 0


@mark.parametrize(
    ("name", "expected"), [("permuted-digits", 1), ("transformer", 1), ("never-learned", 0)]
)
def test_of_the_others_it_rises_or_stays(name, expected):
    assert direction(read_run(RUNS / name)) == expected


def test_the_images_are_paired_where_the_run_kept_their_values(tmp_path):
    run = read_run(RUNS / "permuted-digits")
    assert all(reading.per_image is not None for reading in readings(run))
    folder = tmp_path / "run"
    shutil.copytree(run.path, folder)
    rows = next((folder / "checkpoints").iterdir())
    whole = rows.read_bytes()
    for damaged in (whole[:-4], whole[:-3], whole[: len(whole) // 2] + bytes(len(whole) // 2), b""):
        rows.write_bytes(damaged)
        assert any(reading.per_image is None for reading in readings(read_run(folder)))
    rows.unlink()
    assert all(reading.per_image is None for reading in readings(read_run(folder)))
    assert "Local redundancy rose to" in trends([read_run(folder)])[0]


def test_a_resumed_run_keeps_the_same_images_values(tmp_path, images):
    settings = {**SMALL, "measures": ("local_redundancy",), "measure_every": 2}
    begin(tmp_path / "whole", images, **settings | {"tasks": 4})
    begin(tmp_path / "parts", images, **settings | {"tasks": 2})
    continual.resume(tmp_path / "parts", {"tasks": 4})
    kept = [tmp_path / name / "checkpoints" / continual.PER_IMAGE for name in ("whole", "parts")]
    assert kept[0].read_bytes() == kept[1].read_bytes()
    assert kept[0].stat().st_size == 4 * 20 * 3  # the start and two readings
    run = read_run(tmp_path / "whole")
    means = [float(reading.per_image.mean()) for reading in readings(run)]
    assert means == approx([m for m in run.measure("local_redundancy") if m == m], rel=1e-6)


def test_the_start_is_no_reading(tmp_path):
    """Training raises the value first: what was measured before it would hide any fall."""
    folder = write_run(tmp_path / "run", 40)
    before = trends([read_run(folder)])
    lines = read_lines(folder)
    lines[0]["measures"]["local_redundancy"] = {"value": 1e-3, "stderr": 1e-5}
    write_lines(folder, lines)
    assert trends([read_run(folder)]) == before


def test_more_than_four_runs_and_groups_of_runs_have_a_line_each(tmp_path):
    paths = [write_run(tmp_path / str(i), 40, seed=i) for i in range(5)]
    runs = [read_run(path) for path in paths]
    directions = [direction(run) for run in runs]
    assert trends(runs) == [
        f"All (5 runs): local redundancy fell significantly in {directions.count(-1)} and rose in "
        f"{directions.count(1)}."
    ]
    assert trends(runs[:2])[1].startswith("1: Local redundancy ")
    bare = read_run(write_run(tmp_path / "bare", 40, leave_out=("local_redundancy",)))
    assert trends([bare]) == []
    assert "; 1 without a trend" in in_a_line("bare", [bare])
    for path, value in zip(paths, (0, 0, 0.1, 0.1, 0.2), strict=True):
        config = path / "config.json"
        text = config.read_text().replace('"seed":', f'"l2_init": {value}, "seed":')
        config.write_text(text)
    report = write_report(paths, tmp_path / "out", figures="none")
    assert [line.partition(":")[0] for line in report.findings] == [
        "none (2 runs)",
        "l2_init=0.1 (2 runs)",
        "l2_init=0.2 (1 run)",
    ]
