"""The sentences of a report follow from the numbers, and say so where nothing can be told."""

import numpy as np
import pytest
from continual_runs import read_lines, write_lines, write_run
from scipy import stats

from fastlr.experiments.continual import correlations, read_run
from fastlr.experiments.continual.findings import (
    course,
    describe,
    findings,
    rank_correlation,
    verdicts,
)


def run_of(folder, accuracy, redundancy):
    """A run with these accuracies, and local redundancy after each task."""
    write_run(folder, len(accuracy))
    lines = read_lines(folder)
    for line in lines:
        if line["kind"] == "task":
            line["accuracy"] = float(accuracy[line["task"]])
            line["measures"]["local_redundancy"]["value"] = float(redundancy[line["task"]])
    write_lines(folder, lines)
    return read_run(folder)


def test_rank_correlations_are_scipys_with_the_same_and_the_next_task(tmp_path):
    rng = np.random.default_rng(0)
    redundancy = rng.lognormal(size=300)
    accuracy = 0.5 + 0.1 * np.tanh(np.log(redundancy)) + 0.02 * rng.normal(size=300)
    run = run_of(tmp_path / "run", accuracy, redundancy)
    same = rank_correlation([run], 0)
    following = rank_correlation([run], 1)
    assert same.value == pytest.approx(stats.spearmanr(redundancy, accuracy).statistic)
    assert following.value == pytest.approx(
        stats.spearmanr(redundancy[:-1], accuracy[1:]).statistic
    )
    assert (same.n, following.n) == (300, 299)
    assert 0.9 < same.low < same.value < same.high
    assert describe(same).endswith("300 tasks)")
    assert describe(following).endswith("which cannot be told from 0")
    assert rank_correlation([run], 0) == same


def test_two_runs_are_averaged_by_their_tasks(tmp_path):
    rng = np.random.default_rng(1)
    values = [(rng.random(n), rng.lognormal(size=n)) for n in (90, 180)]
    runs = [run_of(tmp_path / str(i), *pair) for i, pair in enumerate(values)]
    each = [stats.spearmanr(*pair).statistic for pair in values]
    assert rank_correlation(runs, 0).value == pytest.approx((each[0] + 2 * each[1]) / 3)


def test_few_or_constant_tasks_tell_nothing(tmp_path):
    short = run_of(tmp_path / "short", np.linspace(0.5, 0.9, 20), np.linspace(1, 2, 20))
    assert (
        describe(rank_correlation([short], 0))
        == "Spearman's rho 1.00, which 20 tasks are too few to tell from chance"
    )
    constant = run_of(tmp_path / "constant", np.full(120, 0.5), np.linspace(1, 2, 120))
    assert "no correlation to tell" in describe(rank_correlation([constant], 0))
    assert "cannot be told from so few tasks" in findings([short], correlations([short]))[2]


def test_the_course_is_of_the_first_and_the_last_fifth(tmp_path):
    accuracy = np.repeat([0.9, 0.8, 0.7, 0.6, 0.5], 4) + np.tile([0.01, -0.01], 10)
    run = run_of(tmp_path / "run", accuracy, np.repeat([100, 50, 20, 10, 5], 4))
    error = 100 * 0.01 * (4 / 3) ** 0.5 / 2
    assert course([run]) == (
        f"Over 20 tasks accuracy went from 90.0 ± {error:.1f} % (first fifth) to 50.0 ± "
        f"{error:.1f} % (last fifth), local redundancy, by its median, from 100 to 5."
    )
    assert "too few to compare" in course([run_of(tmp_path / "four", np.ones(4), np.ones(4))])


def test_the_last_sentences_say_what_each_run_has_lost(tmp_path):
    folder = write_run(tmp_path / "run", 40)
    lines = read_lines(folder)
    start, end = lines[0]["measures"], lines[-1]["measures"]
    shares = {"body.weight": 60.0, "neck.weight": 20.0, "head.weight": 20.0}
    start["local_redundancy"] = {"value": 100.0, "stderr": 2.0, "per_parameter": shares}
    late = {"body.weight": 9.0, "neck.weight": 20.0, "head.weight": 11.0}
    end["local_redundancy"] = {"value": 40.0, "stderr": 1.0, "per_parameter": late}
    end["dormant_ratio"] |= {"value": 0.25, "units": 192, "dormant": 48}
    write_lines(folder, lines)
    (told,) = verdicts([read_run(folder)])
    told, helped, _ = told.partition(" Where such a fall")
    assert helped
    assert told == (
        "Local redundancy has fallen by 60 % since the start, from 100.0 ± 2.0 to 40.0 ± 1.0: "
        "beyond its error (95 %). The fall is largest in body (85 %) and head (15 %); 48 of 192 "
        "units (25 %) are dormant."
    )
    end["local_redundancy"] |= {"value": 70.0}
    write_lines(folder, lines)
    assert "fallen by 30 %" in verdicts([read_run(folder)])[0]
    assert "Where such" not in verdicts([read_run(folder)])[0]
    end["local_redundancy"] |= {"value": 95.0, "stderr": 2.0}
    del end["dormant_ratio"]
    write_lines(folder, lines)
    (told,) = verdicts([read_run(folder)])
    assert "95.0 ± 2.0, after 100.0 ± 2.0 at the start: a change cannot be told" in told
    assert told.endswith("Which blocks lost most cannot be told; dormant units were not measured.")
    others = [
        read_run(write_run(tmp_path / str(i), 40, leave_out=("local_redundancy",) * (i == 4)))
        for i in range(6)
    ]
    assert verdicts(others)[0].startswith(
        "Local redundancy has fallen beyond its error since the start in "
    )
    assert verdicts(others)[0].endswith(" of 5 runs.")
    assert verdicts(others[4:5]) == []
    assert verdicts(others[:2])[1].startswith("1: Local redundancy ")
