"""Where nothing can be measured whatever the model: a clear error, and nothing is changed."""

import pytest
import torch
from torch import nn

import fastlr
from fastlr.errors import InputError


@pytest.fixture
def model():
    return nn.Linear(3, 2).eval()


def calls(model, x):
    """The public functions that measure, on one model and its inputs."""
    return [
        lambda: fastlr.estimate(model, fastlr.TensorInputs(x), n=4),
        lambda: fastlr.per_sample_grad_sq_norms(model, x, torch.ones(4, 2)),
        lambda: fastlr.support_report(model, x),
        lambda: fastlr.redundancy_loss(model, x),
    ]


@pytest.mark.parametrize("which", range(4))
def test_a_default_device_without_values_is_refused(model, which):
    call = calls(model, torch.randn(4, 3))[which]
    with torch.device("meta"), pytest.raises(InputError, match="default device is meta"):
        call()
    call()


def test_within_vmap_norms_are_refused(model):
    def norms(x):
        return fastlr.per_sample_grad_sq_norms(model, x, torch.ones(4, 2))

    def value(x):
        return fastlr.estimate(model, fastlr.TensorInputs(x), 4).value

    for measure in (norms, value):
        with pytest.raises(InputError, match="torch.func"):
            torch.func.vmap(measure)(torch.randn(5, 4, 3))


def test_tensors_without_values_are_refused(model):
    x, v = torch.randn(4, 3), torch.ones(4, 2)
    with pytest.raises(InputError, match="the cotangent is on meta"):
        fastlr.per_sample_grad_sq_norms(model, x, v.to("meta"))
    with pytest.raises(InputError, match="an input tensor is on meta"):
        fastlr.per_sample_grad_sq_norms(model.to("meta"), x.to("meta"), v)


def test_parameters_of_a_transform_are_refused(model):
    def value(parameters, x):
        def call(inputs):
            return torch.func.functional_call(model, parameters, inputs)

        wrapped = nn.Module()
        wrapped.forward = call
        for name, p in parameters.items():
            wrapped.register_parameter(name, nn.Parameter(p))
        return fastlr.redundancy_loss(wrapped, x, seed=0)

    with pytest.raises(InputError, match="torch.func"):
        torch.func.grad(value)(dict(model.named_parameters()), torch.randn(4, 3))
