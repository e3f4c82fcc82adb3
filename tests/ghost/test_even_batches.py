"""Models that take batches of an even number of samples only."""

import pytest
import torch
from exact import holds
from folding import randomise
from single_samples import Written
from torch import nn

import fastlr
from fastlr.errors import InputError, InteractionError


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


@pytest.mark.parametrize("rearranged", [halved, viewed, paired, required])
@pytest.mark.parametrize("count", [2, 4, 6, 10])
def test_they_are_proven_on_four_samples(rearranged, count):
    """Six and ten have halves of an odd number."""
    engine = holds(model(rearranged), batch(count))
    assert engine.folding.folded
    assert engine.ledger.subject == "perturbed float64 copy"
    assert not [note for note in engine.ledger.notes if "rows are found" not in note]


def test_one_that_takes_multiples_of_four_is_audited_on_four():
    x, v = batch(8), torch.randn(8, 3, dtype=torch.float64)
    got, want = (
        fastlr.per_sample_grad_sq_norms(model(rearranged), x, v)
        for rearranged in (of_four, lambda h: h)
    )
    torch.testing.assert_close(got, want)


def test_they_are_not_spared_the_proof():
    net, x = model(mixed), batch(6)
    with pytest.raises(InteractionError):
        fastlr.per_sample_grad_sq_norms(net, x, torch.ones(6, 3, dtype=x.dtype))


def test_others_are_proven_on_three():
    engine = holds(model(lambda h: h), batch(6))
    assert engine.known.few_samples.count == 3


@pytest.mark.parametrize("most", [7, 8, 16, 50])
def test_estimates_take_even_chunks(most, monkeypatch):
    monkeypatch.setattr("fastlr.estimator.chunks.chunk_for_memory", lambda *_: most)
    net, inputs = model(required), fastlr.NoiseImages((1, 4, 4))
    got = fastlr.estimate(net, inputs, 50)
    assert got.batch_size % 2 == 0
    torch.testing.assert_close(
        got.per_sample, fastlr.estimate(model(lambda h: h), inputs, 50).per_sample
    )


def test_an_odd_number_of_inputs_is_an_error_of_theirs():
    with pytest.raises(InputError, match="does not run on"):
        fastlr.estimate(model(viewed), fastlr.NoiseImages((1, 4, 4)), 9)
