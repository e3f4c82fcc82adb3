"""Analysis: records read back, correlations (scipy), block bootstrap (simulation), other tables."""

import itertools
import json
import math
import shutil

import numpy as np
from continual_runs import autoregressive, read_lines, set_options, write_lines, write_run
from expected import refused, warned
from pytest import approx, mark, warns
from scipy import stats

from fastlr.errors import FastlrWarning
from fastlr.experiments.continual import (
    TooShort,
    agreement,
    correlations,
    costs,
    forgetting_by_blocks,
    read_run,
    read_runs,
)
from fastlr.experiments.continual.association import METHODS, TRANSFORMS
from fastlr.experiments.continual.rank_correlation import rank_correlation
from fastlr.experiments.continual.tables import (
    ablation_sheet,
    correlation_sheets,
    cost_sheet,
)
from fastlr.experiments.statistics.bootstrap import (
    block_length,
    block_weights,
    interval,
    mean_error,
    mean_over_runs,
)
from fastlr.experiments.statistics.correlation import (
    Resampled,
    constant,
    correlation,
    residuals,
    straight,
)

HORIZON = 10


# records


def test_a_run_is_read_back(tmp_path):
    run = read_run(write_run(tmp_path / "run", 30, skip=(4,), resume=(10, 20)))
    assert len(run) == 30
    assert run.skipped == [4]
    assert run.resumed == [10, 20]
    assert run.measures[:2] == ["local_redundancy", "local_redundancy_noise"]
    assert run.definition("weight_norm") == "definition of weight_norm"
    assert np.isnan(run.accuracy[4])
    assert np.isfinite(np.delete(run.accuracy, 4)).all()
    assert run.untrained["measures"]["weight_norm"]["value"] == 10.0
    assert run.timed == ["train", "evaluate", "local_redundancy", "dormant_ratio+srank"]
    assert sum(run.per_parameter()[3].values()) == approx(run.measure("local_redundancy")[3])


def test_forgetting_compares_a_task_with_itself_one_task_later(tmp_path):
    folder = write_run(tmp_path / "run", 6)
    tasks = [record for record in read_lines(folder) if record["kind"] == "task"]
    expected = [tasks[t]["accuracy"] - tasks[t + 1]["previous_accuracy"] for t in range(5)]
    forgetting = read_run(folder).forgetting
    np.testing.assert_allclose(forgetting[:5], expected)
    assert np.isnan(forgetting[5])


def test_future_accuracy_is_of_the_tasks_after_the_boundary(tmp_path):
    run = read_run(write_run(tmp_path / "run", 25, skip=(12,)))
    future = run.future_accuracy()
    # Task 14 is followed by 15..24.
    assert np.isfinite(future[:15]).all()
    assert np.isnan(future[15:]).all()
    assert future[14] == approx(run.accuracy[15:25].mean())
    # The skipped task 12 is left out.
    assert future[5] == approx(np.nanmean(run.accuracy[6:16]))
    many = read_run(write_run(tmp_path / "many", 25, skip=tuple(range(5, 11))))
    assert np.isnan(many.future_accuracy()[3])  # of tasks 4..13 only four are there
    assert np.isfinite(many.future_accuracy()[4:6]).tolist() == [False, True]


@mark.parametrize("tail", ['{"kind": "task", "ta', '{"kind": "task"}', "\x00\x00", "[1, 2]"])
def test_an_incomplete_last_line_is_dropped_with_a_warning(tmp_path, tail):
    folder = write_run(tmp_path / "run", 12, tail=tail)
    with warned("last line is incomplete"):
        assert len(read_run(folder)) == 12


def test_a_damaged_line_in_the_middle_is_named_and_the_last_of_two_lines_counts(tmp_path):
    folder = write_run(tmp_path / "run", 12)
    again = json.dumps({"kind": "task", "task": 3, "accuracy": 0.25, "measures": None})
    file = folder / "records.jsonl"
    text = file.read_text()
    file.write_text(f"{text}{again}\n")
    run = read_run(folder)
    assert len(run) == 12
    assert run.accuracy[3] == 0.25
    assert np.isnan(run.measure("weight_norm")[3])
    file.write_text(f"{text}{{broken\n{again}\n")
    with refused("line 14"):
        read_run(folder)


