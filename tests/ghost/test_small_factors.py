"""Small factors whose norms are taken together have the norms that each has alone."""

import torch

from fastlr.ghost.norms.factors import Dense, Outer, PickedRows
from fastlr.ghost.norms.sq_norms import HELD, SMALL, _NormsOfUses


def test_norms_are_those_of_the_gradients():
    norms, exact = _NormsOfUses(None, None), {}
    for i in range(1 + HELD // SMALL):  # so many that some need not wait for the last
        a, g = torch.randn(3, 1, 5, 4), torch.randn(3, 1, 5, 6)
        rows = PickedRows(torch.randint(7, (3, 5)), g[:, 0], (7, 6))
        for factor in Outer(a, g, (6, 4)), rows, Dense(a), Dense(torch.randn(2, SMALL // 2)):
            norms._add_factor((i, factor.form), factor)
            exact[i, factor.form] = factor.dense(0, 3).double().flatten(1).square().sum(1)
    assert norms.by_name
    norms._add_small()
    torch.testing.assert_close(norms.by_name, exact, rtol=1e-5, atol=0)
