"""The study of alarms: losses, signals, rings and choices, on runs made up for the purpose."""

import math

import numpy as np
from pytest import approx, mark

from bench.alarm import choices, losses, rings, signals
from bench.alarm.signals import Course
from fastlr.display import alarm
from fastlr.display.alarm import Rules

GUESS = 0.1


def falling(onset, tasks=120, high=0.9, low=0.12, noise=0.01, seed=0):
    """Return accuracies that drop from high to low at a task."""
    level = np.where(np.arange(tasks) < onset, high, low)
    return level + noise * np.random.default_rng(seed).standard_normal(tasks)


def course(accuracy, problem="made up", seed=0, variant="none", **measures):
    """Return a run read after every second task."""
    read_at = np.arange(1, len(accuracy), 2)
    return Course(problem, variant, seed, GUESS, accuracy, read_at, measures)


def rung_at(signal, sign, threshold, read_at):
    """Return the tasks at which one rule rings."""
    held = alarm.holds(np.asarray(signal, float), Rules(np.array([sign]), np.array([threshold])))
    return read_at[alarm.rings(held, read_at)[0]].tolist()


class TestLosses:
    def test_is_declared_and_begins_where_accuracy_drops(self):
        loss = losses.find_loss(falling(60), GUESS)
        # Of the ten that declare it, the last six (or all) are down; three are at the onset.
        assert 55 <= loss.declared <= 60
        assert loss.onset in (58, 59, 60)

    @mark.parametrize(
        ("accuracy", "outcome"),
        [
            (falling(60), losses.LOST),
            (falling(60, low=0.0), losses.LOST),  # below a guess counts as nearer to it
            (falling(21), losses.LOST_EARLY),  # right after the first block
            (falling(1000), losses.NOT_LOST),
            (np.linspace(0.9, 0.6, 120), losses.UNCLEAR),  # a fall of a fifth
        ],
        ids=["lost", "below a guess", "early", "steady", "slipping"],
    )
    def test_outcomes(self, accuracy, outcome):
        assert losses.outcome(accuracy, GUESS) == outcome
        assert (losses.find_loss(accuracy, GUESS) is not None) == outcome.startswith(losses.LOST)

    def test_noise_as_large_as_the_distance_declares_nothing(self):
        rng = np.random.default_rng(1)
        accuracy = 0.2 + 0.15 * rng.standard_normal(150)
        accuracy[70:] = GUESS
        assert losses.find_loss(accuracy, GUESS) is None

    def test_best_block_ends_before_the_task(self):
        accuracy = np.concatenate([np.full(20, 0.5), np.full(20, 0.9)])
        assert losses.best_before(accuracy, 19) is None
        assert losses.best_before(accuracy, 39).mean == approx(0.5)
        assert losses.best_before(accuracy, 40).mean == approx(0.9)

    def test_shuffled_runs_have_the_same_accuracies(self):
        accuracy = falling(60)
        assert sorted(losses.shuffled(accuracy, 3)) == sorted(accuracy)
        assert losses.share_declared([accuracy, falling(1000)], GUESS) == 0.5


class TestSignals:
    def test_logarithm_of_the_ratio_to_the_reference(self):
        value = np.full(60, 8.0)
        value[40:] = 2.0
        got = signals.signal(course(falling(1000), local_redundancy=value), "local_redundancy")
        assert got[0] == approx(0) and got[-1] == approx(math.log(0.25))

    def test_a_value_of_zero_is_minus_infinity_and_none_is_nan(self):
        value = np.full(60, 8.0)
        value[50], value[51] = 0.0, np.nan
        got = signals.signal(course(falling(1000), local_redundancy=value), "local_redundancy")
        assert got[50] == -np.inf and np.isnan(got[51])

    def test_accuracy_is_a_share_of_the_distance_to_a_guess(self):
        got = signals.signal(course(falling(60, low=GUESS, noise=0.0)), "accuracy_3")
        assert got[10] == approx(1) and got[-1] == approx(0, abs=1e-12)

    def test_shares_are_differences(self):
        dormant = np.linspace(0.1, 0.9, 60)
        got = signals.signal(course(falling(60), dormant_ratio=dormant), "dormant_ratio")
        assert got[-1] - got[0] == approx(0.8)

    def test_trailing_means_are_of_fewer_tasks_at_the_start(self):
        got = alarm.trailing_mean(np.array([1.0, 2.0, 3.0, 4.0]), 3)
        assert got.tolist() == [1.0, 1.5, 2.0, 3.0]

    def test_a_run_at_a_guess_has_no_signal_of_accuracy(self):
        at_a_guess = course(np.full(120, GUESS))
        assert np.isnan(signals.signal(at_a_guess, "accuracy_10")).all()


