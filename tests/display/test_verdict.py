"""The verdict's rule against scipy and simulations, and its words in every case."""

import math

import numpy as np
import torch
from pytest import approx, mark
from scipy import stats

from fastlr.display.verdict import (
    Measurement,
    change,
    difference,
    first_and_last,
    paired_error,
    student,
    verdict,
)

BLOCKS = {"body": 60.0, "neck": 20.0, "head": 20.0}


def measurements(values, error=0.01, **kept):
    return [Measurement(float(value), error * float(value), **kept) for value in values]


def moved(values):
    return change(*first_and_last(measurements(values, 1e-6))).moved


@mark.parametrize("freedom", [1, 2, 2.5, 3, 7, 11, 13.9, 33, 90, 500, 1e6])
def test_students_quantile_is_scipys_or_slightly_larger(freedom):
    exact = stats.t.ppf(0.995, math.floor(freedom))
    assert exact - 5e-4 <= student(freedom) <= 1.025 * exact


def test_the_error_of_the_scatter_is_welchs():
    rng = np.random.default_rng(0)
    early, late = rng.lognormal(3, 0.2, 8), rng.lognormal(2.5, 0.4, 8)
    found = change(*(measurements(part, 1e-6) for part in (early, late)))
    exact = stats.ttest_ind(np.log(late), np.log(early), equal_var=False).confidence_interval(0.99)
    assert found.first == approx(stats.gmean(early))
    assert math.exp(exact.low) == approx(found.low, rel=0.02)
    assert math.exp(exact.high) == approx(found.high, rel=0.02)
    plain = difference(early.tolist(), late.tolist())
    exact = stats.ttest_ind(late, early, equal_var=False).confidence_interval(0.99)
    assert (plain.low, plain.high) == approx((exact.low, exact.high), rel=0.05)


def test_noise_around_a_level_cannot_be_told():
    """Of independent noise at most 5 of 100 draws count as a change, at any length."""
    rng = np.random.default_rng(0)
    for count in (6, 20, 40, 200):
        draws = [moved(np.exp(0.3 * rng.standard_normal(count))) for _ in range(100)]
        assert draws.count(0) >= 95, count


def test_noise_of_which_half_carries_over_is_told_more_often():
    """As docs/interpreting.md says: AR(1) noise at .5 counts as a change in 9 to 17 of 100."""
    rng = np.random.default_rng(0)
    told = 0
    for _ in range(1000):
        noise = rng.standard_normal(100)
        for i in range(1, 100):
            noise[i] = 0.5 * noise[i - 1] + math.sqrt(0.75) * noise[i]
        told += moved(np.exp(0.3 * noise)) != 0
    assert 90 <= told <= 170


def test_images_are_paired_where_their_values_were_kept():
    """Images that differ much, and all fall alike, say surely what independent ones would not."""
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.lognormal(0, 2, 64))
    rows = [images * factor for factor in (1.0, 1.01, 0.99, 0.8, 0.79, 0.81)]
    errors = [float(row.std()) / 8 for row in rows]
    kept = [
        Measurement(float(row.mean()), error, {}, row)
        for row, error in zip(rows, errors, strict=True)
    ]
    found = change(kept[:3], kept[3:])
    assert found.moved == -1
    assert found.paired
    apart = [reading._replace(per_image=None) for reading in kept]
    found = change(apart[:3], apart[3:])
    assert found.moved == 0
    assert not found.paired


def test_the_paired_error_is_that_of_other_images():
    """Over draws of the images, logarithms of the ratio lie apart as one draw's error says."""
    rng = np.random.default_rng(1)
    ratios, errors = [], []
    for _ in range(400):
        first = torch.from_numpy(rng.lognormal(0, 1, (3, 400)))
        last = first * torch.from_numpy(rng.lognormal(0, 0.5, 400))
        parts = [[Measurement(float(row.mean()), 0.1, {}, row) for row in p] for p in (first, last)]
        logarithms = [np.mean([math.log(reading.value) for reading in part]) for part in parts]
        ratios.append(logarithms[1] - logarithms[0])
        errors.append(paired_error(*parts) / student(399))
    assert np.std(ratios) == approx(np.mean(errors), rel=0.1)


