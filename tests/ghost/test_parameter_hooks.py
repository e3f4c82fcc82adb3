"""Hooks of parameters: linear ones are measured, others are refused by name."""

import torch
from pytest import fixture, mark, raises
from single_samples import truth
from torch import nn

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


@mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@mark.parametrize("name", NONLINEAR)
def test_others_are_refused(name, dtype, model):
    model.to(dtype)[0].weight.register_hook(NONLINEAR[name])
    x, v = torch.randn(BATCH, 5).to(dtype), torch.randn(BATCH, 3).to(dtype)
    for _ in range(2):
        with raises(NonlinearBackwardError, match="a hook that clips them"):
            fastlr.per_sample_grad_sq_norms(model, x, v)
