"""Noise scale, trainability, curvature and NTK rank against their definitions."""

import copy
import math
import threading

import numpy as np
import torch
import torch.nn.functional as F
from exact import gradients
from expected import refused, warned
from pytest import approx, mark, raises
from single_samples import Written
from torch import nn
from untouched import untouched

import fastlr
from fastlr import memorization_capacity
from fastlr.errors import InteractionError, ModelError, NonFiniteError
from fastlr.metrics import curvature_rank, ntk_rank, probes, trainability


def two_layers(outputs=3, act=nn.Tanh):
    return nn.Sequential(nn.Linear(5, 8), act(), nn.Linear(8, outputs))


# -- noise scale
# --------------------------------------------------------------------------------------------------


def test_the_noise_scale_is_that_of_the_sample_covariance(double):
    model = two_layers().eval()
    x = torch.randn(40, 5)
    y = torch.randint(3, (40,))
    g = gradients(model, F.cross_entropy(model(x), y, reduction="none"))
    trace = g.var(0).sum()
    square = g.mean(0).square().sum() - trace / len(g)
    scale = fastlr.gradient_noise_scale(model, x, y, F.cross_entropy, groups=5)
    assert scale.details["trace"] == approx(float(trace), rel=1e-9)
    assert scale.details["grad_sq_norm"] == approx(float(square), rel=1e-9)
    assert scale == (approx(float(trace / square), rel=1e-9) if square > 0 else math.inf)


def test_the_noise_scale_of_a_single_number_and_of_sparse_gradients(double):
    model = Written(
        lambda m, x: m.scale * m.embedding(x).sum(1),
        embedding=nn.Embedding(7, 3),
        scale=nn.Parameter(torch.tensor(0.7)),
    )
    x, y = torch.randint(7, (12, 2)), torch.randint(3, (12,))
    g = gradients(model, F.cross_entropy(model(x), y, reduction="none"))
    for sparse in (False, True):
        model.embedding.sparse = sparse
        scale = fastlr.gradient_noise_scale(model, x, y, F.cross_entropy, groups=5)
        assert scale.details["trace"] == approx(float(g.var(0).sum()), rel=1e-9)


def test_its_standard_error_covers_the_truth(double):
    """Linear regression, whose gradient noise is known, holds estimates to their standard errors.

    Each of many data sets has its estimate and error.
    """
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)

    def draw(n):
        x = torch.randn(n, 2)
        return x, x[:, :1] + 0.5 * torch.randn(n, 1)

    x, y = draw(200_000)
    g = -2 * x * y  # gradient of (w x - y)^2 at w = 0
    truth = float(g.var(0).sum() / g.mean(0).square().sum())
    deviations, errors = [], []
    for _ in range(60):
        scale = fastlr.gradient_noise_scale(model, *draw(400), F.mse_loss)
        deviations.append(float(scale) - truth)
        errors.append(scale.details["stderr"])
    assert abs(np.mean(deviations)) < 0.15 * truth
    assert 0.7 < np.mean(errors) / np.std(deviations) < 1.5


def test_no_signal_has_an_infinite_noise_scale_and_too_few_samples_none(double):
    model = nn.Linear(3, 1)
    x = torch.randn(8, 3)
    opposed = torch.cat([x, x])
    errors = torch.tensor([[1.0], [-1.0]]).repeat_interleave(8, 0)  # whose gradients cancel
    told = "the mean gradient of 16 samples cannot be told from zero: more samples are needed"
    with warned(f"gradient_noise_scale is inf: {told}"):
        scale = fastlr.gradient_noise_scale(
            model, opposed, model(opposed).detach() + errors, F.mse_loss, groups=2
        )
    assert scale == math.inf
    assert scale.details["reason"] == told
    assert scale.details["stderr"] is None
    with raises(NonFiniteError):
        fastlr.gradient_noise_scale(model, x * 1e160, torch.zeros(8, 1), F.mse_loss, groups=2)
    for groups in (1, 5):
        with refused(f"groups={groups} of 8 samples"):
            fastlr.gradient_noise_scale(model, x, torch.zeros(8, 1), F.mse_loss, groups=groups)


# -- trainability
# --------------------------------------------------------------------------------------------------


