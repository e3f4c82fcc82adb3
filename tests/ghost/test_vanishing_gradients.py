"""Gradients that vanish on their way down, as over the steps of a recurrence."""

import pytest
import torch
from exact import truth
from torch import nn

import fastlr
from fastlr.ghost.api import engine_for

STEPS = 30
# Of weights, so that gradients of the first steps are denormal.
SHRINK = {torch.float32: 0.03, torch.float64: 1e-12}


class Recurrence(nn.Module):
    """A recurrence written by hand whose gradients fall by a factor of ten or more a step."""

    def __init__(self, dtype=torch.float32, width=6):
        super().__init__()
        self.width = width
        self.inner = nn.Linear(3, width)
        self.outer = nn.Linear(width, width)
        self.head = nn.Linear(width, 2)
        with torch.no_grad():
            self.outer.weight.mul_(SHRINK[dtype])
        self.to(dtype)

    def step(self, x, h):
        return torch.tanh(self.inner(x) + self.outer(h))

    def forward(self, x):
        h = x.new_zeros(len(x), self.width)
        for t in range(x.shape[1]):
            h = self.step(x[:, t], h)
        return self.head(h)


class GatedRecurrence(Recurrence):
    """A gate keeps a small part of the states."""

    def step(self, x, h):
        shut = torch.sigmoid(self.inner(x) + self.outer.weight.abs().mean().log())
        return h * shut + torch.tanh(self.outer(h))


def right(model, x):
    """Hold the norms of every parameter to float64's."""
    v = torch.randn(len(x), *model(x[:2]).shape[1:])
    got = fastlr.per_sample_grad_sq_norms(model, x, v, per_parameter=True)
    want = truth(model, (x,), v.double())
    assert not want.interact
    for name, norms in got.items():
        torch.testing.assert_close(norms, want.norms[name], rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [Recurrence, GatedRecurrence])
def test_denormal_gradients_are_found_by_the_graph(kind, dtype):
    torch.manual_seed(0)
    model = kind(dtype).eval()
    x = torch.randn(9, STEPS, 3, dtype=dtype)
    right(model, x)
    engine = engine_for(model)
    assert not engine.plan.rows_lost_at
    assert not engine.independence.suspicion
    before = engine.independence.comparisons
    right(model, x.flip(0))
    assert engine.independence.comparisons == before