def test_odd_values_are_missing_not_numbers(tmp_path):
    lines = [
        {"kind": "task", "task": t, "accuracy": a, "measures": {"weight_norm": w}}
        for t, (a, w) in enumerate(
            [(0.5, {"value": True}), ("x", {"value": None}), (math.nan, 3.0), (math.inf, {})]
        )
    ]
    lines.append({"kind": "task", "task": 6})
    write_lines(tmp_path, lines)
    with warns(FastlrWarning) as told:
        run = read_run(tmp_path)
    (text,) = [str(warning.message) for warning in told]
    assert (
        "no record of task 4; no record of task 5; accuracy of task 1 is 'x', which is left out"
        in text
    )
    assert "accuracy of task 2 is nan" in text
    assert "accuracy of task 3 is inf" in text
    assert len(run) == 7
    assert run.config == {}
    assert np.isfinite(run.accuracy).tolist() == [True] + [False] * 6
    assert np.isfinite(run.measure("weight_norm")).tolist() == [False, False, True] + [False] * 4


def test_folders_of_runs_stand_for_their_runs_in_order(tmp_path):
    for seed in (10, 2, 0):
        write_run(tmp_path / "all" / f"seed-{seed}", 11, seed=seed)
    runs = read_runs([tmp_path / "all"])
    assert [run.name for run in runs] == ["all/seed-0", "all/seed-2", "all/seed-10"]
    with refused("given twice"):
        read_runs([tmp_path / "all", tmp_path / "all" / "seed-2"])
    with refused("no run folder"):
        read_runs([tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "records.jsonl").write_text("")
    with refused("nothing to report"):
        read_runs([tmp_path / "empty"])


def test_a_copy_of_a_run_is_no_evidence(tmp_path, cli):
    write_run(tmp_path / "run", 12)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    write_run(tmp_path / "short", 6)
    set_options(tmp_path / "short", tasks=6, threads=2)  # neither makes it another run
    # The default, which an earlier version did not write.
    set_options(tmp_path / "copy", norm_batch=256)
    for other, longest in (("copy", "copy"), ("short", "run")):
        for command in ("report", "ablate", "cost"):
            error = cli(f"{command} {tmp_path / other} {tmp_path / 'run'} --pool", code=2).err
            assert "the same seed (0)" in error
            assert f"no further evidence: give {tmp_path / longest} alone" in error
    set_options(tmp_path / "short", norm_batch=64)
    assert len(read_runs([tmp_path / "short", tmp_path / "run"])) == 2


# correlations


def _series(n=200, seed=0):
    rng = np.random.default_rng(seed)
    t = np.arange(n, dtype=float)
    return t, autoregressive(rng, n) - t / n, autoregressive(rng, n, 0.5) + 0.01 * t


def test_residuals_are_scipys():
    t, _, y = _series()
    line = stats.linregress(t, y)
    np.testing.assert_allclose(residuals(y, t), y - line.slope * t - line.intercept, atol=1e-12)


def test_what_has_no_correlation_is_found():
    t, x, _ = _series()
    assert constant(np.full(50, 1e9 / 3))
    assert not constant(1e9 + x)
    assert straight(3e5 - 0.1 * t, t)
    assert not straight(3e5 - 0.1 * t + 1e-3 * x, t)
    for method in METHODS:
        assert math.isnan(correlation(method, np.ones(9), np.arange(9.0)))


def test_correlations_of_a_run_are_scipys_on_the_same_residuals(tmp_path):
    run = read_run(write_run(tmp_path / "run", 150, skip=(30,)))
    task = np.arange(150)
    for target, y in (("future accuracy", run.future_accuracy()), ("forgetting", run.forgetting)):
        found = correlations([run], target=target, resamples=100)
        assert [c.measure for c in found[::8]] == run.measures
        for c in found:
            x = run.measure(c.measure)
            known = np.isfinite(x) & np.isfinite(y)
            if c.note:
                assert c.transform == "log"
                assert (x[known] <= 0).any()
                assert math.isnan(c.value)
                continue
            x = np.log(x[known]) if c.transform == "log" else x[known]
            x = residuals(x, task[known]) if c.kind == "partial" else x
            of = stats.pearsonr if c.method == "pearson" else stats.spearmanr
            assert c.value == approx(of(x, residuals(y[known], task[known]))[0], abs=1e-10)
            assert c.n == known.sum()
            assert c.naive == approx(1 / math.sqrt(c.n))
            assert c.low < c.value < c.high
            assert c.stderr > 0
            assert 0 < c.smallest <= 1


def test_resampled_correlations_are_those_of_the_written_out_resample():
    t, x, y = _series(90)
    x = np.round(x, 1)
    weights = block_weights(90, 30, 40, np.random.default_rng(3))
    resampled = Resampled(weights, t, y)
    for partial in (False, True):
        fast = {
            "pearson": resampled.pearson(x, partial=partial),
            "spearman": resampled.spearman(x, partial=partial),
        }
        for row, w in enumerate(weights.astype(int)):
            tt, xx, yy = (np.repeat(each, w) for each in (t, x, y))
            a = residuals(xx, tt) if partial else xx
            b = residuals(yy, tt)
            # Copies of one task differ by rounding, which would break their ties.
            a = np.round(a, 9)
            b = np.round(b, 9)
            assert fast["pearson"][row] == approx(stats.pearsonr(a, b)[0], abs=1e-7)
            assert fast["spearman"][row] == approx(stats.spearmanr(a, b)[0], abs=1e-7)


def test_a_resample_of_tasks_at_a_guess_has_no_correlation():
    """Its target is constant, or constant but for rounding beside a trend that was taken out."""
    t, x, _ = _series(90)
    y = np.where(t < 45, x, 0.1)  # a tenth has no exact mean
    weights = np.zeros((2, 90))
    weights[0, 45:], weights[1, 30:60] = 2, 3
    resampled = Resampled(weights, t, y)
    for partial, method in itertools.product((False, True), ("pearson", "spearman")):
        constant, varied = getattr(resampled, method)(x, partial=partial)
        assert math.isnan(constant) and abs(varied) <= 1
        constant, varied = getattr(resampled, method)(y, partial=True)
        assert math.isnan(constant) and varied > 0.999


def test_runs_without_a_value_in_a_resample_are_left_out_of_its_mean():
    nan = math.nan
    first, second, third = ([1, nan, nan, 4], [2, 6, nan, 6], [3, 9, 5, nan])
    replicates = [np.array(row, dtype=float) for row in (first, second, third)]
    found = mean_over_runs(replicates, [1, 1, 2])
    assert found == approx(np.array([2.25, 8, 5, 5]), nan_ok=True)
    found = mean_over_runs(replicates, [1, 2, 1])
    assert found == approx(np.array([2, 7, nan, 16 / 3]), nan_ok=True)


def test_runs_that_end_at_a_guess_have_errors(tmp_path):
    """In some resamples all tasks of such a run are at the guess."""
    paths = [write_run(tmp_path / str(n), 120, seed=n, at_a_guess_from=20) for n in range(8)]
    runs = [read_run(path) for path in paths]
    for found in correlations(runs, ["local_redundancy"], resamples=200):
        assert found.stderr > 0
    assert math.isfinite(rank_correlation(runs, 1, resamples=200).low)


def test_a_run_that_never_left_a_guess_has_no_correlation(tmp_path):
    run = read_run(write_run(tmp_path / "run", 120, at_a_guess_from=0))
    for found in correlations([run], ["local_redundancy"], resamples=100):
        assert found.note == "what it should predict is a straight line in task number"


def test_several_runs_are_averaged_by_their_tasks(tmp_path):
    # The last is too short.
    runs = [read_run(write_run(tmp_path / f"{n}", n, seed=n)) for n in (140, 270, 40)]
    single = [correlations([run], ["weight_norm"], resamples=100) for run in runs[:2]]
    pooled = correlations(runs, ["weight_norm"], resamples=100)
    for a, b, both in zip(*single, pooled):
        assert (a.n, b.n, both.n) == (130, 260, 390)
        assert both.value == approx((a.value + 2 * b.value) / 3)
        assert both.per_run == (a.value, b.value)
        assert both.blocks == a.blocks + b.blocks


def test_the_lead_of_local_redundancy_is_paired(tmp_path):
    runs = [read_run(write_run(tmp_path / str(seed), 300, seed=seed)) for seed in range(2)]
    found = {
        (c.measure, c.kind, c.method): c
        for c in correlations(runs, resamples=300)
        if c.transform == "raw"
    }
    for (name, kind, method), c in found.items():
        first = found["local_redundancy", kind, method]
        if name == "local_redundancy":
            assert math.isnan(c.lead)
            continue
        assert c.lead == approx(first.value - c.value)
        assert c.lead_stderr > 0
        if name == "local_redundancy_next_task":
            # Nearly the same series: far less than independent errors would give.
            assert c.lead_stderr < 0.4 * math.hypot(first.stderr, c.stderr)
        if name == "train_grad_norm":  # pure noise
            assert c.lead_stderr == approx(math.hypot(first.stderr, c.stderr), rel=0.35)
    alone = correlations(runs, ["weight_norm"], resamples=100)
    assert all(math.isnan(c.lead) for c in alone)


def test_what_was_measured_in_other_runs_is_not_compared(tmp_path):
    left_out = ("train_grad_norm",), (), ("local_redundancy",)
    runs = [
        read_run(write_run(tmp_path / str(seed), 150, seed=seed, leave_out=names))
        for seed, names in enumerate(left_out)
    ]
    found = correlations(runs, resamples=100)
    runs_of = {c.measure: len(c.per_run) for c in found if not c.note}
    assert runs_of["local_redundancy"] == runs_of["train_grad_norm"] == 2
    assert all(math.isnan(c.lead) for c in found)
    notes = correlation_sheets(found, "future accuracy")[0].notes
    assert any("Mean over 3 runs" in note for note in notes)
    assert any(
        note.startswith("Of fewer runs") and "local redundancy (2), " in note for note in notes
    )


def test_short_runs_get_a_sentence(tmp_path):
    """Four blocks of 30 in a single run; three in each of several."""
    run = read_run(write_run(tmp_path / "run", 100))
    found = correlations([run])
    assert isinstance(found, TooShort)
    assert "run has 90 usable tasks" in str(found)
    assert "at least 91" in str(found)
    assert not isinstance(correlations([run], target="forgetting", resamples=100), TooShort)
    pair = [read_run(write_run(tmp_path / f"pair{seed}", 71, seed=seed)) for seed in range(2)]
    assert isinstance(correlations(pair[:1]), TooShort)
    assert all(c.n == 122 for c in correlations(pair, resamples=100) if not c.note)


def test_a_measure_taken_rarely_or_constant_has_a_reason_instead_of_a_value(tmp_path):
    folder = write_run(tmp_path / "run", 110)
    lines = read_lines(folder)
    for record in lines[1:]:
        t, measures = record["task"], record["measures"]
        measures["weight_norm"]["value"] = 3.0
        measures["distance_from_init"]["value"] = 0.1 * t + 2
        if t % 5:
            del measures["train_grad_norm"]
    write_lines(folder, lines)
    found = {
        (c.measure, c.kind, c.transform): c for c in correlations([read_run(folder)], resamples=100)
    }
    assert found["weight_norm", "semi-partial", "raw"].note == "constant"
    assert found["distance_from_init", "partial", "raw"].note == "a straight line in task number"
    assert "20 usable tasks" in found["train_grad_norm", "semi-partial", "raw"].note
    assert math.isfinite(found["local_redundancy", "partial", "log"].value)


def test_the_same_seed_gives_the_same_errors(tmp_path):
    run = read_run(write_run(tmp_path / "run", 120))
    one, two, other = (
        correlations([run], ["weight_norm"], resamples=100, seed=s)[0] for s in (1, 1, 2)
    )
    assert one == two
    assert one.stderr != other.stderr
    assert one.value == other.value


@mark.parametrize(
    ("runs", "options", "words"),
    [
        (0, {}, "no runs"),
        (1, {"target": "loss"}, "choose one of future accuracy, forgetting"),
        (1, {"length": 500}, "blocks of 500 tasks"),
        (1, {"resamples": 1}, "at least 2 resamples"),
    ],
)
def test_wrong_arguments_are_named(tmp_path, runs, options, words):
    run = read_run(write_run(tmp_path / "run", 120))
    with refused(words):
        correlations([run] * runs, **options)


# the bootstrap


def test_blocks_are_whole_and_every_task_is_drawn_as_often():
    weights = block_weights(100, 30, 4000, np.random.default_rng(0))
    assert (weights.sum(1) == 100).all()
    assert weights.min() == 0
    assert abs(weights.mean(0) - 1).max() < 5 * math.sqrt(1.0 / 4000)
    changes = (np.diff(weights, axis=1) != 0).sum(1)
    assert changes.max() <= 8  # four blocks have at most eight ends
    assert block_length(60) == 30
    assert block_length(3000) >= 30


def test_the_mean_error_of_few_is_scipys():
    few = np.random.default_rng(0).standard_normal(40)
    assert mean_error(few) == approx(stats.sem(few))


def test_the_error_of_a_mean_knows_of_neighbours():
    rng = np.random.default_rng(0)
    series = [np.convolve(rng.standard_normal(1009), np.ones(10) / 10, "valid") for _ in range(300)]
    true = np.std([s.mean() for s in series])
    assert np.mean([mean_error(s) for s in series]) == approx(true, rel=0.15)
    assert np.mean([stats.sem(s) for s in series]) < 0.5 * true  # what a naive error would say


def test_the_interval_widens_with_few_blocks_and_fails_honestly():
    replicates = 0.1 * np.random.default_rng(0).standard_normal(1000)
    wide = interval(0.2, replicates, 4)
    narrow = interval(0.2, replicates, 100)
    assert wide.high - wide.low > 2 * (narrow.high - narrow.low)
    assert narrow.smallest == approx(math.tanh((stats.t.ppf(0.975, 98) + 0.8416) * 0.1), rel=0.05)
    assert math.isnan(interval(0.2, np.full(100, np.nan), 50).stderr)


def _simulated(rng, n, effect):
    """Simulate a measure, AR(1) with .97, and accuracy = trend + effect x measure + noise.

    The accuracy is averaged over the next ten tasks.
    """
    measure = autoregressive(rng, n + HORIZON)
    accuracy = effect * measure + rng.standard_normal(n + HORIZON)
    target = np.convolve(accuracy, np.ones(HORIZON) / HORIZON, "valid")[1 : n + 1]
    return measure[:n], target - 0.5 * np.arange(n) / n


def _true_correlation(effect, phi=0.97):
    steps = np.arange(1, HORIZON + 1)
    variance = (phi ** np.abs(steps[:, None] - steps)).mean()
    return effect * (phi**steps).mean() / math.sqrt(effect**2 * variance + 1 / HORIZON)


def _coverage(n, runs, resamples, effect):
    """Return, by kind, the coverage of 95 % intervals, and their mean error over the true error.

    The coverage is the share of intervals that hold the true correlation.
    """
    truth = {"pearson": _true_correlation(effect)}
    truth["spearman"] = 6 / math.pi * math.asin(truth["pearson"] / 2)  # of normal variables
    task, length = np.arange(n, dtype=float), block_length(n)
    hits = {(method, partial): 0 for method in METHODS for partial in (False, True)}
    found = {key: [] for key in hits}
    for number in range(runs):
        rng = np.random.default_rng([number, n])
        x, y = _simulated(rng, n, effect)
        resampled = Resampled(block_weights(n, length, resamples, rng), task, y)
        for method, partial in hits:
            value = correlation(method, residuals(x, task) if partial else x, residuals(y, task))
            replicates = getattr(resampled, method)(x, partial=partial)
            error = interval(value, replicates, -(-n // length))
            hits[method, partial] += error.low <= truth[method] <= error.high
            found[method, partial].append((value, error.stderr))
    ratio = {}
    for key, pairs in found.items():
        values, errors = zip(*pairs)
        ratio[key] = np.mean(errors) / np.std(values)
    return {key: count / runs for key, count in hits.items()}, ratio


def test_intervals_cover_the_truth_where_naive_errors_would_not():
    covered, ratio = _coverage(1000, runs=60, resamples=100, effect=0.0)
    assert min(covered.values()) >= 0.85  # 95 % less three and a half standard errors of 60 trials
    assert min(ratio.values()) > 0.75
    assert max(ratio.values()) < 1.35
    rng = np.random.default_rng(0)
    naive = 0
    for _ in range(60):
        x, y = _simulated(rng, 1000, 0.0)
        naive += abs(correlation("pearson", x, residuals(y))) < 1.96 / math.sqrt(1000)
    assert naive / 60 < 0.7


@mark.long
@mark.parametrize("effect", [0.0, 0.1])
def test_intervals_cover_at_least_nine_in_ten_at_3000_tasks(effect):
    covered, ratio = _coverage(3000, runs=1000, resamples=300, effect=effect)
    print(effect, covered, ratio)
    assert min(covered.values()) >= 0.90


# the other tables


def test_forgetting_by_blocks(tmp_path):
    runs = [read_run(write_run(tmp_path / str(n), n, seed=n, skip=(7,))) for n in (100, 80)]
    whole, *blocks = forgetting_by_blocks(runs)
    lost = np.concatenate([run.forgetting for run in runs])
    assert (whole.first, whole.last, whole.n) == (0, 99, int(np.isfinite(lost).sum()))
    assert whole.mean == approx(np.nanmean(lost))
    assert whole.stderr > 0
    assert whole.right_after - whole.one_later == approx(whole.mean)
    assert [b.first for b in blocks] == list(range(0, 100, 10))
    assert sum(b.n for b in blocks) == whole.n
    part = runs[0].forgetting[90:]
    assert blocks[-1].stderr == approx(stats.sem(part[np.isfinite(part)]))


def test_costs_are_sums_and_shares(tmp_path):
    runs = [read_run(write_run(tmp_path / str(n), n, seed=n)) for n in (20, 30)]
    found = {cost.name: cost for cost in costs(runs)}
    assert list(found) == ["train", "evaluate", "local_redundancy", "dormant_ratio+srank"]
    cost = found["local_redundancy"]
    assert cost.n == 50
    assert cost.total == approx(2 * 3.0 + 48 * 0.2)
    assert cost.median == 0.2
    assert cost.share == approx(cost.total / 500)
    assert found["train"].share == 1.0
    totals = [each.total / 50 for each in found.values()]
    whole, of_measures = sum(totals), sum(totals[2:])
    note = f"A task took {whole:.4g} s in all, {of_measures:.4g} s of them for measures."
    assert cost_sheet(list(found.values()), runs).notes[0] == note


def test_agreement_is_defined_as_it_says(tmp_path):
    run = read_run(write_run(tmp_path / "run", 95))
    found = {(a.measure, a.transform): a for a in agreement([run], resamples=100)}
    assert set(found) == {
        (m, t) for m in ("local_redundancy", "local_redundancy_noise") for t in TRANSFORMS
    }
    y = run.measure("local_redundancy_next_task")
    for (name, transform), a in found.items():
        x = run.measure(name)
        u, v = (np.log(x), np.log(y)) if transform == "log" else (x, y)
        assert a.r == approx(stats.pearsonr(u, v)[0])
        assert a.r_squared == approx(a.r**2)
        assert a.squared_error == approx(np.mean((u - v) ** 2))
        assert a.identity == approx(1 - np.sum((u - v) ** 2) / np.sum((v - v.mean()) ** 2))
        assert a.mse == approx(np.mean((stats.zscore(u) - stats.zscore(v)) ** 2))
        assert a.ratio == approx(stats.gmean(x / y))
        assert a.n == 95
        assert a.stderr > 0
    assert found["local_redundancy", "log"].r > found["local_redundancy_noise", "log"].r
    sheet = ablation_sheet(list(found.values()))
    assert [row[sheet.columns.index("MSE")] for row in sheet.rows] == [
        f"{a.squared_error:.3g}" for a in found.values()
    ]
    lines = read_lines(tmp_path / "run")
    lines[5]["measures"]["local_redundancy"]["value"] = 0.0
    write_lines(tmp_path / "run", lines)
    sheet = ablation_sheet(agreement([read_run(tmp_path / "run")], resamples=100))
    assert sheet.rows[0][sheet.columns.index("x / y")] == "–"  # a zero has no geometric mean
    without = read_run(
        write_run(tmp_path / "without", 20, leave_out=("local_redundancy_next_task",))
    )
    assert agreement([without]) == []
