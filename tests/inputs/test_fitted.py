"""Gaussian inputs like the data's: their mean and covariance, exact sums, and errors."""

import torch
from expected import refused, warned
from pytest import mark
from torch.testing import assert_close

import fastlr
from fastlr.inputs import GaussianInputs, fitted


def correlated(n, *shape, seed=0):
    """Samples whose values correlate along the last axis, each place about its own mean."""
    draws = torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed))
    return draws.cumsum(-1) + torch.arange(shape[-1])


def test_mean_and_covariance_are_those_of_the_data():
    x = correlated(300, 2, 6)
    made = GaussianInputs(x).batch(0, 40_000).double().flatten(1)
    wanted = x.double().flatten(1)
    error = wanted.var(0).max() / len(made) ** 0.5
    assert (made.mean(0) - wanted.mean(0)).abs().max() < 5 * error.sqrt()
    assert (made.T.cov() - wanted.T.cov()).abs().max() < 8 * error


def test_samples_lie_in_the_span_of_the_data():
    """Where the data never varies the inputs never do."""
    x = correlated(20, 8)
    x[:, 3] = 0.5
    x[:, 5] = -x[:, 6]
    made = GaussianInputs(x).batch(0, 100)
    assert (made[:, 3] == 0.5).all()
    assert (made[:, 5] + made[:, 6]).abs().max() < 1e-3


def test_sums_are_exact_in_any_order(monkeypatch):
    inputs = GaussianInputs(1e3 * correlated(100, 3, 7))
    whole = inputs.batch(0, 9, seed=3)
    monkeypatch.setattr(fitted, "_AT_ONCE", 400)
    assert torch.equal(whole, inputs.batch(0, 9, seed=3)), "columns in blocks"
    products = fitted.normals(0, 9, (100,), stream=13, seed=3).double()[:, :, None, None]
    products = products * inputs.deviations.double()
    for order in (torch.arange(100), torch.arange(99, -1, -1)):
        total = torch.zeros(9, 3, 7, dtype=torch.float64)
        for sample in order.tolist():
            total += products[:, sample]
        assert torch.equal(whole, (total * (1 / 99**0.5) + inputs.mean).float())


@mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_rounding_is_relative_to_the_largest_value(scale):
    x = scale * correlated(50, 6)
    back = GaussianInputs(x).deviations + GaussianInputs(x).mean
    assert (back - x).abs().max() <= x.abs().max() * 2**-15


def test_values_that_the_grid_drowns_are_told():
    x = correlated(50, 6)
    x[:, 0] *= 1e6
    with warned("5 of 6 values of a sample vary too little"):
        assert GaussianInputs(x).batch(0, 9)[:, 1:].std() == 0


@mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_any_floating_point_values_are_fitted(dtype):
    x = correlated(50, 6).to(dtype)
    assert_close(GaussianInputs(x).mean, x.double().mean(0), rtol=0, atol=1e-3)


def test_records_and_pairs_tell_what_was_fitted():
    x = correlated(50, 6)
    same, other = GaussianInputs(x.clone()), GaussianInputs(x + torch.eye(6).repeat(50, 1)[:50])
    assert same.to_dict() == GaussianInputs(x).to_dict() != other.to_dict()
    assert same.identity(4, 0) == GaussianInputs(x).identity(4, 0)
    assert len({same.identity(4, 0), same.identity(4, 1), other.identity(4, 0)}) == 3
    model = torch.nn.Linear(6, 3)
    first, again = (fastlr.estimate(model, GaussianInputs(x), 8, progress=False) for _ in range(2))
    assert fastlr.paired_difference(first, again)[0] == 0
    assert fastlr.estimate(model, other, 8, progress=False).value != first.value


class Mine(GaussianInputs):
    """A subclass may make other inputs."""


def test_a_subclass_has_no_identity_of_its_own_accord():
    assert Mine(correlated(5, 2)).identity(2, 0) == ""


@mark.parametrize(
    ("x", "words"),
    [
        ([1.0], "got list"),
        (torch.zeros(4, 3, dtype=torch.uint8), "uint8"),
        (torch.zeros(4), r"float32 \[4\]"),
        (torch.zeros(1, 3), "2 to 16,384"),
        (torch.zeros(4, 0), "with values"),
        (torch.tensor([[0.0], [float("nan")]]), "not finite"),
        (torch.ones(4, 3), "alike"),
        (torch.zeros(4, 3), "alike"),
        (1e6 + torch.rand(4, 3), "alike"),
        (torch.rand(4, 3).double() * 1e300, r"up to \d.*e\+.*normalise"),
        (torch.rand(4, 3) * 3e38, "normalise"),
        (torch.rand(4, 3).double() * 1e-300, "normalise"),
    ],
)
def test_what_cannot_be_fitted_is_refused(x, words):
    with refused(words):
        GaussianInputs(x)
