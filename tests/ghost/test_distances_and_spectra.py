"""Distances to points and products of spectra go by rule.

Their rows are known of the graph; values are the zoo's.
"""

import models_zoo as zoo
import pytest
import torch
from exact import truth
from single_samples import Written
from torch import nn

import fastlr
from fastlr.ghost.api import engine_for

# From 26 rows or points on, torch computes distances by a product of matrices, in a node of another
# kind.
COUNT = 40
NAMES = [name for name in zoo.ZOO if name.startswith(("distances", "spectrum"))]


@pytest.mark.parametrize("name", NAMES)
def test_by_rule_and_looked_at_once(name):
    case = zoo.make(name, torch.float64)
    engine = engine_for(case.model)
    x = torch.randn(COUNT, *case.x.shape[1:], dtype=torch.float64)
    v = torch.randn_like(case.model(x))
    got = fastlr.per_sample_grad_sq_norms(case.model, x, v, per_parameter=True)
    want = truth(case.model, (x,), v, samples=range(0, COUNT, 9))
    for parameter, norms in got.items():
        torch.testing.assert_close(norms[::9], want.norms[parameter], rtol=1e-10, atol=0)
    assert {engine.plan.route(name) for name in engine.parameters} == {"rule"}
    assert not engine.plan.rows_lost_at
    assert not engine.independence.suspicion


def test_rows_that_are_nearly_a_point():
    """Norms are those of the gradients that torch takes.

    That holds where distances of float32 have lost their digits, too.
    """
    torch.manual_seed(0)
    points = 30
    model = Written(lambda m, x: torch.cdist(x, m.w), w=nn.Parameter(10 + torch.randn(points, 3)))
    x = 10 + torch.randn(COUNT, 3)
    x[:3] = model.w.detach()[:3] + torch.tensor([0.0, 1e-3, 3e-2])[:, None]
    v = torch.randn(COUNT, points)
    got = fastlr.per_sample_grad_sq_norms(model, x, v)
    (w,) = model.parameters()
    for sample in range(5):
        only = torch.zeros_like(v)
        only[sample] = v[sample]
        (gradient,) = torch.autograd.grad(model(x), [w], only)
        torch.testing.assert_close(got[sample], gradient.double().square().sum(), rtol=1e-3, atol=0)