def test_a_fresh_network_learns_and_a_dead_one_does_not():
    torch.manual_seed(0)
    model, x = two_layers(4, nn.ReLU).train(), torch.randn(32, 5)
    with untouched(model):
        fresh = trainability(model, x, learning_rate=1e-2)
    few = [trainability(model, x, steps=9, learning_rate=1e-2, seed=seed) for seed in (0, 0, 1)]
    assert few[0] == few[1] != few[2]
    details = fresh.details
    assert 0.1 < fresh < 1
    assert details["n"] == 32
    assert 0 < details["half"] < 100
    assert details["stderr"] > 0
    nn.init.constant_(model[0].bias, -100.0)  # no unit is ever active: only the last bias learns
    dead = trainability(model, x, learning_rate=1e-2)
    assert dead < 0.3 * fresh
    model[2].bias.data[0] = (
        20.0  # it unlearns its confidence, which takes most of the loss away, and learns no label
    )
    confident = trainability(model, x, steps=400, learning_rate=0.1, repeats=1)
    assert abs(confident) < 0.1
    assert confident.details["end"] < 0.2 * confident.details["start"]
    assert trainability(model, x, steps=1, repeats=1).details["stderr"] is None


def test_it_follows_its_definition_for_every_predictive(double):
    model, x = two_layers(2), torch.randn(6, 5)
    for predictive, loss, guess in (
        (fastlr.Categorical(), lambda z, y: F.cross_entropy(z, y), math.log(2)),
        (
            fastlr.Bernoulli(),
            lambda z, y: F.binary_cross_entropy_with_logits(z, y.to(z.dtype)),
            math.log(2),
        ),
        (fastlr.Gaussian(2.0), lambda z, y: F.mse_loss(z, y.to(z.dtype)) / 8, 1 / 8),
    ):
        found = trainability(
            model, x, steps=3, repeats=1, learning_rate=0.1, seed=7, predictive=predictive
        )
        torch.manual_seed(7)
        copied = copy.deepcopy(model)
        y = torch.randint(2, (6,)) if isinstance(predictive, fastlr.Categorical) else None
        if y is None:
            y = (
                torch.randint(2, (6, 2)).float()
                if isinstance(predictive, fastlr.Bernoulli)
                else torch.randn(6, 2)
            )
        optimizer = torch.optim.AdamW(copied.parameters(), lr=0.1, weight_decay=0.0)
        losses = []
        for _ in range(4):
            losses.append(loss(copied(x), y))
            optimizer.zero_grad()
            losses[-1].backward()
            optimizer.step()
        assert found == approx(1 - float(losses[3].detach()) / guess, rel=1e-9)


def closed_over():
    model = two_layers()
    model.head = lambda h: model[2](h)
    model.forward = lambda x: model.head(model[1](model[0](x)))
    return model


def replaced():
    model = two_layers()
    before = model.forward
    model.forward = lambda x: 2 * before(x)
    return model


class OwnInputs:
    """Inputs as the documentation of `fastlr.estimate` describes them."""

    def batch(self, start, stop, *, seed, device, dtype):
        return torch.randn(stop - start, 3, dtype=dtype, device=device)


@mark.parametrize("dtype", [torch.float32, torch.float64])
def test_capacity_on_inputs_of_an_own_class(dtype):
    found = memorization_capacity(torch.nn.Linear(3, 2, dtype=dtype), OwnInputs(), 4, steps=2)
    assert found.details["n"] == 4


class DroppedWords(nn.Module):
    """A language model with dropout."""

    def __init__(self):
        super().__init__()
        layers = nn.Embedding(7, 5), nn.Dropout(0.5), nn.Linear(5, 7)
        self.layers = nn.Sequential(*layers)

    def forward(self, words):
        return self.layers(words)


def test_the_default_distribution_of_a_language_model_draws_nothing():
    torch.manual_seed(0)
    model, words = DroppedWords(), fastlr.TokenInputs(7, 3, name=None)
    given = {}, {"predictive": fastlr.Categorical()}
    found = [memorization_capacity(model, words, 4, steps=3, **options) for options in given]
    assert found[0] == found[1]


TRAINED = [trainability, memorization_capacity]


@mark.parametrize("measure", TRAINED)
@mark.parametrize("make", [closed_over, replaced])
def test_a_copy_that_runs_with_the_models_own_parameters_is_refused(measure, make):
    """Nothing of it was trained, and the gradients went to the user's model."""
    model, x = make(), torch.randn(6, 5)
    with untouched(model), refused("still runs with the model's own parameters", ModelError):
        measure(model, x, steps=2)


