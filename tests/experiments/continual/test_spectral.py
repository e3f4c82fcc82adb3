"""Spectral regularisation: its gradient is that of the penalty, its singular values are torch's."""

import copy

import torch
from continual_cases import plain, trainer
from expected import refused
from pytest import mark
from torch import nn
from torch.testing import assert_close

from fastlr.experiments.data import synthetic_store

STORE = synthetic_store(classes=3, size=8, train=11, test=5)


class Summed(nn.Module):
    """A network that has no layer with a weight."""

    def __init__(self, num_classes=2):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(num_classes))

    def forward(self, x):
        return x.sum((1, 2, 3))[:, None] * self.scale


def made(network=plain, **settings):
    learner = trainer(network, spectral=0.3, **settings)
    learner.started_at(copy.deepcopy(learner.model.state_dict()), STORE)
    (spectral,) = learner.interventions
    return learner, spectral


@mark.parametrize("power", [1, 2, 3])
def test_the_gradient_is_that_of_the_penalty(power):
    """In float64: singular values by decomposition, derivatives by autograd, norm layers left."""
    learner, spectral = made(spectral_power=power)
    torch.nn.init.normal_(learner.model[4].bias)
    named = dict(learner.model.named_parameters())
    for p in named.values():
        p.grad = torch.zeros_like(p)
    for _ in range(200):  # of the power iteration
        spectral.add_gradients()
    for p in named.values():
        p.grad = torch.ones_like(p)
    spectral.add_gradients()
    exact = {name: p.detach().double().requires_grad_() for name, p in named.items()}
    largest = [
        torch.linalg.matrix_norm(exact[name].flatten(1), 2) for name in ("0.weight", "4.weight")
    ]
    penalty = sum((value**power - 1) ** 2 for value in largest)
    penalty = 0.3 * (penalty + exact["4.bias"].norm() ** (2 * power))
    wanted = torch.autograd.grad(penalty, list(exact.values()), materialize_grads=True)
    for p, gradient in zip(named.values(), wanted, strict=True):
        assert_close(p.grad.double(), 1 + gradient, rtol=1e-4, atol=1e-4)
    found = spectral.record()["largest_singular_value"]
    assert_close(found, float(max(largest).detach()), rtol=1e-5, atol=0)


def test_it_draws_the_largest_singular_value_of_a_layer_to_one():
    learner, spectral = made(optimiser="sgd", learning_rate=0.1, weight_decay=0.0)
    weight = learner.model[4].weight
    weight.data *= 4
    assert torch.linalg.matrix_norm(weight, 2) > 1.3
    for _ in range(300):
        for p in learner.model.parameters():
            p.grad = torch.zeros_like(p)
        learner.update()
    for p in (weight, learner.model[0].weight):
        assert_close(
            torch.linalg.matrix_norm(p.flatten(1), 2), torch.tensor(1.0), rtol=0, atol=1e-3
        )
    assert not learner.model[4].bias.abs().gt(0.2).any()


def test_what_the_loss_has_not_reached_is_left_alone():
    learner, spectral = made()
    before = [v.clone() for v in spectral.directions]
    spectral.add_gradients()
    assert all(p.grad is None for p in learner.model.parameters())
    assert all(map(torch.equal, before, spectral.directions))


def test_a_model_without_weights_is_refused():
    with refused("spectral: no layer of the model has a trainable weight: leave it out"):
        made(Summed)
