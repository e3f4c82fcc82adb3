"""The rule of the trend: courses of known shape, simulated rates, and its sentences."""

import math

import numpy as np
import torch
from pytest import approx, mark
from scipy import stats

from fastlr.display.trend import Measurement, describe, trend


def measurements(values, error=0.0):
    return [Measurement(float(value), error * float(value)) for value in values]


def rate(draw, readings, draws):
    """Share of draws of logarithms, in per cent, whose trend is significant."""
    found = [trend(measurements(np.exp(draw(readings)))).direction for _ in range(draws)]
    return 100 * np.mean(np.abs(found))


@mark.parametrize("readings", [6, 10, 15, 40])
def test_independent_noise_rarely_has_a_trend(readings):
    """20,000 draws gave 0.3 to 1.3 % of normal and at most 1.5 % of lognormal noise."""
    rng = np.random.default_rng(readings)
    assert rate(lambda n: 0.3 * rng.standard_normal(n), readings, 1500) <= 2.3
    assert rate(lambda n: 0.3 * rng.lognormal(size=n), readings, 1500) <= 2.7


def test_noise_that_carries_over_has_a_trend_more_often():
    """AR(1) noise with a coefficient of 0.5: 14 % of 15 readings in 20,000 draws."""
    rng = np.random.default_rng(0)

    def carried_over(n):
        noise = rng.standard_normal(n + 50)
        for i in range(1, n + 50):
            noise[i] += 0.5 * noise[i - 1]
        return noise[50:]

    assert 8 <= rate(carried_over, 15, 1500) <= 16


def test_an_exponential_fall_always_has_a_trend():
    rng = np.random.default_rng(0)
    assert rate(lambda n: -0.25 * np.arange(n) + 0.1 * rng.standard_normal(n), 15, 200) == 100


def test_monotone_courses_are_found():
    """The readings that the earlier rule took for noise: the trend within a fifth hid the trend."""
    fallen = describe(measurements(np.geomspace(27, 0.9, 15), 0.01))
    assert fallen.startswith("Local redundancy fell to 0.054 of its first value (99 % interval ")
    risen = describe(measurements(np.geomspace(13, 371, 15), 0.01))
    assert risen.startswith("Local redundancy rose to 18 times its first value (99 % interval ")


def test_the_interval_is_that_of_the_formula():
    y = np.array([3.0, 2.9, 3.2, 2.5, 2.6, 2.2, 2.0, 1.7, 1.9])
    found = trend(measurements(np.exp(y)))
    variance = np.square(np.diff(y)).sum() / (2 * 8)
    half = stats.t.ppf(0.995, 2 * 8**2 / (3 * 9 - 4)) * math.sqrt(variance * 2 / 3)
    change = y[-3:].mean() - y[:3].mean()
    assert (found.low, found.ratio, found.high) == approx(
        tuple(math.exp(change + shift) for shift in (-half, 0, half))
    )
    assert (found.direction, found.steady, found.readings) == (-1, None, 9)


def test_many_readings_are_averaged_in_fifteen_groups():
    rng = np.random.default_rng(3)
    z = np.linspace(2, 1, 15) + 0.1 * rng.standard_normal(15)
    noise = rng.standard_normal((15, 4))
    y = z[:, None] + noise - noise.mean(1, keepdims=True)
    grouped, whole = trend(measurements(np.exp(z))), trend(measurements(np.exp(y.ravel())))
    assert whole[:5] == approx(grouped[:5])
    assert "of 15 groups, 60 readings in all)" in str(whole)


def test_a_steady_change_is_found_by_kendalls_tau_alone():
    """A course that falls at every reading, with too much scatter for the interval."""
    y = np.array([0, -0.9, -0.91, -0.92, -0.93, -0.94, -0.95, -0.96, -0.97, -1.8])
    found = trend(measurements(np.exp(y)))
    assert found.low < 1 < found.high
    assert found.direction == -1
    assert found.steady == approx(stats.kendalltau(np.arange(10), y).pvalue)
    assert str(found).startswith("Local redundancy fell steadily (Kendall p = 6e-07) to ")


def test_a_change_within_the_error_of_the_images_is_not_significant():
    values = np.geomspace(10, 9, 15)
    assert trend(measurements(values, 0.001)).direction == -1
    found = trend(measurements(values, 0.05))
    assert found.direction == 0
    error = 0.05 * math.sqrt(2) * stats.norm.ppf(0.995)
    assert found.high / found.ratio == approx(math.exp(error))
    assert str(found).startswith("Local redundancy did not change significantly: 0.91 of its first")


def test_images_are_paired_where_their_values_were_kept():
    """The same images at both ends: what they have in common cancels."""
    torch.manual_seed(0)
    images = torch.rand(100) + 0.5
    values = np.geomspace(10, 9.5, 15)

    def readings(kept):
        rows = [images * (1 + 0.01 * torch.randn(100)) * value for value in values]
        return [
            Measurement(float(row.mean()), float(row.std()) / 10, row if kept else None)
            for row in rows
        ]

    assert trend(readings(True)).direction == -1
    assert trend(readings(False)).direction == 0
    mixed = [*readings(True)[:-1], *readings(False)[-1:]]
    assert trend(mixed).direction == 0


@mark.parametrize("values", [[1.0] * 5, []])
def test_too_few_readings(values):
    assert trend(measurements(values)) is None
    assert describe(measurements(values)) == (
        "Too few readings for a trend: it takes 6 after training began, and there are "
        f"{len(values)}."
    )


@mark.parametrize(
    "reading", [Measurement(0.0, 0.1), Measurement(math.nan, 0.1), Measurement(1.0, math.nan)]
)
def test_no_trend_where_a_reading_is_zero_or_has_no_error(reading):
    readings = [*measurements([1, 2, 3, 4, 5], 0.01), reading]
    assert trend(readings) is None
    assert "has no standard error" in describe(readings)


def test_a_small_change_is_printed_with_enough_digits():
    text = describe(measurements([1.001**k for k in range(15)]))
    assert text.startswith(
        "Local redundancy rose to 1.012 times its first value (99 % interval 1.01"
    )
    assert " 1.00 " not in text


def test_an_interval_of_many_decades():
    found = trend(measurements([1e-200, 1e200] * 4))
    assert (found.direction, found.high) == (0, math.inf)


def test_equal_readings_have_no_trend():
    found = trend(measurements([2.0] * 8))
    assert (found.ratio, found.direction) == (1.0, 0)