@mark.parametrize("measure", TRAINED)
def test_models_that_cannot_be_copied_are_named_and_scripted_ones_are_trained(measure):
    locked, x = two_layers(), torch.randn(6, 5)
    locked.lock = threading.Lock()
    with refused("cannot be copied .*lock", ModelError):
        measure(locked, x, steps=2)
    plain = two_layers()
    wanted = measure(plain, x, steps=3)
    assert measure(torch.jit.script(plain), x, steps=3) == approx(wanted, rel=1e-4)


@mark.parametrize("measure", [trainability, memorization_capacity])
def test_neighbouring_seeds_share_no_labels(measure):
    model, x = two_layers(), torch.randn(16, 5)
    options = {"steps": 5, "learning_rate": 0.1}
    alone = [measure(model, x, repeats=1, seed=seed, **options) for seed in (0, 1)]
    assert float(measure(model, x, repeats=2, **options)) != approx(sum(alone) / 2, rel=1e-6)


@mark.parametrize("measure", [trainability, memorization_capacity])
def test_labels_are_drawn_for_all_positions_of_the_right_outputs_alone(measure):
    model, x = two_layers(), torch.randn(4, 5)
    parts = {"embed": nn.Embedding(9, 4), "head": nn.Linear(4, 3)}
    said = Written(lambda m, input_ids, attention_mask: m.head(m.embed(input_ids)), **parts)
    padded = {
        "input_ids": torch.ones(2, 3, dtype=torch.int64),
        "attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0]]),
    }
    mask = fastlr.Categorical(mask=torch.tensor([True, True, True, False]))
    for network, given, predictive, says in (
        (two_layers(1), x, fastlr.Categorical(), "has size 1"),
        (model, x, fastlr.Categorical(dim=0), "dim must be another axis"),
        (model, x, mask, "leave the mask out"),
        (said, padded, fastlr.Categorical(), "has padding"),
    ):
        with refused(says):
            measure(network, given, steps=2, predictive=predictive)
    with refused("depends on no trainable parameter", ModelError):
        measure(Written(lambda m, x: x, unused=nn.Linear(2, 2)), x, steps=2)


# -- curvature rank
# --------------------------------------------------------------------------------------------------


def test_the_rank_is_that_of_the_gauss_newton_matrix(double):
    """Two classes: the matrix itself, not a sample of it."""
    model, x = two_layers(2).eval(), torch.randn(7, 5)
    p = model(x).detach().softmax(1)
    g = gradients(model, (model(x)[:, 0] - model(x)[:, 1]) * (p[:, 0] * p[:, 1]).sqrt())
    values = torch.linalg.eigvalsh(g.T @ g / len(x)).flip(0).clamp_min(0)
    for delta in (0.5, 0.1, 0.01, 1e-6):
        sums = values.cumsum(0) / values.sum()
        measure = curvature_rank(model, x, delta=delta)
        assert measure == int((sums < 1 - delta).sum()) + 1
    assert measure.details["trace"] == approx(float(values.sum()), rel=1e-9)
    assert measure.details["n"] == 7
    same = curvature_rank(model, x[:1].expand(6, 5), delta=0.01)
    assert same == 1, "copies of one input have one direction"


def test_small_curvature_keeps_its_rank():
    model = two_layers(2)
    with torch.no_grad():
        model[2].bias.copy_(torch.tensor([70.0, -70.0]))  # squared cotangents vanish in float32
    x = torch.randn(6, 5)
    assert curvature_rank(model, x) == curvature_rank(copy.deepcopy(model).double(), x.double()) > 1
    model[2].bias.data *= 4  # the product of two squares vanishes in float64, too
    assert curvature_rank(model.double(), x.double()) > 1


@mark.parametrize("rank", [curvature_rank, ntk_rank])
def test_samples_that_interact_have_no_rank(rank):
    class Centred(nn.Linear):
        def forward(self, x):
            return super().forward(x) - super().forward(x).mean(0)

    with raises(InteractionError):
        rank(Centred(5, 2), torch.randn(6, 5))


# -- NTK rank
# --------------------------------------------------------------------------------------------------


def pixels():
    """A network with an output for each pixel, in another layout than its shape says."""
    layers = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 2, 2)
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


