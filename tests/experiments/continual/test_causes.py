"""Runs that differ by intervention: what goes with accuracy, and what foretells it.

The records are made up, so that both are known.
"""

from __future__ import annotations

import csv
import json
import math
import re

import numpy as np
import pytest
from continual_runs import autoregressive, read_lines, write_lines, write_run
from rich.console import Console

from fastlr.cli.main import main
from fastlr.experiments.continual import read_run, read_runs
from fastlr.experiments.continual.causes import compare, predictions, together
from fastlr.experiments.continual.findings import brief
from fastlr.experiments.continual.options import INTERVENTIONS
from fastlr.experiments.continual.report import write_report

# What each intervention does to plasticity, and to weight norm.
GRID = [(u, v) for u in (0, 1, -1) for v in (0, 1, -1)]


def write_grid(parent, seeds=4, tasks=100, grid=GRID):
    """Write runs whose plasticity moves redundancy and accuracy, and whose weight norm moves alone.

    Redundancy also shows the slow part of accuracy early.
    """
    for k, (u, v) in enumerate(grid):
        for seed in range(seeds):
            rng = np.random.default_rng([seed, k])
            plasticity, slow = 1.5 * u + 0.2 * rng.normal(), autoregressive(rng, tasks)
            accuracy = 0.5 + 0.1 * plasticity + 0.03 * slow + 0.03 * rng.normal(size=tasks)
            norm = np.exp(1.5 * v + 0.3 * rng.normal() + 0.3 * rng.normal(size=tasks))
            folder = write_run(
                parent / f"{'none' if k == 0 else f'way-{k}'},seed-{seed}", tasks, seed=seed
            )
            config = json.loads((folder / "config.json").read_text())
            config["options"] |= {"shrink": 1 - 0.05 * k}
            (folder / "config.json").write_text(json.dumps(config))
            lines = read_lines(folder)
            for t, line in enumerate(lines[1:]):
                line["accuracy"] = float(accuracy[t])
                line["measures"]["local_redundancy"]["value"] = float(
                    np.exp(3 + plasticity + 0.3 * slow[t])
                )
                line["measures"]["weight_norm"]["value"] = float(norm[t])
            write_lines(folder, lines)
    return parent


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    return write_grid(tmp_path_factory.mktemp("grid"))


def test_a_cause_and_a_sign_that_is_none_are_told_apart(grid):
    found = compare(read_runs([grid]))
    assert found.names[0] == "none" and set(found.names) == {
        "none",
        *(f"way-{k}" for k in range(1, 9)),
    }
    by = {pair.measure: pair for pair in together(found, resamples=200)}
    cause, alone = by["local_redundancy"], by["weight_norm"]
    assert cause.values["between"] > 0.9 and cause.intervals["between"][0] > 0.5
    assert (
        cause.values["change"] > 0.9
        and cause.intervals["change"][0] > 0.5
        and cause.intervals["within"][0] > 0
    )
    for kind in ("between", "within", "change"):
        low, high = alone.intervals[kind]
        assert low < 0 < high and abs(alone.values[kind]) < 0.45
    x, y = found.measures["local_redundancy"], found.accuracy
    assert cause.values["between"] == pytest.approx(np.corrcoef(x.mean(1), y.mean(1))[0, 1])
    deviations = [(part - part.mean(1, keepdims=True)).ravel() for part in (x, y)]
    assert cause.values["within"] == pytest.approx(np.corrcoef(*deviations)[0, 1])
    dx, dy = ((part[1:] - part[0]).ravel() for part in (x, y))
    assert cause.values["change"] == pytest.approx(
        dx @ dy / np.linalg.norm(dx) / np.linalg.norm(dy)
    )
    late = read_run(grid / "way-3,seed-2")
    row = found.names.index("way-3")
    assert x[row, 2] == pytest.approx(np.log(late.measure("local_redundancy")[80:]).mean())
    assert y[row, 2] == pytest.approx(late.accuracy[80:].mean())


def test_only_what_foretells_accuracy_gains_out_of_sample(grid):
    by = {p.measure: p for p in predictions(read_runs([grid]), resamples=200)}
    assert by["local_redundancy"].low > 0.02 and by["local_redundancy"].n > 2000
    assert (
        by["weight_norm"].low < 0 < by["weight_norm"].high and abs(by["weight_norm"].gain) < 0.005
    )
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


