"""The study of alarms from a run to its report, on runs of a few tasks and on made up values."""

import json
from functools import partial

import numpy as np
import pytest
import torch

from bench.alarm import networks, problems, report, runs, values
from bench.alarm.analysis import ALL, RingCounts, analyse
from bench.alarm.falls import falls_sheets
from bench.alarm.problems import COMMON, JUDGED, PROBLEMS, Setting
from bench.alarm.signals import Course, degrading, signal

pytest.importorskip("sklearn")


@pytest.fixture
def short(monkeypatch):
    """Give the study one problem of four tasks and one seed."""
    settings = {**problems.LABELS, "random_images": 32, "epochs": 1, "learning_rate": 1e-3}
    small = {"redundancy_n": 8, "redundancy_batch": 8}
    monkeypatch.setitem(COMMON, "redundancy_n", 8)
    made = Setting(True, 0.15, {**settings, **small}, seeds=1, tasks=4, learned=4)
    for module in (problems, runs, values):
        monkeypatch.setattr(module, "PROBLEMS", {"random-labels": made})


def test_runs_are_made_read_kept_and_not_made_again(short, tmp_path, monkeypatch, capsys):
    out, kept = tmp_path / "runs", tmp_path / "values"
    arguments = ["runs", str(out), "--values", str(kept)]
    monkeypatch.setattr("sys.argv", arguments)
    runs.main()
    made = sorted(path.name for path in (out / "random-labels").iterdir())
    assert made == ["none,seed-0", "shrink-and-perturb,seed-0"]
    monkeypatch.setattr("sys.argv", ["values", str(out), "--values", str(kept)])
    values.main()
    courses = values.courses(kept, "random-labels")
    assert [course.variant for course in courses] == ["none", "shrink-and-perturb"]
    for course in courses:
        assert course.read_at.tolist() == [1, 3], "after every second task"
        assert len(course.accuracy) == 4
        for name, taken in course.measures.items():
            assert np.isfinite(taken).all(), name
    records = (out / "random-labels" / "none,seed-0" / "records.jsonl").read_text().splitlines()
    last = json.loads(records[-1])
    value = last["measures"]["local_redundancy"]["value"]
    assert courses[0].measures["local_redundancy"][-1] == pytest.approx(value, rel=1e-4)
    capsys.readouterr()
    monkeypatch.setattr("sys.argv", arguments)
    monkeypatch.setattr(runs, "carry_out", lambda *_: pytest.fail("it is kept"))
    runs.main()
    assert capsys.readouterr().out == ""


def test_a_run_that_was_stopped_goes_on_without_the_reading_that_it_lost(short, tmp_path):
    cell = runs.Cell("random-labels", "none", 0)
    settings = runs.settings_of(cell, None)
    whole, parted = tmp_path / "none,seed-0", tmp_path / "parted" / "none,seed-0"
    runs.carry_out(whole, settings, partial(runs.Reader, whole, learned=4))
    for tasks in (2, 4):
        reader_of = partial(runs.Reader, parted, learned=4)
        runs.carry_out(parted, {**settings, "tasks": tasks}, reader_of)
    assert values.run_rows(whole) == values.run_rows(parted)
    (parted / "readings.jsonl").write_text("")
    assert {row["score"] for row in values.run_rows(parted)} == {""}


def test_probe_reads_the_activations_of_the_inputs_alone():
    network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    x = torch.randn(32, 4)
    with torch.no_grad():
        network[0].bias.fill_(-100.0)
    dead = networks.probe_reading(network, x)
    assert dead.critical == 1 and dead.score < 0.01
    with torch.no_grad():
        network[0].bias.fill_(0.0)
    assert networks.probe_reading(network, x).score > dead.score
    assert not network[1]._forward_hooks, "it leaves nothing behind"


def test_probe_is_degrading_where_its_score_falls():
    assert degrading(np.full(6, 0.5)).tolist() == [0.0] * 6
    assert degrading(np.array([0.5, 0.5, 0.4, 0.4])).tolist() == [0.0, 0.0, 1.0, 1.0]


