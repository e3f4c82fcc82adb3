"""Rank correlations of local redundancy with accuracy, and their words."""

import numpy as np
from continual_runs import read_lines, write_lines, write_run
from pytest import approx
from scipy import stats

from fastlr.experiments.continual import read_run
from fastlr.experiments.continual.rank_correlation import describe, rank_correlation


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
    assert same.value == approx(stats.spearmanr(redundancy, accuracy).statistic)
    assert following.value == approx(stats.spearmanr(redundancy[:-1], accuracy[1:]).statistic)
    assert (same.n, following.n) == (300, 299)
    assert 0.9 < same.low < same.value < same.high
    assert describe(same).endswith("300 tasks)")
    assert describe(following).endswith("299 tasks, not significant)")
    assert rank_correlation([run], 0) == same


def test_two_runs_are_averaged_by_their_tasks(tmp_path):
    rng = np.random.default_rng(1)
    values = [(rng.random(n), rng.lognormal(size=n)) for n in (90, 180)]
    runs = [run_of(tmp_path / str(i), *pair) for i, pair in enumerate(values)]
    each = [stats.spearmanr(*pair).statistic for pair in values]
    assert rank_correlation(runs, 0).value == approx((each[0] + 2 * each[1]) / 3)


def test_few_or_constant_tasks_tell_nothing(tmp_path):
    short = run_of(tmp_path / "short", np.linspace(0.5, 0.9, 20), np.linspace(1, 2, 20))
    assert (
        describe(rank_correlation([short], 0))
        == "Spearman's rho 1.00 (20 tasks are too few for an interval)"
    )
    constant = run_of(tmp_path / "constant", np.full(120, 0.5), np.linspace(1, 2, 120))
    assert "no rank correlation" in describe(rank_correlation([constant], 0))
