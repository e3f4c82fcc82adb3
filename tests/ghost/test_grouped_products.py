"""Products of groups of rows with a matrix each (grouped_mm), as in mixtures of experts.

They are held against one pass a sample.
"""

import pytest
import torch
from single_samples import Written
from torch import nn

import fastlr
from fastlr.ghost.api import engine_for

F = torch.nn.functional
pytestmark = pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this torch has no grouped_mm")
COUNT, TOKENS, WIDTH, EXPERTS = 6, 5, 8, 3


def mixed(m, x, layers=1):
    """Each token through the expert that its largest number names, as often as there are layers."""
    tokens = x.flatten(0, 1)
    chosen = tokens[:, :EXPERTS].argmax(1)
    order = chosen.argsort(stable=True)
    ends = torch.bincount(chosen, minlength=EXPERTS).cumsum(0).to(torch.int32)
    rows = m.first(tokens[order])
    for _ in range(layers):
        rows = F.grouped_mm(rows, m.experts, offs=ends).tanh()
    return torch.zeros_like(rows).index_copy(0, order, rows).view_as(x).sum(1)


def experts(layers):
    parts = {
        "first": nn.Linear(WIDTH, WIDTH),
        "experts": nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 2),
    }
    return Written(lambda m, x: mixed(m, x, layers), **parts).eval()


@pytest.mark.parametrize("layers", [1, 2])
def test_experts_go_by_rule(layers):
    torch.manual_seed(0)
    model, x = experts(layers), torch.randn(COUNT, TOKENS, WIDTH)
    x[1] = x[0, :1]  # one expert takes all tokens of a sample
    v = torch.randn_like(model(x))
    norms = fastlr.per_sample_grad_sq_norms(model, x, v, per_parameter=True)
    engine = engine_for(model)
    assert {engine.plan.route(name) for name in engine.parameters} == {"rule"}
    names, parameters = zip(*model.named_parameters(), strict=True)
    for sample in range(COUNT):
        only = torch.zeros_like(v)
        only[sample] = v[sample]
        for name, gradient in zip(
            names, torch.autograd.grad(model(x), parameters, only), strict=True
        ):
            torch.testing.assert_close(
                norms[name][sample], gradient.double().square().sum(), rtol=1e-4, atol=0
            )
