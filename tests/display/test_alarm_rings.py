"""An alarm rings where a rule holds at two readings in a row, and again every ten tasks."""

import json
from pathlib import Path

import numpy as np
from pytest import approx, mark

from fastlr.display.alarm import (
    AGAIN,
    BY_ACCURACY,
    BY_REDUNDANCY,
    FIRST,
    Alarm,
    Rule,
    change,
    ring_flags,
)

RECORD = Path(__file__).parents[2] / "bench/results/cpu/alarm/report.json"

FALLS = Rule("local_redundancy", "local redundancy", False, -1.0, (0.1, 0.5), (0.2, 0.9))


def rung(values, rule=FALLS, guess=0.0):
    """Return the tasks after which an alarm rang that read these values, task by task."""
    alarm = Alarm(rule, guess)
    for task, value in enumerate(values):
        alarm.read(task, value)
    return alarm.rung


def test_it_rings_at_the_second_reading_beyond_and_again_every_ten_tasks():
    falling = np.where(np.arange(60) < 30, 10.0, 1.0)
    assert rung(falling) == [31, 31 + AGAIN, 31 + 2 * AGAIN]


def test_nothing_rings_before_task_16_nor_by_one_reading_alone():
    assert min(rung(np.where(np.arange(40) < 12, 10.0, 1.0))) == FIRST
    spikes = np.full(60, 10.0)
    spikes[20::3] = 0.1
    assert rung(spikes) == []


def test_what_is_not_known_never_rings():
    assert rung([np.nan] * 40) == []
    assert rung([0.0] * 40) == [], "there is nothing to compare with"
    late = [np.nan] * 16 + [1e-9] * 40
    assert rung(late) == []


def test_accuracy_is_compared_as_its_distance_to_a_guess():
    rule = FALLS._replace(signal="accuracy_3", threshold=0.5)
    falling = np.where(np.arange(40) < 30, 0.9, 0.5)
    assert rung(falling, rule, guess=0.0) == []
    assert rung(falling, rule, guess=0.5) == [31]
    moved = change("accuracy_3", falling, np.arange(40), 0.5)
    assert moved[[0, -1]].tolist() == approx([1.0, 0.0])


def test_a_resumed_alarm_rings_as_one_that_was_not_stopped():
    falling = np.where(np.arange(60) < 30, 10.0, 1.0)
    first = Alarm(FALLS)
    for task in range(33):
        first.read(task, falling[task])
    second = Alarm(FALLS)
    second.load_state_dict(first.state_dict())
    for task in range(33, 60):
        second.read(task, falling[task])
    assert second.rung == rung(falling)
    flags = ring_flags(FALLS, falling, range(60), 0.0)
    assert np.flatnonzero(flags).tolist() == second.rung, "at once as one by one"


def test_rates_are_said():
    said = FALLS.rates()
    assert "10 to 50 %" in said
    assert "0.2 to 0.9 false alarms in 100 tasks" in said


@mark.skipif(not RECORD.exists(), reason="a source distribution has no results")
@mark.parametrize(
    ("rule", "measure"),
    [(BY_ACCURACY, "mean accuracy of recent tasks"), (BY_REDUNDANCY, "local redundancy on shapes")],
)
def test_rules_and_their_rates_are_those_of_the_study(rule, measure):
    study = json.loads(RECORD.read_text())
    chosen = study["rules"][measure]
    assert (rule.signal, rule.above) == (chosen["signal"], chosen["above"])
    assert rule.threshold == approx(chosen["threshold"], abs=5e-4)
    alarms = study["alarms"][measure]
    found = [alarms[problem]["found_5"] for problem in study["losing"]]
    false = [alarms[problem]["false_per_100_tasks"] for problem in study["problems"]]
    assert rule.found == approx((min(found), max(found)), abs=5e-3)
    assert rule.false == approx((min(false), max(false)), abs=5e-2)
