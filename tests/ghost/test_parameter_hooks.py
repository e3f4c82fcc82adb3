"""Hooks of parameters: linear ones are measured, others are refused by name."""

import torch
from pytest import fixture, mark, raises
from single_samples import truth
from torch import nn
from torch.nn.functional import cross_entropy

import fastlr
from fastlr.errors import NonlinearBackwardError

BATCH = 6
LINEAR = {
    "a mask": lambda g: g * (torch.arange(g.numel()).view_as(g) % 2),
    "twice": lambda g: 2 * g,
    "a look": lambda g: None,
}
NONLINEAR = {
    "clip": lambda g: g.clamp(-0.1, 0.1),
    "normalise": lambda g: g / g.norm(),
    "decay": lambda g: g + 0.1,
}


@fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).eval()


@mark.parametrize("name", LINEAR)
def test_linear_ones_are_measured(name, double, model):
    model[0].weight.register_hook(LINEAR[name])
    x, v = torch.randn(BATCH, 5), torch.randn(BATCH, 3)
    alone = truth(model, (x,), v)  # a copy of the model would have no hooks
    for _ in range(2):
        found = fastlr.per_sample_grad_sq_norms(model, x, v)
        torch.testing.assert_close(found, alone, rtol=1e-12, atol=0.0)


@mark.parametrize("name", LINEAR)
def test_linear_ones_are_measured_of_a_single_sample(name, double, model):
    model[0].weight.register_hook(LINEAR[name])
    x, v = torch.randn(1, 5), torch.randn(1, 3)
    alone = truth(model, (x,), v)
    for _ in range(2):
        found = fastlr.per_sample_grad_sq_norms(model, x, v)
        torch.testing.assert_close(found, alone, rtol=1e-12, atol=0.0)


@mark.parametrize("samples", [1, BATCH])
@mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@mark.parametrize("name", NONLINEAR)
def test_others_are_refused(name, dtype, samples, model):
    model.to(dtype)[0].weight.register_hook(NONLINEAR[name])
    x, v = torch.randn(samples, 5).to(dtype), torch.randn(samples, 3).to(dtype)
    for _ in range(2):
        with raises(NonlinearBackwardError, match="a hook that clips them"):
            fastlr.per_sample_grad_sq_norms(model, x, v)


@mark.parametrize("samples", [2, 4])
def test_one_that_leaves_some_samples_as_they_are_is_measured_for_the_others(samples, double):
    """The audited sample may be one whose gradient is positive, which the hook keeps."""
    model = nn.Linear(5, 1, bias=False)
    model.weight.register_hook(lambda g: g.clamp(min=0))
    x, v = torch.rand(samples, 5), torch.ones(samples, 1)
    v[::2] = -1
    for _ in range(2):
        found = fastlr.per_sample_grad_sq_norms(model, x, v)
        torch.testing.assert_close(found, (x * v).clamp(min=0).square().sum(1))


@mark.parametrize("samples", [2, 4])
def test_one_that_does_not_add_is_refused_where_a_batch_stands_for_its_samples(samples, model):
    model[0].weight.register_hook(lambda g: g.clamp(min=0))
    x, y = torch.randn(samples, 5), torch.randint(3, (samples,))
    with raises(NonlinearBackwardError, match="hook of parameter 0.weight does not give"):
        fastlr.redundancy_loss(model, x)
    with raises(NonlinearBackwardError, match="hook of parameter 0.weight does not give"):
        fastlr.metrics.gradient_measures(
            model, x, y, cross_entropy, measures=["train_grad_norm_batch"]
        )
    with raises(NonlinearBackwardError, match="hook of parameter 0.weight does not give"):
        fastlr.estimate(model, fastlr.TensorInputs(x), samples, probe="batch", batch_size=2)


def test_one_that_comes_later_is_refused_of_a_single_sample(model):
    x, v = torch.randn(1, 5), torch.randn(1, 3)
    fastlr.per_sample_grad_sq_norms(model, x, v)
    handle = model[0].weight.register_hook(NONLINEAR["clip"])
    with raises(NonlinearBackwardError, match="a hook that clips them"):
        fastlr.per_sample_grad_sq_norms(model, x, v)
    handle.remove()
    torch.testing.assert_close(
        fastlr.per_sample_grad_sq_norms(model, x, v), truth(model, (x,), v), rtol=1e-5, atol=0.0
    )


@mark.parametrize("name", NONLINEAR)
@mark.parametrize("probe", ["rademacher", "batch"])
def test_others_are_refused_by_estimates_of_single_samples(name, probe, model):
    model[0].weight.register_hook(NONLINEAR[name])
    inputs = fastlr.TensorInputs(torch.randn(4, 5))
    with raises(NonlinearBackwardError, match="a hook that clips them"):
        fastlr.estimate(model, inputs, 4, batch_size=1, probe=probe)


@mark.parametrize("name", NONLINEAR)
@mark.parametrize("batch_size", [None, 1])
def test_others_are_refused_for_the_gradient_of_the_whole_batch(name, batch_size, model):
    model[0].weight.register_hook(NONLINEAR[name])
    x, y = torch.randn(BATCH, 5), torch.randint(3, (BATCH,))
    batch_gradient = {"measures": ["train_grad_norm_batch"], "batch_size": batch_size}
    with raises(NonlinearBackwardError, match="a hook that clips them"):
        fastlr.metrics.gradient_measures(model, x, y, cross_entropy, **batch_gradient)