@mark.parametrize(("make", "shape"), [(two_layers, (7, 5)), (pixels, (6, 2, 5, 5))])
@mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_kernel_is_that_of_a_backward_pass_for_each_sample_and_output(make, shape, dtype):
    torch.manual_seed(0)
    model, x = make().to(dtype), torch.randn(shape, dtype=dtype)
    exact = copy.deepcopy(model).double().eval()
    z = exact(x.double())
    rows = gradients(exact, z.reshape(-1)).view(len(x), z[0].numel(), -1)
    values = torch.linalg.eigvalsh(torch.einsum("aop,bop->ab", rows, rows)).flip(0)
    for delta in (0.5, 0.1, 0.01):
        sums = values.cumsum(0) / values.sum()
        with untouched(model):
            measure = ntk_rank(model, x, delta=delta)
        assert measure == int((sums < 1 - delta).sum()) + 1
    tolerance = 1e-9 if dtype == torch.float64 else 1e-5
    assert measure.details["trace"] == approx(float(values.sum()) / len(x), rel=tolerance)
    assert measure.details["n"] == len(x)


def test_the_kernel_does_not_see_how_sure_the_network_is():
    torch.manual_seed(0)
    model, x = two_layers(3), torch.randn(12, 5)
    unsure = ntk_rank(model, x)
    with torch.no_grad():
        model[2].bias[0] += 70.0
    assert ntk_rank(model, x).to_dict() == unsure.to_dict()
    one, gaussian = two_layers(1), fastlr.Gaussian()
    assert ntk_rank(one, x) == curvature_rank(one, x, predictive=gaussian) > 1


# -- memorization capacity
# ----------------------------------------------------------------------------------------------


def test_gain_and_ceiling_of_all_labelings_are_those_by_hand():
    """Two inputs that look alike fit labels 00 and 11 with probability 1, 01 and 10 with 1/4."""
    constant = Written(lambda m, x: m.logits.expand(len(x), 2), logits=nn.Parameter(torch.zeros(2)))
    found = memorization_capacity(
        constant, torch.zeros(2, 1), enumerated=True, steps=200, learning_rate=0.2
    )
    # Log2 sum over y of P_fit(y).
    assert found.details["ceiling"] == approx(math.log2(2.5), abs=0.01)
    assert found.details["bits"] == approx(1.0, abs=0.01)
    assert found.details["parameters"] == 2
    assert float(found) == found.details["bits"] / 2
    assert found.details["stderr"] is None


def test_capacity_stops_at_what_the_model_can_hold():
    inputs = fastlr.ShapeImages((3, 8, 8))
    torch.manual_seed(0)
    small = nn.Sequential(nn.Flatten(), nn.Linear(192, 2), nn.Linear(2, 4))
    few, many = (
        memorization_capacity(small, inputs, n, steps=200, learning_rate=0.05, repeats=2)
        for n in (16, 400)
    )
    assert few.details["share"] > 0.95
    assert few.details["conclusion"].endswith("raise n")
    assert few.details["bits"] <= 32
    assert few.details["n"] == 16
    assert many.details["share"] < 0.9
    assert many.details["conclusion"] is None
    assert many.details["stderr"] > 0
    by_default, by_seed = (
        memorization_capacity(small, inputs, 400, steps=5, **seed) for seed in ({}, {"seed": 0})
    )
    assert by_default == by_seed
    assert float(many) == many.details["bits"] / many.details["parameters"]
    alike = memorization_capacity(
        small, torch.zeros(64, 3, 8, 8), steps=100, learning_rate=0.05, repeats=2
    )
    # One look for all labels: only the counts of the classes are held.
    assert abs(alike.details["bits"]) < 8


@mark.parametrize(("predictive", "classes"), [(fastlr.Bernoulli(), 2), (fastlr.Gaussian(2.0), 0)])
def test_capacity_of_coins_and_of_targets(predictive, classes):
    """A linear model of as many weights as inputs fits all targets; Gaussian bits have no end."""
    torch.manual_seed(0)
    model, x = nn.Linear(6, 1), torch.eye(6)
    found = memorization_capacity(
        model, x, steps=400, learning_rate=0.1, repeats=2, predictive=predictive
    )
    assert (found.details["share"] is None) == (classes == 0)
    assert found.details["bits"] > 5.5 if classes else 12 < found.details["bits"] <= 6 * 23


def test_capacity_where_targets_are_fitted_to_the_last_digit(monkeypatch):
    fit = probes._fit
    monkeypatch.setattr(
        probes, "_fit", lambda *args, **options: fit(*args, **options)._replace(end=0.0)
    )
    found = memorization_capacity(
        nn.Linear(3, 1), torch.eye(3), steps=1, predictive=fastlr.Gaussian()
    )
    assert found.details["bits"] == approx(3 * 23)
