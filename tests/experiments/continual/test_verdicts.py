"""The verdict on runs that were learned for it, trimmed: one new seed of each problem."""

import copy
import shutil
from pathlib import Path

from continual_cases import SMALL, begin
from continual_runs import read_lines, write_lines, write_run
from pytest import approx, mark

from fastlr.experiments.continual import experiment as continual
from fastlr.experiments.continual import read_run
from fastlr.experiments.continual.report import write_report
from fastlr.experiments.continual.verdicts import (
    alarms,
    guess,
    in_a_line,
    never_learned,
    outcome,
    readings,
    rings_in,
    verdict_of,
    verdicts,
)

# Learned with seed 11 by this commit: the preset demo with 128 synthetic images, without and with
# shrink-and-perturb, and at a learning rate of 3; permuted digits and the transformer of
# bench/causes/runs.py. Records hold what the verdict reads.
RUNS = Path(__file__).with_name("runs_of_verdicts")


def cut(name, tasks):
    """The first tasks of a run."""
    run = copy.copy(read_run(RUNS / name))
    run.rows = {task: record for task, record in run.tasks.items() if task < tasks}
    return run


@mark.parametrize("tasks", [28, 40, 84, 200])
def test_a_network_that_stops_learning_has_fallen(tasks):
    told = verdict_of(cut("demo", tasks))
    assert told.startswith("Local redundancy has fallen from ")
    assert "Accuracy fell from " in told
    assert "as the value did: believe accuracy" in told
    assert "L2 to init" in told


@mark.parametrize("tasks", [28, 40, 60, 84, 120, 160, 200])
def test_one_that_shrink_and_perturb_keeps_learning_has_not(tasks):
    run = cut("shrink-and-perturb", tasks)
    assert outcome(run).value.moved >= 0
    assert outcome(run).accuracy.moved >= 0
    assert "fallen" not in verdict_of(run)


def test_on_permuted_digits_the_value_rises_and_accuracy_falls_all_the_same():
    told = verdict_of(read_run(RUNS / "permuted-digits"))
    assert told.startswith("Local redundancy has risen from ")
    assert "On its own inputs it has risen from " in told
    assert "Accuracy fell from 86.9 to 81.0 % all the same: believe it;" in told


def test_of_the_transformer_both_rise():
    told = verdict_of(read_run(RUNS / "transformer"))
    assert told.startswith("Local redundancy has risen from ")
    assert "Accuracy rose from 52.2 to 63.9 %, as the value did" in told


def test_the_alarm_rings_where_plasticity_is_lost_and_not_where_it_is_kept():
    rung = rings_in(read_run(RUNS / "demo"))
    assert 16 <= rung[0] < 40, "accuracy falls to a guess between tasks 20 and 30"
    assert rings_in(read_run(RUNS / "shrink-and-perturb")) == []
    assert rings_in(read_run(RUNS / "transformer")) == []
    assert rings_in(read_run(RUNS / "never-learned")) == []
    run = read_run(RUNS / "demo")
    (told,) = alarms({"as it is": [run]})
    assert f": after {rung[0] + 1}, " in told
    (told,) = alarms({"none": [run, run], "helped": [read_run(RUNS / "shrink-and-perturb")]})
    assert ": none: in 2 of 2 runs; helped: not at all. " in told
    (told,) = alarms({"none": [run, cut("demo", 16)]})
    assert ": in 1 of 1 run (in 1 more it cannot: it needs more than 16 tasks). " in told


@mark.parametrize(
    ("name", "tasks", "reason"),
    [("demo", 16, "more than 16 tasks"), ("permuted-digits", 200, "not known what a guess gives")],
)
def test_where_the_alarm_cannot_ring_it_says_so(name, tasks, reason):
    (told,) = alarms({name: [cut(name, tasks)]})
    assert ": never, as it " in told
    assert reason in told


def test_a_network_at_a_guess_from_the_start_never_learned():
    run = read_run(RUNS / "never-learned")
    assert "the network never learned, and has lost nothing" in verdict_of(run)
    assert 0.12 < guess(run) < 0.14  # the most frequent of ten labels, of 256
    assert not any(never_learned(read_run(path)) for path in RUNS.iterdir() if path != run.path)
    assert in_a_line("dead", [run]).endswith("; 1 never learned.")


def test_the_images_are_paired_where_the_run_kept_their_values(tmp_path):
    run = read_run(RUNS / "permuted-digits")
    assert outcome(run).value.paired
    assert "neighbouring readings taken for independent" in verdict_of(run)
    assert all(reading.per_image is not None for reading in readings(run))
    folder = tmp_path / "run"
    shutil.copytree(run.path, folder)
    rows = next((folder / "checkpoints").iterdir())
    whole = rows.read_bytes()
    for damaged in (whole[:-4], whole[:-3], whole[: len(whole) // 2] + bytes(len(whole) // 2), b""):
        rows.write_bytes(damaged)
        assert not outcome(read_run(folder)).value.paired
    rows.unlink()
    assert "both parts' images taken for independent" in verdict_of(read_run(folder))


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
    before = verdict_of(read_run(folder))
    lines = read_lines(folder)
    lines[0]["measures"]["local_redundancy"] = {"value": 1e-3, "stderr": 1e-5}
    write_lines(folder, lines)
    assert verdict_of(read_run(folder)) == before


def test_more_than_four_runs_and_groups_of_runs_have_a_line_each(tmp_path):
    paths = [write_run(tmp_path / str(i), 40, seed=i) for i in range(5)]
    runs = [read_run(path) for path in paths]
    fallen = sum(outcome(run).value.moved < 0 for run in runs)
    about, line = verdicts(runs)
    assert about.startswith("Below, the last fifth of each run")
    assert line.startswith(f"All (5 runs): local redundancy has fallen in {fallen}, risen in ")
    assert "; accuracy has fallen in " in line
    assert verdicts(runs[:2])[1].startswith("1: Local redundancy ")
    bare = read_run(write_run(tmp_path / "bare", 40, leave_out=("local_redundancy",)))
    assert verdicts([bare]) == []
    assert in_a_line("bare", [bare]).startswith("bare (1 run): accuracy ")
    for path, value in zip(paths, (0, 0, 0.1, 0.1, 0.2), strict=True):
        config = path / "config.json"
        text = config.read_text().replace('"seed":', f'"l2_init": {value}, "seed":')
        config.write_text(text)
    report = write_report(paths, tmp_path / "out", figures="none")
    assert [line.partition(":")[0] for line in report.findings[1:-1]] == [
        "none (2 runs)",
        "l2_init=0.1 (2 runs)",
        "l2_init=0.2 (1 run)",
    ]