def test_the_report_says_whether_it_causes(grid, tmp_path, cli):
    out = tmp_path / "out"
    printed = cli(f"report {grid} --bootstrap 100 --out {out}").out
    assert "Does it cause? Late measures against late accuracy" in printed
    assert max(map(len, printed.split("Correlation of late")[0].splitlines())) <= 80
    sentences = json.loads((out / "report.json").read_text())["findings"]
    ups, downs = ([f"way-{k}" for k, (u, _) in enumerate(GRID) if u == sign] for sign in (1, -1))
    for words, names in (
        ("raise it and raise accuracy", ups),
        ("lower it and lower accuracy", downs),
    ):
        told = re.search(f"{words}: ([^;.]*)", sentences[1])[1].split(", ")
        assert len(set(told) & set(names)) >= 2 and set(told) <= set(names)
    assert (out / "causes.png").exists() and (out / "interventions.csv").exists()
    page = (out / "index.html").read_text()
    assert all(slug in page for slug in ('id="causes"', 'id="interventions"', 'id="prediction"'))
    assert "nan" not in page.lower().split()
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


def test_part_of_a_study_reports_and_tells_nothing_from_too_few(tmp_path):
    write_grid(tmp_path, seeds=1, tasks=30, grid=GRID[:3])
    write_run(tmp_path / "begun,seed-1", 3, seed=1)
    with pytest.warns(UserWarning, match="1 of 4 runs have less than 9/10 of 30 tasks"):
        report = write_report([tmp_path], resamples=100)
    assert all("too few to tell from chance" in report.findings[0].split(", ")[i] for i in range(3))
    assert report.findings[1].endswith("too few seeds to tell which change what.")
    assert "nan" not in report.findings[0]
    report.show(Console(width=80, quiet=True))


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
    assert float(course["way-1"]) == pytest.approx(late, abs=0.1) and course["way-2"] == "–"


def test_a_study_of_which_only_the_control_has_got_far_says_nothing(tmp_path):
    write_grid(tmp_path, seeds=1, tasks=30, grid=GRID[:1])
    begun = write_run(tmp_path / "begun,seed-0", 3)
    config = json.loads((begun / "config.json").read_text())
    config["options"] |= {"shrink": 0.5}
    (begun / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match="1 of 2 runs have less than 9/10"):
        report = write_report([tmp_path], resamples=100)
    assert "Correlation" not in " ".join(report.findings) and report.page.exists()


def test_other_options_are_still_not_pooled_and_pool_gives_the_tables_of_before(tmp_path, cli):
    write_grid(tmp_path, seeds=2, tasks=30, grid=GRID[:2])
    cli(f"report {tmp_path} --pool --bootstrap 100 --figures none", says="Table 1")
    cli(f"cost {tmp_path}", code=2, says="not pooled")
    file = tmp_path / "none,seed-0" / "config.json"
    config = json.loads(file.read_text())
    config["options"]["epochs"] = 7
    for folder in tmp_path.glob("*,seed-*"):
        other = json.loads((folder / "config.json").read_text())
        other["options"]["epochs"] = 5
        (folder / "config.json").write_text(json.dumps(other))
    file.write_text(json.dumps(config))
    cli(f"report {tmp_path}", code=2, says="epochs=7")


def test_every_intervention_option_is_one_of_the_driver():
    from fastlr.experiments.continual.interventions import __doc__ as table

    assert {name.rstrip(".`") for name in re.findall(r"``(\w+)``", table)} <= set(INTERVENTIONS)


@pytest.mark.long
def test_every_cell_of_the_study_runs_resumes_and_reports(tmp_path, monkeypatch):
    from bench import causes

    monkeypatch.setattr(causes, "COMMON", {**causes.COMMON, "measure_every": 1, "redundancy_n": 16})
    problem = causes.Problem({"data": "permuted-digits", "random_images": 64, "epochs": 1}, seeds=1)
    monkeypatch.setattr(causes, "PROBLEMS", {"permuted": problem})
    for tasks in ("2", "3", "3"):
        monkeypatch.setattr("sys.argv", ["causes", str(tmp_path), "--tasks", tasks])
        causes.main()
    runs = read_runs([tmp_path / "permuted"], apart=INTERVENTIONS, pool=False)
    assert len(runs) == len(causes.INTERVENTIONS) and all(len(run) == 3 for run in runs)
    assert all(len(run.resumed) == 1 for run in runs)  # not a third time
    assert main(["report", str(tmp_path / "permuted"), "--bootstrap", "100"]) == 0
    assert compare(runs).names[0] == "none"
