"""Where nothing can be measured whatever the model: a clear error, and nothing is changed."""

from unittest import mock

import torch
from expected import refused
from pytest import fixture, mark
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fastlr
from fastlr.errors import ModelError


@fixture
def model():
    return nn.Linear(3, 2).eval()


def calls(model, x):
    """The public functions that measure, on one model and its inputs."""
    return [
        lambda: fastlr.estimate(model, fastlr.TensorInputs(x), n=4),
        lambda: fastlr.per_sample_grad_sq_norms(model, x, torch.ones(4, 2)),
        lambda: fastlr.support_report(model, x),
        lambda: fastlr.redundancy_loss(model, x),
        lambda: fastlr.metrics.effective_rank(model, x),
    ]


@mark.parametrize("which", range(5))
def test_a_default_device_without_values_is_refused(model, which):
    call = calls(model, torch.randn(4, 3))[which]
    with torch.device("meta"), refused("default device is meta"):
        call()
    call()


def test_within_vmap_norms_are_refused(model):
    def norms(x):
        return fastlr.per_sample_grad_sq_norms(model, x, torch.ones(4, 2))

    def value(x):
        return fastlr.estimate(model, fastlr.TensorInputs(x), 4).value

    for measure in (norms, value):
        with refused("torch.func"):
            torch.func.vmap(measure)(torch.randn(5, 4, 3))


def test_tensors_without_values_are_refused(model):
    x, v = torch.randn(4, 3), torch.ones(4, 2)
    with refused("the cotangent is on meta"):
        fastlr.per_sample_grad_sq_norms(model, x, v.to("meta"))
    with refused("an input tensor is on meta"):
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

    with refused("torch.func"):
        torch.func.grad(value)(dict(model.named_parameters()), torch.randn(4, 3))


@mark.parametrize("which", range(5))
def test_tensors_that_stand_for_values_are_refused(model, which):
    call = calls(model, torch.randn(4, 3))[which]
    with FakeTensorMode(allow_non_fake_inputs=True), refused("outside"):
        call()
    call()
    with FakeTensorMode():
        fake, x = nn.Linear(3, 2), torch.randn(4, 3)
    with refused("a parameter is a FakeTensor"):
        calls(fake, x)[which]()


@mark.filterwarnings("ignore")  # of torch.jit.trace
@mark.parametrize("which", range(5))
@mark.parametrize(
    ("trace", "name"),
    [
        (lambda f, x: make_fx(f)(x), "make_fx"),
        (lambda f, x: make_fx(f, tracing_mode="fake")(x), "make_fx"),
        (lambda f, x: torch.export.export(as_module(f), (x,), strict=False), "torch.export"),
        (lambda f, x: torch.jit.trace(f, (x,)), "torch.jit.trace"),
    ],
)
def test_what_is_traced_is_not_measured(model, which, trace, name):
    def traced(x):
        calls(model, x)[which]()
        return x

    with refused(name):
        trace(traced, torch.randn(4, 3))


def as_module(function):
    module = nn.Module()
    module.forward = function
    return module


@mark.parametrize("specified", [nn.Linear, nn.Linear(3, 3)], ids=["class", "instance"])
@mark.parametrize("which", range(5))
def test_a_mock_in_place_of_a_module_is_refused(model, which, specified):
    net = nn.Sequential(model)
    net.extra = mock.create_autospec(specified, instance=True)
    with refused("extra of Sequential is no nn.Module", ModelError):
        calls(net, torch.randn(4, 3))[which]()