def test_rows_of_other_images_are_not_paired():
    rows = [torch.ones(n) for n in (4, 4, 4, 4, 4, 5)]
    kept = [Measurement(1.0, 0.1, {}, row) for row in rows]
    assert paired_error(kept[:3], kept[3:]) is None


def test_a_fall_names_its_blocks():
    early = measurements([100, 101, 99], blocks=BLOCKS)
    late = measurements([40, 41, 39], blocks={"body": 9.0, "neck": 20.0, "head": 11.0})
    told = verdict((early, late), 6, dormant={"value": 0.25, "units": 192, "dormant": 48})
    assert told.startswith(
        "Local redundancy has fallen from 100 to 40, beyond its error at 99 % (0.343 to 0.467 "
        "times; neighbouring readings and both parts' images taken for independent). Accuracy is "
        "not known"
    )
    assert (
        "The fall is largest in body (85 %) and head (15 %); 48 of 192 units (25 %) are dormant."
        in told
    )
    assert told.endswith("(docs/interpreting.md).")
    assert "L2 to init" in told
    late = measurements([70, 71, 69], blocks=BLOCKS)
    assert "L2 to init" not in verdict((early, late), 6)  # more than half is left


LEVELS = {-1: [0.9, 0.91, 0.89, 0.5, 0.51, 0.49], 0: [0.5] * 6, 1: [0.5, 0.5, 0.51, 0.9, 0.9, 0.91]}
VALUES = {-1: [9.0, 9.1, 8.9, 1.0, 1.1, 0.9], 0: [5.0] * 6, 1: [1.0, 1.1, 0.9, 9.0, 9.1, 8.9]}


@mark.parametrize(
    ("value", "accuracy", "words"),
    [
        (-1, -1, "Accuracy fell from 90.0 to 50.0 %, as the value did: believe accuracy."),
        (0, -1, "all the same: believe it; a value not seen to fall is no proof."),
        (1, -1, "all the same: believe it; a value not seen to fall is no proof."),
        (-1, 0, "no change that can be told: believe accuracy, nothing is lost yet"),
        (-1, 1, "Accuracy rose from 50.3 to 90.3 %: believe accuracy, nothing is lost yet"),
        (1, 1, "Accuracy rose from 50.3 to 90.3 %, as the value did: believe accuracy."),
        (0, 0, "Accuracy went from 50.0 to 50.0 %, no change that can be told."),
        (1, 0, "went from 50.0 to 50.0 %, no change that can be told: believe accuracy."),
        (0, 1, "Accuracy rose from 50.3 to 90.3 %. Dormant"),
    ],
)
def test_accuracy_and_what_to_believe(value, accuracy, words):
    parts = first_and_last(measurements(VALUES[value]))
    told = verdict(parts, 6, accuracy=difference(*first_and_last(LEVELS[accuracy])))
    assert words in told
    assert ("L2 to init" in told) == (value == accuracy == -1)


def test_own_inputs_are_believed_before_others():
    parts = first_and_last(measurements(VALUES[0]))
    own = change(*first_and_last(measurements(VALUES[-1])))
    told = verdict(parts, 6, own=own)
    assert "On its own inputs it has fallen from 9 to 0.997, beyond its error at 99 %." in told
    assert "of the two values, believe that on its own inputs if they are still to be" in told
    assert "these are its own inputs" in verdict(parts, 6, on_own=True)
    assert "a fall to below a half went with lost accuracy wherever" in verdict(parts, 6)
    accuracy = difference(*first_and_last(LEVELS[-1]))
    told = verdict(parts, 6, accuracy=accuracy, own=own)
    assert "all the same: believe it and the value on its own inputs; a value not seen" in told


def test_what_cannot_be_told():
    few = measurements([3.0] * 5)
    assert first_and_last(few) is None
    assert "it takes 6 readings after training began" in verdict(None, 5)
    assert "and there are 5." in verdict(None, 5)
    for odd in (0.0, math.nan):
        parts = first_and_last(measurements([*VALUES[0][:5], odd]))
        assert "cannot be told: a value is zero" in verdict(parts, 6)
    alone = [reading._replace(stderr=math.nan) for reading in measurements([5.0] * 6)]
    assert change(*first_and_last(alone)) is None  # of one input each
    assert "dormant units were not measured" in verdict(None, 0).lower()
