"""Samples that autograd gets wrong alone, and gradients that go by the number of samples."""

from copy import deepcopy

import torch
from expected import refused
from pytest import fixture, mark
from single_samples import Written
from torch import nn
from torch.testing import assert_close

import fastlr
from fastlr.errors import InteractionError


class Transposed(nn.Module):
    """A batch norm whose output is flattened and transposed, as in sequence models."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
        nn.init.normal_(self.norm.running_mean)

    def forward(self, x):
        return self.norm(self.conv(x)).flatten(2).transpose(1, 2)


@fixture
def model():
    torch.manual_seed(0)
    return Transposed().eval()


def beside_a_copy(model, x, v, change):
    """Squared norms in float64, each sample beside a copy of it, the first gradient changed."""
    model = deepcopy(model).double()
    norms = []
    for sample, own in zip(x.double(), v.double(), strict=True):
        z = model(torch.stack([sample, sample]))[0]
        first, *others = torch.autograd.grad((z * own).sum(), list(model.parameters()))
        norms.append(sum(g.square().sum() for g in (change(first), *others)))
    return torch.stack(norms)


def mask(g):
    return g * (torch.arange(g.numel()).view_as(g) % 2)


@mark.parametrize("hooked", [False, True])
@mark.parametrize("samples", [1, 2, 5])
def test_strides_and_cotangents_of_earlier_calls_change_nothing(model, samples, hooked):
    """A hook that changes gradients sends its parameter to the loop over samples."""
    x, v = torch.randn(samples, 3, 2, 3), torch.randn(samples, 6, 4)
    wanted = beside_a_copy(model, x, v, mask if hooked else lambda g: g)
    if hooked:
        model.conv.weight.register_hook(mask)
    zero_first = v.clone()
    zero_first[0] = 0
    for earlier_x, earlier_v in (
        (x.contiguous(memory_format=torch.channels_last), v),
        (x, zero_first),
        (x, torch.ones_like(v)),
    ):
        fastlr.per_sample_grad_sq_norms(model, earlier_x, earlier_v)
        got = fastlr.per_sample_grad_sq_norms(model, x, v, check=True)
        assert_close(got, wanted, rtol=1e-5, atol=0.0)


class Averaged(torch.autograd.Function):
    """A product with a weight whose gradient is a mean over the batch."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):  # type: ignore[override]
        x, w = ctx.saved_tensors
        return g * w, (g * x).mean(0)


def hooked_by_number(m, x):
    z = m.first(x)
    if z.requires_grad:
        z.register_hook(lambda g: g / len(g))
    return z


@mark.parametrize("samples", [2, 3, 5])
@mark.parametrize(
    "forward", [lambda m, x: Averaged.apply(m.first(x), m.first.bias), hooked_by_number]
)
def test_gradients_that_go_by_the_number_of_samples_are_refused(forward, samples):
    model, v = Written(forward, first=nn.Linear(3, 4)), torch.randn(samples, 4)
    with refused("changes with the number of samples", InteractionError):
        fastlr.per_sample_grad_sq_norms(model, torch.randn(samples, 3), v)
