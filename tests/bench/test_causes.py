"""The study of causes: what goes with accuracy, over interventions and seeds.

The records are made up, so that it is known.
"""

import json
import re

import numpy as np
from continual_runs import GRID, write_grid, write_run
from expected import refused
from pytest import approx, fixture, mark, warns
from rich.console import Console

from bench.causes import report, runs
from bench.causes.comparison import compare
from bench.causes.correlations import together
from fastlr.experiments.continual import read_run, read_runs
from fastlr.experiments.continual.options import COMPARED


@fixture(scope="module")
def grid(tmp_path_factory):
    return write_grid(tmp_path_factory.mktemp("grid"))


def test_a_cause_and_a_sign_that_is_none_are_told_apart(grid):
    found = compare(read_runs([grid]))
    assert found.names[0] == "none"
    assert set(found.names) == {"none", *(f"way-{k}" for k in range(1, 9))}
    by = {pair.measure: pair for pair in together(found, resamples=200)}
    cause, alone = by["local_redundancy"], by["weight_norm"]
    assert cause.values["between"] > 0.9
    assert cause.intervals["between"][0] > 0.5
    assert cause.values["change"] > 0.9
    assert cause.intervals["change"][0] > 0.5
    assert cause.intervals["within"][0] > 0
    for kind in ("between", "within", "change"):
        low, high = alone.intervals[kind]
        assert low < 0 < high
        assert abs(alone.values[kind]) < 0.45
    x, y = found.measures["local_redundancy"], found.accuracy
    assert cause.values["between"] == approx(np.corrcoef(x.mean(1), y.mean(1))[0, 1])
    deviations = [(part - part.mean(1, keepdims=True)).ravel() for part in (x, y)]
    assert cause.values["within"] == approx(np.corrcoef(*deviations)[0, 1])
    dx, dy = ((part[1:] - part[0]).ravel() for part in (x, y))
    assert cause.values["change"] == approx(dx @ dy / np.linalg.norm(dx) / np.linalg.norm(dy))
    late = read_run(grid / "way-3,seed-2")
    row = found.names.index("way-3")
    assert x[row, 2] == approx(np.log(late.measure("local_redundancy")[80:]).mean())
    assert y[row, 2] == approx(late.accuracy[80:].mean())


def test_the_report_says_whether_it_causes(grid, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    arguments = f"report {grid} --bootstrap 100 --out {out}"
    monkeypatch.setattr("sys.argv", arguments.split())
    report.main()
    printed = capsys.readouterr().out
    assert "Does it cause? Late measures against late accuracy" in printed
    assert max(map(len, printed.split("Correlation of late")[0].splitlines())) <= 80
    sentences = json.loads((out / "report.json").read_text())["findings"]
    ups, downs = ([f"way-{k}" for k, (u, _) in enumerate(GRID) if u == sign] for sign in (1, -1))
    for words, names in (
        ("raise it and raise accuracy", ups),
        ("lower it and lower accuracy", downs),
    ):
        told = re.search(f"{words}: ([^;.]*)", sentences[1])[1].split(", ")
        assert len(set(told) & set(names)) >= 2
        assert set(told) <= set(names)
    assert (out / "causes.png").exists()
    assert (out / "interventions.csv").exists()
    page = (out / "index.html").read_text()
    assert all(slug in page for slug in ('id="causes"', 'id="interventions"', 'id="prediction"'))
    assert "nan" not in page.lower().split()
    assert (out / "course.csv").exists()
    assert (out / "course.png").stat().st_size > 10_000


def test_part_of_a_study_reports_and_tells_nothing_from_too_few(tmp_path):
    write_grid(tmp_path, seeds=1, tasks=30, grid=GRID[:3])
    write_run(tmp_path / "begun,seed-1", 3, seed=1)
    with warns(UserWarning, match="1 of 4 runs have less than 9/10 of 30 tasks"):
        written = report.write_report([tmp_path], resamples=100)
    assert all(
        "too few to tell from chance" in written.findings[0].split(", ")[i] for i in range(3)
    )
    assert written.findings[1].endswith("too few seeds to tell which change what.")
    assert "nan" not in written.findings[0]
    written.show(Console(width=80, quiet=True))


def test_runs_of_one_intervention_are_not_compared(tmp_path):
    write_grid(tmp_path, seeds=2, tasks=30, grid=GRID[:1])
    with refused("one intervention"):
        report.write_report([tmp_path], resamples=100)


@mark.long
def test_every_cell_of_the_study_runs_resumes_and_reports(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "COMMON", {**runs.COMMON, "measure_every": 1, "redundancy_n": 16})
    problem = runs.Problem({"data": "permuted-digits", "random_images": 64, "epochs": 1}, seeds=1)
    monkeypatch.setattr(runs, "PROBLEMS", {"permuted": problem})
    for tasks in ("2", "3", "3"):
        monkeypatch.setattr("sys.argv", ["causes", str(tmp_path), "--tasks", tasks])
        runs.main()
    made = read_runs([tmp_path / "permuted"], apart=COMPARED, pool=False)
    assert len(made) == len(runs.INTERVENTIONS)
    assert all(len(run) == 3 for run in made)
    assert all(len(run.resumed) == 1 for run in made)  # not a third time
    assert report.write_report([tmp_path / "permuted"], resamples=100).page.exists()
    assert compare(made).names[0] == "none"
