"""Models that take batches of an even number of samples only."""

import torch
from exact import holds
from expected import refused
from folding import randomise
from pytest import mark, raises
from single_samples import Written
from torch import nn
from torch.testing import assert_close

import fastlr
from fastlr.errors import InteractionError
from fastlr.estimator.memory import InputsThatFit
from fastlr.ghost.fallback import RightCopies, SingleSamples


def halved(x):
    return torch.stack(x.chunk(2)).flatten(0, 1)


def viewed(x):
    return x.view(2, -1, x.shape[1]).flatten(0, 1)


def paired(x):
    return x.view(-1, 2, x.shape[1]).flatten(0, 1)


def required(x):
    assert len(x) % 2 == 0, "an even batch, please"
    return x


def of_four(x):
    assert len(x) % 4 == 0, "a multiple of four, please"
    return x


def at_least_four(x):
    assert len(x) >= 4, "four, please"
    return x


def mixed(x):
    pairs = x.view(-1, 2, x.shape[1])
    return (pairs - 0.1 * pairs.flip(1)).flatten(0, 1)


def model(rearranged):
    """A folded convolution, and linear layers on what is rearranged."""

    def forward(m, x):
        return m.last(rearranged(m.first(m.images(x).flatten(1)).tanh()))

    images = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU())
    return randomise(Written(forward, images=images, first=nn.Linear(8, 6), last=nn.Linear(6, 3)))


def batch(count):
    return torch.randn(count, 1, 4, 4, dtype=torch.float64)


@mark.parametrize("rearranged", [halved, viewed, paired, required])
@mark.parametrize("count", [2, 4, 6, 10])
def test_they_are_measured(rearranged, count):
    """Six and ten have halves of an odd number."""
    engine = holds(model(rearranged), batch(count))
    assert engine.folding.blocks.folded
    assert not [note for note in engine.ledger.notes if "rows are found" not in note]


@mark.parametrize(
    ("rearranged", "count"),
    [(at_least_four, count) for count in (4, 5, 7, 8)] + [(of_four, 4), (of_four, 12)],
)
def test_those_that_need_four_are_measured(rearranged, count):
    x, v = batch(count), torch.randn(count, 3, dtype=torch.float64)
    got, want = (
        fastlr.per_sample_grad_sq_norms(model(rearranged), x, v)
        for rearranged in (rearranged, lambda h: h)
    )
    assert_close(got, want)


@mark.parametrize(
    "mix", [lambda x: x - 0.1 * x.mean(0), lambda x: x.sort(0).values, lambda x: x.cummax(0).values]
)
def test_samples_that_interact_in_them_are_found(mix):
    with raises(InteractionError):
        holds(model(lambda x: mix(at_least_four(x))), batch(6))


def test_a_loop_over_their_samples_runs_four_of_each():
    net, x = nn.Linear(4, 3, bias=False), torch.randn(6, 4)
    samples = SingleSamples(lambda k: net(at_least_four(x[list(k)])), 0, {"weight": net.weight})
    (norm,) = RightCopies().sq_norms(samples, 5, torch.ones(1, 3), (), 1e-6)
    assert_close(norm, 3 * x[5].double().square().sum())


def test_interaction_in_them_is_found():
    net, x = model(mixed), batch(6)
    with raises(InteractionError):
        fastlr.per_sample_grad_sq_norms(net, x, torch.ones(6, 3, dtype=x.dtype))


@mark.parametrize("most", [7, 8, 16, 50])
def test_estimates_take_even_chunks(most, monkeypatch):
    fitting = InputsThatFit(most, most)
    monkeypatch.setattr("fastlr.estimator.chunks.chunk_for_memory", lambda *_: fitting)
    net, inputs = model(required), fastlr.NoiseImages((1, 4, 4))
    got = fastlr.estimate(net, inputs, 50)
    assert got.batch_size % 2 == 0
    assert_close(got.per_sample, fastlr.estimate(model(lambda h: h), inputs, 50).per_sample)


def test_an_odd_number_of_inputs_is_an_error_of_theirs():
    with refused("does not run on"):
        fastlr.estimate(model(viewed), fastlr.NoiseImages((1, 4, 4)), 9)
