"""What a process has one of is as before: the generators from which a forward pass draws."""

import random
import sys

import numpy
import torch
from pytest import mark
from single_samples import Written
from torch import nn

import fastlr
from fastlr.ghost.process_state import quiet_rng


def states():
    """Return the states of all generators that a process has one of."""
    return torch.get_rng_state().tolist(), random.getstate(), repr(numpy.random.get_state())


def draw():
    """Draw an odd number of normal numbers, too: their generators keep the second of each two."""
    return torch.rand(()), random.gauss(0, 1), numpy.random.randn()


def drawing(net, x):
    draw()
    return net.layer(x)


@mark.parametrize("drawn_before", [0, 1])
def test_generators_are_as_before(drawn_before):
    random.seed(0)
    numpy.random.seed(0)
    for _ in range(drawn_before):
        draw()
    model, x = Written(drawing, layer=nn.Linear(5, 3)).eval(), torch.randn(4, 5)
    before = states()
    fastlr.per_sample_grad_sq_norms(model, x, torch.ones(4, 3))
    assert states() == before
    fastlr.estimate(model, fastlr.TensorInputs(x), 4)
    assert states() == before


def test_contexts_within_each_other():
    before = states()
    with quiet_rng(torch.device("cpu")):
        draw()
        with quiet_rng(torch.device("cpu")):
            draw()
        draw()
    assert states() == before


def test_numpy_is_left_alone_where_nobody_has_imported_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "numpy.random")
    with quiet_rng(torch.device("cpu")):
        random.random()
    assert "numpy.random" not in sys.modules
