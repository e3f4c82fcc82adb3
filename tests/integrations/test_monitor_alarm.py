"""A monitor with an alarm rings by accuracy, or by its readings where accuracy is not known."""

import math
import warnings

import pytest
import torch
from expected import refused

import fastlr
from fastlr.display.alarm import BY_ACCURACY
from fastlr.errors import FastlrWarning
from fastlr.integrations import Monitor


def monitor(**options):
    """Return a monitor of a linear model with an alarm."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 10))
    images = fastlr.ShapeImages((3, 2, 2))
    return Monitor(model, images, n=4, **{"alarm": True, "guess": 0.1, **options})


def rings_of(watcher, accuracies):
    """Return the numbers of the tasks at which the alarm rang, counted from 1."""
    rung = []
    for number, accuracy in enumerate(accuracies, 1):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            text = watcher.task(accuracy)
        assert [str(warning.message) for warning in said] == ([text] if text else [])
        if text:
            assert f"after task {number}:" in text
            assert "false alarms in 100 tasks" in text
            rung.append(number)
    return rung


def test_it_rings_where_accuracy_falls_and_not_where_it_stays():
    assert rings_of(monitor(), [0.9] * 60) == []
    rung = rings_of(monitor(), [0.9] * 30 + [0.1] * 30)
    assert 31 <= rung[0] <= 40
    assert all(later - earlier == 10 for earlier, later in zip(rung, rung[1:]))


def test_it_measures_only_where_accuracy_is_not_known():
    known, unknown = monitor(), monitor()
    for _ in range(4):
        known.task(0.9)
        unknown.task()
    assert known.last is None
    assert unknown.last is not None


def test_by_value_it_rings_where_the_value_falls():
    watcher = monitor()
    rung = []
    for number in range(1, 61):
        if number == 31:
            with torch.no_grad():
                for parameter in watcher.model.parameters():
                    parameter.mul_(60.0)  # confident: its value falls
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FastlrWarning)
            text = watcher.task()
        rung += [number] if text else []
    assert rung
    assert rung[0] > 30


def test_without_tasks_readings_count_and_it_says_so():
    watcher = monitor(every_n_steps=1)
    said = []
    for number in range(60):
        if number == 30:
            with torch.no_grad():
                for parameter in watcher.model.parameters():
                    parameter.mul_(60.0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            watcher.step()
        said += [str(warning.message) for warning in caught]
    assert said
    assert all("measured by tasks, not by readings" in text for text in said)


def test_a_resumed_monitor_rings_at_the_same_tasks():
    accuracies = [0.9] * 30 + [0.1] * 30
    whole = rings_of(monitor(), accuracies)
    first, second = monitor(), monitor()
    rings_of(first, accuracies[:33])
    second.load_state_dict(first.state_dict())
    for number, accuracy in enumerate(accuracies[33:], 34):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FastlrWarning)
            text = second.task(accuracy)
        assert bool(text) == (number in whole)
    assert [task + 1 for task in second.alarm.by_accuracy.rung] == whole


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: monitor(alarm=False).task(0.5), "alarm=True"),
        (lambda: monitor().task(50.0), "a share between 0 and 1"),
        (lambda: monitor().task("0.5"), "accuracy must be a number, not '0.5'"),
        (lambda: monitor().task(torch.ones(2)), "accuracy must be a number, not tensor"),
        (lambda: monitor(guess="10 %"), "guess must be a number, not '10 %'"),
        (lambda: monitor(guess=1.5), "the accuracy of a guess"),
    ],
)
def test_wrong_use_names_the_remedy(call, words):
    with refused(words):
        call()


def test_a_task_whose_accuracy_is_refused_does_not_count():
    watcher = monitor()
    with refused("a share between 0 and 1"):
        watcher.task(math.nan)
    assert watcher.alarm.tasks == 0
    assert watcher.alarm.state_dict()["accuracies"] == []


def test_rules_are_read_as_their_words_say():
    assert BY_ACCURACY.signal.startswith("accuracy_")
    assert BY_ACCURACY.signal.removeprefix("accuracy_") in BY_ACCURACY.words