class TestRings:
    read_at = np.arange(1, 120, 2)

    def test_two_readings_in_a_row_are_needed(self):
        once = np.zeros(60)
        once[20] = 1.0
        assert rung_at(once, 1.0, 0.5, self.read_at) == []
        twice = once.copy()
        twice[21] = 1.0
        assert rung_at(twice, 1.0, 0.5, self.read_at) == [43]

    def test_a_rule_that_goes_on_rings_every_ten_tasks_from_task_16(self):
        assert rung_at(np.ones(60), 1.0, 0.5, self.read_at)[:4] == [17, 27, 37, 47]

    def test_falls_ring_by_a_negative_sign(self):
        value = np.zeros(60)
        value[30:32] = -2.0
        assert rung_at(value, -1.0, 1.0, self.read_at) == [63]

    def test_what_is_not_known_rings_never(self):
        assert rung_at(np.full(60, np.nan), 1.0, -np.inf, self.read_at) == []

    @mark.parametrize(
        ("ring", "lead", "false"),
        [(19, None, 1), (21, 40, 0), (57, 4, 0), (71, -10, 0), (73, None, 0)],
    )
    def test_a_ring_around_the_onset_finds_it_and_an_earlier_one_is_false(self, ring, lead, false):
        run = course(falling(62, noise=0.0))
        onset = run.loss.onset
        assert onset == 61
        rung = (run.read_at == ring)[None]
        judged = rings.judge(run, rung)
        assert judged.lost
        assert math.isnan(judged.lead[0]) if lead is None else judged.lead[0] == lead
        assert judged.false[0] == false
        assert judged.quiet_tasks == onset - 40 - 16

    def test_all_rings_are_false_where_nothing_was_lost(self):
        run = course(falling(1000))
        rung = np.isin(run.read_at, [21, 45])[None]
        judged = rings.judge(run, rung)
        assert not judged.lost and judged.false[0] == 2 and judged.quiet_tasks == 120 - 16

    def test_unclear_runs_count_neither_way(self):
        run = course(np.linspace(0.9, 0.6, 120))
        assert rings.judge(run, np.ones((1, 60), bool)) is None


def study(lead, seeds=8):
    """Return two problems that lose and one that does not, and a measure that falls in time."""
    rng = np.random.default_rng(0)
    courses = []
    for problem, onset in (("a", 50), ("b", 70), ("steady", 1000)):
        for seed in range(seeds):
            accuracy = falling(onset + seed, seed=seed)
            fall_at = onset + seed - lead
            value = np.where(np.arange(1, 120, 2) >= fall_at, 1.0, 10.0)
            value = value * np.exp(0.05 * rng.standard_normal(60))
            courses.append(course(accuracy, problem, seed, local_redundancy=value))
    return courses


PROBLEMS = ["a", "b", "steady"]
ACCURACY = tuple(f"accuracy_{width}" for width in signals.TRAILING)


def found_in_time(courses, names, resamples=100):
    """Return the share found by problem, in the sample and in each resample."""
    found = {}
    for number, problem in enumerate(PROBLEMS[:2]):
        made = choices.candidates(courses, names, problem, PROBLEMS)
        drawn = choices.seed_weights(made, resamples, np.random.default_rng(7))
        weights = np.concatenate([np.ones((1, drawn.shape[1])), drawn])
        best = choices.chosen(made, number, len(PROBLEMS), weights)
        of_it = choices.rates(made, number, weights)
        found[problem] = of_it.found[np.arange(len(weights)), best]
    return found


class TestChoices:
    def test_a_measure_that_falls_twenty_tasks_ahead_warns_earlier(self):
        courses = study(lead=20)
        by_measure = found_in_time(courses, ["local_redundancy"])
        by_accuracy = found_in_time(courses, ACCURACY)
        assert by_measure["a"][0] >= 0.9
        assert by_accuracy["a"][0] <= 0.2
        difference = choices.compare(by_measure, by_accuracy, list(by_measure))
        assert difference.low > 0 and not difference.worse_somewhere
        assert choices.warns_earlier(difference, choices.holm({"it": difference.p})["it"])

    def test_a_measure_that_falls_with_accuracy_does_not(self):
        courses = study(lead=-4)
        by_measure = found_in_time(courses, ["local_redundancy"])
        by_accuracy = found_in_time(courses, ACCURACY)
        difference = choices.compare(by_measure, by_accuracy, list(by_measure))
        assert not choices.warns_earlier(difference, choices.holm({"it": difference.p})["it"])

    def test_the_judged_problem_does_not_choose(self):
        courses = study(lead=20)
        made = choices.candidates(courses, ["local_redundancy"], "a", PROBLEMS)
        weights = np.ones((1, len(made.problems)))
        before = choices.chosen(made, 0, 3, weights)
        weights[:, made.problems == 0] = 5.0
        assert choices.chosen(made, 0, 3, weights) == before
        # Nor do its readings make the thresholds: those of other problems alone do.
        altered = [
            course(c.accuracy, "a", c.seed, local_redundancy=100 * c.measures["local_redundancy"])
            if c.problem == "a"
            else c
            for c in courses
        ]
        again = choices.candidates(altered, ["local_redundancy"], "a", PROBLEMS)
        np.testing.assert_array_equal(again.rules.thresholds, made.rules.thresholds)

    def test_a_chosen_rule_keeps_to_the_false_alarms_that_are_allowed(self):
        courses = study(lead=20)
        made = choices.candidates(courses, [signals.AT_RANDOM], "a", PROBLEMS)
        weights = np.ones((1, len(made.problems)))
        best = choices.chosen(made, 0, 3, weights)[0]
        false = choices.mean_known([choices.rates(made, p, weights).false for p in (1, 2)])
        assert false[0, best] <= choices.MOST_FALSE

    def test_seeds_are_drawn_within_problems_with_all_their_variants(self):
        courses = study(lead=20, seeds=4)
        courses += [course(c.accuracy, c.problem, c.seed, "helped") for c in courses]
        made = choices.candidates(courses, ["accuracy_3"], "a", PROBLEMS)
        weights = choices.seed_weights(made, 50, np.random.default_rng(0))
        for problem in range(3):
            at = made.problems == problem
            assert (weights[:, at].sum(1) == at.sum()).all()
            for seed in range(4):
                both = weights[:, at & (made.seeds == seed)]
                assert (both == both[:, :1]).all()

    def test_holms_method(self):
        adjusted = choices.holm({"a": 0.01, "b": 0.04, "c": 0.03})
        assert adjusted == approx({"a": 0.03, "c": 0.06, "b": 0.06})