def made_up(problem, variant, seed, onset, warned):
    """Return a run whose accuracy falls at a task, and whose measures fall so much earlier."""
    rng = np.random.default_rng([seed, len(problem), len(variant)])
    tasks = np.arange(100)
    accuracy = np.where(tasks < onset, 0.8, 0.1) + 0.01 * rng.standard_normal(100)
    read_at = tasks[1::2]
    falling = np.where(read_at < onset - warned, 10.0, 1.0) * np.exp(0.05 * rng.standard_normal(50))
    noise = np.exp(0.05 * rng.standard_normal((len(values.READ), 50)))
    measures = dict(zip(values.READ, noise))
    measures |= {"local_redundancy": falling, "critical": np.zeros(50)}
    return Course(problem, variant, seed, 0.1, accuracy, read_at, measures)


@pytest.fixture(scope="module")
def found():
    """Judge alarms in runs of which one measure falls twenty tasks ahead of accuracy."""
    return analyse(two_problems(), resamples=50)


def two_problems():
    """Return the runs of two problems that lose plasticity unless they are helped."""
    return [
        made_up(problem, variant, seed, 65 if variant == "none" else 1000, 20)
        for problem in ("one", "another")
        for variant in ("none", "helped")
        for seed in range(4)
    ]


def test_a_measure_that_falls_earlier_is_found_to_warn_and_noise_is_not(found):
    for problem in found.problems:
        alarm = found.alarms["local redundancy on shapes"][problem]
        assert alarm.found[5][0] == 1.0
        assert alarm.false[0] == 0.0
        assert alarm.followed[0] > 0.5
        assert alarm.losses == 4
    assert found.alarms["weight norm"]["one"].found[5][0] < 0.6
    difference = found.differences["local redundancy on shapes"]
    assert difference.low > 0
    assert not difference.worse_somewhere
    assert found.differences["weight norm"].low <= 0
    assert found.differences["weight norm"].p > difference.p


def test_shares_of_rings_followed_fall_where_losses_are_rare():
    counts = (np.array([count]) for count in (10.0, 10.0, 10.0, 12.0, 2.0))
    rings = RingCounts(*counts)
    assert rings.share_followed() == pytest.approx(10 / 14)
    assert rings.share_followed(0.1) == pytest.approx(0.1 / (0.1 * 1.2 + 0.9 * 0.2))


def test_report_says_what_was_shown(found, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "analyse", lambda *_: found)
    page = report.write_report(two_problems(), tmp_path)
    assert "warns earlier" not in page.sheets[0].csv(), "50 resamples cannot show it"
    assert page.findings[0].startswith("Not shown of any measure")
    assert (tmp_path / "alarm.png").stat().st_size > 10_000
    assert len(page.sheets) == 2 + 2 + 3 + 2 + 3
    assert set(json.loads((tmp_path / "report.json").read_text())["alarms"]) == set(ALL)


def test_falls_are_counted_as_they_are_written():
    """Half of eight runs lose at task 65; their value falls at task 45 from 10 to 1."""
    constant, half, onset = falls_sheets(two_problems())
    rows = {row[0]: row[1:] for row in half.rows}
    assert rows["shapes one"] == ("8", "4", "4", "0")
    assert rows["shapes all problems"] == ("16", "8", "8", "0")
    assert rows["images just learned one"] == ("8", "0", "0", "4")
    rows = {row[0]: row[1:] for row in onset.rows}
    losses, rose, factor = rows["shapes one"]
    assert (losses, rose) == ("4", "0") and float(factor) == pytest.approx(0.1, rel=0.1)
    rows = {row[0]: row[1:] for row in constant.rows}
    readings, near, mean, highest, *below = rows["shapes one"]
    assert int(readings) == 8 * 42 and below == ["0", "–", "–"]
    at_one = 4 * 28  # readings from task 45 on, a tenth of them beyond ten per cent of 0.9
    assert 0 < int(near) < at_one and float(mean) < float(highest) < 85


def test_every_problem_is_as_it_is_and_helped():
    judged = {name: PROBLEMS[name] for name in JUDGED}
    assert len(judged) == 7
    assert sum(problem.loses for problem in judged.values()) == 4
    for problem in judged.values():
        assert len(problem.variants) == 2
        assert 100 <= problem.tasks <= 150
    assert len(runs.cells(judged)) == 2 * (5 * 30 + 2 * 10)


def test_signal_of_the_probe_is_what_it_says():
    course = made_up("one", "none", 0, 65, 10)
    assert not signal(course, "probe_critical").any()
